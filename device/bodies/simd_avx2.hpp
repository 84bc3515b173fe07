// The AVX2 level: eight lanes, FMA and F16C. simd_portable.hpp says what each name means.
#pragma once
#include "simd.hpp"

#define GPURT_TARGET_AVX2 "avx2,fma,f16c"
#define GPURT_OP inline __attribute__((always_inline, target(GPURT_TARGET_AVX2)))

namespace gpurt::host::avx2 {

constexpr u32 kLanes = 8;
constexpr int kSide = 2;  // rows of W beside four rows of x: as many as registers hold
using Vf = __m256;

GPURT_OP Vf splat(f32 a) {
  return _mm256_set1_ps(a);
}
GPURT_OP Vf add(Vf a, Vf b) {
  return _mm256_add_ps(a, b);
}
GPURT_OP Vf sub(Vf a, Vf b) {
  return _mm256_sub_ps(a, b);
}
GPURT_OP Vf mul(Vf a, Vf b) {
  return _mm256_mul_ps(a, b);
}
GPURT_OP Vf div(Vf a, Vf b) {
  return _mm256_div_ps(a, b);
}
GPURT_OP Vf fma(Vf a, Vf b, Vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
GPURT_OP Vf max(Vf a, Vf b) {
  return _mm256_max_ps(a, b);
}
// The order of every sum: lanes i and i + 2 of each 128 bits, then those two, then the halves.
GPURT_OP Quad add_halves(__m256 a) {
  return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
GPURT_OP Quad sums_of_ymm(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return add_halves(
      _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)));
}
GPURT_OP Quad magnitudes_of_ymm(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_max_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i m = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_castsi128_ps(_mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1)));
}
/// The sum of 32 codes, spread over four lanes.
GPURT_OP __m128i code_sum(const i16* codes) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 16));
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i s = _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
  return _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}
GPURT_OP Quad code_sums_of(const i16* codes) {
  const __m128i ab = _mm_hadd_epi32(code_sum(codes), code_sum(codes + 32));
  const __m128i cd = _mm_hadd_epi32(code_sum(codes + 64), code_sum(codes + 96));
  return _mm_cvtepi32_ps(_mm_hadd_epi32(ab, cd));
}

using Pair = __m128;  // in the low two lanes; what the others hold never matters

GPURT_OP Pair load_pair(const f32* p) {
  return _mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(p)));
}
GPURT_OP Pair load_halves(const u8* p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
GPURT_OP void store_pair(f32* p, Pair a) {
  _mm_storel_pi(reinterpret_cast<__m64*>(p), a);
}
GPURT_OP Pair mul_pair(Pair a, Pair b) {
  return _mm_mul_ps(a, b);
}
GPURT_OP Pair add_pair(Pair a, Pair b) {
  return _mm_add_ps(a, b);
}
GPURT_OP __m256 first_of(Pair a) {
  return _mm256_broadcastss_ps(a);
}
GPURT_OP f32 second_of(Pair a) {
  return _mm_cvtss_f32(_mm_movehdup_ps(a));
}

GPURT_OP f32 sum_of(Vf a) {
  return sums_of_ymm(a, a, a, a)[0];
}
GPURT_OP Quad sums_of(const Vf (&a)[4]) {
  return sums_of_ymm(a[0], a[1], a[2], a[3]);
}
GPURT_OP Vf magnitude(Vf a, Vf b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i x = _mm256_and_si256(_mm256_castps_si256(a), mask);
  return _mm256_castsi256_ps(_mm256_max_epi32(x, _mm256_and_si256(_mm256_castps_si256(b), mask)));
}
GPURT_OP Quad magnitudes_of(const Vf (&a)[4]) {
  return magnitudes_of_ymm(_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1]),
                           _mm256_castps_si256(a[2]), _mm256_castps_si256(a[3]));
}
GPURT_OP f32 max_of(Vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

GPURT_OP Vf load(const f32* p) {
  return _mm256_loadu_ps(p);
}
GPURT_OP Vf load(const F16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
GPURT_OP Vf load(const Bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <class T>
GPURT_OP Vf load_part(const T* p, u32 n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
GPURT_OP void store(f32* p, Vf v) {
  _mm256_storeu_ps(p, v);
}
GPURT_OP void store(F16* p, Vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
GPURT_OP void store(Bf16* p, Vf v) {
  f32 lanes[kLanes];
  _mm256_storeu_ps(lanes, v);
  for (u32 i = 0; i < kLanes; ++i) p[i] = to_bf16(lanes[i]);
}
template <class T>
GPURT_OP void store_part(T* p, Vf v, u32 n) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(T));
}
GPURT_OP void store_codes(i16* p, Vf v) {
  const __m256i wide = _mm256_cvtps_epi32(v);
  const __m128i codes =
      _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}

GPURT_OP Vf exp_of(Vf x) {
  const Vf low = splat(-87.33F);
  // The second operand comes back when either is NaN, so NaN passes both clamps.
  const Vf clamped = _mm256_max_ps(low, _mm256_min_ps(splat(88.7F), x));
  const Vf n = _mm256_round_ps(mul(clamped, splat(1.44269504F)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vf high = _mm256_fnmadd_ps(n, splat(0.693359375F), clamped);
  const Vf r = _mm256_fnmadd_ps(n, splat(-2.12194440e-4F), high);
  Vf p = splat(1.0F / 5040.0F);
  p = fma(p, r, splat(1.0F / 720.0F));
  p = fma(p, r, splat(1.0F / 120.0F));
  p = fma(p, r, splat(1.0F / 24.0F));
  p = fma(p, r, splat(1.0F / 6.0F));
  p = fma(p, r, splat(0.5F));
  p = fma(p, r, splat(1.0F));
  p = fma(p, r, splat(1.0F));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const Vf y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  const Vf kept = _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), y);
  // NaN and what is above the bound: x * infinity is either one.
  const Vf above = _mm256_cmp_ps(x, splat(88.7F), _CMP_NLE_UQ);
  return _mm256_blendv_ps(kept, mul(x, splat(__builtin_inff())), above);
}

struct Qblock {
  __m256i low, high;  // codes 0-15 and 16-31
};
using Qsum = __m256i;
using Qacc = __m256;
using Qscale = __m256;

GPURT_OP Qblock unpack_q4_1(const u8* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m256i words = _mm256_cvtepu8_epi16(bytes);
  return {_mm256_and_si256(words, _mm256_set1_epi16(15)), _mm256_srli_epi16(words, 4)};
}
GPURT_OP Qblock unpack_q8_0(const u8* codes) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16));
  return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
}
GPURT_OP Qsum dot_block(const Qblock& q, const i16* x) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16));
  return _mm256_add_epi32(_mm256_madd_epi16(q.low, low), _mm256_madd_epi16(q.high, high));
}
GPURT_OP Qacc zero_acc() {
  return _mm256_setzero_ps();
}
GPURT_OP Qacc add_scaled(Qacc acc, Qsum sum, Qscale scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc);
}
GPURT_OP Quad acc_sums_of(const Qacc (&acc)[4]) {
  return sums_of_ymm(acc[0], acc[1], acc[2], acc[3]);
}
GPURT_OP Qscale broadcast(const f32* scale) {
  return _mm256_broadcast_ss(scale);
}

}  // namespace gpurt::host::avx2

#undef GPURT_OP
