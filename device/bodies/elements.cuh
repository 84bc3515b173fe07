// Eight consecutive elements of a row, as a lane reads and writes them: f32, f16, bf16 or e4m3 in
// memory, float32 in registers; and activations, which may be payload.
#pragma once
#include "../payload.cuh"
#include "context.cuh"

namespace gpurt {

GPURT_FN f32 bf16_low(u32 pair) {
  return __uint_as_float(pair << 16);
}
GPURT_FN f32 bf16_high(u32 pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// How a cache of this DTypeCode lies in memory. `at` counts elements from `base`.
template <u32 CODE>
struct Elements {
  static_assert(CODE == kF16 || CODE == kBf16, "others have specialisations");
  using Eight = uint4;

  // Zeros if not `valid`: nothing is read then.
  GPURT_FN static Eight read8(u64 base, u64 at, bool valid) {
    return valid ? *reinterpret_cast<const uint4*>(base + at * 2) : make_uint4(0, 0, 0, 0);
  }
  GPURT_FN static void unpack8(const Eight& eight, f32 (&x)[8]) {
    const u32 word[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      x[2 * i] = CODE == kBf16 ? bf16_low(word[i]) : f32_from_f16(u16(word[i]));
      x[2 * i + 1] = CODE == kBf16 ? bf16_high(word[i]) : f32_from_f16(u16(word[i] >> 16));
    }
  }
  GPURT_FN static void store8(u64 base, u64 at, const f32 (&x)[8]) {
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      word[i] =
          CODE == kBf16 ? pack_bf16x2(x[2 * i], x[2 * i + 1]) : pack_f16x2(x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(base + at * 2) = make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <>
struct Elements<kF32> {
  struct Eight {
    float4 low, high;
  };
  GPURT_FN static Eight read8(u64 base, u64 at, bool valid) {
    const float4* from = reinterpret_cast<const float4*>(base + at * 4);
    const float4 zero = make_float4(0, 0, 0, 0);
    return {valid ? from[0] : zero, valid ? from[1] : zero};
  }
  GPURT_FN static void unpack8(const Eight& eight, f32 (&x)[8]) {
    x[0] = eight.low.x, x[1] = eight.low.y, x[2] = eight.low.z, x[3] = eight.low.w;
    x[4] = eight.high.x, x[5] = eight.high.y, x[6] = eight.high.z, x[7] = eight.high.w;
  }
  GPURT_FN static void store8(u64 base, u64 at, const f32 (&x)[8]) {
    float4* to = reinterpret_cast<float4*>(base + at * 4);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
};

template <>
struct Elements<kE4m3> {
  using Eight = uint2;
  GPURT_FN static Eight read8(u64 base, u64 at, bool valid) {
    return valid ? *reinterpret_cast<const uint2*>(base + at) : make_uint2(0, 0);
  }
  GPURT_FN static void unpack8(const Eight& eight, f32 (&x)[8]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 pair = f16x2_from_e4m3x2(u16((i < 2 ? eight.x : eight.y) >> i % 2 * 16));
      x[2 * i] = f32_from_f16(u16(pair));
      x[2 * i + 1] = f32_from_f16(u16(pair >> 16));
    }
  }
  GPURT_FN static void store8(u64 base, u64 at, const f32 (&x)[8]) {
    const u32 low = u32{pack_e4m3x2(x[0], x[1])} | u32{pack_e4m3x2(x[2], x[3])} << 16;
    const u32 high = u32{pack_e4m3x2(x[4], x[5])} | u32{pack_e4m3x2(x[6], x[7])} << 16;
    *reinterpret_cast<uint2*>(base + at) = make_uint2(low, high);
  }
};

// Eight floats at `from` (32-byte aligned), polled if `payload`. All lanes of a warp, converged.
GPURT_FN void load8(const f32* from, bool payload, f32 (&x)[8]) {
  uint4 low, high;
  load_granules(reinterpret_cast<u64>(from), payload, low, high);
  x[0] = __uint_as_float(low.x), x[1] = __uint_as_float(low.y);
  x[2] = __uint_as_float(low.z), x[3] = __uint_as_float(low.w);
  x[4] = __uint_as_float(high.x), x[5] = __uint_as_float(high.y);
  x[6] = __uint_as_float(high.z), x[7] = __uint_as_float(high.w);
}

// Eight floats to `to` (32-byte aligned), payload or not. Any lanes.
GPURT_FN void store8(f32* to, const f32 (&x)[8]) {
  store_granule(reinterpret_cast<u64>(to), x[0], x[1], x[2], x[3]);
  store_granule(reinterpret_cast<u64>(to + 4), x[4], x[5], x[6], x[7]);
}

}  // namespace gpurt
