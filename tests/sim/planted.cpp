// Bugs planted in the simulated protocol, by the words they touch: the headers stay as they are.
#include "world.hpp"

namespace gpurt::sim {
namespace {

template <class T>
Broken broken(Broken::How how, const T* begin, u64 count = 1) {
  return Broken{begin, begin + count, how};
}

// No access to these words releases or acquires anything.
template <class T>
Broken relaxed(const T* begin, u64 count = 1) {
  return broken(Broken::How::kRelaxed, begin, count);
}

}  // namespace

void World::plant() {
  switch (planted_) {
    case Planted::kNothing:
    case Planted::kClaimPastDrain:
    case Planted::kAbsentForgotten:
    case Planted::kEarlyCompensation:
      break;  // in the model
    case Planted::kTurnChanges:
    case Planted::kRoundOfSteps:
      break;  // turn_wrongly()
    case Planted::kWeakTickets:
    case Planted::kPublishBeforeData:
    case Planted::kRoundBeforeCount:
      plant_in_decisions();
      break;
    case Planted::kSignalBeforeData:
    case Planted::kRearmWithoutRelease:
    case Planted::kCounterWraps:
      plant_in_counters();
      break;
    default:
      plant_in_control();
      break;
  }
}

// By the sample body, on which the end of its step waits.
void World::turn_wrongly() {
  const bool changes = planted_ == Planted::kTurnChanges;
  if (!changes && planted_ != Planted::kRoundOfSteps) return;
  const Program& p = *model_->program;
  if (p.variant_count == 1) return;
  DeviceControl* control = device_control(p);
  const u64 next = step_state(p)->step + 1;
  const u64 turn = load_relaxed(&control->turns[next % kTurnCount]);
  const u32 variant = turn_variant(turn);
  u64 wrong = make_turn(step_count(p, next), variant);
  if (changes) {
    const u32 other = (variant + 1) % p.variant_count;
    --control->rounds[variant];
    wrong = make_turn(++control->rounds[other], other);
  }
  if (wrong == turn) return;
  model_->misled += 1;
  store_release(&control->turns[next % kTurnCount], wrong);
}

void World::plant_in_counters() {
  const Program& p = *model_->program;
  Memory& memory = machine_->memory();
  if (planted_ == Planted::kRearmWithoutRelease) {
    memory.plant(relaxed(model_->counter(model_->rearm_counter)));
  } else if (planted_ == Planted::kCounterWraps) {
    memory.plant(
        broken(Broken::How::kTruncated, at<u8>(p.counters), u64{p.counter_count} * kCounterStride));
  } else {
    for (u32 i = 0; i < p.counter_count; ++i) {
      if (model_->is_data_counter(i)) memory.plant(relaxed(model_->counter(i)));
    }
  }
}

void World::plant_in_decisions() {
  for (const Family& family : model_->families) {
    if (!family.is_dynamic) continue;
    if (planted_ == Planted::kWeakTickets) {
      for (const Family::Level& level : family.levels) {
        const Cursor* cursors = at<const Cursor>(model_->program->cursors);
        machine_->memory().plant(relaxed(&cursors[level.segment].head));
      }
    } else {
      // Its body decides by itself, at the wrong moment; parameter 0 says "does not".
      TaskRecord& record = model_->record(family.decider);
      record.flags &= static_cast<u16>(~kTaskDecides);
      record.param[kParamDecision] += 1;
    }
  }
}

void World::plant_in_control() {
  const Program& p = *model_->program;
  Memory& memory = machine_->memory();
  const DeviceControl* control = device_control(p);
  switch (planted_) {
    case Planted::kLostAbortExit: {
      Broken blind = broken(Broken::How::kBlind, &control->abort);
      blind.fibre = random_.below(p.worker_count);
      memory.plant(blind);
      break;
    }
    case Planted::kNoFence:
      memory.plant(Broken{nullptr, nullptr, Broken::How::kNoFence});
      break;
    case Planted::kWeakStepsOpen:
      memory.plant(relaxed(&control->steps_open));
      break;
    case Planted::kWeakArrivals:
      memory.plant(relaxed(at<u64>(p.arrived), p.task_count));
      break;
    case Planted::kWeakSlots:
      memory.plant(relaxed(at<u64>(p.ready_slots), p.task_count));
      break;
    case Planted::kWeakTurns:
      memory.plant(relaxed(control->turns, kTurnCount));
      break;
    case Planted::kWeakIdle:
      memory.plant(relaxed(&control->idle));
      break;
    case Planted::kWeakMirrorTail:
      memory.plant(relaxed(&control->mirror_submit_tail));
      break;
    case Planted::kWeakSubmitTail:
      memory.plant(relaxed(&host_control(p)->submit_tail));
      break;
    case Planted::kWeakTokenCount:
      for (u32 i = 0; i < p.queue_capacity; ++i) {
        memory.plant(relaxed(&request_output(p, i)->token_count));
      }
      break;
    case Planted::kWeakFinish:
      for (u32 i = 0; i < p.queue_capacity; ++i) {
        memory.plant(relaxed(&request_output(p, i)->finish_reason));
      }
      break;
    default:
      break;
  }
}

}  // namespace gpurt::sim
