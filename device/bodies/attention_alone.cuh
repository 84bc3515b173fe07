// attention of a tile by one warp: all of its virtual warps, one after another, without a barrier.
//
// For steps of many rows, which have tiles enough for every warp. The definition weighs a virtual
// warp's partial by the largest score of all (attention.cuh, merge_sums), so the warp goes over the
// keys twice: for that score, then for the sums; each partial is added as soon as it is made. So a
// warp needs room for one of them, where a team needs all, and no warp waits for another's.
// What bounds it is a warp's own trips to keys and values, which lie in L1 or L2 by then.
#pragma once
#include "attention_mma.cuh"
#include "attention_output.cuh"

namespace gpurt {

// Whole: the attention_of whose scratch, places and queries these are.
template <class Whole, u32 D, u32 GROUP, u32 CACHE, bool EXTRAS>
struct AttentionAlone {
  using One = AttentionMma<D, CACHE, EXTRAS>;
  using Cache = typename One::Cache;
  using Eight = typename One::Eight;
  using Query = typename One::Query;
  static constexpr u32 kChunk = One::kChunk;
  static constexpr u32 kHeads = GROUP < kAttentionColumns ? GROUP : kAttentionColumns;
  static constexpr u32 kRows = kAttentionColumns / kHeads;
  static constexpr u32 kFours = D / 4;                          // of a column's outputs
  static constexpr u32 kOwn = kAttentionColumns * kFours / 32;  // of them, a lane's

  // Rows [first, end) of the step's part at hand, whose queries begin with row `first`.
  GPURT_FN static void attend(u32 first, u32 end) {
    const AttentionShape& s = Whole::shape();
    u32 number = 0;
#pragma unroll 1
    for (u32 row = first; row < end;) {
      AttentionTile tile = Whole::template tile_at<kRows>(row, end);
#pragma unroll 1
      for (u32 head = s.head_begin; head < s.head_end; head += kHeads, ++number) {
        if (number % kTeamWarps != threadIdx.x / 32) continue;
        tile.head = head, tile.heads = min(kHeads, s.head_end - head);
        attend_tile(tile, first);
      }
      row += tile.rows;
    }
  }

 private:
  // What a lane has of outputs: fours `lane`, `lane` + 32, ... of the tile's columns.
  struct Outputs {
    f32 out[kOwn][4], total[kOwn];
  };

  __device__ __noinline__ static void attend_tile(const AttentionTile& given, u32 first) {
    const AttentionTile tile = given;
    const Cache cache = Whole::cache_at(Whole::place(tile.row));
    const u32 lane = threadIdx.x % 32;
    const AttentionBounds bounds = Whole::bounds_of(tile, 0, lane);
    const Query* query = Whole::scratch().query[tile.row - first][tile.head];
    f32* partial = Whole::scratch().partial[threadIdx.x / 32];
    f32* tops = partial + kAttentionColumns * kPartialFloats<D>;
    find_tops(cache, tile, bounds, query, lane, tops);
    Outputs outputs = {};
#pragma unroll 1
    for (u32 v = 0; v < kVirtualWarps; ++v) {
      const u32 start = tile.template start<kChunk>(v, 0);
      Waits waits = kNoWaits;
      One::fold(cache, tile, bounds, query, GROUP, start, lane, partial, waits);
      __syncwarp();
      add_partial(tile, lane, partial, tops, outputs);
      __syncwarp();
    }
    store(tile, lane, outputs);
  }

  // The largest score of each column.
  GPURT_FN static void find_tops(const Cache& cache, const AttentionTile& tile,
                                 const AttentionBounds& bounds, const Query* query, u32 lane,
                                 f32* tops) {
    const u32 g = lane / 4, c = lane % 4;
    const u32 column = min(g % 4, tile.columns() - 1);
    query += (column / tile.heads * GROUP + column % tile.heads) * D;
    const u16* own = reinterpret_cast<const u16*>(query) + g / 4 * D + c * 8;
    uint4 q[D / 32];
#pragma unroll
    for (u32 b = 0; b < D / 32; ++b) q[b] = *reinterpret_cast<const uint4*>(own + b * 32);
    f32 top[2] = {kNothingSeen, kNothingSeen};
#pragma unroll 2
    for (u32 begin = tile.seen / kChunk * kChunk; begin < tile.end; begin += kChunk) {
      const u64 from = cache.key(cache.page(begin), begin) + c * sizeof(Eight);
      Eight keys[2][D / 32];
#pragma unroll
      for (u32 h = 0; h < 2; ++h)
        One::template read<32>(cache, from, g + 8 * h, begin, tile, keys[h]);
      f32 score[4] = {};
      One::scores(keys, q, score);
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        if (bounds.template has<EXTRAS>(i, begin + g)) top[i] = fmaxf(top[i], score[i]);
        if (bounds.template has<EXTRAS>(i, begin + g + 8)) top[i] = fmaxf(top[i], score[2 + i]);
      }
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 step = 4; step < 32; step *= 2)
        top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
      if (lane < 2) tops[lane * 2 + i] = top[i];
    }
  }

  GPURT_FN static u32 column_of(const AttentionTile& tile, u32 lane, u32 i) {
    return min((i * 32 + lane) / kFours, tile.columns() - 1);
  }

  // As attention_of::merge_sums adds them.
  GPURT_FN static void add_partial(const AttentionTile& tile, u32 lane, const f32* partial,
                                   const f32* tops, Outputs& o) {
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {
      const u32 column = column_of(tile, lane, i);
      const f32* from = partial + column * kPartialFloats<D>;
      const f32 weight = ex2_approx_ftz(from[D] - tops[column]);
      const float4 x = *reinterpret_cast<const float4*>(from + (i * 32 + lane) % kFours * 4);
      o.total[i] = fmaf(from[D + 1], weight, o.total[i]);
      o.out[i][0] = fmaf(x.x, weight, o.out[i][0]), o.out[i][1] = fmaf(x.y, weight, o.out[i][1]);
      o.out[i][2] = fmaf(x.z, weight, o.out[i][2]), o.out[i][3] = fmaf(x.w, weight, o.out[i][3]);
    }
  }

  // A lane beyond the last output repeats one, and stores nothing.
  GPURT_FN static void store(const AttentionTile& tile, u32 lane, Outputs& o) {
    const AttentionShape& s = Whole::shape();
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) {
      const u32 column = column_of(tile, lane, i), row = tile.row_of(column);
      const u32 head = s.kv_head * GROUP + tile.head_of(column);
      const u32 element = head * D + (i * 32 + lane) % kFours * 4;
      const bool stores = (i * 32 + lane) / kFours < tile.columns();
      const u64 gates = Whole::gates_of(s, row, element);
      uint4 gate{};
      if constexpr (EXTRAS) {
        if (s.gated) gate = ld_relaxed_b128(gates);
      }
      Whole::finish_four(s, row, element, gate, gates, o.total[i], o.out[i], stores);
    }
  }
};

}  // namespace gpurt
