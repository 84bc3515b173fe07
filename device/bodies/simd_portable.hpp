// The portable level: four lanes in the compilers' generic vectors (SSE2, NEON or plain code).
//
// Owns: the names that kernels use, which simd_avx2.hpp and simd_avx512.hpp define again:
//   Vf          kLanes floats; load, load_part (n < kLanes, the rest zero), store, store_part
//   splat add sub mul div fma max magnitude sum_of max_of exp_of
//   sums_of     four vectors' sums, each in the order of sum_of; magnitudes_of: four maxima
//   store_codes code_sums_of   rounds to i16; the sums of four blocks of codes
//   Qblock Qsum Qacc Qscale    32 weight codes; an exact integer sum; float sums of scaled Qsums
//   Pair        a block's scale and minimum, or a row's scale and sum of a block
#pragma once
#include "simd.hpp"

namespace gpurt::host::portable {

constexpr u32 kLanes = 4;
constexpr int kSide = 2;  // rows of W beside four rows of x: as many as registers hold
using Vf = f32 __attribute__((vector_size(16)));
using Vi = i32 __attribute__((vector_size(16)));

inline Vf splat(f32 a) {
  return Vf{a, a, a, a};
}
inline Vf add(Vf a, Vf b) {
  return a + b;
}
inline Vf sub(Vf a, Vf b) {
  return a - b;
}
inline Vf mul(Vf a, Vf b) {
  return a * b;
}
inline Vf div(Vf a, Vf b) {
  return a / b;
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return a * b + c;
}
/// Of two lanes the larger; if either is NaN, b.
inline Vf max(Vf a, Vf b) {
  return a > b ? a : b;
}
inline f32 sum_of(Vf a) {
  return (a[0] + a[2]) + (a[1] + a[3]);
}
inline Quad sums_of(const Vf (&a)[4]) {
  return Quad{sum_of(a[0]), sum_of(a[1]), sum_of(a[2]), sum_of(a[3])};
}
inline f32 max_of(Vf a) {
  const f32 low = a[0] > a[1] ? a[0] : a[1];
  const f32 high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}

/// The larger magnitude, by bit pattern: infinity beats numbers, and NaN beats infinity.
inline Vf magnitude(Vf a, Vf b) {
  const Vi x = std::bit_cast<Vi>(a) & 0x7fffffff;
  const Vi y = std::bit_cast<Vi>(b) & 0x7fffffff;
  return std::bit_cast<Vf>(x > y ? x : y);
}
inline Quad magnitudes_of(const Vf (&a)[4]) {
  Quad most{};
  for (u32 i = 0; i < 4; ++i) {
    const Vi bits = std::bit_cast<Vi>(a[i]);
    const i32 low = bits[0] > bits[1] ? bits[0] : bits[1];
    const i32 high = bits[2] > bits[3] ? bits[2] : bits[3];
    most[i] = std::bit_cast<f32>(low > high ? low : high);
  }
  return most;
}

using Vu = u32 __attribute__((vector_size(16)));
using Halves = u16 __attribute__((vector_size(8)));

inline Vf load(const f32* p) {
  return load_quad(p);
}
inline Vu load_halves_wide(const void* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof(halves));
  return __builtin_convertvector(halves, Vu);
}
inline Vf load(const F16* p) {
  const Vu bits = load_halves_wide(p);
  const Vu sign = (bits & 0x8000U) << 16;
  const Vu magnitude = (bits & 0x7fffU) << 13;
  // As to_f32 does: the multiplication re-bases the exponent, subnormals included.
  const Vu scaled = std::bit_cast<Vu>(std::bit_cast<Vf>(magnitude) * splat(0x1p112F));
  const Vu special = magnitude | 0x7f800000U;
  return std::bit_cast<Vf>(sign | (magnitude >= (0x7c00U << 13) ? special : scaled));
}
inline Vf load(const Bf16* p) {
  return std::bit_cast<Vf>(load_halves_wide(p) << 16);
}
template <class T>
inline Vf load_part(const T* p, u32 n) {
  Vf v = splat(0.0F);
  for (u32 i = 0; i < n; ++i) v[i] = to_f32(p[i]);
  return v;
}
template <class T>
inline void store(T* p, Vf v) {
  for (u32 i = 0; i < kLanes; ++i) from_f32(v[i], p + i);
}
template <class T>
inline void store_part(T* p, Vf v, u32 n) {
  for (u32 i = 0; i < n; ++i) from_f32(v[i], p + i);
}

