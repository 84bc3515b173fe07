// reduce_squares on the GPU: sums parts of this rank's columns of each pair, times a gain, and
// their squares, which go to all ranks.
//
// A warp makes one of a pair's four sums, for itself: no barrier, and the same bits in any team.
// Its lanes store it, a rank each.
#pragma once
#include "published.cuh"
#include "row_norm.cuh"
#include "slots.cuh"

namespace gpurt {

struct reduce_squares {
  static constexpr u32 kSums = 4;  // of squares, a pair

  GPURT_FN static void prefetch(const TaskRecord& task) {
    prefetch_to_l2(task.addr[1], task.param[0] * 4);
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 width = task.param[0] / 4, per_row = task.param[2], stride = task.param[3] / 4;
    const u64 slot = u64(stride) * context.step->rows_capacity * per_row;
    const SlotsOf<float4> parts{context.address<const float4>(task, 0), slot, stride,
                                task.param[1]};
    float4* x = context.address<float4>(task, 2);
    const u32 lane = context.thread % 32;
    const CopyOf copy(task.param + 4, reinterpret_cast<u64>(context.address<f32>(task, 3)),
                      per_row * kSums, lane);
    const u32 end = min(task.tile[1], context.step->rows * per_row);
#pragma unroll 1
    for (u32 at = task.tile[0] * kSums + context.thread / 32; at < end * kSums;
         at += context.team_threads / 32) {
      const u32 pair = at / kSums;
      f32 sum = 0;
#pragma unroll 1
      for (u32 i = at % kSums * 32 + lane; i < width; i += kSums * 32) {
        const float4 gain = read4(arg<const f32>(task, 1), i);
        const float4 v =
            mul4(slots_piece<8, float4>(parts, pair, i, {}, false, polls_input(task, 0)), gain);
        store_granule(reinterpret_cast<u64>(x + u64(pair) * width + i), v.x, v.y, v.z, v.w);
        sum = RowNorm::add4(v, sum);
      }
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < copy.count)
        st_relaxed_u32(copy.place(pair / per_row, pair % per_row * kSums + at % kSums),
                       canonical_f32(__float_as_uint(sum)));
    }
  }
};

}  // namespace gpurt
