// combine_columns on the GPU: this rank's columns of y = sum over a row's experts of weight * R(x).
//
// The contract is in graphs/ops/combine_columns.py, the layout of `routes` in route.py. A warp
// makes 128 columns of a row, and for itself the factor of each of the row's pairs: no barrier, and
// all loads under way, and looked at again, together. Lane t + n * span sums the squares of pair t
// over ranks n, n + 32 / span, ..; then a tree over n. So the order hangs on the number of pairs
// alone.
#pragma once
#include "published.cuh"
#include "routes.hpp"
#include "row_norm.cuh"
#include "rows.cuh"

namespace gpurt {

struct combine_columns {
  // What a lane asks for at once: of 8 pairs over 8 ranks it is all.
  static constexpr u32 kPairs = 8, kRanks = 2;

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    const u32 width = task.param[0] / 4, lane = context.thread % 32;
    const CopyOf copy(task.param + 5, reinterpret_cast<u64>(context.address<f32>(task, 3)),
                      task.param[0], lane);
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
#pragma unroll 1
      for (u32 i = context.thread; i - lane < width; i += context.team_threads)
        make(task, context, row, i, copy);
    }
  }

 private:
  // Granule `i` of a row; a lane without one has the last one and stores nothing.
  GPURT_FN static void make(const TaskRecord& task, const BodyContext& context, u32 row, u32 i,
                            const CopyOf& copy) {
    const u32 width = task.param[0] / 4, ranks = task.param[1], top_k = task.param[2];
    const u32 lane = context.thread % 32;
    const u32 span = top_k < 2 ? 1 : 2u << (31 - __clz(static_cast<int>(top_k - 1)));
    const u32 own = min(lane % span, top_k - 1), step = 32 / span, rank = lane / span;
    const float4* x = context.address<const float4>(task, 0) + u64(row) * top_k * width;
    const float4* squares = context.address<const float4>(task, 1) + u64(row) * ranks * top_k;
    const auto of_pair = [&](u32 t) { return x + (min(t, top_k - 1) * width + min(i, width - 1)); };
    const auto of_rank = [&](u32 n) { return squares + (min(n, ranks - 1) * top_k + own); };
    const auto place = [&](u32 j) {
      return j < kPairs ? of_pair(j) : of_rank(rank + (j - kPairs) * step);
    };
    float4 piece[kPairs + kRanks];
#pragma unroll
    for (u32 j = 0; j < kPairs + kRanks; ++j) piece[j] = load_piece(place(j));
    const RoutesLayout layout{context.step->rows_capacity, task.param[4], top_k};
    const f32 weight =
        arg<const f32>(task, 2)[layout.pair(row * top_k + own) + RoutesLayout::kWeight];
    const bool polls = polls_input(task, 0) || polls_input(task, 1);
    whole_pieces(piece, polls, place);
    f32 sum = 0;
#pragma unroll
    for (u32 j = 0; j < kRanks; ++j)
      if (rank + j * step < ranks) sum += total_of(piece[kPairs + j]);
#pragma unroll 1
    for (u32 n = rank + kRanks * step; n < ranks; n += step)
      sum += total_of(whole_piece(load_piece(of_rank(n)), of_rank(n), polls));
#pragma unroll 1
    for (u32 other = span; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    const f32 count = static_cast<f32>(ranks * task.param[0]);
    const f32 factors = weight * rsqrtf(__fdiv_rn(sum, count) + param_f32(task, 3));
    float4 total{};
#pragma unroll
    for (u32 t = 0; t < kPairs; ++t) {
      if (t < top_k) add(total, piece[t], factors, t);
    }
#pragma unroll 1
    for (u32 t = kPairs; t < top_k; ++t)
      add(total, whole_piece(load_piece(of_pair(t)), of_pair(t), polls), factors, t);
#pragma unroll 1
    for (u32 c = 0; c < copy.count; ++c) {
      const u64 base = __shfl_sync(~0u, copy.base, c);
      if (i < width)
        store_granule(base + (u64{row} * copy.stride + i * 4) * 4, total.x, total.y, total.z,
                      total.w);
    }
  }

  GPURT_FN static f32 total_of(const float4& s) { return (s.x + s.y) + (s.z + s.w); }

  GPURT_FN static void add(float4& total, const float4& x, f32 factors, u32 t) {
    const f32 f = __shfl_sync(~0u, factors, t);
    total = t == 0 ? scale4(x, f) : fma4(x, make_float4(f, f, f, f), total);
  }
};

}  // namespace gpurt