inline void store_codes(i16* p, Vf v) {
  for (u32 i = 0; i < kLanes; ++i) {
    const f32 rounded = v[i] + (v[i] < 0.0F ? -0.5F : 0.5F);
    p[i] = rounded >= -32768.0F && rounded < 32768.0F ? static_cast<i16>(rounded) : i16{0};
  }
}

inline Quad code_sums_of(const i16* codes) {
  Quad sums{};
  for (u32 b = 0; b < 4; ++b) {
    i32 sum = 0;
    for (u32 i = 0; i < 32; ++i) sum += codes[b * 32 + i];
    sums[b] = static_cast<f32>(sum);
  }
  return sums;
}

/// e^x within 2 ulp; 0 below -87.3 (no subnormal results), infinity above 88.7; NaN stays NaN.
inline Vf exp_of(Vf x) {
  const Vf low = splat(-87.33F);
  const Vf high = splat(88.7F);
  const Vf clamped = max(low, x > high ? high : x);
  const Vf shifted = clamped * splat(1.44269504F) + splat(12582912.0F);  // 1.5 * 2^23: rounds
  const Vf n = shifted - splat(12582912.0F);
  const Vf r = clamped - n * splat(0.693359375F) - n * splat(-2.12194440e-4F);  // ln 2 in two parts
  Vf p = splat(1.0F / 5040.0F);
  for (const f32 c : {1.0F / 720.0F, 1.0F / 120.0F, 1.0F / 24.0F, 1.0F / 6.0F, 0.5F, 1.0F, 1.0F}) {
    p = p * r + splat(c);
  }
  const Vi bits = std::bit_cast<Vi>(shifted) << 23;  // the exponent; the constant's bits fall out
  const Vf y = std::bit_cast<Vf>(std::bit_cast<Vi>(p) + bits);
  const Vf kept = x < low ? splat(0.0F) : y;
  const Vf bounded = x > high ? splat(__builtin_inff()) : kept;
  return x == x ? bounded : x;
}

struct Qblock {
  i16 code[32];
};
using Qsum = i32;
using Qacc = f32;
using Qscale = f32;

using Bytes = u8 __attribute__((vector_size(16)));
using Words = i16 __attribute__((vector_size(32)));

// Whole vectors are stored: words stored one by one could not be forwarded to dot_block's loads.
inline Qblock unpack_q4_1(const u8* codes) {
  Bytes bytes;
  std::memcpy(&bytes, codes, sizeof(bytes));
  const Bytes low_bytes = bytes & 15;
  const Bytes high_bytes = bytes >> 4;
  const Words low = __builtin_convertvector(low_bytes, Words);
  const Words high = __builtin_convertvector(high_bytes, Words);
  Qblock q;
  std::memcpy(q.code, &low, sizeof(low));
  std::memcpy(q.code + 16, &high, sizeof(high));
  return q;
}
inline Qblock unpack_q8_0(const u8* codes) {
  Qblock q;
  for (u32 i = 0; i < 32; ++i) q.code[i] = static_cast<i16>((codes[i] ^ 0x80) - 0x80);
  return q;
}
inline Qsum dot_block(const Qblock& q, const i16* x) {
  i32 sum = 0;
  for (u32 i = 0; i < 32; ++i) sum += static_cast<i32>(q.code[i]) * static_cast<i32>(x[i]);
  return sum;
}
inline Qacc zero_acc() {
  return 0.0F;
}
inline Qacc add_scaled(Qacc acc, Qsum sum, Qscale scale) {
  return acc + static_cast<f32>(sum) * scale;
}
inline Quad acc_sums_of(const Qacc (&acc)[4]) {
  return Quad{acc[0], acc[1], acc[2], acc[3]};
}
inline Qscale broadcast(const f32* scale) {
  return *scale;
}

struct Pair {
  f32 first, second;
};
inline Pair load_pair(const f32* p) {
  return {p[0], p[1]};
}
/// The two f16 at `p`; eight bytes must be readable.
inline Pair load_halves(const u8* p) {
  F16 halves[2];
  std::memcpy(halves, p, sizeof(halves));
  return {to_f32(halves[0]), to_f32(halves[1])};
}
inline void store_pair(f32* p, Pair a) {
  p[0] = a.first, p[1] = a.second;
}
inline Pair mul_pair(Pair a, Pair b) {
  return {a.first * b.first, a.second * b.second};
}
inline Pair add_pair(Pair a, Pair b) {
  return {a.first + b.first, a.second + b.second};
}
inline Qscale first_of(Pair a) {
  return a.first;
}
inline f32 second_of(Pair a) {
  return a.second;
}

}  // namespace gpurt::host::portable
