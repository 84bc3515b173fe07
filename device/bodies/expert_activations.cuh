// expert_matvec's activations on the GPU: a warp's chunk of 64 columns of up to PAIRS rows of x.
//
// Lane (g = lane / 4, c = lane % 4) of an mma takes columns 16c .. 16c+15, four granules, of pairs
// g and g + 8. PAIRS is 2, 8 or 16: the most that a variant takes.
//   2       nearly all experts of a step of 16 rows, top 8 of 256: each half warp loads one row, a
//           lane one granule, converts it and passes it on. 8 registers hold what is under way
//   8, 16   each lane loads what it needs
// Rounded to bf16; with a norm, first multiplied by its weights, and a pair's squares are summed
// granule by granule, then in one tree: the same bits in all variants.
#pragma once
#include "../payload.cuh"
#include "expert_units.cuh"

namespace gpurt {

// Squares of one granule, added in the order of its columns.
GPURT_FN f32 add_squares(const float4& v, f32 sum) {
  sum = fmaf(v.x, v.x, sum), sum = fmaf(v.y, v.y, sum);
  return fmaf(v.w, v.w, fmaf(v.z, v.z, sum));
}
GPURT_FN void scale_granule(float4& v, const float4& by) {
  v.x *= by.x, v.y *= by.y, v.z *= by.z, v.w *= by.w;
}

template <u32 PAIRS>
struct ExpertActivations {
  static constexpr u32 kTiles = PAIRS / 8;
  f32 squares[kTiles][4];  // of this lane's four granules

  // rows: for each tile of 8 pairs the address of this lane's row, 0 if there is none.
  GPURT_FN void start(const u64 (&rows)[kTiles]) {
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
      row[t] = rows[t];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) squares[t][i] = 0;
    }
  }

  GPURT_FN void load(u64, u32, u32) {}

  GPURT_FN void convert(u64 norm, u32 chunk, u32 k, ExpertPairs (&pairs)[kTiles]) {
    const u32 column = chunk * 64 + threadIdx.x % 4 * 16;
#pragma unroll
    for (u32 t = 0; t < kTiles; ++t) {
      const bool valid = row[t] != 0 && column < k;
      float4 x[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        x[i] = valid ? at<const float4>(row[t] + u64{column} * 4)[i] : make_float4(0, 0, 0, 0);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        if (norm != 0 && column < k) {
          squares[t][i] = add_squares(x[i], squares[t][i]);
          scale_granule(x[i], __ldg(at<const float4>(norm + u64{column} * 4) + i));
        }
        pairs[t][2 * i] = pack_bf16x2(x[i].x, x[i].y);
        pairs[t][2 * i + 1] = pack_bf16x2(x[i].z, x[i].w);
      }
    }
  }

  // Of the row of pair g + 8t, the same in its four lanes.
  GPURT_FN f32 sum_squares(u32 t) const {
    f32 sum[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      sum[i] = squares[t][i] + __shfl_xor_sync(~0u, squares[t][i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

 private:
  u64 row[kTiles];
};

template <>
struct ExpertActivations<2> {
  static constexpr u32 kTiles = 1;

  // rows: the address of the row of pair lane / 16, of pair 0 if there is no other.
  GPURT_FN void start(const u64 (&rows)[1]) {
    row = rows[0];
    squares = 0;
  }

  GPURT_FN void load(u64, u32 chunk, u32 k) { load_from(row, chunk, k); }

  // This lane's. Past L1: the release of a stage waits for loads through it. Beyond the last column
  // some other one, which convert() makes zero.
  GPURT_FN void load_from(u64 of_row, u32 chunk, u32 k) {
    x = ld_relaxed_b128(of_row + offset_of(chunk, k));
  }

  // Lanes (g, c) get pair g % 2: columns of the product beyond pair 1 belong to nobody. Zeros where
  // there are no columns: W is padded with zeros there, and what lies behind x may be anything.
  GPURT_FN void convert(u64 norm, u32 chunk, u32 k, ExpertPairs (&pairs)[1]) {
    uint4 weights{};
    if (norm != 0) weights = ld_relaxed_b128(norm + offset_of(chunk, k));
    convert_with(weights, norm != 0, chunk, k, pairs);
  }

  // As above: a granule is a lane's, the four lanes of a row are four apart.
  GPURT_FN f32 sum_squares(u32) const {
    f32 sum = squares + __shfl_xor_sync(~0u, squares, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return __shfl_sync(~0u, sum, threadIdx.x / 4 % 2 * 16);
  }

 protected:
  GPURT_FN static u32 column_of(u32 chunk) { return chunk * 64 + threadIdx.x % 16 * 4; }
  GPURT_FN static u32 offset_of(u32 chunk, u32 k) {
    const u32 column = column_of(chunk);
    return column < k ? column * 4 : 0;
  }

  GPURT_FN void convert_with(const uint4& weights, bool norms, u32 chunk, u32 k,
                             ExpertPairs (&pairs)[1]) {
    const u32 column = column_of(chunk);
    float4 v = float4_of(x);
    if (norms && column < k) {
      squares = add_squares(v, squares);
      scale_granule(v, float4_of(weights));
    }
    const u32 low = column < k ? pack_bf16x2(v.x, v.y) : 0;
    const u32 high = column < k ? pack_bf16x2(v.z, v.w) : 0;
    const u32 from = threadIdx.x / 4 % 2 * 16 + threadIdx.x % 4 * 4;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      pairs[0][2 * i] = __shfl_sync(~0u, low, from + i);
      pairs[0][2 * i + 1] = __shfl_sync(~0u, high, from + i);
    }
  }

  u64 row;
  uint4 x;  // under way from load() to convert()
  f32 squares;
};

}  // namespace gpurt
