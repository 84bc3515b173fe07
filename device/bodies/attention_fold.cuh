// A virtual warp's partial of a column in float32, for caches that bf16 does not hold: f32 and f16.
//
// D / 8 lanes read one position, 8 dimensions each; the warp's groups of them take positions in
// turn, and are joined at the end. Every multiply-add is written out (fmaf, and NVRTC's
// --fmad=false).
#pragma once
#include "attention_tile.cuh"

namespace gpurt {

template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFold {
  using Cache = AttentionCache<D, CACHE, WINDOWED>;
  using View = AttentionView<Cache>;
  using Eight = typename Elements<CACHE>::Eight;
  using Query = f32;
  static constexpr u32 kLanes = D / 8;                  // lanes a position
  static constexpr u32 kPositions = 32 / kLanes;        // positions a warp reads at once
  static constexpr u32 kBatch = CACHE == kF32 ? 2 : 4;  // such reads in flight
  static constexpr u32 kChunk = kBatch * kPositions;    // a page is a multiple of it
  static constexpr u32 kStride = kVirtualWarps * kChunk;

  // Running softmax of one column over one lane's 8 dimensions.
  struct Partial {
    f32 max, total;
    f32 out[8];
  };

  // Of every 16th chunk from `start` on, positions [seen, end); to `to`: D sums, maximum, total.
  __device__ static void fold(const Cache& cache, u32 start, u32 seen, u32 end, const Query* query,
                              u32 lane, f32* to) {
    Partial part{kNothingSeen, 0, {}};
    f32 q[8];
    Elements<kF32>::unpack8(
        Elements<kF32>::read8(reinterpret_cast<u64>(query), lane % kLanes * 8, true), q);
#pragma unroll 1
    for (u32 begin = start; begin < end; begin += kStride) {
      const u64 from = cache.key(cache.page(begin), begin) + lane * sizeof(Eight);
      Eight keys[kBatch], values[kBatch];
      bool valid[kBatch];
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        // Those not seen are not read: what lies there may be NaN, or of another lap of the ring.
        const u32 position = begin + lane / kLanes + b * kPositions;
        valid[b] = position < end && (!WINDOWED || position >= seen);
        u64 at = from + b * kPositions * Cache::kRowBytes;
        if (valid[b]) at += cache.detour(position);
        keys[b] = Elements<CACHE>::read8(at, 0, valid[b]);
        values[b] = Elements<CACHE>::read8(at + cache.values, 0, valid[b]);
      }
      add(q, keys, values, valid, part);
    }
    join_groups(part);
    if (lane < kLanes) Elements<kF32>::store8(reinterpret_cast<u64>(to), lane * 8, part.out);
    if (lane == 0) to[D] = part.max, to[D + 1] = part.total;
  }

 private:
  GPURT_FN static void add(const f32 (&q)[8], const Eight (&keys)[kBatch],
                           const Eight (&values)[kBatch], const bool (&valid)[kBatch],
                           Partial& part) {
    f32 score[kBatch];
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      f32 key[8];
      Elements<CACHE>::unpack8(keys[b], key);
      score[b] = 0;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) score[b] = fmaf(q[i], key[i], score[b]);
    }
#pragma unroll
    for (u32 step = 1; step < kLanes; step *= 2) {
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) score[b] += __shfl_xor_sync(~0u, score[b], step);
    }
    f32 top = part.max;
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      if (valid[b]) top = fmaxf(top, score[b]);
    }
    const f32 shrink = ex2_approx_ftz(part.max - top);
    part.max = top;
    part.total *= shrink;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) part.out[i] *= shrink;
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const f32 weight = valid[b] ? ex2_approx_ftz(score[b] - top) : 0.0f;
      part.total += weight;
      f32 value[8];
      Elements<CACHE>::unpack8(values[b], value);
#pragma unroll
      for (u32 i = 0; i < 8; ++i) part.out[i] = fmaf(weight, value[i], part.out[i]);
    }
  }

  // The groups of a warp took different positions: one partial from them, the same in all lanes.
  GPURT_FN static void join_groups(Partial& part) {
#pragma unroll 1
    for (u32 step = kLanes; step < 32; step *= 2) {
      const f32 other_max = __shfl_xor_sync(~0u, part.max, step);
      const f32 other_total = __shfl_xor_sync(~0u, part.total, step);
      const f32 top = fmaxf(part.max, other_max);
      const f32 mine = ex2_approx_ftz(part.max - top), theirs = ex2_approx_ftz(other_max - top);
      part.max = top;
      // Products and one sum: both sides of a pair must round alike, which fmaf would not.
      part.total = __fadd_rn(__fmul_rn(part.total, mine), __fmul_rn(other_total, theirs));
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const f32 other = __shfl_xor_sync(~0u, part.out[i], step);
        part.out[i] = __fadd_rn(__fmul_rn(part.out[i], mine), __fmul_rn(other, theirs));
      }
    }
  }
};

}  // namespace gpurt
