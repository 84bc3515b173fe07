// nvfp4 as the host reads it: blocks of 16 elements, 8 bytes of e2m1 codes (the even element in the
// low nibble), then one e4m3 scale. An element is code * scale, exact in f32: 2 and 4 significant
// bits. The second-level scale is the caller's.
//
// Owns: load_e2m1, the floats of kLanes codes from kLanes / 2 bytes, at every SIMD level.
#pragma once
#include "e4m3.hpp"

namespace gpurt::host {

constexpr u32 kNvfp4Block = 16;
constexpr u32 kNvfp4Codes = 8;  // bytes; the scale follows
constexpr u32 kNvfp4Bytes = 9;

// A sign, two bits of exponent, one of mantissa.
alignas(64) inline constexpr f32 kE2m1[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                              4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                              -2.0F, -3.0F, -4.0F, -6.0F};

namespace portable {
inline Vf load_e2m1(const u8* codes) {
  static_assert(kLanes == 4);
  return Vf{kE2m1[codes[0] & 15], kE2m1[codes[0] >> 4], kE2m1[codes[1] & 15], kE2m1[codes[1] >> 4]};
}
}  // namespace portable

#if GPURT_SIMD_X86
namespace avx2 {
inline __attribute__((always_inline, target(GPURT_TARGET_AVX2))) Vf load_e2m1(const u8* codes) {
  static_assert(kLanes == 8);
  i32 word;
  std::memcpy(&word, codes, sizeof(word));
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
  // The permutation reads three bits of its index: the magnitude's.
  const Vf magnitude = _mm256_permutevar8x32_ps(_mm256_load_ps(kE2m1), code);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}
}  // namespace avx2

namespace avx512 {
inline __attribute__((always_inline, target(GPURT_TARGET_AVX512))) Vf load_e2m1(const u8* codes) {
  static_assert(kLanes == 16);
  i32 words[2];
  std::memcpy(words, codes, sizeof(words));
  const __m512i shifts =
      _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xff00, words[1]);
  // The permutation reads four bits of its index: the code.
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(both, shifts), _mm512_load_ps(kE2m1));
}
}  // namespace avx512
#endif

}  // namespace gpurt::host
