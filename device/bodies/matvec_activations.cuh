// matvec's activations on the GPU: a lane's 16 columns of one chunk, for TILES tiles of 8 step rows.
//
// X is kF32 or kBf16. Lane (g, c) takes granules c, c + 4, ... of a chunk's 8 (bf16) or 16 (f32), of
// step rows g, g + 8: the B operand of four mma after conversion. So the lanes of a row read 64
// neighbouring bytes at a time, whole sectors: the lines of a payload edge are polled by every SM,
// and what limits a hop is how many sectors their L2 slices must serve. The packing of W has its
// columns in the same order (graphs/ops/packing.py).
// Loads go to L2 for payload and for ordinary inputs alike, so one path serves both.
#pragma once
#include "../stream.cuh"

namespace gpurt {

constexpr u32 kMatvecRowTile = 8;  // rows of a step in one mma: its n

template <u32 X, u32 TILES>
struct MatvecActivations {
  static constexpr u32 kGranules = X == kBf16 ? 2 : 4;
  static constexpr u32 kElementBytes = X == kBf16 ? 2 : 4;
  static constexpr u32 kChunkBytes = 64 * kElementBytes;
  static constexpr u32 kGranuleStride = 64;  // bytes: four lanes' granules
  uint4 raw[TILES][kGranules];  // in flight from load() to wait()
  u64 at[TILES];                // this lane's first granule of the current chunk
  u32 offset;                   // of that granule in its row, bytes
  u32 row_bytes;                // 0: there is no row to read

  // row(j): the row of x that belongs to row j of the output. Lanes beyond the last row read that
  // one again: it costs no further sector, and their columns of the product are never stored.
  template <class Row>
  GPURT_FN void start(u64 x, u32 k, u32 chunk, u32 rows, Row row) {
    const u32 lane = threadIdx.x % 32;
    offset = chunk * kChunkBytes + lane % 4 * 16;
    row_bytes = rows == 0 ? 0 : k * kElementBytes;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      const u32 j = t * kMatvecRowTile + lane / 4;
      const u32 source = rows == 0 ? 0 : row(j < rows ? j : rows - 1);
      at[t] = x + u64{source} * row_bytes + offset;
    }
  }

  GPURT_FN void advance(u32 chunks) {
    offset += chunks * kChunkBytes;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) at[t] += chunks * kChunkBytes;
  }

  // Zeros beyond the row's end, where W is padded with zeros: zero never looks like the sentinel.
  GPURT_FN void load() {
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
      for (u32 i = 0; i < kGranules; ++i) raw[t][i] = make_uint4(0, 0, 0, 0);
    }
    reload();
  }

  GPURT_FN void reload() {
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
#pragma unroll
      for (u32 i = 0; i < kGranules; ++i) {
        if (offset + i * kGranuleStride < row_bytes)
          raw[t][i] = ld_relaxed_gpu_b128(at[t] + i * kGranuleStride);
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
    for (u32 polls = 0; payload_missing(missing(), polls);) reload();
  }

  // To bf16 pairs in mma order: pair[2j], pair[2j + 1] are B of mma j. `norm`: address of the norm
  // weights (f32 x only), 0 if there are none; with them, adds this lane's squares.
  GPURT_FN void convert(u32 t, u64 norm, u32 (&pair)[8], f32& squares) const {
#pragma unroll
    for (u32 i = 0; i < kGranules; ++i) {
      const uint4 v = raw[t][i];
      if constexpr (X == kBf16) {
        pair[4 * i] = v.x, pair[4 * i + 1] = v.y, pair[4 * i + 2] = v.z, pair[4 * i + 3] = v.w;
      } else {
        f32 a = __uint_as_float(v.x), b = __uint_as_float(v.y);
        f32 c = __uint_as_float(v.z), d = __uint_as_float(v.w);
        if (norm != 0 && offset + i * kGranuleStride < row_bytes) {
          squares = __fmaf_rn(a, a, squares), squares = __fmaf_rn(b, b, squares);
          squares = __fmaf_rn(c, c, squares), squares = __fmaf_rn(d, d, squares);
          const float4 weight =
              __ldg(reinterpret_cast<const float4*>(norm + offset + i * kGranuleStride));
          a *= weight.x, b *= weight.y, c *= weight.z, d *= weight.w;
        }
        pair[2 * i] = pack_bf16x2(a, b), pair[2 * i + 1] = pack_bf16x2(c, d);
      }
    }
  }
};

}  // namespace gpurt
