// candidates on the GPU: the best of a chunk of one row. graphs/ops/candidates.py has the contract.
//
// A warp keeps the best of its part of the chunk in its lanes (lane_best.cuh), kLoads reads in
// flight before the first is used; then one warp takes the best of all parts, in their order.
#pragma once
#include "lane_best.cuh"

namespace gpurt {

struct candidates {
  static constexpr u32 kLoads = 8;
  static constexpr u32 kParts = 16;  // of a chunk, whatever the team

  struct Scratch {
    f32 value[kParts][32];
    u32 id[kParts][32];
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 n = task.param[0], count = task.param[1], chunk = task.param[2], row = task.tile[3];
    if (row >= context.step->sample_count) return;  // all threads
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const f32* x = arg<const f32>(task, 0) + u64(row) * n;
    const u32 lane = context.thread % 32, begin = task.tile[0], end = task.tile[1];
    const u32 columns = (end - begin + kParts - 1) / kParts;
#pragma unroll 1
    for (u32 part = context.thread / 32; part < kParts; part += context.team_threads / 32) {
      const u32 first = min(begin + part * columns, end);
      const LaneBest best = choose(x, first, min(first + columns, end), count, lane);
      scratch.value[part][lane] = lane < count ? best.value : LaneBest::none();
      scratch.id[part][lane] = best.id;
    }
    context.sync();
    if (context.thread >= 32) return;
    LaneBest best;
#pragma unroll 1
    for (u32 part = 0; part < kParts; ++part)
      best.offer(scratch.value[part][lane], scratch.id[part][lane], count);
    if (lane >= count) return;
    const u64 width = u64((n + chunk - 1) / chunk) * count;
    const u64 at = row * width + u64(task.tile[2]) * count + lane;
    arg<f32>(task, 1)[at] = best.value;
    arg<u32>(task, 2)[at] = task.param[3] + best.id;
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
