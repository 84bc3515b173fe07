// What matvec does to a sum after its norm: times scale, then the soft cap.
#pragma once
#include "../ptx.cuh"

// 1 if a matvec of the plan has a scale or a soft cap: the generated bodies.gen.cuh says so. Other
// kernels hold no word of it.
#ifndef GPURT_MATVEC_SCALED
#define GPURT_MATVEC_SCALED 0
#endif

namespace gpurt {

constexpr bool kMatvecScaled = GPURT_MATVEC_SCALED != 0;
constexpr u32 kMatvecScale = 8;  // indices of the parameters
constexpr u32 kMatvecSoftcap = 9;

// z * scale, then softcap * tanh(z / softcap) if softcap > 0. tanh by one exponential: exact to
// 1e-7 of its largest value, which is the softcap's unit.
GPURT_FN f32 scale_and_cap(f32 z, f32 scale, f32 softcap) {
  z = __fmul_rn(z, scale);
  if (!(softcap > 0)) return z;
  const f32 u = __fdiv_rn(z, softcap);
  const f32 t = ex2_approx_ftz(-2.88539008f * fabsf(u));  // exp(-2 |u|)
  const f32 magnitude = __fmul_rn(softcap, __fdividef(1.0f - t, 1.0f + t));
  return z != z ? z : copysignf(magnitude, u);
}

}  // namespace gpurt
