// The persistent kernel: one block per SM, launched once, running a plan step after step.
//
//   block = team (16 warps, or 1) + a warp each: loader, streamer, storer, controller (block 0's)
//
//   loader    scheduler/loader.cuh       takes tasks ahead, fetches records, finds experts
//   streamer  scheduler/loader.cuh       streams weights
//   team      scheduler/team.cuh         waits for edges, runs bodies
//   storer    scheduler/storer.cuh       outputs of experts, signals, spans; frees slots
//   controller scheduler/controller.hpp  looks at host memory, admits while idle, ends the kernel
//
// What the host gives at compile time, in a generated bodies.gen.cuh on the include path:
//
//   #pragma once
//   #include "types.hpp"
//   namespace gpurt {
//   constexpr u32 kTeamWarps = 16;   // or 1
//   constexpr u32 kStageCount = 6;   // as many as the device's shared memory holds
//   }
//   #include "bodies/body_list.cuh"
//   #include "bodies/noop.cuh"       // the bodies of this program; a user's structs follow as text
//   #include "bodies/matvec.cuh"
//   namespace gpurt {
//   using Bodies = BodyList<noop, matvec>;  // TaskRecord::body is an index into this list
//   }
//
// Include path: that file's folder, device/, scheduler/. Options: -std=c++20, sm_90a or newer.
// At launch: grid = Program::worker_count blocks, all resident at once; block =
// gpurt_block_threads; dynamic shared memory = gpurt_shared_bytes; `gpurt_program` holds the
// Program. A task with flag kTaskAdvance runs advance() whatever its body index says.

// First: it says how many warps and stages there are.
// clang-format off
#include "bodies.gen.cuh"
// clang-format on

#include "controller.hpp"
#include "loader.cuh"
#include "storer.cuh"
#include "team.cuh"

extern "C" {
__constant__ gpurt::Program gpurt_program;
// For the host: read by name after loading, so that no layout is stated twice.
__device__ gpurt::u32 gpurt_shared_bytes = sizeof(gpurt::SharedMemory);
__device__ gpurt::u32 gpurt_block_threads = gpurt::kBlockThreads;
}

namespace gpurt {

GPURT_FN void init_shared() {
  SharedMemory& memory = shared();
  for (u32 i = 0; i < kStageCount; ++i) {
    mbarrier_init(shared_address(&memory.stage_full[i]), 1);
    mbarrier_init(shared_address(&memory.stage_empty[i]), kTeamWarps);
  }
  for (u32 i = 0; i < kSlotCount; ++i) {
    mbarrier_init(shared_address(&memory.slot_full[i]), 2);
    mbarrier_init(shared_address(&memory.slot_done[i]), kTeamWarps);
    mbarrier_init(shared_address(&memory.slot_known[i]), 1);
    mbarrier_init(shared_address(&memory.slot_empty[i]), 2);
    memory.slots[i].met_turn = kNoTurn;
  }
  memory.leaving = 0;
  memory.rows = 0;
  memory.sample_count = 0;
  memory.gave_up = 0;
  fence_mbarrier_init();
}

__device__ __noinline__ void run_controller() {
  if (blockIdx.x != 0 || threadIdx.x % 32 != 0) return;
  const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
  Controller controller;
  controller_start(controller);
  while (load_relaxed(&control->abort) == 0 && load_relaxed(&control->exit) == 0)
    controller_poll(gpurt_program, controller);
}

}  // namespace gpurt

extern "C" __global__ void __launch_bounds__(gpurt::kBlockThreads, 1) gpurt_persistent() {
  using namespace gpurt;
  if (threadIdx.x == 0) init_shared();
  __syncthreads();  // the only one: from here on the roles part
  const u32 warp = threadIdx.x / 32;
  if (warp < kTeamWarps) {
    run_team();
  } else if (warp == kLoaderWarp) {
    run_loader();
  } else if (warp == kStorerWarp) {
    run_storer();
  } else if (warp == kStreamerWarp) {
    run_streamer();
  } else {
    run_controller();
  }
}
