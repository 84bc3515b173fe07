// The AVX-512 level: sixteen lanes for floats; integer sums stay 256 bits wide, as in AVX2, and
// use VNNI.
// simd_portable.hpp says what each name means.
#pragma once
#include "simd.hpp"
#include "simd_avx2.hpp"

#define GPURT_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define GPURT_OP inline __attribute__((always_inline, target(GPURT_TARGET_AVX512)))

namespace gpurt::host::avx512 {

constexpr u32 kLanes = 16;
constexpr int kSide = 4;  // rows of W beside four rows of x: as many as registers hold
using Vf = __m512;

GPURT_OP __mmask16 first(u32 n) {
  return static_cast<__mmask16>((1U << n) - 1U);
}

GPURT_OP Vf splat(f32 a) {
  return _mm512_set1_ps(a);
}
GPURT_OP Vf add(Vf a, Vf b) {
  return _mm512_add_ps(a, b);
}
GPURT_OP Vf sub(Vf a, Vf b) {
  return _mm512_sub_ps(a, b);
}
GPURT_OP Vf mul(Vf a, Vf b) {
  return _mm512_mul_ps(a, b);
}
GPURT_OP Vf div(Vf a, Vf b) {
  return _mm512_div_ps(a, b);
}
GPURT_OP Vf fma(Vf a, Vf b, Vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
GPURT_OP Vf max(Vf a, Vf b) {
  return _mm512_max_ps(a, b);
}
GPURT_OP __m256 upper(Vf a) {
  return _mm512_extractf32x8_ps(a, 1);
}
GPURT_OP __m256 fold(Vf a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), upper(a));
}
GPURT_OP Quad sums_of(const Vf (&a)[4]) {
  return avx2::sums_of_ymm(fold(a[0]), fold(a[1]), fold(a[2]), fold(a[3]));
}
GPURT_OP f32 sum_of(Vf a) {
  const __m256 half = fold(a);
  return avx2::sums_of_ymm(half, half, half, half)[0];
}
GPURT_OP Vf magnitude(Vf a, Vf b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a), mask);
  return _mm512_castsi512_ps(_mm512_max_epi32(x, _mm512_and_si512(_mm512_castps_si512(b), mask)));
}
GPURT_OP __m256i fold_magnitude(Vf a) {
  const __m512i bits = _mm512_castps_si512(a);
  return _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1));
}
GPURT_OP Quad magnitudes_of(const Vf (&a)[4]) {
  return avx2::magnitudes_of_ymm(fold_magnitude(a[0]), fold_magnitude(a[1]), fold_magnitude(a[2]),
                                 fold_magnitude(a[3]));
}
GPURT_OP f32 max_of(Vf a) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a), upper(a));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

GPURT_OP Vf widen(__m256i bits, const F16*) {
  return _mm512_cvtph_ps(bits);
}
GPURT_OP Vf widen(__m256i bits, const Bf16*) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
GPURT_OP Vf load(const f32* p) {
  return _mm512_loadu_ps(p);
}
template <class T>
GPURT_OP Vf load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), p);
}
GPURT_OP Vf load_part(const f32* p, u32 n) {
  return _mm512_maskz_loadu_ps(first(n), p);
}
template <class T>
GPURT_OP Vf load_part(const T* p, u32 n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p), p);
}

GPURT_OP __m256i narrow(Vf v, const F16*) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
}
GPURT_OP __m256i narrow(Vf v, const Bf16*) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
GPURT_OP void store(f32* p, Vf v) {
  _mm512_storeu_ps(p, v);
}
template <class T>
GPURT_OP void store(T* p, Vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, p));
}
GPURT_OP void store_part(f32* p, Vf v, u32 n) {
  _mm512_mask_storeu_ps(p, first(n), v);
}
template <class T>
GPURT_OP void store_part(T* p, Vf v, u32 n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(v, p));
}
GPURT_OP void store_codes(i16* p, Vf v) {
  const __m256i codes = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
}

GPURT_OP Vf exp_of(Vf x) {
  const Vf low = splat(-87.33F);
  // The second operand comes back when either is NaN, so NaN passes both clamps.
  const Vf clamped = _mm512_max_ps(low, _mm512_min_ps(splat(89.0F), x));
  const Vf n = _mm512_roundscale_ps(mul(clamped, splat(1.44269504F)), 0);
  const Vf high = _mm512_fnmadd_ps(n, splat(0.693359375F), clamped);
  const Vf r = _mm512_fnmadd_ps(n, splat(-2.12194440e-4F), high);
  Vf p = splat(1.0F / 5040.0F);
  p = fma(p, r, splat(1.0F / 720.0F));
  p = fma(p, r, splat(1.0F / 120.0F));
  p = fma(p, r, splat(1.0F / 24.0F));
  p = fma(p, r, splat(1.0F / 6.0F));
  p = fma(p, r, splat(0.5F));
  p = fma(p, r, splat(1.0F));
  p = fma(p, r, splat(1.0F));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, n);
}

// Block formats: 512-bit sums would pay an insertion a block and gain nothing on CPUs that execute
// them in two halves.
using avx2::acc_sums_of;
using avx2::add_pair;
using avx2::code_sums_of;
using avx2::first_of;
using avx2::load_halves;
using avx2::load_pair;
using avx2::mul_pair;
using avx2::Pair;
using avx2::Qacc;
using avx2::Qblock;
using avx2::Qscale;
using avx2::Qsum;
using avx2::second_of;
using avx2::store_pair;
using avx2::unpack_q4_1;
using avx2::unpack_q8_0;
using avx2::zero_acc;

GPURT_OP Qsum dot_block(const Qblock& q, const i16* x) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16));
  return _mm256_dpwssd_epi32(_mm256_madd_epi16(q.low, low), q.high, high);
}
// The two below are repeated from AVX2: there a broadcast from memory is an instruction of its own.
GPURT_OP Qacc add_scaled(Qacc acc, Qsum sum, Qscale scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc);
}
GPURT_OP Qscale broadcast(const f32* scale) {
  return _mm256_set1_ps(*scale);
}

}  // namespace gpurt::host::avx512

#undef GPURT_OP
