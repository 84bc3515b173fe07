// What a World does and checks about families of experts (model.hpp) and their deciders.
#include "payload.hpp"
#include "words.hpp"
#include "world.hpp"

namespace gpurt::sim {
namespace {

u64 expert_word(u64 launch, u32 family, u32 slot, u64 round) {
  return mix(data_word(launch, family + 5000, round), slot);
}

}  // namespace

// The last round up to this one in which the task exists; 0 if none.
u64 World::last_live_round(u32 task, u64 round) const {
  if (!model_->is_dynamic(task)) return round;
  while (round != 0 && model_->is_absent(task, launch_count_, round)) --round;
  return round;
}

// Once in each round in which it exists, and in no other.
void World::check_run(u32 task, u64 round) {
  if (last_live_round(task, round) != round) {
    fail("task " + std::to_string(task) + " runs in round " + std::to_string(round) +
         ", which lacks it");
  }
  if (run_counts_[task] == last_live_round(task, round - 1)) return;
  fail("task " + std::to_string(task) + " runs in round " + std::to_string(round) +
       ", after round " + std::to_string(run_counts_[task]));
}

void World::check_expert(u32 task, u64 round) {
  const TaskFacts& facts = model_->tasks[task];
  const u64 expected = expert_word(launch_count_, facts.family, facts.slot, round);
  if (data_load(model_->families[facts.family].experts + facts.slot) == expected) return;
  fail("task " + std::to_string(task) + " sees stale data of its decider");
}

void World::look_ahead(u32 task, u64 round) {
  // Only with a planted bug; the record of no task could not be read.
  if (task >= run_counts_.size()) fail("a ticket in a round which lacks it");
  if (model_->is_dynamic(task)) check_expert(task, round);
}

u32 World::decide_body(const TaskRecord& record, u64 round, const TaskFacts& facts) {
  const Family& family = model_->families[facts.family];
  const u32 live = model_->live_slots(facts.family, launch_count_, round);
  const u32 kind = data_body(record, round, facts);
  if (kind != kFaultNone) return kind;
  payload_store(family.live, live);
  if (planted_ == Planted::kPublishBeforeData) decide_wrongly(record, round);
  for (u32 slot = 0; slot < live; ++slot)
    data_store(family.experts + slot, expert_word(launch_count_, facts.family, slot, round));
  if (planted_ == Planted::kRoundBeforeCount) decide_wrongly(record, round);
  return kFaultNone;
}

// In place of what the worker does after the body, whose flag was taken away.
void World::decide_wrongly(const TaskRecord& record, u64 round) {
  const Program& p = *model_->program;
  if (record.param[kParamDecision] == 0) return;
  const Decision& decision = at<const Decision>(p.decisions)[record.param[kParamDecision] - 1];
  const u32 live = live_slots(decision);
  model_->misled += 1;
  if (planted_ == Planted::kPublishBeforeData) {
    gpurt::publish_live(p, decision, round, live);
  } else {
    for (u32 i = 0; i < decision.published_count; ++i) {
      Cursor& cursor = at<Cursor>(p.cursors)[decision.published[i].cursor];
      const u32 count = live * decision.published[i].tiles_per_slot;
      store_release(&cursor.head, (round & 0xFFFFFFFFu) << 32U | (kPlaceEnd - count));
      store_release(&cursor.tail, u64{count});
    }
  }
  compensate(p, decision, round, live, nullptr);
}

}  // namespace gpurt::sim
