// A stand-alone kernel for one half of the chosen experts: what gpurt's experts are measured
// beside.
//
// Not part of the runtime: one launch an operator, as in a CUDA graph of ordinary kernels. Weights
// lie row by row: bf16, or codes of e2m1 (the even element low) and their e4m3 scales apart.
//
//   block  one expert, 32 of its rows; leaves at once if no step row chose the expert
//   warp   4 rows of W, for 4 users at a time: each weight is read once for them
//   lane   blocks of 16 columns: lane, lane + 32, ...
#pragma once
#include "counter.hpp"
#include "ptx.cuh"

namespace gpurt {

struct GroupedExperts {
  u64 x;       // f32 [rows or pairs, k]
  u64 w;       // u8 [experts, n, k / 2] codes, or bf16 [experts, n, k]
  u64 scales;  // u8 [experts, n, k / 16] e4m3; 0: w is bf16
  u64 second;  // f32 [experts, 2] second-level scales, or 0
  u64 counts;  // i32 [experts] users of each
  u64 users;   // i32 [experts, rows]: a user's row of x
  u64 pairs;   // i32 [experts, rows]: a user's row of y
  u64 y;       // f32 [pairs, n], or [pairs, n / 2] with swiglu
  u32 n, k, rows, swiglu;
};

constexpr u32 kGroupedWarps = 8;
constexpr u32 kGroupedRows = 4;   // of W in a warp
constexpr u32 kGroupedUsers = 4;  // at a time
constexpr u32 kGroupedTile = kGroupedWarps * kGroupedRows;
constexpr u32 kGroupedBlock = 16;  // columns of a scale
// Codes and scales are read as fp16 bits: 2^14 and 2^8 too small.
constexpr f32 kGroupedFactor = 4194304.0f;

// Sixteen weights of one row, before their scale.
template <bool QUANTISED>
struct GroupedWeights {
  u64 words[QUANTISED ? 1 : 4];
  f32 scale;

  GPURT_FN void load(const GroupedExperts& g, u64 row, u32 block) {
    const u64 index = row * (g.k / kGroupedBlock) + block;
    scale = 1;
    if constexpr (QUANTISED) {
      words[0] = __ldg(at<const u64>(g.w) + index);
      const u32 bits = __ldg(at<const u8>(g.scales) + index);
      scale = f32_from_f16(static_cast<u16>((bits & 0x7F) << 7 | (bits & 0x80) << 8));
    } else {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) words[i] = __ldg(at<const u64>(g.w) + index * 4 + i);
    }
  }

  GPURT_FN f32 value(u32 i) const {
    if constexpr (QUANTISED) {
      const u32 code = static_cast<u32>(words[0] >> 4 * i) & 15;
      return f32_from_f16(static_cast<u16>((code & 7) << 9 | (code & 8) << 12));
    } else {
      return __uint_as_float(static_cast<u32>(words[i / 4] >> i % 4 * 16 & 0xFFFF) << 16);
    }
  }
};

// x of up to four users as bf16 pairs, zeros where there are none; all threads.
GPURT_FN void load_users(const GroupedExperts& g, u32 expert, u32 first, u32 count, u32* staged) {
  const u32 words = g.k / 2;
  for (u32 i = threadIdx.x; i < kGroupedUsers * words; i += kGroupedWarps * 32) {
    const u32 user = first + i / words;
    u32 pair = 0;
    if (user < count) {
      const u64 row = static_cast<u64>(at<const i32>(g.users)[expert * g.rows + user]);
      const f32* from = at<const f32>(g.x) + row * g.k + i % words * 2;
      pair = pack_bf16x2(from[0], from[1]);
    }
    staged[i] = pair;
  }
}

