// Dynamic work: segments of which a step has only as many tasks as its decider says.
//
//   decider (route) runs -> publish: tail = live tasks; head = round << 32 | kPlaceEnd - tasks
//                        -> workers draw places up to kPlaceEnd (task_source.hpp)
//   compensator          -> what the absent tasks would have signalled, counter by counter
//
// Tasks lie slot by slot, the same number in each; the first `live` slots exist in a step. So every
// counter still gets its signals_per_step in every step, and every wait keeps its target.
// The compensator is the decider itself, or a task after it that also follows all that the absent
// tasks would have waited for: whoever waits for one of them relies on that.
// Does not know: what a slot means to a body. The decider's body leaves the count at
// Decision::live.
#pragma once
#include "queue.hpp"

namespace gpurt {

GPURT_FN const Decision& decision_of(const Program& program, const TaskRecord& task) {
  return at<const Decision>(program.decisions)[task.param[kParamDecision]];
}

// By the worker that ran the task's body, after it; or, for a compensator, after its edges.
GPURT_FN u32 live_slots(const Decision& decision) {
  return load_relaxed(at<const u32>(decision.live));
}

// Of a segment that opens for a round with so many tasks.
GPURT_FN u64 dynamic_head(u64 round, u32 tasks) {
  return (round & 0xFFFFFFFFu) << 32U | (kPlaceEnd - tasks);
}

// Opens the step in all segments of the decider. Once a step: all tasks of the round before have
// ended, so nobody needs the old words, and draws that only found kPlaceEnd may be lost.
GPURT_FN void publish_live(const Program& program, const Decision& decision, u64 round, u32 live) {
  for (u32 i = 0; i < decision.published_count; ++i) {
    const Published& published = decision.published[i];
    Cursor& cursor = at<Cursor>(program.cursors)[published.cursor];
    const u32 tasks = live * published.tiles_per_slot;
    store_relaxed(&cursor.tail, u64{tasks});
    store_release(&cursor.head, dynamic_head(round, tasks));
  }
}

GPURT_FN u32 absent_signals(const Absent& absent, u32 live) {
  const u32 first = live > absent.slot_begin ? live : absent.slot_begin;
  return first < absent.slot_end ? (absent.slot_end - first) * absent.signals_per_slot : 0;
}

GPURT_FN void compensate(const Program& program, const Decision& decision, u64 round, u32 live,
                         u32* kept) {
  const Absent* absents = at<const Absent>(program.absents) + decision.absent_begin;
  for (u32 i = 0; i < decision.absent_count; ++i) {
    const u32 amount = absent_signals(absents[i], live);
    if (amount != 0) signal_many(program, absents[i].counter, amount, round, kept);
  }
}

}  // namespace gpurt
