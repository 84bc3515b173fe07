// device/ptx.cuh for the emulator: the same names, in C++. Accesses check their alignment, as the
// hardware does.
#pragma once
#include "atomics.hpp"
#include "cuda.hpp"
#include "types.hpp"

#define GPURT_WGMMA 1  // as sm_90a

#ifndef GPURT_RANKS
#define GPURT_RANKS 0
#endif

namespace gpurt {

inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const u8*>(p) - emu::shared);
}
inline void pin(u32&) {}
inline void pin(u64&) {}
inline void mbarrier_init(u32 barrier, u32 arrivals) {
  emu::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_inval(u32 barrier) {
  emu::mbarrier_inval(barrier);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(u32 barrier) {
  emu::mbarrier_arrive(barrier, 0);
}
inline void mbarrier_arrive_behind(u32 barrier, u32) {
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  emu::mbarrier_arrive(barrier, bytes);
}
inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
  return emu::mbarrier_wait(barrier, parity);
}
inline bool mbarrier_try_wait_for(u32 barrier, u32 parity, u32) {
  return emu::mbarrier_wait(barrier, parity);
}
inline bool mbarrier_test_wait(u32 barrier, u32 parity) {
  return emu::mbarrier_test(barrier, parity);
}
inline void bulk_copy_to_shared(u32 to, u64 from, u32 bytes, u32 barrier) {
  emu::bulk_copy(to, reinterpret_cast<const void*>(from), bytes, barrier);
}
inline void mbarrier_arrive_expect_if(bool arrives, u32 barrier, u32 bytes) {
  if (arrives) mbarrier_arrive_expect(barrier, bytes);
}
inline void bulk_copy_to_shared_if(bool copies, u32 to, u64 from, u32 bytes, u32 barrier) {
  if (copies) bulk_copy_to_shared(to, from, bytes, barrier);
}
inline void copy16_to_shared(u32 to, u64 from) {
  emu::copy16(to, reinterpret_cast<const void*>(from));
}
inline void mbarrier_arrive_after_copies(u32 barrier) {
  emu::arrive_after_copies(barrier);
}
inline void commit_copies() {
  emu::commit_copies();
}
template <u32 N>
void wait_copies() {
  emu::wait_copies(N);
}
inline void wait_all_copies() {
  emu::wait_all_copies();
}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline void fence_acq_rel_gpu() {}

template <class T>
T* aligned(u64 address) {
  if (address % sizeof(T) != 0) {
    std::fprintf(stderr, "address %llx is not aligned to %zu\n",
                 static_cast<unsigned long long>(address), sizeof(T));
    std::abort();
  }
  return reinterpret_cast<T*>(address);
}
inline u64 in_shared(u32 address) {
  return reinterpret_cast<u64>(emu::shared) + address;
}
template <u32 SEGMENTS, u32 FROM>
u32 shuffle_in_segments(u32 v) {
  return __shfl_sync(~0U, v, static_cast<int>((emu::lane() & SEGMENTS) | FROM));
}
inline u32 in_register(u32 v) {
  return v;
}
inline uint4 ld_relaxed_b128(u64 from) {
  return *aligned<const uint4>(from);
}
inline void st_relaxed_b128(u64 to, uint4 value) {
  *aligned<uint4>(to) = value;
}
inline uint2 ld_relaxed_b64(u64 from) {
  return *aligned<const uint2>(from);
}
inline u32 ld_relaxed_u32(u64 from) {
  return *aligned<const u32>(from);
}
inline void st_relaxed_u32(u64 to, u32 value) {
  *aligned<u32>(to) = value;
}
inline void prefetch_to_l2(u64 from, u32 bytes) {
  aligned<const uint4>(from);
  aligned<const uint4>(bytes);
}
inline void prefetch_line_to_l2(u64) {}
inline uint4 ld_weight_b128(u64 from) {
  return *aligned<const uint4>(from);
}
inline u32 ld_weight_u16(u64 from) {
  return *aligned<const u16>(from);
}
inline uint4 ld_shared_matrices(u32 row) {
  const u32 lane = emu::lane();
  u32 words[4];
  for (u32 i = 0; i < 4; ++i) {
    const u32 from = __shfl_sync(~0U, row, static_cast<int>(i * 8 + lane / 4));
    aligned<const uint4>(in_shared(from));
    words[i] = *aligned<const u32>(in_shared(from) + lane % 4 * 4);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
inline void st_shared_b128(u32 to, uint4 v) {
  *aligned<uint4>(in_shared(to)) = v;
}
inline uint4 ld_shared_b128(u32 from) {
  return *aligned<const uint4>(in_shared(from));
}
inline uint2 ld_shared_b64(u32 from) {
  return *aligned<const uint2>(in_shared(from));
}
inline u32 ld_shared_u8(u32 from) {
  return *reinterpret_cast<const u8*>(in_shared(from));
}
inline u32 ld_shared_acquire_u32(u32 from) {
  emu::yield();
  return *aligned<const u32>(in_shared(from));
}
inline u32 decide_shared_u32(u32 at, u32 word) {
  emu::yield();
  u32& held = *aligned<u32>(in_shared(at));
  return held != 0 ? held : held = word;
}
inline void st_shared_release_u32(u32 to, u32 value) {
  *aligned<u32>(in_shared(to)) = value;
}
inline f32 ld_shared_f32(u32 from) {
  return *aligned<const f32>(in_shared(from));
}
inline void st_shared_f32(u32 to, f32 value) {
  *aligned<f32>(in_shared(to)) = value;
}
inline void bar_sync(u32 barrier, u32 threads) {
  emu::barrier(barrier, threads);
}
inline void bar_arrive(u32 barrier, u32 threads) {
  emu::arrive(barrier, threads);
}
inline u64 clock_cycles() {
  return clock_ns() * 2;
}
inline u32 clock_cycles_low() {
  return static_cast<u32>(clock_cycles());
}
inline f32 f32_of_bf16(u32 bits) {
  return __uint_as_float(bits << 16);
}
// Round to nearest even; every NaN becomes the canonical one.
inline u32 bf16_of_f32(f32 x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FFF;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
inline u32 pack_bf16x2(f32 low, f32 high) {
  return bf16_of_f32(low) | bf16_of_f32(high) << 16;
}
inline u32 mul_bf16x2(u32 a, u32 b) {
  return pack_bf16x2(f32_of_bf16(a & 0xFFFF) * f32_of_bf16(b & 0xFFFF),
                     f32_of_bf16(a >> 16) * f32_of_bf16(b >> 16));
}
inline u32 pack_f16x2(f32 low, f32 high) {
  const _Float16 parts[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  u32 bits;
  std::memcpy(&bits, parts, 4);
  return bits;
}
inline f32 f32_from_f16(u16 bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<f32>(value);
}
inline u32 e4m3_of_f32(f32 x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFU;
  u32 code = 0x7F;
  if (magnitude < 0x3C800000U) {
    code = static_cast<u32>(__builtin_rintf(__uint_as_float(magnitude) * 512.0F));
  } else if (magnitude <= 0x7F800000U) {
    code = (magnitude - 0x3C000000U + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
    if (code > 0x7E) code = 0x7E;
  }
  return (bits >> 24 & 0x80) | code;
}
inline u16 pack_e4m3x2(f32 low, f32 high) {
  return static_cast<u16>(e4m3_of_f32(low) | e4m3_of_f32(high) << 8);
}
inline u32 f16x2_from_e4m3x2(u16 bits) {
  u32 pair = 0;
  for (u32 i = 0; i < 2; ++i) {
    const u32 code = bits >> 8 * i & 0x7F;
    const f32 exact = code == 0x7F ? __builtin_nanf("")
                      : code < 8   ? static_cast<f32>(code) / 512.0F
                                   : __builtin_ldexpf(8.0F + static_cast<f32>(code & 7),
                                                      static_cast<int>(code >> 3) - 10);
    const f32 value = (bits >> 8 * i & 0x80) != 0 ? -exact : exact;
    pair |= (pack_f16x2(value, 0.0F) & 0xFFFF) << 16 * i;
  }
  return pair;
}
inline f32 rcp_approx_ftz(f32 x) {
  return 1.0F / x;
}
inline f32 ex2_approx_ftz(f32 x) {
  return exp2f(x);
}

inline u32 movmatrix_trans(u32 pair) {
  const u32 lane = emu::lane();
  u32 out = 0;
  for (u32 i = 0; i < 2; ++i) {  // element (row 2c + i, column g)
    const u32 from = (lane % 4 * 2 + i) * 4 + lane / 8;
    const u32 word = __shfl_sync(~0U, pair, static_cast<int>(from));
    out |= (word >> 16 * (lane / 4 % 2) & 0xFFFF) << 16 * i;
  }
  return out;
}

// Fragments as the PTX manual lays them out for m16n8k16; sums in double, rounded once.
inline void mma_m16n8k16_bf16(f32 (&d)[4], const uint4& a, u32 b0, u32 b1) {
  const u32 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
  const emu::Lanes& all = emu::exchange(emu::Collective::kMma, mine, sizeof mine);
  const auto pair = [&](u32 lane, u32 word) {
    u32 bits;
    std::memcpy(&bits, all[lane] + 4 * word, 4);
    return bits;
  };
  const u32 lane = emu::lane();
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + 8 * (i / 2);
    const u32 column = 2 * (lane % 4) + i % 2;
    double sum = d[i];
    for (u32 k = 0; k < 16; k += 2) {
      const u32 left = pair((row % 8) * 4 + (k % 8) / 2, row / 8 + 2 * (k / 8));
      const u32 right = pair(column * 4 + (k % 8) / 2, 4 + k / 8);
      sum += f32_of_bf16(left & 0xFFFF) * static_cast<double>(f32_of_bf16(right & 0xFFFF));
      sum += f32_of_bf16(left >> 16) * static_cast<double>(f32_of_bf16(right >> 16));
    }
    d[i] = static_cast<f32>(sum);
  }
}

inline void warps_mma_begin(f32 (&)[8][4]) {}
inline void warps_mma_commit() {}
inline void warps_mma_wait(f32 (&)[8][4]) {}
// In the hardware's fields, each in units of 16 bytes.
inline u64 warps_mma_operand(u32 at, u32 columns_apart, u32 rows_apart) {
  return u64{rows_apart >> 4} << 32 | (columns_apart >> 4) << 16 | at >> 4;
}
// Each warp's part, by the products of one warp: fragments are words of cores.
inline void warps_mma_m64n64k16_bf16(f32 (&d)[8][4], u64 a, u64 b) {
  const auto word = [](u64 operand, u32 rows, u32 columns) {
    const u32 at = (operand & 0x3FFF) << 4, columns_apart = (operand >> 16 & 0x3FFF) << 4;
    const u32 rows_apart = (operand >> 32 & 0x3FFF) << 4;
    return *aligned<const u32>(
        in_shared(at + rows * rows_apart + columns * columns_apart + emu::lane() * 4));
  };
  const u32 rows = threadIdx.x / 32 % 4 * 2;
  const uint4 of_a{word(a, rows, 0), word(a, rows + 1, 0), word(a, rows, 1), word(a, rows + 1, 1)};
  for (u32 n = 0; n < 8; ++n) mma_m16n8k16_bf16(d[n], of_a, word(b, n, 0), word(b, n, 1));
}

}  // namespace gpurt
