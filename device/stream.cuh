// The two rings of a block: weight stages and task slots. Who waits for what.
//
//   loader --stage_full--> team --stage_empty--> loader      up to 32 KB of packed weights a stage
//   loader --slot_full---> team --slot_done----> storer --slot_empty--> loader      a task a slot
//
// A task's packed weights are one contiguous range, cut into stages in order; the last one may be
// short. The loader fills stages of tasks far ahead of the one that runs: weights depend on
// nothing. A slot brings the task's record; the slots are a queue that every warp of the team reads
// in the same order, so leaving the loop is a slot too (kSlotLeave), and all warps leave together.
#pragma once
#include "payload.cuh"

namespace gpurt {

// Where one side stands in the ring of stages.
struct StageCursor {
  u32 stage;
  u32 parity;

  GPURT_FN void advance() {
    if (++stage == kStageCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

GPURT_FN u32 slot_parity(u32 turn) {
  return turn / kSlotCount & 1;
}
GPURT_FN Slot& slot_of(u32 turn) {
  return shared().slots[turn % kSlotCount];
}

// ---- team ------------------------------------------------------------------------------------

GPURT_FN u32 full_barrier(const StageCursor& cursor) {
  return shared_address(&shared().stage_full[cursor.stage]);
}

// Asked without suspending: what try_wait sleeps through by itself would count as no wait.
GPURT_FN bool is_stage_there(const StageCursor& cursor) {
  return mbarrier_test_wait(full_barrier(cursor), cursor.parity);
}

// Every lane waits itself: one instruction a warp, and each lane acquires the copy's bytes.
// Returns the cycles spent if the stage was not there at once.
GPURT_FN u32 wait_stage(const StageCursor& cursor) {
  if (is_stage_there(cursor)) return 0;
  const u32 begin = clock_cycles_low();
  for (u32 polls = 0; !mbarrier_try_wait(full_barrier(cursor), cursor.parity);) {
    if (must_end(polls)) break;
  }
  return clock_cycles_low() - begin;
}

// After this warp's last read of the stage, by all lanes.
GPURT_FN void release_stage(const StageCursor& cursor) {
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&shared().stage_empty[cursor.stage]));
}

// The same without a fence between the proxies, in a loop that has no time for one: `read` is made
// of all words of the stage that may still be on their way, so the reads are over when the warp
// arrives, and the next copy into the stage is issued behind that.
GPURT_FN void release_stage_behind(const StageCursor& cursor, u32 read) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    mbarrier_arrive_behind(shared_address(&shared().stage_empty[cursor.stage]), read);
}

// A task with kTaskExpertStream: until the loader has found its expert and seen its edges met; by
// any lanes, each acquires it. False, for all warps alike: it never will.
GPURT_FN bool wait_met(const Slot& slot) {
  for (;;) {
    const u32 edges = ld_shared_acquire_u32(shared_address(&slot.is_met));
    if (edges == kNeverMet) return false;
    if (edges == kMet && ld_shared_acquire_u32(shared_address(&slot.chosen[1])) != kNotChosen)
      return true;
  }
}

// No time-out: an idle kernel waits here, and the loader ends the wait by a kSlotLeave.
GPURT_FN void wait_slot(u32 turn) {
  const u32 full = shared_address(&shared().slot_full[turn % kSlotCount]);
  while (!mbarrier_try_wait(full, slot_parity(turn))) {
  }
}

// After this warp's last read of the slot and its last store of the task, by all lanes.
GPURT_FN void finish_slot(u32 turn) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    mbarrier_arrive(shared_address(&shared().slot_done[turn % kSlotCount]));
}

// ---- times of a run: one lane of the team writes clocks into the slot, the storer subtracts
// -------
GPURT_FN bool is_trace_lane() {
  return threadIdx.x == (kTeamWarps == 1 ? 0 : 32);
}
GPURT_FN void trace_begin(u32 turn) {
  if (!is_trace_lane()) return;
  Slot& slot = slot_of(turn);
  slot.begin = clock_cycles();
  slot.met = static_cast<u32>(slot.begin);
  slot.stall = 0;
}
GPURT_FN void trace_met(u32 turn) {
  if (is_trace_lane()) slot_of(turn).met = clock_cycles_low();
}
GPURT_FN void trace_end(u32 turn) {
  if (is_trace_lane()) slot_of(turn).end = clock_cycles_low();
}
// The task behind `turn`, whose edges are met, begins where that one ends.
GPURT_FN void trace_follow(u32 turn) {
  if (!is_trace_lane()) return;
  Slot& next = slot_of(turn + 1);
  next.begin = clock_cycles();
  next.met = slot_of(turn).end = static_cast<u32>(next.begin);
  next.stall = 0;
}
GPURT_FN void trace_stall(u32 turn, u32 cycles) {
  if (is_trace_lane()) slot_of(turn).stall += cycles;
}

// Whether a body with kEntersEarly has edges to wait for.
GPURT_FN bool has_edges(const Slot& slot) {
  return slot.record.wait_count != 0 && slot.is_met == kNotMet;
}

// By a body with kEntersEarly, all threads of the team, once: its counter edges, a lane of the
// first warp each, then a team barrier. False, for all alike: they never will be met, and the body
// returns.
GPURT_FN bool wait_edges(Slot& slot) {
  if (!has_edges(slot)) return true;
  const u32 lane = threadIdx.x;
  if (lane < 32) {
    const bool passed =
        lane >= slot.record.wait_count || wait_counter(slot.record.wait[lane], slot.round);
    if (__any_sync(~0u, !passed) && lane == 0) {
      slot.kind = kSlotSkip;
      shared().gave_up = 1;  // all warps see it behind the barrier
    }
  }
  team_sync();
  const bool runs = slot.kind == kSlotTask;  // before the clock: see enter_slot()
  if (runs && is_trace_lane()) slot.met = clock_cycles_low();
  return runs;
}
GPURT_FN bool wait_edges(const BodyContext& context) {
  return wait_edges(*context.slot);
}

// Arguments with two sets point to the round's from here on: the loops of experts ask for none.
GPURT_FN void choose_sets(Slot& slot) {
  for (u32 i = 0; slot.record.payload_mask >> i != 0; ++i)
    slot.record.addr[i] = arg_address(slot.record, i, slot.round, gpurt_program.payload_set_bytes);
  slot.record.payload_mask = 0;
}

}  // namespace gpurt
