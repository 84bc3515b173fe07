// A virtual warp's partials of several fours of columns, for which it reads each chunk once.
//
// What attention_mma.cuh does for one four, in the same order: so are the bits. Registers hold the
// chunk and the sums of one four at a time; between two chunks they wait in shared memory, in the
// room in which the warp's partials are put at the end. Of a chunk and four that is 4 KB in and out
// (D = 128), where the chunk is 8 KB from L2.
#pragma once
#include "attention_fold.cuh"
#include "attention_mma.cuh"

namespace gpurt {

template <u32 D, u32 CACHE, bool WINDOWED, u32 TILES>
struct AttentionMmaTiles {
  using One = AttentionMma<D, CACHE, WINDOWED>;
  using Cache = typename One::Cache;
  using View = typename One::View;
  using Eight = typename One::Eight;
  using Query = typename One::Query;
  using Sums = typename One::Sums;
  static constexpr u32 kChunk = One::kChunk;
  static constexpr u32 kStride = One::kStride;
  static constexpr u32 kColumns = kAttentionColumns;
  static_assert(TILES * kColumns * kPartialFloats<D> <= kSumsFloats<D>,
                "partials of all lie where the first four's sums were");

  // As One::fold; bounds: of each four, those beyond the tile's columns too.
  GPURT_FN static void fold(const Cache& cache, const AttentionTile& tile,
                            const AttentionBounds (&bounds)[TILES], const Query* query, u32 group,
                            u32 start, u32 lane, f32* to) {
    const u32 g = lane / 4, c = lane % 4;
    float4* room = reinterpret_cast<float4*>(to) + lane;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) put(Sums{{kNothingSeen, kNothingSeen}, {}, {}}, room, t);
    u32 page = start < tile.end ? cache.page(start) : 0;
#pragma unroll 1
    for (u32 begin = start; begin < tile.end; begin += kStride) {
      const u64 from = cache.key(page, begin);
      f32 score[TILES][4] = {};
      {
        Eight keys[2][D / 32];
#pragma unroll
        for (u32 h = 0; h < 2; ++h)
          One::template read<32>(cache, from + c * sizeof(Eight), g + 8 * h, begin, tile, keys[h]);
        if (begin + kStride < tile.end) page = cache.page(begin + kStride);
#pragma unroll
        for (u32 t = 0; t < TILES; ++t) {
          if (t * kColumns >= tile.columns()) break;
          uint4 q[D / 32];
          read_query(query, tile, group, t, g, c, q);
          One::scores(keys, [&](u32 b) { return q[b]; }, score[t]);
        }
      }
      Eight values[4][D / 64];
      asm volatile("" ::: "memory");  // there are no registers for keys and values at once
      One::read_values(cache, from, g, c, begin, tile, values);
#pragma unroll
      for (u32 t = 0; t < TILES; ++t) {
        if (t * kColumns >= tile.columns()) break;
        Sums sums = get(room, t);
        u32 weights[2];
        One::weigh(bounds[t], begin + g, c >= 2, score[t], sums, weights);
        One::add(values, movmatrix_trans(weights[0]), movmatrix_trans(weights[1]), sums);
        put(sums, room, t);
      }
    }
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      if (t * kColumns >= tile.columns()) break;
      Sums sums = get(room, t);
      One::finish(sums);
      __syncwarp();  // all lanes have read what partials are put over
      One::park(sums, 0, min(tile.columns() - t * kColumns, kColumns), lane,
                to + t * kColumns * kPartialFloats<D>);
    }
  }

 private:
  GPURT_FN static void read_query(const Query* query, const AttentionTile& tile, u32 group, u32 t,
                                  u32 g, u32 c, uint4 (&q)[D / 32]) {
    const u32 column = min(t * kColumns + g % 4, tile.columns() - 1);
    query += (column / tile.heads * group + column % tile.heads) * D;
    const u16* own = reinterpret_cast<const u16*>(query) + g / 4 * D + c * 8;
#pragma unroll
    for (u32 b = 0; b < D / 32; ++b) q[b] = *reinterpret_cast<const uint4*>(own + b * 32);
  }

  // A lane's sums of four t, every 16 bytes side by side with those of other lanes.
  GPURT_FN static void put(const Sums& sums, float4* room, u32 t) {
    float4* to = room + t * (kSumsFloats<D> / 4);
    to[0] = make_float4(sums.max[0], sums.max[1], sums.total[0], sums.total[1]);
#pragma unroll
    for (u32 i = 0; i < D / 16; ++i) {
      const f32(&x)[4] = sums.out[i / 4][i % 4];
      to[(i + 1) * 32] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  GPURT_FN static Sums get(const float4* room, u32 t) {
    const float4* from = room + t * (kSumsFloats<D> / 4);
    Sums sums{{from[0].x, from[0].y}, {from[0].z, from[0].w}, {}};
#pragma unroll
    for (u32 i = 0; i < D / 16; ++i) {
      const float4 v = from[(i + 1) * 32];
      f32(&x)[4] = sums.out[i / 4][i % 4];
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
    return sums;
  }
};

// Who folds: by what the cache holds and how many fours of columns.
template <bool IS_MMA, u32 D, u32 CACHE, bool WINDOWED, u32 TILES>
struct AttentionFolder {
  using Type = AttentionFold<D, CACHE, WINDOWED>;
};
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder<true, D, CACHE, WINDOWED, 1> {
  using Type = AttentionMma<D, CACHE, WINDOWED>;
};
template <u32 D, u32 CACHE, bool WINDOWED>
struct AttentionFolder<true, D, CACHE, WINDOWED, 2> {
  using Type = AttentionMmaTiles<D, CACHE, WINDOWED, 2>;
};

}  // namespace gpurt
