// RMS norms of a row that stays where it is, at one SIMD level. Included by simd_each.hpp, so
// without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// The first n of kLanes elements; the rest is zero, and not read.
GPURT_SIMD_FN Vf load_upto(const f32* p, u32 n) {
  return n == kLanes ? load(p) : load_part(p, n);
}

/// 1 / sqrt(mean((x * gain)^2) + eps) over `count` elements; gain null: ones. The order of the sum
/// is a function of count alone, so every tile of a row finds the same bits.
GPURT_SIMD_FN f32 norm_scale(const f32* x, const f32* gain, u32 count, f32 eps) {
  Vf squares[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (u32 i = 0; i < count; i += 4 * kLanes) {
    for (u32 t = 0; t < 4 && i + t * kLanes < count; ++t) {
      const u32 at = i + t * kLanes;
      const u32 n = count - at < kLanes ? count - at : kLanes;
      Vf v = load_upto(x + at, n);
      if (gain) v = mul(v, load_upto(gain + at, n));
      squares[t] = fma(v, v, squares[t]);
    }
  }
  const Quad sums = sums_of(squares);
  const f32 mean = ((sums[0] + sums[2]) + (sums[1] + sums[3])) / static_cast<f32>(count);
  return 1.0F / __builtin_sqrtf(mean + eps);
}

/// to = x * norm_scale(x) * weights
template <class T>
GPURT_SIMD_FN void norm_row(const f32* x, const f32* weights, u32 count, f32 eps, T* to) {
  const Vf by = splat(norm_scale(x, nullptr, count, eps));
  for (u32 i = 0; i < count; i += kLanes) {
    const u32 n = count - i < kLanes ? count - i : kLanes;
    const Vf v = mul(mul(load_upto(x + i, n), by), load_upto(weights + i, n));
    f32 lanes[kLanes];
    store(lanes, v);
    for (u32 j = 0; j < n; ++j) from_f32(lanes[j], to + i + j);
  }
}

GPURT_SIMD_FN void store_normed(const NormedRows& rows, u64 row, const f32* x) {
  const u64 at = row * rows.width;
  if (rows.is_bf16) {
    norm_row(x, rows.norm, rows.width, rows.eps, static_cast<Bf16*>(rows.to) + at);
  } else {
    norm_row(x, rows.norm, rows.width, rows.eps, static_cast<f32*>(rows.to) + at);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
