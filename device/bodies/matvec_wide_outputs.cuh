// Units of a matvec of many rows, and what becomes of their sums: matvec_wide.cuh.
#pragma once
#include "matvec_input.cuh"

namespace gpurt {

struct MatvecWide {
  using T = MatvecTask;
  static constexpr u32 kWarps = 16;      // at work on a task, whatever the team
  static constexpr u32 kTiles = 4;       // of 16 rows of W
  static constexpr u32 kStepTiles = 16;  // of 8 step rows
  static constexpr u32 kBlock = kStepTiles * 8;
  static constexpr u32 kOwn = 4;  // of them, a warp's
  using Sums = f32[kOwn][4];

  // How K is cut: its groups are added in chains of 2^chain_log2.
  struct Cut {
    u32 chunks, groups, groups_log2, chain_log2;
  };

  // What all lanes share. A unit is 64 rows of W by 128 step rows: a task has those from its first
  // rows of both on, all step rows of a W tile before those of the next.
  struct Job {
    Cut cut;
    u32 units, blocks, before;  // blocks of 128 step rows; units before the first one
    u32 tiles, rows;            // of W in the task, and of the step, that are there
    u32 first, size_log2;       // row tile in its packed tile, and how many that one has
    u64 w, x;
  };

  // Where this thread's outputs lie: rows g and g + 8 of W of step rows 2c and 2c + 1 of each tile.
  // Of pairs it has one: that of row g, or the one eight rows on where g is odd.
  struct Place {
    u32 row, of_w, rows, all_of_w;  // its first ones of the step and in the task, and all of them
    u32 width, paired;
    u64 first;

    GPURT_FN static Place of(const TaskRecord& task, const Job& job, u32 unit, u32 warp) {
      const u32 paired = task.param[T::kEpilogue] == T::kSwiglu ? 1 : 0;
      const u32 number = job.before + unit, g = threadIdx.x % 32 / 4;
      const u32 row = number % job.blocks * kBlock + warp / kTiles * kOwn * 8 + threadIdx.x % 4 * 2;
      const u32 of_w = (number / job.blocks * kTiles + warp % kTiles) * 16 + g + (paired & g) * 7,
                width = task.param[T::kN] >> paired;
      const u64 first = u64{row} * width + ((task.tile[0] + of_w) >> paired);
      return {row, of_w, job.rows, task.tile[1] - task.tile[0], width, paired, first};
    }
    // Whether a warp has any.
    GPURT_FN static bool works(const Job& job, u32 unit, u32 warp) {
      const u32 number = job.before + unit;
      return number / job.blocks * kTiles + warp % kTiles < job.tiles &&
             number % job.blocks * kBlock + warp / kTiles * kOwn * 8 < job.rows;
    }
    GPURT_FN bool has(u32 n, u32 i) const {
      return row + n * 8 + i % 2 < rows && of_w + i / 2 * 8 < all_of_w;
    }
    GPURT_FN u64 at(u32 n, u32 i) const { return first + (n * 8 + i % 2) * width + i / 2 * 8; }
  };

  GPURT_FN static void finish(const TaskRecord& task, const Job& job, u32 unit, u32 warp,
                              Sums& value) {
    const Place place = Place::of(task, job, unit, warp);
    if (task.addr[T::kArgNorm] != 0) scale_rows(task, job, place, value);
    if constexpr (kMatvecScaled) {
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) value[n][i] = scaled(task, value[n][i]);
      }
    }
    if (place.paired != 0) {
      join_pairs(value);
      add_and_store<2>(task, place, value);
    } else {
      add_and_store<4>(task, place, value);
    }
  }

  // Lanes of a gate and of its up part share the pairs of both their rows: [n][0] and [n][1].
  GPURT_FN static void join_pairs(Sums& value) {
    const bool has_up = (threadIdx.x / 4 & 1) != 0;
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const f32 low = value[n][i], high = value[n][2 + i], own = has_up ? high : low;
        const f32 other = __shfl_xor_sync(~0u, has_up ? low : high, 4);
        value[n][i] = T::swiglu(has_up ? other : own, has_up ? own : other);
      }
    }
  }

  // COUNT: of a thread's outputs in each tile. Loads go out before the first store.
  template <u32 COUNT>
  GPURT_FN static void add_and_store(const TaskRecord& task, const Place& place, Sums& value) {
    if (task.addr[T::kArgResidual] != 0) {
      const f32* residual = arg<const f32>(task, T::kArgResidual);
      f32 held[kOwn][COUNT];
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
          held[n][i] = place.has(n, i) ? residual[place.at(n, i)] : 0.0f;
      }
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) value[n][i] = __fadd_rn(value[n][i], held[n][i]);
      }
    }
    if (task.param[T::kYDtype] == kBf16) {
      store<COUNT>(arg<u16>(task, T::kArgY), place, value);
    } else {
      store<COUNT>(arg<f32>(task, T::kArgY), place, value);
    }
  }

  GPURT_FN static void convert(f32 v, f32& to) { to = v; }
  GPURT_FN static void convert(f32 v, u16& to) { to = static_cast<u16>(pack_bf16x2(v, 0.0f)); }

  template <u32 COUNT, class Y>
  GPURT_FN static void store(Y* y, const Place& place, const Sums& value) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i) {
        if (place.has(n, i)) convert(value[n][i], y[place.at(n, i)]);
      }
    }
  }

  // By the factor of each step row, for packed tiles of this task's size. A row that is not there
  // takes the last one's, and is not stored.
  GPURT_FN static void scale_rows(const TaskRecord& task, const Job& job, const Place& place,
                                  Sums& value) {
    const f32* factors = arg<const f32>(task, T::kArgNorm) + job.size_log2 * 8;
    f32 factor[kOwn][2];
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = min(place.row + n * 8 + i, job.rows - 1);
        factor[n][i] = factors[row / 8 * matvec_input::kSizes * 8 + row % 8];
      }
    }
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) value[n][i] = __fmul_rn(value[n][i], factor[n][i % 2]);
    }
  }

  GPURT_FN static f32 scaled(const TaskRecord& task, f32 v) {
    if constexpr (kMatvecScaled) {
      if (param_f32(task, kMatvecScale) != 1 || param_f32(task, kMatvecSoftcap) > 0)
        v = scale_and_cap(v, param_f32(task, kMatvecScale), param_f32(task, kMatvecSoftcap));
    }
    return v;
  }
};

}  // namespace gpurt
