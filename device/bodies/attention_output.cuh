// What some models do to a head's output: an RMS norm without weights, then a gate. A lane holds
// four consecutive elements. All lanes of a warp, converged.
#pragma once
#include "elements.cuh"

namespace gpurt {

// Over the D / 4 lanes of a head, which lie side by side in a warp.
template <u32 D>
GPURT_FN void norm_head(f32 eps, f32 (&out)[4]) {
  f32 squares = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) squares = fmaf(out[i], out[i], squares);
#pragma unroll
  for (u32 step = 1; step < D / 4; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const f32 factor = rsqrtf(fmaf(squares, 1.0f / D, eps));
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] *= factor;
}

// out *= sigmoid(gate). g: what ld_relaxed_b128 gave at address `gates`, polled if `payload`.
GPURT_FN void gate_head(uint4 g, u64 gates, bool payload, f32 (&out)[4]) {
  for (u32 polls = 0; payload_missing(payload && is_sentinel(g), polls);)
    g = ld_relaxed_b128(gates);
  const f32 gate[4] = {__uint_as_float(g.x), __uint_as_float(g.y), __uint_as_float(g.z),
                       __uint_as_float(g.w)};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = __fdividef(out[i], 1.0f + __expf(-gate[i]));
}

}  // namespace gpurt
