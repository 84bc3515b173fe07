// Counter: how a task tells other workers that its output is ready.
//
//   writer:  the team stores -> team barrier -> one thread counter_signal()
//   reader:  one thread counter_is_met() until true -> team barrier -> the team loads
//
// A signal is a release, a met wait an acquire, both at device scope. A Counter only grows, for the
// life of one launch, and is never reset: the wait of a step is for a multiple of its round, the
// number of steps of its variant since launch, this one included. 64 bits: at one signal a
// nanosecond a counter lasts 580 years, so it never wraps.
//
// A rank counter (kRankCounter in its index) is how all ranks signal each other. Every rank has a
// word of it for every rank, in its symmetric memory; rank r adds to word r on all ranks, at system
// scope, and a wait is for all words of the own rank. So whoever gives up can say who is late.
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

GPURT_FN bool is_rank_counter(u32 counter) {
  return (counter & kRankCounter) != 0;
}

// Where rank `source` signals a rank counter of rank `rank`.
GPURT_FN u64* rank_counter_address(const Program& program, u32 counter, u32 rank, u32 source) {
  const u64 place = u64{counter & ~kRankCounter} * program.rank_count + source;
  return at<u64>(at<const u64>(program.peers)[rank] + program.rank_counters +
                 place * kCounterStride);
}

// What a wait sees: of a rank counter the first word that is below the target, else the last one.
struct Seen {
  u64 value;
  u32 rank;  // whose word it is
};

GPURT_FN Seen seen_of(const Program& program, u32 counter, u64 target) {
  if (!is_rank_counter(counter)) return {load_acquire(counter_address(program, counter)), 0};
  Seen seen = {0, 0};
  for (u32 rank = 0; rank < program.rank_count; ++rank) {
    const u64* word = rank_counter_address(program, counter, program.rank, rank);
    seen = {load_acquire_system(word), rank};
    if (seen.value < target) break;
  }
  return seen;
}

// `amount` signals to all ranks. The release passes on all that this thread has seen.
GPURT_FN void signal_ranks(const Program& program, u32 counter, u32 amount) {
  for (u32 rank = 0; rank < program.rank_count; ++rank)
    add_release_system(rank_counter_address(program, counter, rank, program.rank), amount);
}

// For a counter without `ready` dependents; scheduler/queue.hpp has the signal that also pushes.
GPURT_FN void counter_signal(u64* counter) {
  add_release(counter, 1);
}

}  // namespace gpurt
