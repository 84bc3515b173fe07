// combine on the GPU: y = sum over a row's experts of weight * R(d * gain), plus a residual.
//
// The contract is in graphs/ops/combine.py, the layout of `routes` in route.py. Row by row: mean
// squares of the row's pairs -> barrier -> one factor a pair -> barrier -> columns, four a thread,
// pairs in ascending order. A tile of few columns makes the factors of its whole row for itself:
// another hop would cost more. Widths are multiples of 4.
#pragma once
#include "../payload.cuh"
#include "routes.hpp"
#include "row_norm.cuh"
#include "rows.cuh"

namespace gpurt {

struct combine {
  static constexpr u32 kTopMax = 32;
  static constexpr u32 kAtOnce = 4;       // pairs whose squares are summed together
  static constexpr u32 kAddedAtOnce = 8;  // pairs whose loads are under way together

  struct Scratch {
    RowNorm::Partial partial[kTopMax];
    f32 factor[kTopMax];
    u32 is_here[kTopMax];  // whether this rank has the pair's expert
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  GPURT_FN static void prefetch(const TaskRecord& task) {
    if (task.addr[2] != 0) prefetch_to_l2(task.addr[2], task.param[0] * 4);
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    const u32 width = task.param[0], top_k = task.param[1];
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      const f32* d = context.address<const f32>(task, 0) + u64(row) * top_k * width;
      weigh(task, context, row, d);
      add_up(task, context, row, d);
    }
  }

 private:
  GPURT_FN static Scratch& scratch_of(const BodyContext& context) {
    return *reinterpret_cast<Scratch*>(context.scratch);
  }

  // Squares of up to kAtOnce of `left` pairs, in RowNorm's order: their loads are under way at
  // once, where pair by pair each made a trip to L2 of its own.
  GPURT_FN static void sum_some(RowNorm::Partial* partial, u32 left, u32 width,
                                const BodyContext& context, const f32* d, const f32* gain) {
    const u32 lane = context.thread % 32;
#pragma unroll 1
    for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
      f32 sum[kAtOnce] = {};
#pragma unroll 2
      for (u32 i = v * 32 + lane; i < width / 4; i += RowNorm::kVirtual * 32) {
        float4 x[kAtOnce];
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) x[j] = read4(d + u64(j < left ? j : 0) * width, i);
        const float4 g = read4(gain, i);
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) sum[j] = RowNorm::add4(mul4(x[j], g), sum[j]);
      }
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], step);
        if (lane == 0 && j < left) partial[j][v] = sum[j];
      }
    }
  }

  // Each pair's weight, times the scale of its norm. The first barrier ends the reading of the
  // factors of the row before, the second one makes these ready.
  GPURT_FN static void weigh(const TaskRecord& task, const BodyContext& context, u32 row,
                             const f32* d) {
    Scratch& scratch = scratch_of(context);
    const u32 width = task.param[0], top_k = task.param[1];
    const f32* gain = arg<const f32>(task, 2);
    const RoutesLayout layout{context.step->rows_capacity, task.param[3], top_k};
    // Under way while squares are summed.
    const u32 words = layout.pair(row * top_k + min(context.thread, top_k - 1));
    const u32 slot = arg<const u32>(task, 1)[words + RoutesLayout::kSlot];
    f32 factor = arg<const f32>(task, 1)[words + RoutesLayout::kWeight];
#pragma unroll 1
    for (u32 t = 0; gain != nullptr && t < top_k; t += kAtOnce)
      sum_some(scratch.partial + t, top_k - t, width, context, d + u64(t) * width, gain);
    context.sync();
    if (context.thread < top_k) {
      scratch.is_here[context.thread] = slot != RoutesLayout::kNoSlot;
      if (gain != nullptr)
        factor *= RowNorm::scale(scratch.partial[context.thread], width, param_f32(task, 2));
      scratch.factor[context.thread] = factor;
    }
    context.sync();
  }

  GPURT_FN static void add_up(const TaskRecord& task, const BodyContext& context, u32 row,
                              const f32* d) {
    const Scratch& scratch = scratch_of(context);
    const u32 width = task.param[0], top_k = task.param[1];
    const f32* gain = arg<const f32>(task, 2);
    const f32* residual = arg<const f32>(task, 3);
    f32* y = context.address<f32>(task, 4) + u64(row) * width;
    for (u32 i = task.tile[0] / 4 + context.thread; i < task.tile[1] / 4;
         i += context.team_threads) {
      float4 total{};
      bool is_first = true;
#pragma unroll 1
      for (u32 base = 0; base < top_k; base += kAddedAtOnce) {
        float4 x[kAddedAtOnce];
#pragma unroll
        for (u32 j = 0; j < kAddedAtOnce; ++j)
          x[j] = read4(d + u64(min(base + j, top_k - 1)) * width, i);
        const float4 g = gain == nullptr ? make_float4(1, 1, 1, 1) : read4(gain, i);
#pragma unroll
        for (u32 j = 0; j < kAddedAtOnce; ++j) {
          if (base + j >= top_k || scratch.is_here[base + j] == 0) continue;
          const f32 f = scratch.factor[base + j];
          const float4 v = gain == nullptr ? x[j] : mul4(x[j], g);
          total = is_first ? scale4(v, f) : fma4(v, make_float4(f, f, f, f), total);
          is_first = false;
        }
      }
      if (residual != nullptr) {
        const float4 r = read4(residual + u64(row) * width, i);
        total = make_float4(total.x + r.x, total.y + r.y, total.z + r.z, total.w + r.w);
      }
      store_piece(reinterpret_cast<float4*>(y) + i, total, arms_output(task, 4));
    }
  }
};

}  // namespace gpurt
