// The ready queue: who makes a task runnable, and how.
//
//   signal(counter) -> the counter reaches its round's target -> for each `ready` successor:
//   arrived[task] + 1 -> it reaches wait_count * round -> push(task): slot[tail + 1] = task
//   (a successor that waits for nothing else is pushed at once: kOnlyWait)
//
// The finishing worker itself pushes; no scheduler block stands between. Every add on the way is
// acquire and release, so whoever makes the last one has seen the writes of all producers, and its
// push (a release) passes them on to the worker that takes the slot (an acquire).
// A segment's n slots are filled exactly once a round, so slot tail % n is free by construction: a
// step ends only after all of its tasks, and the queue cannot overflow.
#pragma once
#include "counter.hpp"
#include "task_source.hpp"

namespace gpurt {

// The segment that holds `task`: segments partition the tasks in order.
GPURT_FN const Segment& segment_of(const Program& program, u32 task) {
  const Segment* segments = at<const Segment>(program.segments);
  u32 low = 0;
  u32 high = program.segment_count;
  while (low + 1 < high) {
    const u32 middle = (low + high) / 2;
    if (segments[middle].begin <= task) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return segments[low];
}

GPURT_FN void fill_slot(const Program& program, const Segment& segment, u32 word, u64 round) {
  const u64 tail = add_relaxed(&at<Cursor>(program.cursors)[segment.cursor].tail, 1);
  const u64 base = (round - 1) * (segment.end - segment.begin);
  u64* slot = at<u64>(program.ready_slots) + segment.begin + (tail - base);
  store_release(slot, (round & 0xFFFFFFFFu) << 32U | word);
}

GPURT_FN void push_ready(const Program& program, u32 task, u64 round) {
  fill_slot(program, segment_of(program, task), task + 1, round);
}

// The pusher runs this task itself: its slot is filled as taken, so that tickets still match.
GPURT_FN void push_taken(const Program& program, u32 task, u64 round) {
  fill_slot(program, segment_of(program, task), kSlotTaken, round);
}

// Whether this arrival was the task's last of this round: then the caller must push it.
GPURT_FN bool arrive(const Program& program, u32 successor, u64 round) {
  if ((successor & kOnlyWait) != 0) return true;
  const u32 task = successor;
  const u64 wait_count = at<const TaskRecord>(program.records)[task].wait_count;
  const u64 before = add_acq_rel(&at<u64>(program.arrived)[task], 1);
  return before + 1 == wait_count * round;
}

// One thread of the worker, after its team has stored everything. `amount` signals at once. Tasks
// that became ready are pushed, but for one of them if `kept` is given: that one is the caller's to
// run next.
GPURT_FN void signal_many(const Program& program, u32 counter, u32 amount, u64 round, u32* kept) {
  if (is_rank_counter(counter)) {  // nobody under `ready` waits for one
    signal_ranks(program, counter, amount);
    return;
  }
  const CounterInfo& info = at<const CounterInfo>(program.counter_infos)[counter];
  u64* word = counter_address(program, counter);
  if (info.successor_count == 0) {
    add_release(word, amount);
    return;
  }
  const u64 before = add_acq_rel(word, amount);
  if (before + amount != u64{info.signals_per_step} * round) return;
  const u32* successors = at<const u32>(program.successors) + info.successor_begin;
  for (u32 i = 0; i < info.successor_count; ++i) {
    if (!arrive(program, successors[i], round)) continue;
    const u32 task = successors[i] & ~kOnlyWait;
    if (kept != nullptr && *kept == kSlotTaken) {
      push_taken(program, task, round);
      *kept = task;
    } else {
      push_ready(program, task, round);
    }
  }
}

GPURT_FN void signal_and_push(const Program& program, u32 counter, u64 round, u32* kept) {
  signal_many(program, counter, 1, round, kept);
}

// By the thread that opens a step, before it does: `ready` tasks that wait for nothing.
GPURT_FN void push_roots(const Program& program, const Variant& variant, u64 round) {
  const u32* roots = at<const u32>(program.successors) + variant.root_begin;
  for (u32 i = 0; i < variant.root_count; ++i) push_ready(program, roots[i], round);
}

}  // namespace gpurt
