// candidates on the GPU: the best of each chunk of a row. graphs/ops/candidates.py has the
// contract.
//
// A warp takes a row and keeps its best in its lanes (lane_best.cuh); kLoads reads are in flight
// before the first is used.
#pragma once
#include "lane_best.cuh"

namespace gpurt {

struct candidates {
  static constexpr u32 kLoads = 8;

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 n = task.param[0], count = task.param[1], chunk = task.param[2];
    const u32 first = task.param[3];
    const u64 width = u64((n + chunk - 1) / chunk) * count;
    const u32 lane = context.thread % 32;
#pragma unroll 1
    for (u32 row = context.thread / 32; row < context.step->sample_count;
         row += context.team_threads / 32) {
      const f32* x = arg<const f32>(task, 0) + u64(row) * n;
      const LaneBest best = choose(x, task.tile[0], task.tile[1], count, lane);
      const u64 at = row * width + u64(task.tile[2]) * count + lane;
      if (lane < count) {
        arg<f32>(task, 1)[at] = best.value;
        arg<u32>(task, 2)[at] = first + best.id;
      }
    }
  }

 private:
  __device__ static LaneBest choose(const f32* x, u32 begin, u32 end, u32 count, u32 lane) {
    LaneBest best;
#pragma unroll 1
    for (u32 base = begin + lane; base - lane < end; base += kLoads * 32) {
      f32 mine[kLoads];
#pragma unroll
      for (u32 k = 0; k < kLoads; ++k)
        mine[k] = base + k * 32 < end ? x[base + k * 32] : LaneBest::none();
#pragma unroll
      for (u32 k = 0; k < kLoads; ++k) best.offer(mine[k], base + k * 32, count);
    }
    return best;
  }
};

}  // namespace gpurt
