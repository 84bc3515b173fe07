// Mean squares of whole rows by a team of any size, with the same bits.
//
// A row is dealt piece by piece to 16 virtual warps of 32 lanes, whatever the team: lane l of
// virtual warp v adds pieces 32 v + l, 32 v + l + 512, ... in order; a tree over its lanes; then 16
// partial sums in four chains. So the order hangs on the row's length alone.
#pragma once
#include "context.cuh"

namespace gpurt {

struct RowNorm {
  static constexpr u32 kVirtual = 16;
  using Partial = f32[kVirtual];

  // add(i, sum): `sum` plus the squares of piece i. The partial sums are there after a barrier.
  template <class Add>
  GPURT_FN static void sum(Partial& partial, u32 pieces, const BodyContext& context, Add add) {
    const u32 lane = context.thread % 32;
#pragma unroll 1
    for (u32 v = context.thread / 32; v < kVirtual; v += context.team_threads / 32) {
      f32 sum = 0;
#pragma unroll 2
      for (u32 i = v * 32 + lane; i < pieces; i += kVirtual * 32) sum = add(i, sum);
      keep(partial, v, sum);
    }
  }

  // A virtual warp's sum, from its lanes'.
  GPURT_FN static void keep(Partial& partial, u32 v, f32 sum) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) partial[v] = sum;
  }

  GPURT_FN static f32 total(const Partial& partial) {
    f32 chain[4] = {};
#pragma unroll
    for (u32 v = 0; v < kVirtual; ++v) chain[v % 4] += partial[v];
    return (chain[0] + chain[1]) + (chain[2] + chain[3]);
  }

  // 1 / sqrt(mean square + eps) of a row of `count` elements.
  GPURT_FN static f32 scale(const Partial& partial, u32 count, f32 eps) {
    return rsqrtf(__fdiv_rn(total(partial), static_cast<f32>(count)) + eps);
  }

  GPURT_FN static f32 add4(const float4& v, f32 sum) {
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    return fmaf(v.w, v.w, sum);
  }
};

GPURT_FN float4 mul4(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
GPURT_FN float4 scale4(const float4& a, f32 by) {
  return make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
}
GPURT_FN float4 fma4(const float4& a, const float4& b, const float4& c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z),
                     fmaf(a.w, b.w, c.w));
}
// Granule `i` of a row.
GPURT_FN float4 read4(const f32* row, u32 i) {
  return reinterpret_cast<const float4*>(row)[i];
}

}  // namespace gpurt
