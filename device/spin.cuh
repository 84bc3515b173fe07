// Spins: every wait ends by what it waits for, by the abort flag, or by its time-out.
//
// A spin polls its edge alone and comes here on each 64th poll. Who times out writes one Fault and
// raises the abort flag; from then on every wait of the kernel ends at its next look, so tasks run
// to their ends on meaningless data, meet all barriers, and the block leaves by its slots
// (stream.cuh). The state of a wait is passed by value: a start time whose address is taken lies in
// local memory, and one such store an iteration cost the stream 25 %.
#pragma once
#include "bodies/context.cuh"
#include "counter.hpp"

namespace gpurt {

constexpr u32 kPollsPerLook = 64;

// scheduler/controller.hpp: the first fault of a launch is kept, and raises the abort flag.
GPURT_FN void raise_fault(const Program& program, const Fault& fault);

struct WaitInfo {
  u32 kind;  // FaultKind if it times out
  u32 task;
  u32 counter;
  u64 step;
  u64 seen;
  u64 needed;
};

// Out of line and cold.
__device__ __noinline__ void report_timeout(WaitInfo info, u64 waited_ns) {
  set_leaving();
  Fault fault = {};
  fault.kind = info.kind;
  fault.worker = blockIdx.x;
  fault.task = info.task;
  fault.counter = info.counter;
  fault.step = info.step;
  fault.seen = info.seen;
  fault.needed = info.needed;
  fault.waited_ns = waited_ns;
  raise_fault(gpurt_program, fault);
}

__device__ __noinline__ void report_fault(const BodyContext& context, const TaskRecord& task,
                                          u32 kind, u32 detail0, u32 detail1, u32 detail2) {
  set_leaving();
  Fault fault = {};
  fault.kind = kind;
  fault.worker = blockIdx.x;
  fault.task = task.task_index;
  fault.step = context.step_index;
  fault.detail[0] = detail0;
  fault.detail[1] = detail1;
  fault.detail[2] = detail2;
  raise_fault(gpurt_program, fault);
}

// Whether a wait must end though it is not met. `begin_ns` is 0 before the wait's first look.
GPURT_FN bool look(u64& begin_ns, const WaitInfo& info) {
  if (is_leaving()) return true;
  if (load_relaxed(&at<const DeviceControl>(gpurt_program.device_control)->abort) != 0) {
    set_leaving();
    return true;
  }
  const u64 now = clock_ns();
  if (begin_ns == 0) begin_ns = now;
  if (now - begin_ns <= gpurt_program.wait_timeout_ns) return false;
  report_timeout(info, now - begin_ns);
  return true;
}

GPURT_FN bool is_look(u32 polls) {
  return polls % kPollsPerLook == 0;
}

// One thread. False: the wait was given up.
GPURT_FN bool wait_counter(const Wait& wait, u32 task, u64 step) {
  const u64* counter = counter_address(gpurt_program, wait.counter);
  const u64 target = counter_target(gpurt_program, wait, step);
  u64 begin_ns = 0;
  for (u32 polls = 1;; ++polls) {
    const u64 seen = load_acquire(counter);
    if (seen >= target) return true;
    if (!is_look(polls)) continue;
    if (look(begin_ns, {kFaultEdgeTimeout, task, wait.counter, step, seen, target})) return false;
  }
}

}  // namespace gpurt
