// A body whose tasks have the whole weight ring as their room (kTaskRing).
//
// The loader gives such a task every stage without bytes; the team has them until it ends. `Body`
// has run(task, context) as cold bodies do, with the ring as context.scratch; the usual scratch is
// free for it, too.
#pragma once
#include "../stream.cuh"
#include "context.cuh"

namespace gpurt {

constexpr u32 kRingBytes = kStageCount * kStageRoom;

template <class Body>
struct RingBody {
  static constexpr u32 kWays = 1;
  static constexpr bool kLeavesScratch = false;
  static constexpr bool kWayIsChosen = false;
  struct Carry {};

  GPURT_FN static u32 way_of(const Slot&) { return 0; }
  GPURT_FN static bool needs_barrier(const TaskRecord&) { return true; }

  template <u32 WAY>
  GPURT_FN static void run_hot(u32 turn, StageCursor& cursor, u32&, Carry&) {
    u32 stall = 0;
    for (u32 i = 0; i < kStageCount; ++i, cursor.advance()) stall += wait_stage(cursor);
    trace_stall(turn, stall);
    Slot& slot = slot_of(turn);
    Body::run(slot.record, context_of(slot, shared().ring[0]));
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {  // all stages, so their order is nobody's business
      for (u32 i = 0; i < kStageCount; ++i)
        mbarrier_arrive(shared_address(&shared().stage_empty[i]));
    }
    team_sync();  // whoever uses the scratch next need not ask
  }
};

}  // namespace gpurt
