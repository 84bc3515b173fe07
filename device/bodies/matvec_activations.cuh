// matvec's activations on the GPU: a lane's 16 columns of one chunk, for TILES tiles of 8 step rows.
//
// X is kF32 or kBf16. Lane (g, c) takes columns 16c .. 16c+15 of step rows g, g + 8: two or four
// granules a row, the B operand of four mma after conversion. Loads go to L2 for payload and for
// ordinary inputs alike, so one path serves both; only payload is polled.
#pragma once
#include "../stream.cuh"

namespace gpurt {

constexpr u32 kMatvecRowTile = 8;  // rows of a step in one mma: its n

template <u32 X, u32 TILES>
struct MatvecActivations {
  static constexpr u32 kGranules = X == kBf16 ? 2 : 4;
  static constexpr u32 kElementBytes = X == kBf16 ? 2 : 4;
  uint4 raw[TILES][kGranules];  // in flight from load() to wait()
  u64 at[TILES];                // this lane's columns of the current chunk
  u32 column;                   // the first of them
  u32 k;
  bool has_row[TILES];

  // row(j): the row of x that belongs to row j of the output.
  template <class Row>
  GPURT_FN void start(u64 x, u32 columns, u32 chunk, u32 rows, Row row) {
    const u32 lane = threadIdx.x % 32;
    k = columns;
    column = chunk * 64 + lane % 4 * 16;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      const u32 j = t * kMatvecRowTile + lane / 4;
      has_row[t] = j < rows;
      at[t] = x + (u64{has_row[t] ? row(j) : 0} * k + column) * kElementBytes;
    }
  }

  GPURT_FN void advance(u32 chunks) {
    column += chunks * 64;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) at[t] += chunks * 64 * kElementBytes;
  }

  // Zeros where this lane has no row or no column: zero never looks like the sentinel.
  GPURT_FN void load() {
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      const bool has = has_row[t] && column < k;
#pragma unroll
      for (u32 i = 0; i < kGranules; ++i) {
        raw[t][i] = make_uint4(0, 0, 0, 0);
        if (has) raw[t][i] = ld_relaxed_gpu_b128(at[t] + i * 16);
      }
    }
  }

  GPURT_FN bool missing() const {
    bool any = false;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
      for (u32 i = 0; i < kGranules; ++i) any |= is_sentinel(raw[t][i]);
    }
    return any;
  }

  // Payload: until all of the chunk is there. Converged.
  GPURT_FN void wait() {
    for (u32 polls = 0; payload_missing(missing(), polls);) load();
  }

  // To bf16 pairs in mma order: pair[2j], pair[2j + 1] are B of mma j. `norm`: address of the norm
  // weights (f32 x only), 0 if there are none; with them, adds this lane's squares.
  GPURT_FN void convert(u32 t, u64 norm, u32 (&pair)[8], f32& squares) const {
    const bool has_norm = norm != 0 && column < k;
    const float4* weights = at_norm(norm);
#pragma unroll
    for (u32 i = 0; i < kGranules; ++i) {
      const uint4 v = raw[t][i];
      if constexpr (X == kBf16) {
        pair[4 * i] = v.x, pair[4 * i + 1] = v.y, pair[4 * i + 2] = v.z, pair[4 * i + 3] = v.w;
      } else {
        f32 a = __uint_as_float(v.x), b = __uint_as_float(v.y);
        f32 c = __uint_as_float(v.z), d = __uint_as_float(v.w);
        if (has_norm) {
          squares = __fmaf_rn(a, a, squares), squares = __fmaf_rn(b, b, squares);
          squares = __fmaf_rn(c, c, squares), squares = __fmaf_rn(d, d, squares);
          const float4 weight = __ldg(weights + i);
          a *= weight.x, b *= weight.y, c *= weight.z, d *= weight.w;
        }
        pair[2 * i] = pack_bf16x2(a, b), pair[2 * i + 1] = pack_bf16x2(c, d);
      }
    }
  }

 private:
  GPURT_FN const float4* at_norm(u64 norm) const {
    return reinterpret_cast<const float4*>(norm + u64{column} * 4);
  }
};

}  // namespace gpurt
