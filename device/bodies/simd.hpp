// Which vector instructions the host bodies use, and the stored number formats they all read.
//
// Owns: the choice of level, made once per process, and the scalar reading of f16 and bf16.
// Does not know: what a body computes.
//
// A body's arithmetic is written once, in a file without an include guard (matvec_kernels.hpp),
// over the names of simd_portable.hpp, simd_avx2.hpp and simd_avx512.hpp. simd_each.hpp includes it
// once per level, inside that level's namespace; GPURT_AT_LEVEL picks one when a task runs. The
// wheel is compiled for baseline x86-64, and only functions marked with a target may use more.
#pragma once
#include <bit>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../types.hpp"

/// Before a loop over registers: gcc otherwise unrolls nested ones so late that each accumulator is
/// also stored to the stack, once an iteration.
#if defined(__clang__)
#define GPURT_UNROLL _Pragma("unroll")
#else
#define GPURT_UNROLL _Pragma("GCC unroll 4")
#endif

#if defined(__x86_64__)
// gcc 12 takes the "any value" operand inside its own AVX-512 intrinsics for an uninitialised read.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#define GPURT_SIMD_X86 1
#else
#define GPURT_SIMD_X86 0
#endif

namespace gpurt::host {

using i8 = std::int8_t;
using i16 = std::int16_t;
using f64 = double;

enum class SimdLevel : u32 { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

inline const char* simd_name(SimdLevel level) {
  constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
  return kNames[static_cast<u32>(level)];
}

/// The best level this CPU has. kAvx512 needs VNNI too: without it AVX2 is as fast here.
inline SimdLevel simd_supported() {
#if GPURT_SIMD_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) return SimdLevel::kAvx512;
  if (avx2) return SimdLevel::kAvx2;
#endif
  return SimdLevel::kPortable;
}

/// The level that `wanted` names (the value of GPURT_SIMD), or the best one if it is null.
/// Throws std::invalid_argument for an unknown name or a level this CPU lacks.
inline SimdLevel simd_parse(const char* wanted) {
  const SimdLevel best = simd_supported();
  if (wanted == nullptr) return best;
  const std::string name(wanted);
  bool known = false;
  for (const SimdLevel level : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (name != simd_name(level)) continue;
    if (level <= best) return level;
    known = true;
  }
  std::string message;
  if (known) {
    message.append("this CPU has ").append(simd_name(best)).append(" at most, not ").append(name);
  } else {
    message.append("'").append(name).append("' is no SIMD level");
  }
  message.append(" - at GPURT_SIMD - use portable, avx2 or avx512, or unset it");
  throw std::invalid_argument(message);
}

/// The level of this process. The environment is read once. Throws as simd_parse does: an executor
/// calls it before it starts a worker, so no worker meets the exception.
inline SimdLevel simd_level() {
  // Python's os.environ may write the environment, but not before the executor has asked here.
  static const SimdLevel level =
      simd_parse(std::getenv("GPURT_SIMD"));  // NOLINT(concurrency-mt-unsafe)
  return level;
}

/// Four floats that belong to four rows, blocks or positions, at every level: 128 bits are native
/// to all of them, and the compilers' own operators do.
using Quad = f32 __attribute__((vector_size(16)));

inline Quad load_quad(const f32* p) {
  Quad v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store_quad(f32* p, Quad v) {
  std::memcpy(p, &v, sizeof(v));
}
inline Quad splat_quad(f32 a) {
  return Quad{a, a, a, a};
}

// Stored 16-bit floats. Types of their own, so that a load converts.
struct F16 {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};
static_assert(sizeof(F16) == 2 && sizeof(Bf16) == 2);

inline f32 to_f32(f32 value) {
  return value;
}

inline f32 to_f32(Bf16 value) {
  return std::bit_cast<f32>(static_cast<u32>(value.bits) << 16);
}

inline f32 to_f32(F16 value) {
  const u32 sign = (value.bits & 0x8000U) << 16;
  const u32 magnitude = value.bits & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<f32>(sign | 0x7f800000U | (magnitude << 13));
  // Exact, subnormals included: the exponent is re-based by a multiplication with 2^112.
  const f32 scaled = std::bit_cast<f32>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<f32>(std::bit_cast<u32>(scaled) | sign);
}

/// To nearest, ties to even; NaN stays NaN and becomes canonical.
inline Bf16 to_bf16(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {0x7fc0};
  return {static_cast<u16>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

/// To nearest, ties to even; too large becomes infinity; NaN stays NaN.
inline F16 to_f16(f32 value) {
  const u32 bits = std::bit_cast<u32>(value);
  const u32 sign = (bits >> 16) & 0x8000U;
  const u32 magnitude = bits & 0x7fffffffU;
  u32 half = 0;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U;
  } else if (magnitude >= 0x477ff000U) {  // 65520 and more round to infinity
    half = 0x7c00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    half = std::bit_cast<u32>(std::bit_cast<f32>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return {static_cast<u16>(sign | half)};
}

inline void from_f32(f32 value, f32* to) {
  *to = value;
}
inline void from_f32(f32 value, F16* to) {
  *to = to_f16(value);
}
inline void from_f32(f32 value, Bf16* to) {
  *to = to_bf16(value);
}

}  // namespace gpurt::host

/// Calls `function` of the chosen level's namespace. The levels exist on x86-64 only.
#if GPURT_SIMD_X86
#define GPURT_AT_LEVEL(function, ...)                               \
  (::gpurt::host::simd_level() == ::gpurt::host::SimdLevel::kAvx512 \
       ? ::gpurt::host::avx512::function(__VA_ARGS__)               \
   : ::gpurt::host::simd_level() == ::gpurt::host::SimdLevel::kAvx2 \
       ? ::gpurt::host::avx2::function(__VA_ARGS__)                 \
       : ::gpurt::host::portable::function(__VA_ARGS__))
#else
#define GPURT_AT_LEVEL(function, ...) (::gpurt::host::portable::function(__VA_ARGS__))
#endif

#include "simd_portable.hpp"
#if GPURT_SIMD_X86
#include "simd_avx2.hpp"
#include "simd_avx512.hpp"
#endif
