// Counter: how a task tells other workers that its output is ready.
//
//   writer:  the team stores -> team barrier -> one thread counter_signal()
//   reader:  one thread counter_is_met() until true -> team barrier -> the team loads
//
// A signal is a release, a met wait an acquire, both at device scope. A Counter only grows, for the
// life of one launch, and is never reset: the wait of a step is for a multiple of its round, the
// number of steps of its variant since launch, this one included. 64 bits: at one signal a
// nanosecond a counter lasts 580 years, so it never wraps.
#pragma once
#include "atomics.hpp"
#include "task_record.hpp"

namespace gpurt {

// An address from a wire struct. Wire structs hold u64 so that host and device agree on their size.
template <class T>
GPURT_FN T* at(u64 address) {
  return reinterpret_cast<T*>(address);
}

GPURT_FN u64* counter_address(const Program& program, u32 counter) {
  return at<u64>(program.counters + u64{counter} * kCounterStride);
}

// Steps since launch, this one included; with one variant also the step's round. `first_step` is
// not 0 in tests that start step numbers just below 2^32; counters start at zero all the same.
GPURT_FN u64 step_count(const Program& program, u64 step) {
  return step + 1 - program.first_step;
}

GPURT_FN u64 counter_target(const Wait& wait, u64 round) {
  return u64{wait.signals_per_step} * round;
}

GPURT_FN bool counter_is_met(const u64* counter, u64 target) {
  return load_acquire(counter) >= target;
}

// For a counter without `ready` dependents; scheduler/queue.hpp has the signal that also pushes.
GPURT_FN void counter_signal(u64* counter) {
  add_release(counter, 1);
}

}  // namespace gpurt
