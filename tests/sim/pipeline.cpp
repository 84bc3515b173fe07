// Three fibres a worker; pipeline.hpp draws how they hand tasks on.
#include "pipeline.hpp"

#include "world.hpp"

namespace gpurt::sim {
namespace {

void wait_above(const u64* count, u64 turn) {
  while (load_acquire(count) <= turn) gpurt::pause();
}

}  // namespace

bool Pipeline::must_leave() const {
  const DeviceControl* control = device_control(program_);
  return load_relaxed(&control->abort) != 0 || load_relaxed(&control->exit) != 0;
}

// Waits for a free slot: the storer gives them back in order.
void Pipeline::put(const Taken& taken, SlotKind kind) {
  while (fetched_ - load_acquire(&shared_->empty) >= kSlotCount) gpurt::pause();
  slot(fetched_) =
      PipelineShared::Slot{taken.step, taken.round, taken.task, static_cast<u32>(kind)};
  store_release(&shared_->full, ++fetched_);
}

// As planted: a static task that stands first is handed on after the claimed one that follows it.
void Pipeline::put_swapped(const Taken& next) {
  if (held_.empty() && next.policy == kPolicyStatic) {
    held_.push_back(next);
    return;
  }
  if (next.policy == kPolicyClaim) put(next, SlotKind::kTask);
  for (const Taken& taken : held_) put(taken, SlotKind::kTask);
  held_.clear();
  if (next.policy != kPolicyClaim) put(next, SlotKind::kTask);
}

void Pipeline::run_loader() {
  add_acq_rel(&device_control(program_)->workers_in, 1);
  TaskSource source{};
  source.start(program_, worker_);
  fetched_ = 0;
  held_.clear();
  for (u32 polls = 1; !is_leaving(); ++polls) {
    const u64 ahead = source.policy == kPolicyStatic ? kSlotCount : kQueueAhead;
    Taken next{};
    if (fetched_ - load_acquire(&shared_->empty) < ahead &&
        source.next(next.task, next.step) == Next::kTask) {
      next.policy = source.policy;
      next.round = source.round;
      world_.look_ahead(next.task, next.round);
      if (planted_ == Planted::kClaimPastDrain) {
        put_swapped(next);
      } else {
        put(next, SlotKind::kTask);
      }
      continue;
    }
    if (polls % 8 == 0 && must_leave()) break;
    gpurt::pause();
  }
  store_relaxed(&shared_->leaving, 1);
  put(Taken{}, SlotKind::kLeave);
}

bool Pipeline::pass_gate(u64 step) {
  for (u32 polls = 1; load_acquire(&device_control(program_)->steps_open) <= step; ++polls) {
    if (polls % 8 == 0 && (is_leaving() || must_leave())) {
      store_relaxed(&shared_->leaving, 1);
      return false;
    }
    gpurt::pause();
  }
  return true;
}

bool Pipeline::pass_edge(const TaskRecord& record, const Wait& wait,
                         const PipelineShared::Slot& taken) {
  const u64* counter = counter_address(program_, wait.counter);
  const u64 target = counter_target(wait, taken.round);
  const u64 begin_ns = clock_ns();
  for (u32 polls = 1; !counter_is_met(counter, target); ++polls) {
    gpurt::pause();
    if (polls % 8 != 0) continue;
    if (is_leaving()) return false;
    const u64 waited_ns = clock_ns() - begin_ns;
    if (waited_ns < program_.wait_timeout_ns && !must_leave()) continue;
    store_relaxed(&shared_->leaving, 1);
    if (waited_ns < program_.wait_timeout_ns) return false;
    Fault fault{};
    fault.kind = kFaultEdgeTimeout;
    fault.worker = worker_;
    fault.task = record.task_index;
    fault.counter = wait.counter;
    fault.step = taken.step;
    fault.seen = load_acquire(counter);
    fault.needed = target;
    fault.waited_ns = waited_ns;
    raise_fault(program_, fault);
    return false;
  }
  return true;
}

void Pipeline::run_task(const TaskRecord& record, PipelineShared::Slot& taken) {
  if ((record.flags & kTaskAdvance) != 0) {
    if (!is_leaving()) advance(program_, record, taken.step);
    return;
  }
  const u32 kind = world_.run_body(worker_, record, taken.step);
  if (kind == kFaultNone) return;
  taken.kind = static_cast<u32>(SlotKind::kSkip);
  store_relaxed(&shared_->leaving, 1);
  Fault fault{};
  fault.kind = kind;
  fault.worker = worker_;
  fault.task = record.task_index;
  fault.step = taken.step;
  fault.detail[0] = 7;
  raise_fault(program_, fault);
}

void Pipeline::run_team() {
  u64 step = program_.first_step - 1;
  for (u64 turn = 0;; ++turn) {
    wait_above(&shared_->full, turn);
    PipelineShared::Slot& taken = slot(turn);
    if (taken.kind == static_cast<u32>(SlotKind::kLeave)) {
      store_release(&shared_->done, turn + 1);
      return;
    }
    const TaskRecord& record = at<const TaskRecord>(program_.records)[taken.task];
    bool passed = taken.step == step || pass_gate(taken.step);
    if (passed || planted_ == Planted::kGateReopens)
      step = taken.step;  // a gate that was given up stays shut
    for (u32 i = 0; passed && i < record.wait_count; ++i) {
      passed = pass_edge(record, record.wait[i], taken);
    }
    if (passed) {
      run_task(record, taken);
    } else {
      taken.kind = static_cast<u32>(SlotKind::kSkip);
    }
    store_release(&shared_->done, turn + 1);
  }
}

void Pipeline::run_storer() {
  for (u64 turn = 0;; ++turn) {
    wait_above(&shared_->done, turn);
    const PipelineShared::Slot& taken = slot(turn);
    if (taken.kind == static_cast<u32>(SlotKind::kLeave)) return;
    const TaskRecord& record = at<const TaskRecord>(program_.records)[taken.task];
    if (taken.kind == static_cast<u32>(SlotKind::kTask) && !is_leaving()) {
      if ((record.flags & kTaskDecides) != 0) {
        const Decision& decision = decision_of(program_, record);
        const u32 live = live_slots(decision);
        publish_live(program_, decision, taken.round, live);
        compensate(program_, decision, taken.round, live, nullptr);
      }
      for (u32 i = 0; i < record.signal_count; ++i) {
        signal_and_push(program_, record.signal[i], taken.round, nullptr);
      }
      const u64 now = gpurt::clock_ns();
      span_record(program_, worker_, taken.task, taken.step, now, now, now, 0);
    }
    store_release(&shared_->empty, turn + 1);
  }
}

void run_pipeline_controller(const Program& program) {
  const DeviceControl* control = device_control(program);
  Controller controller;
  controller_start(controller);
  while (load_relaxed(&control->abort) == 0 && load_relaxed(&control->exit) == 0) {
    controller_poll(program, controller);
    gpurt::pause();
  }
}

}  // namespace gpurt::sim
