// attention's inner loop: a virtual warp's positions of a sequence, folded by running softmax.
//
// A warp holds a chunk of keys and of values, and folds it into the partials of HEADS query heads:
// what limits a short context is trips to L2, so each chunk makes one trip for all heads. Keys of
// the next chunk are asked for as soon as this one's scores have them, and values as soon as this
// one's are folded, so that a trip passes behind the arithmetic of the other half.
// HEADS changes no bit: heads do not mix.
#pragma once
#include "attention_place.cuh"
#include "elements.cuh"

namespace gpurt {

constexpr u32 kVirtualWarps = 16;

// Of head dimension D, cached as CACHE (a DTypeCode). WINDOWED: there may be a first position seen,
// and pages may be a ring.
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFold {
  static_assert(D == 64 || D == 128, "head dimensions that fill lanes of 8");
  static constexpr u32 kLanes = D / 8;                  // lanes a position
  static constexpr u32 kPositions = 32 / kLanes;        // positions a warp reads at once
  static constexpr u32 kBatch = CACHE == kF32 ? 2 : 4;  // such reads in flight
  static constexpr u32 kChunk = kBatch * kPositions;    // a page is a multiple of it
  static constexpr u32 kStride = kVirtualWarps * kChunk;
  static constexpr u32 kHeadFloats = D + 4;  // D outputs, max, sum; aligned to 16 bytes

  using Eight = typename Elements<CACHE>::Eight;
  static constexpr u32 kRowBytes = D / 8 * sizeof(Eight);  // of a position's key

  // Running softmax of one head over one lane's 8 dimensions.
  struct Partial {
    f32 max, sum;
    f32 out[8];
  };

  // Where a lane finds its 8 dimensions of a slot's positions, and which of them a row sees.
  struct Sequence {
    u64 keys;             // of position 0 of page 0, for the lane's place in a chunk
    u64 values;           // bytes from a key to its value
    const u32* pages;     // the slot's
    u32 page_bytes;       // from one page to the next
    u32 page_log2, ring;  // positions a page; WINDOWED: pages of the slot
    u32 seen, end;        // WINDOWED: the first position seen; behind the last one
    Branch branch;

    GPURT_FN u32 page(u32 position) const {
      const u32 at = position >> page_log2;
      return pages[WINDOWED ? at % ring : at];
    }
    GPURT_FN u64 at(u32 page, u32 position) const {
      const u32 offset = position & ((1u << page_log2) - 1);
      return keys + u64(page) * page_bytes + offset * kRowBytes;
    }
    // Bytes from a position's place to where a row on a branch finds it.
    GPURT_FN u64 detour(u32 position) const {
      if (!branch.is_elsewhere(position) || position >= end) return 0;
      const u32 place = branch.place(position);
      return at(page(place), place) - at(page(position), position);
    }
  };

  // Folds every 16th chunk from `start` on, whose page is `page`, for HEADS heads; parks a partial
  // for each of the first `heads`.
  template <u32 HEADS>
  GPURT_FN static void fold(const Sequence& sequence, u32 start, u32 page, const f32 (*query)[D],
                            u32 heads, u32 lane, f32* to) {
    Partial parts[HEADS];
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h)
      parts[h] = {-3.0e38f, 0, {}};  // finite: a difference of two is 0, not NaN
    const u32 group = lane / kLanes;
    const f32* own = query[0] + lane % kLanes * 8;
#pragma unroll 1
    for (u32 begin = start; begin < sequence.end; begin += kStride) {
      const u64 from = sequence.at(page, begin);
      Eight keys[kBatch], values[kBatch];
      read(sequence, from, begin + group, keys);
      read(sequence, from + sequence.values, begin + group, values);
      if (begin + kStride < sequence.end) page = sequence.page(begin + kStride);
      f32 score[HEADS][kBatch];
      scores<HEADS>(own, heads, keys, score);
#pragma unroll
      for (u32 h = 0; h < HEADS; ++h) add(sequence, score[h], values, begin + group, parts[h]);
    }
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h) {
      if (h >= heads) break;
      join_groups(parts[h]);
      park(to + h * kHeadFloats, parts[h], lane);
    }
  }

 private:
  // Of a lane's position in each row of a chunk. Those not seen are not read: what lies there may
  // be NaN, or of another lap of the ring.
  GPURT_FN static bool is_seen(const Sequence& sequence, u32 position) {
    return position < sequence.end && (!WINDOWED || position >= sequence.seen);
  }

  GPURT_FN static void read(const Sequence& sequence, u64 from, u32 position,
                            Eight (&eights)[kBatch]) {
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const bool valid = is_seen(sequence, position + b * kPositions);
      const u64 at = from + b * kPositions * kRowBytes;
      eights[b] = Elements<CACHE>::read8(at + sequence.detour(position + b * kPositions), 0, valid);
    }
  }

  // Of heads beyond the last, the last one's again.
  template <u32 HEADS>
  GPURT_FN static void scores(const f32* query, u32 heads, const Eight (&keys)[kBatch],
                              f32 (&score)[HEADS][kBatch]) {
#pragma unroll
    for (u32 h = 0; h < HEADS; ++h) {
      const float4* from = reinterpret_cast<const float4*>(query + min(h, heads - 1) * D);
      const float4 low = from[0], high = from[1];
      const f32 q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (u32 b = 0; b < kBatch; ++b) {
        f32 key[8];
        Elements<CACHE>::unpack8(keys[b], key);
        score[h][b] = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) score[h][b] = fmaf(q[i], key[i], score[h][b]);
      }
    }
