// Spins: every wait ends by what it waits for, or because the block leaves.
//
// A spin polls its edge alone and looks at the block's `leaving` word on each 64th poll: one load
// of shared memory. Abort, exit and time-outs are watched by the block's loader
// (scheduler/loader.cuh), which has nothing better to do when its team makes no progress. So a hot
// loop holds neither clock nor fault: written out in every wait they tripled its code, and the loop
// fell out of the instruction cache. Once `leaving` is set, tasks run to their ends on meaningless
// data, meet all barriers, and the block leaves by its slots (stream.cuh).
#pragma once
#include "bodies/context.cuh"
#include "counter.hpp"

namespace gpurt {

constexpr u32 kPollsPerLook = 64;

GPURT_FN bool is_look(u32 polls) {
  return polls % kPollsPerLook == 0;
}

// After an unmet poll, by any lanes. Whether the wait must end though it is not met.
GPURT_FN bool must_end(u32& polls) {
  return is_look(++polls) && is_leaving();
}

// Out of line: no hot body waits for other ranks.
__device__ __noinline__ bool wait_ranks(Wait wait, u64 round) {
  const u64 target = counter_target(wait, round);
  for (u32 polls = 0; seen_of(gpurt_program, wait.counter, target).value < target;) {
    if (must_end(polls)) return false;
  }
  return true;
}

// One thread. False: the wait was given up.
template <bool RANKS = true>
GPURT_FN bool wait_counter(const Wait& wait, u64 round) {
  if constexpr (RANKS) {
    if (is_rank_counter(wait.counter)) return wait_ranks(wait, round);
  }
  const u64* counter = counter_address(gpurt_program, wait.counter);
  const u64 target = counter_target(wait, round);
  for (u32 polls = 0; load_acquire(counter) < target;) {
    if (must_end(polls)) return false;
  }
  return true;
}

// scheduler/controller.hpp: the first fault of a launch is kept, and raises the abort flag.
GPURT_FN void raise_fault(const Program& program, const Fault& fault);

// Out of line and cold.
__device__ __noinline__ void report_fault(const BodyContext& context, const TaskRecord& task,
                                          u32 kind, u32 detail0, u32 detail1, u32 detail2) {
  Fault fault = {};
  fault.kind = kind;
  fault.worker = blockIdx.x;
  fault.task = task.task_index;
  fault.step = context.step_index;
  fault.detail[0] = detail0;
  fault.detail[1] = detail1;
  fault.detail[2] = detail2;
  raise_fault(gpurt_program, fault);
  set_leaving();
}

}  // namespace gpurt
