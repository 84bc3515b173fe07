// Spins: every wait ends by what it waits for, by the abort flag, or by its time-out.
//
// A spin polls its edge alone and comes here on each 64th poll. Who times out leaves a note, the
// block's loader makes it a Fault and raises the abort flag; from then on every wait of the kernel
// ends at its next look, so tasks run to their ends on meaningless data, meet all barriers, and the
// block leaves by its slots (stream.cuh). The state of a wait is passed by value: a start time whose address is taken lies in
// local memory, and one such store an iteration cost the stream 25 %.
#pragma once
#include "bodies/context.cuh"
#include "counter.hpp"

namespace gpurt {

constexpr u32 kPollsPerLook = 64;

// The edge a wait is for. `turn` finds the task's slot.
struct WaitInfo {
  u32 kind;  // FaultKind if it times out
  u32 turn;
  u32 counter;
  u64 seen;
  u64 needed;
};

// The first fault of a block stays in shared memory, and the block leaves; its loader passes the
// fault on. So a hot loop holds no call, around which it would have to save its registers.
GPURT_FN void note_fault(const WaitInfo& info, u64 waited_ns, u32 detail0, u32 detail1,
                         u32 detail2) {
  FaultNote& note = shared().fault;
  if (atomicExch(&note.is_claimed, 1u) == 0) {
    note.turn = info.turn;
    note.counter = info.counter;
    note.seen = info.seen;
    note.needed = info.needed;
    note.waited_ns = waited_ns;
    note.detail[0] = detail0;
    note.detail[1] = detail1;
    note.detail[2] = detail2;
    __threadfence_block();
    *const_cast<volatile u32*>(&note.kind) = info.kind;
    set_leaving();
  }
}

__device__ __noinline__ void report_fault(const BodyContext& context, const TaskRecord& task,
                                          u32 kind, u32 detail0, u32 detail1, u32 detail2) {
  (void)task;
  note_fault({kind, context.turn, 0, 0, 0}, 0, detail0, detail1, detail2);
}

// Read where it stands: a volatile access keeps the compiler from loading it ahead of a loop that
// hardly ever comes here, into registers that the loop needs.
template <class T>
GPURT_FN T cold(const T& word) {
  return *const_cast<const volatile T*>(&word);
}

// Whether a wait must end though it is not met. `begin_ns` is 0 before the wait's first look.
GPURT_FN bool look(u64& begin_ns, const WaitInfo& info) {
  if (is_leaving()) return true;
  if (load_relaxed(&at<const DeviceControl>(cold(gpurt_program.device_control))->abort) != 0) {
    set_leaving();
    return true;
  }
  const u64 now = clock_ns();
  if (begin_ns == 0) begin_ns = now;
  if (now - begin_ns <= cold(gpurt_program.wait_timeout_ns)) return false;
  note_fault(info, now - begin_ns, 0, 0, 0);
  return true;
}

GPURT_FN bool is_look(u32 polls) {
  return polls % kPollsPerLook == 0;
}

// One thread. False: the wait was given up.
GPURT_FN bool wait_counter(const Wait& wait, u32 turn, u64 step) {
  const u64* counter = counter_address(gpurt_program, wait.counter);
  const u64 target = counter_target(gpurt_program, wait, step);
  u64 begin_ns = 0;
  for (u32 polls = 1;; ++polls) {
    const u64 seen = load_acquire(counter);
    if (seen >= target) return true;
    if (!is_look(polls)) continue;
    if (look(begin_ns, {kFaultEdgeTimeout, turn, wait.counter, seen, target})) return false;
  }
}

}  // namespace gpurt
