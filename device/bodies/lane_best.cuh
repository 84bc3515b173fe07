// The 32 best values that a warp was offered, one a lane in falling order, and whose they are.
//
// 32 values are offered together, and most offers end with one ballot: nothing beats the last of
// those kept. A winner's place is the number of lanes that are not below it; those behind shift.
// All lanes of a warp, converged.
#pragma once
#include "context.cuh"

namespace gpurt {

struct LaneBest {
  f32 value = none();
  u32 id = 0;

  // -infinity: there is no value.
  GPURT_FN static f32 none() { return __uint_as_float(0xFF800000u); }

  // NaN is not above anything. Equal values keep the order in which they were offered, lane by
  // lane. count: how many of the best will be wanted, 1 to 32.
  __device__ void offer(f32 mine, u32 mine_id, u32 count) {
    const u32 lane = threadIdx.x % 32;
    const f32 last = __shfl_sync(~0u, value, count - 1);
    for (u32 better = __ballot_sync(~0u, mine > last); better != 0; better &= better - 1) {
      const u32 from = __ffs(static_cast<i32>(better)) - 1;
      const f32 offered = __shfl_sync(~0u, mine, from);
      const u32 offered_id = __shfl_sync(~0u, mine_id, from);
      const u32 place = __popc(__ballot_sync(~0u, value >= offered));
      const f32 above = __shfl_up_sync(~0u, value, 1);
      const u32 above_id = __shfl_up_sync(~0u, id, 1);
      if (lane > place) {
        value = above;
        id = above_id;
      } else if (lane == place) {
        value = offered;
        id = offered_id;
      }
    }
  }
};

}  // namespace gpurt
