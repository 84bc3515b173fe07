// The part of CUDA's language that the device code uses, for g++ and the machine of machine.hpp.
// Approximate intrinsics are exact here.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"

#define __device__
#define __constant__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

namespace emu {
template <class T>
T pick(T value, unsigned lane) {
  const Lanes& all = exchange(Collective::kShuffle, &value, sizeof(T));
  std::memcpy(&value, all[lane % 32], sizeof(T));
  return value;
}
inline unsigned lane() {
  return threadIdx.x % 32;
}
}  // namespace emu

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emu::pick(value, emu::lane() ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emu::pick(value, static_cast<unsigned>(from));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
  const unsigned lane = emu::lane();
  return emu::pick(value, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
  const unsigned lane = emu::lane();
  return emu::pick(value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const unsigned mine = vote ? 1 : 0;
  const emu::Lanes& all = emu::exchange(emu::Collective::kVote, &mine, 4);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned{all[i][0]} << i;
  return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const emu::Lanes& all = emu::exchange(emu::Collective::kShuffle, &value, 4);
  unsigned lanes[32];
  for (unsigned i = 0; i < 32; ++i) std::memcpy(&lanes[i], all[i], 4);
  return *std::max_element(lanes, lanes + 32);
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return ~__reduce_max_sync(0, ~value);
}
inline bool __any_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}
inline void __syncwarp() {
  __ballot_sync(0, false);
}
inline void __syncthreads() {
  emu::barrier(0, emu::block_threads());
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline int __popc(unsigned v) {
  return __builtin_popcount(v);
}
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline int __clz(int v) {
  return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __expf(float x) {
  return expf(x);
}
inline float rsqrtf(float x) {
  return 1.0F / sqrtf(x);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned byte = (selector >> (4 * i)) & 7;
    out |= static_cast<unsigned>((both >> (8 * byte)) & 255) << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32) | low) >> (by & 31));
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
  const unsigned old = *p;
  *p |= v;
  return old;
}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
  const unsigned old = *p;
  *p += v;
  return old;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned min(unsigned a, unsigned b) {
  return a < b ? a : b;
}
inline unsigned max(unsigned a, unsigned b) {
  return a > b ? a : b;
}
