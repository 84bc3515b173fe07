// Row operations that several bodies share, at one SIMD level. Included by simd_each.hpp.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// Converts k elements to float; zeros follow up to `stride`, a multiple of kPadLanes.
template <class X>
GPURT_SIMD_FN void copy_row(const X* from, f32* to, u32 k, u64 stride) {
  const u32 whole = k / kLanes * kLanes;
  for (u32 i = 0; i < whole; i += kLanes) store(to + i, load(from + i));
  for (u64 i = whole; i < stride; i += kLanes) store(to + i, splat(0.0F));
  if (whole < k) store(to + whole, load_part(from + whole, k - whole));
}

/// x = x * rsqrt(mean(x^2) + eps) * norm, in place; norm null: without weights. x is zero from k to
/// the next kPadLanes.
GPURT_SIMD_FN void normalise_row(f32* x, const f32* norm, u32 k, f32 eps) {
  Vf squares[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (u32 i = 0; i < k; i += 4 * kLanes) {
    for (u32 t = 0; t < 4 && i + t * kLanes < k; ++t) {
      const Vf v = load(x + i + t * kLanes);
      squares[t] = fma(v, v, squares[t]);
    }
  }
  const Quad sums = sums_of(squares);
  const f32 mean = ((sums[0] + sums[2]) + (sums[1] + sums[3])) / static_cast<f32>(k);
  const Vf scale = splat(1.0F / __builtin_sqrtf(mean + eps));
  for (u32 i = 0; i < k; i += kLanes) {
    Vf v = mul(load(x + i), scale);
    if (norm) v = mul(v, i + kLanes <= k ? load(norm + i) : load_part(norm + i, k - i));
    store(x + i, v);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
