// e4m3 as the host reads and writes it: the scales of nvfp4, and an 8-bit cache of keys and values.
//
// A sign, four bits of exponent (bias 7), three of mantissa; no infinity, NaN at both ends. As a
// half, the same bits are worth 2^-8 of it, so every level widens through halves, exactly.
#pragma once
#include <array>

#include "simd.hpp"

namespace gpurt::host {

struct E4m3 {
  u8 bits;
};
static_assert(sizeof(E4m3) == 1);

constexpr f32 e4m3_value(u32 code) {
  const u32 exponent = code >> 3 & 15U;
  const u32 mantissa = code & 7U;
  const f32 magnitude = (code & 127U) == 127U ? std::bit_cast<f32>(0x7fc00000U)
                        : exponent == 0
                            ? static_cast<f32>(mantissa) * 0x1p-9F
                            : std::bit_cast<f32>((exponent + 120) << 23 | mantissa << 20);
  return code < 128 ? magnitude : -magnitude;
}

inline constexpr std::array<f32, 256> kE4m3Values = [] {
  std::array<f32, 256> values{};
  for (u32 code = 0; code < 256; ++code) values[code] = e4m3_value(code);
  return values;
}();

inline f32 to_f32(E4m3 value) {
  return kE4m3Values[value.bits];
}

/// To nearest, ties to even; what is larger than 448 becomes 448, NaN stays NaN.
inline E4m3 to_e4m3(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 sign = bits >> 24 & 0x80U;
  const u32 magnitude = bits & 0x7fffffffU;
  u32 code = 0;
  if (magnitude > 0x7f800000U) {
    code = 0x7fU;
  } else if (magnitude >= 0x43e00000U) {  // 448
    code = 0x7eU;
  } else if (magnitude < 0x3c800000U) {  // below 2^-6: adding 2^14 rounds to a multiple of 2^-9
    code = std::bit_cast<u32>(std::bit_cast<f32>(magnitude) + 0x1p14F) - 0x46800000U;
  } else {
    code = (magnitude - 0x3c000000U + 0x7ffffU + (magnitude >> 20 & 1U)) >> 20;
  }
  return {static_cast<u8>(sign | code)};
}

inline void from_f32(f32 value, E4m3* to) {
  *to = to_e4m3(value);
}

namespace portable {
inline Vf load(const E4m3* p) {
  static_assert(kLanes == 4);
  return Vf{kE4m3Values[p[0].bits], kE4m3Values[p[1].bits], kE4m3Values[p[2].bits],
            kE4m3Values[p[3].bits]};
}
}  // namespace portable

#if GPURT_SIMD_X86
namespace avx2 {
inline __attribute__((always_inline, target(GPURT_TARGET_AVX2))) Vf load(const E4m3* p) {
  static_assert(kLanes == 8);
  i64 word;
  std::memcpy(&word, p, sizeof(word));
  const __m128i code = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(word));
  const __m128i magnitude = _mm_and_si128(code, _mm_set1_epi16(127));
  const __m128i sign = _mm_slli_epi16(_mm_srli_epi16(code, 7), 15);
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(127));
  const __m128i halves = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7)),
                                      _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  return mul(_mm256_cvtph_ps(halves), splat(256.0F));
}
inline __attribute__((always_inline, target(GPURT_TARGET_AVX2))) Vf load_part(const E4m3* p,
                                                                              u32 n) {
  E4m3 lanes[kLanes] = {};
  std::memcpy(lanes, p, n);
  return load(lanes);
}
}  // namespace avx2

namespace avx512 {
inline __attribute__((always_inline, target(GPURT_TARGET_AVX512))) Vf widen_e4m3(__m128i bytes) {
  static_assert(kLanes == 16);
  const __m256i code = _mm256_cvtepu8_epi16(bytes);
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(127));
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(code, 7), 15);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(127));
  const __m256i halves = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)),
                                         _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
  return mul(_mm512_cvtph_ps(halves), splat(256.0F));
}
inline __attribute__((always_inline, target(GPURT_TARGET_AVX512))) Vf load(const E4m3* p) {
  return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __attribute__((always_inline, target(GPURT_TARGET_AVX512))) Vf load_part(const E4m3* p,
                                                                                u32 n) {
  return widen_e4m3(_mm_maskz_loadu_epi8(first(n), p));
}
}  // namespace avx512
#endif

}  // namespace gpurt::host