#pragma unroll
    for (u32 step = 1; step < kLanes; step *= 2) {
#pragma unroll
      for (u32 h = 0; h < HEADS; ++h) {
#pragma unroll
        for (u32 b = 0; b < kBatch; ++b) score[h][b] += __shfl_xor_sync(~0u, score[h][b], step);
      }
    }
  }

  // Positions that are not seen weigh nothing.
  GPURT_FN static void add(const Sequence& sequence, const f32 (&score)[kBatch],
                           const Eight (&values)[kBatch], u32 position, Partial& part) {
    f32 top = part.max;
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      if (is_seen(sequence, position + b * kPositions)) top = fmaxf(top, score[b]);
    }
    const f32 shrink = ex2_approx_ftz(part.max - top);
    part.max = top;
    part.sum *= shrink;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) part.out[i] *= shrink;
#pragma unroll
    for (u32 b = 0; b < kBatch; ++b) {
      const bool weighs = is_seen(sequence, position + b * kPositions);
      const f32 weight = weighs ? ex2_approx_ftz(score[b] - top) : 0.0f;
      part.sum += weight;
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
      const f32 other_sum = __shfl_xor_sync(~0u, part.sum, step);
      const f32 top = fmaxf(part.max, other_max);
      const f32 mine = ex2_approx_ftz(part.max - top), theirs = ex2_approx_ftz(other_max - top);
      part.max = top;
      // Products and one sum: both sides of a pair must round alike, which fmaf would not.
      part.sum = __fadd_rn(__fmul_rn(part.sum, mine), __fmul_rn(other_sum, theirs));
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const f32 other = __shfl_xor_sync(~0u, part.out[i], step);
        part.out[i] = __fadd_rn(__fmul_rn(part.out[i], mine), __fmul_rn(other, theirs));
      }
    }
  }

  GPURT_FN static void park(f32* to, const Partial& part, u32 lane) {
    if (lane < kLanes) Elements<kF32>::store8(reinterpret_cast<u64>(to), lane * 8, part.out);
    if (lane == 0) {
      to[D] = part.max;
      to[D + 1] = part.sum;
    }
  }
};

}  // namespace gpurt