GPURT_FN void store_grouped(const GroupedExperts& g, u32 expert, u32 row, u32 user,
                            const f32 (&z)[kGroupedRows]) {
  const f32* second = at<const f32>(g.second) + expert * 2;
  const f32 even = g.second != 0 ? second[0] : 1;
  const f32 odd = g.second != 0 && g.swiglu != 0 ? second[1] : even;
  const u64 pair = static_cast<u64>(at<const i32>(g.pairs)[expert * g.rows + user]);
  f32* y = at<f32>(g.y) + pair * (g.swiglu != 0 ? g.n / 2 : g.n);
  for (u32 r = 0; r < kGroupedRows; r += 2) {
    const f32 a = z[r] * even, b = z[r + 1] * odd;
    if (g.swiglu != 0) {
      y[(row + r) / 2] = a / (1.0f + __expf(-a)) * b;
    } else {
      y[row + r] = a, y[row + r + 1] = b;
    }
  }
}

template <bool QUANTISED, u32 USERS>
GPURT_FN void multiply_grouped(const GroupedExperts& g, u64 row, const u32* staged,
                               f32 (&sums)[USERS][kGroupedRows]) {
#pragma unroll 1
  for (u32 block = threadIdx.x % 32; block < g.k / kGroupedBlock; block += 32) {
    GroupedWeights<QUANTISED> w[kGroupedRows];
#pragma unroll
    for (u32 r = 0; r < kGroupedRows; ++r) w[r].load(g, row + r, block);
    const u32* x = staged + block * (kGroupedBlock / 2);
#pragma unroll
    for (u32 r = 0; r < kGroupedRows; ++r) {
      f32 block_sums[USERS] = {};
#pragma unroll
      for (u32 i = 0; i < kGroupedBlock; i += 2) {
        const f32 even = w[r].value(i), odd = w[r].value(i + 1);
#pragma unroll
        for (u32 u = 0; u < USERS; ++u) {
          const u32 pair = x[u * (g.k / 2) + i / 2];
          block_sums[u] = fmaf(even, __uint_as_float(pair << 16), block_sums[u]);
          block_sums[u] = fmaf(odd, __uint_as_float(pair & 0xFFFF0000u), block_sums[u]);
        }
      }
#pragma unroll
      for (u32 u = 0; u < USERS; ++u) sums[u][r] = fmaf(block_sums[u], w[r].scale, sums[u][r]);
    }
  }
}

// `USERS` users from `first` on; whole warps.
template <bool QUANTISED, u32 USERS>
GPURT_FN void run_grouped_users(const GroupedExperts& g, u32 expert, u32 row, u32 first, u32 count,
                                const u32* staged) {
  f32 sums[USERS][kGroupedRows] = {};
  multiply_grouped<QUANTISED>(g, u64{expert} * g.n + row, staged, sums);
#pragma unroll
  for (u32 u = 0; u < USERS; ++u) {
#pragma unroll
    for (u32 r = 0; r < kGroupedRows; ++r) {
      f32 sum = sums[u][r];
      for (u32 by = 16; by != 0; by /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, by);
      sums[u][r] = sum * (QUANTISED ? kGroupedFactor : 1);
    }
    if (threadIdx.x % 32 == 0 && first + u < count)
      store_grouped(g, expert, row, first + u, sums[u]);
  }
}

// staged: shared memory of kGroupedUsers * k bf16. block_index: expert by expert, its tiles.
template <bool QUANTISED>
GPURT_FN void grouped_experts(const GroupedExperts& g, u32 block_index, u32* staged) {
  const u32 tiles = (g.n + kGroupedTile - 1) / kGroupedTile;
  const u32 expert = block_index / tiles;
  const u32 row = block_index % tiles * kGroupedTile + threadIdx.x / 32 * kGroupedRows;
  const u32 count = static_cast<u32>(at<const i32>(g.counts)[expert]);
  for (u32 first = 0; first < count; first += kGroupedUsers) {
    load_users(g, expert, first, count, staged);
    __syncthreads();
    if (row < g.n && count - first == 1)
      run_grouped_users<QUANTISED, 1>(g, expert, row, first, count, staged);
    else if (row < g.n)
      run_grouped_users<QUANTISED, kGroupedUsers>(g, expert, row, first, count, staged);
    __syncthreads();
  }
}

}  // namespace gpurt
