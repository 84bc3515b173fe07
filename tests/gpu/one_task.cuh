// One task in one block, without the scheduler: what tests/gpu/one_task.py runs, and tests/emu.
//
// The loader's own code fills the ring for a body that streams; slot 0 holds the task.
#pragma once
#include "bodies.gen.cuh"
//
#include "loader.cuh"

namespace gpurt {

// One thread, before all others.
GPURT_FN void start_one(const TaskRecord& task) {
  SharedMemory& memory = shared();
  const StepState* step = step_state(gpurt_program);
  memory.slots[0].record = task;
  memory.slots[0].step = step->step;
  memory.slots[0].round = step->round;
  memory.slots[0].kind = kSlotTask;
  memory.slots[0].is_met = kMet;
  memory.slots[0].chosen[1] = kNotChosen;
  memory.slots[0].parked = 0;
  memory.leaving = 0;
  memory.gave_up = 0;
  memory.rows = step->rows;
  memory.sample_count = step->sample_count;
  for (u32 i = 0; i < kStageCount; ++i) {
    mbarrier_init(shared_address(&memory.stage_full[i]), 1);
    mbarrier_init(shared_address(&memory.stage_empty[i]), kTeamWarps);
  }
  for (u32 i = 0; i < kSlotCount; ++i) {
    mbarrier_init(shared_address(&memory.slot_full[i]), 1);
    mbarrier_init(shared_address(&memory.slot_known[i]), 1);
    memory.slots[i].met_turn = kNoTurn;
  }
  fence_mbarrier_init();
  mbarrier_arrive(shared_address(&memory.slot_full[0]));
}

struct OneHot {
  StageCursor cursor;
  u32 half;
  template <class Body, u32 WAY>
  GPURT_FN void run() {
    typename Body::Carry carry{};
    Body::template run_hot<WAY>(0, cursor, half, carry);
  }
};

// The team.
GPURT_FN void run_one() {
  if ((slot_of(0).record.flags & kTaskExpertStream) != 0) wait_met(slot_of(0));
  team_sync();
  const u32 route = Bodies::route_of(slot_of(0));
  if (route < kRouteCold) {
    OneHot hot{{0, 0}, 0};
    Bodies::dispatch(route, hot);
  } else {
    Bodies::run_cold(0);
  }
  team_sync();
  if (threadIdx.x < 32 && slot_of(0).parked != 0) Bodies::make_outputs(slot_of(0));
  team_sync();
  if (threadIdx.x == 0) set_leaving();
}

// Loader and streamer in one lane, until the task has ended.
GPURT_FN void load_one() {
  Loader loader{};
  loader.forget(~u64{0});
  loader.fetched = 1;
  while (!is_leaving() && !loader.choose()) pause();
  Streamer streamer;
  streamer.stream(slot_of(0));
}

}  // namespace gpurt
