// A virtual warp's partials of a tile on the tensor cores, for caches that bf16 holds exactly.
//
// Of a chunk of 16 positions: scores = K Q, positions by columns; sums += V' weights, dimensions by
// columns. A tile has 4 columns at most and an mma has 8: column i + 4 is column i's rest, what its
// query or weight lost when it was rounded to bf16. Lane (g = lane / 4, c = lane % 4) reads
//   keys of positions g and g + 8: dimensions 8c .. 8c+7 of each 32, A of two mma
//   values of positions 2c, 2c+1, 2c+8, 2c+9: dimensions 8g .. 8g+7 of each 64, A of four mma
// in 8 elements at once, so that mma j takes as its k (or rows) what the lane has at 2j and 2j + 1.
// A column that sees nothing of a chunk keeps its bits: its weights are zeros, its maximum stays.
#pragma once
#include "attention_tile.cuh"
#include "attention_waits.cuh"

namespace gpurt {

template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionMma {
  using Cache = AttentionCache<D, CACHE, WINDOWED>;
  using View = AttentionView<Cache>;
  using Eight = typename Elements<CACHE>::Eight;
  using Query = u32;  // room for two bf16: D of them, then their D rests
  static constexpr u32 kChunk = 16;
  static constexpr u32 kStride = kVirtualWarps * kChunk;
  static constexpr u32 kLines = kChunk * Cache::kRowBytes / 128;  // of a chunk's keys

  // Of columns 2c and 2c + 1, of which those of c >= 2 are rests: sums of dimensions 64b + 8g + 2j
  // and 64b + 8g + 2j + 1.
  struct Sums {
    f32 max[2], total[2];   // D > 64: between two chunks in shared memory, for want of registers
    f32 out[D / 64][4][4];  // b, j: (2j, column 2c), (2j, 2c + 1), (2j + 1, 2c), (2j + 1, 2c + 1)
  };

  // Of every 16th chunk from `start` on, up to tile.end; to `to`, a partial a column. query: of the
  // tile's first row and head; a row has `group` heads. view: this warp's own.
  GPURT_FN static void fold(const Cache& cache, const AttentionTile& tile,
                            const AttentionBounds& bounds, const Query* query, u32 group, u32 start,
                            u32 lane, View& view, f32* to, Waits& waits) {
    const Sums sums = sum<false>(cache, tile, bounds, query, group, start, lane, view, to, waits);
    park(sums, 0, tile.columns(), lane, to);
  }

  // AHEAD: asks for the next chunk while it waits for one, see ask(). room: 16 bytes a lane.
  template <bool AHEAD>
  GPURT_FN static Sums sum(const Cache& of_slot, const AttentionTile& of_columns,
                           const AttentionBounds& of_lane, const Query* query, u32 group, u32 start,
                           u32 lane, View& view, f32* room, Waits& waits) {
    const u32 g = lane / 4, c = lane % 4, end = of_columns.end;
    Sums sums{{kNothingSeen, kNothingSeen}, {}, {}};
    const u32 column = min(g % 4, of_columns.columns() - 1);
    query += (column / of_columns.heads * group + column % of_columns.heads) * D;
    const u32 own = shared_address(query) + (g / 4 * D + c * 8) * 2;
    const u32 kept = shared_address(room) + lane * 16;
    if constexpr (kKeeps) {
      view.set(of_slot, of_columns, of_lane, lane);
      keep(sums, kept);
    }
    uint4 q[D / 32] = {};
    u32 page = page_of(of_slot, end, start);
    u32 next = AHEAD ? page_of(of_slot, end, start + kStride) : 0;
#pragma unroll 1
    for (u32 begin = start; begin < end; begin += kStride) {
      waits.for_keys(begin + kChunk);
      Eight keys[2][D / 32], values[4][D / 64];
      const Cache cache = kKeeps ? shared_copy(view.cache) : of_slot;
      const u64 from = cache.key(page, begin);
      const AttentionTile tile = kKeeps ? shared_copy(view.tile) : of_columns;
#pragma unroll
      for (u32 h = 0; h < 2; ++h)
        read<32>(cache, from + c * sizeof(Eight), g + 8 * h, begin, tile, keys[h]);
      if constexpr (!kKeeps) read_values(cache, from, g, c, begin, tile, values);
      if constexpr (AHEAD) {
        if (begin + kStride < end) ask(cache, next, begin + kStride, lane);
        page = next;
        next = page_of(cache, end, begin + 2 * kStride);
      } else {
        page = page_of(cache, end, begin + kStride);
      }
      if (begin == start) waits.for_queries();
      if (!kKeeps && begin == start) {
#pragma unroll
        for (u32 b = 0; b < D / 32; ++b) q[b] = ld_shared_b128(own + b * 64);
      }
      f32 score[4] = {};
      scores(keys, [&](u32 b) { return kKeeps ? ld_shared_b128(own + b * 64) : q[b]; }, score);
      // There are no registers for both at once.
      if constexpr (kKeeps) {
        read_values(shared_copy(view.cache), from, g, c, begin, shared_copy(view.tile), values);
        fetch(sums, kept);
      }
      u32 weights[2];
      const AttentionBounds bounds = kKeeps ? shared_copy(view.bounds[lane % 2]) : of_lane;
      weigh(bounds, begin + g, c >= 2, score, sums, weights);
      if constexpr (kKeeps) keep(sums, kept);
      add(values, movmatrix_trans(weights[0]), movmatrix_trans(weights[1]), sums);
    }
    if constexpr (kKeeps) fetch(sums, kept);
    __syncwarp();  // what is parked may lie where other lanes kept theirs
    finish(sums);
    return sums;
  }

  // Heads of 64 dimensions have registers for all of it.
  static constexpr bool kKeeps = D > 64;
  GPURT_FN static void keep(const Sums& sums, u32 to) {
    st_shared_b128(to, make_uint4(__float_as_uint(sums.max[0]), __float_as_uint(sums.max[1]),
                                  __float_as_uint(sums.total[0]), __float_as_uint(sums.total[1])));
  }
  GPURT_FN static void fetch(Sums& sums, u32 from) {
    const uint4 v = ld_shared_b128(from);
    sums.max[0] = __uint_as_float(v.x), sums.max[1] = __uint_as_float(v.y);
    sums.total[0] = __uint_as_float(v.z), sums.total[1] = __uint_as_float(v.w);
  }

  // 0 behind the tile.
  GPURT_FN static u32 page_of(const Cache& cache, u32 end, u32 position) {
    return position < end ? cache.page(position) : 0;
  }

  // The chunk at `begin` into L2: of a long context it lies in memory, whose trip is twice as long.
  GPURT_FN static void ask(const Cache& cache, u32 page, u32 begin, u32 lane) {
    const u64 line = cache.key(page, begin) + lane % kLines * 128;
    prefetch_line_to_l2(line);
    prefetch_line_to_l2(line + cache.values);
  }

  // All lanes' sums of a column, rests included, in each of its lanes.
  GPURT_FN static void finish(Sums& sums) {
#pragma unroll
    for (u32 step = 4; step < 32; step *= 2) {
      sums.total[0] += __shfl_xor_sync(~0u, sums.total[0], step);
      sums.total[1] += __shfl_xor_sync(~0u, sums.total[1], step);
    }
#pragma unroll
    for (u32 b = 0; b < D / 64; ++b) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sums.out[b][j][i] += __shfl_xor_sync(~0u, sums.out[b][j][i], 2);
      }
    }
  }

  // Columns [first, end) of finished sums, to a partial each.
  GPURT_FN static void park(const Sums& sums, u32 first, u32 end, u32 lane, f32* to) {
    const u32 g = lane / 4, c = lane % 4;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 column = 2 * c + i;
      if (column < first || column >= end) continue;
      f32* partial = to + (column - first) * kPartialFloats<D>;
#pragma unroll
      for (u32 b = 0; b < D / 64; ++b) {
        float4* own = reinterpret_cast<float4*>(partial + b * 64 + g * 8);
        const f32(&x)[4][4] = sums.out[b];
        own[0] = make_float4(x[0][i], x[0][2 + i], x[1][i], x[1][2 + i]);
        own[1] = make_float4(x[2][i], x[2][2 + i], x[3][i], x[3][2 + i]);
      }
      if (g == 0) partial[D] = sums.max[i], partial[D + 1] = sums.total[i];
    }
  }

  GPURT_FN static void read_values(const Cache& cache, u64 from, u32 g, u32 c, u32 begin,
                                   const AttentionTile& tile, Eight (&values)[4][D / 64]) {
#pragma unroll
    for (u32 h = 0; h < 4; ++h) {
      const u32 offset = 2 * c + h % 2 + h / 2 * 8;
      read<64>(cache, from + cache.values + g * sizeof(Eight), offset, begin, tile, values[h]);
    }
  }

  // A position's elements, 8 of each STRIDE dimensions. For one that no row of the tile sees the
  // next that some row does, since it weighs nothing: what lies there may be NaN, or of another lap
  // of the ring. A choice of addresses costs less than one of loads.
  template <u32 STRIDE>
  GPURT_FN static void read(const Cache& cache, u64 from, u32 offset, u32 begin,
                            const AttentionTile& tile, Eight (&eights)[D / STRIDE]) {
    offset = min(offset, tile.end - 1 - begin);
    if (WINDOWED && tile.seen > begin) offset = max(offset, tile.seen - begin);
    from += offset * Cache::kRowBytes + cache.detour(begin + offset);
#pragma unroll
    for (u32 b = 0; b < D / STRIDE; ++b)
      eights[b] = Elements<CACHE>::read8(from + b * STRIDE * Cache::kElementBytes, 0, true);
  }

  // Of positions g and g + 8, columns 2c and 2c + 1, or those whose rests they are.
  // query_at(b): this lane's of each 32 dimensions.
  template <class QueryAt>
  GPURT_FN static void scores(const Eight (&keys)[2][D / 32], QueryAt query_at, f32 (&score)[4]) {
    f32 other[4] = {};  // a second chain: a dependent mma costs its whole latency
#pragma unroll
    for (u32 b = 0; b < D / 32; ++b) {
      const uint4 low = bf16_of(keys[0][b]), high = bf16_of(keys[1][b]);
      const uint4 q = query_at(b);
      mma_m16n8k16_bf16(score, make_uint4(low.x, high.x, low.y, high.y), q.x, q.y);
      mma_m16n8k16_bf16(other, make_uint4(low.z, high.z, low.w, high.w), q.z, q.w);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      score[i] += other[i];
      score[i] += __shfl_xor_sync(~0u, score[i], 2);
    }
  }

  // Weights of scores, or their rests, as pairs of columns: of position g, and of g + 8. What a
  // column does not see weighs nothing.
  GPURT_FN static void weigh(const AttentionBounds& bounds, u32 position, bool is_rest,
                             const f32 (&score)[4], Sums& sums, u32 (&weights)[2]) {
    f32 weight[4];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const bool low = bounds.template has<WINDOWED>(i, position),
                 high = bounds.template has<WINDOWED>(i, position + 8);
      f32 top = fmaxf(low ? score[i] : kNothingSeen, high ? score[2 + i] : kNothingSeen);
#pragma unroll
      for (u32 step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      top = fmaxf(top, sums.max[i]);
      const f32 shrink = ex2_approx_ftz(sums.max[i] - top);
      sums.max[i] = top;
      sums.total[i] *= shrink;
#pragma unroll
      for (u32 b = 0; b < D / 64; ++b) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sums.out[b][j][i] *= shrink, sums.out[b][j][2 + i] *= shrink;
      }
      weight[i] = low ? ex2_approx_ftz(score[i] - top) : 0.0f;
      weight[2 + i] = high ? ex2_approx_ftz(score[2 + i] - top) : 0.0f;
    }
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      sums.total[0] += weight[2 * h];
      sums.total[1] += weight[2 * h + 1];
      weights[h] = pack_bf16x2(weight[2 * h], weight[2 * h + 1]);
      const u32 rests = pack_bf16x2(weight[2 * h] - bf16_low(weights[h]),
                                    weight[2 * h + 1] - bf16_high(weights[h]));
      if (is_rest) weights[h] = rests;
    }
  }

  // sums += V' weights. low, high: of positions 2c, 2c + 1 and 2c + 8, 2c + 9, for column g.
  GPURT_FN static void add(const Eight (&values)[4][D / 64], u32 low, u32 high, Sums& sums) {
#pragma unroll
    for (u32 b = 0; b < D / 64; ++b) {
      uint4 v[4];
#pragma unroll
      for (u32 h = 0; h < 4; ++h) v[h] = bf16_of(values[h][b]);
      add_pair(v[0].x, v[1].x, v[2].x, v[3].x, low, high, sums.out[b][0]);
      add_pair(v[0].y, v[1].y, v[2].y, v[3].y, low, high, sums.out[b][1]);
      add_pair(v[0].z, v[1].z, v[2].z, v[3].z, low, high, sums.out[b][2]);
      add_pair(v[0].w, v[1].w, v[2].w, v[3].w, low, high, sums.out[b][3]);
    }
  }

  // Two dimensions of four positions each.
  GPURT_FN static void add_pair(u32 v0, u32 v1, u32 v2, u32 v3, u32 low, u32 high, f32 (&out)[4]) {
    const uint4 a = make_uint4(low_halves(v0, v1), high_halves(v0, v1), low_halves(v2, v3),
                               high_halves(v2, v3));
    mma_m16n8k16_bf16(out, a, low, high);
  }

  GPURT_FN static u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
  GPURT_FN static u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

  GPURT_FN static uint4 bf16_of(const Eight& eight) {
    if constexpr (CACHE == kBf16) {
      return eight;
    } else {  // three bits of mantissa
      f32 x[8];
      Elements<CACHE>::unpack8(eight, x);
      return make_uint4(pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]), pack_bf16x2(x[4], x[5]),
                        pack_bf16x2(x[6], x[7]));
    }
  }
};

}  // namespace gpurt
