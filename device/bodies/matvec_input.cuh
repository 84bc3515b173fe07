// matvec_input on the GPU: rows of x as the tensor cores take them, for a step of many rows.
//
// The contract is in graphs/ops/matvec_wide_cuda.py. A task has eight rows, and all of their
// columns or, without a norm, some. They are loaded, converted and squared by what a smaller step's
// matvec does it with, in the same order: so are the bits, of a row's factor too. Floor: 8 rows of
// x from L2, one trip for each chunk of 64 columns and virtual warp.
#pragma once
#include "matvec_outputs.cuh"

namespace gpurt {

struct matvec_input {
  enum Arg : u32 { kArgX, kArgNorm, kArgY, kArgFactors };
  static constexpr u32 kRowTiles = 10;  // parameter: of a packed tile of W
  static constexpr u32 kSizes = 5;      // of packed tiles: 1, 2, 4, 8, 16
  static constexpr u32 kRows = kMatvecRowTile;
  static constexpr u32 kTiles = 16;  // of as many rows in a block

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[MatvecTask::kXDtype] == kBf16) return run_of<kBf16>(task, context);
    run_of<kF32>(task, context);
  }

 private:
  template <u32 X>
  __device__ __noinline__ static void run_of(const TaskRecord& task, const BodyContext& context) {
    const bool sampled = task.param[MatvecTask::kSampled] != 0;
    const u32 all = sampled ? context.step->sample_count : context.step->rows;
    const u32 first = task.tile[0] * kRows;
    if (first >= all) return;  // all threads
    const u32 rows = min(all - first, kRows);
    const auto row = [&](u32 j) { return sampled ? context.sample_rows[first + j] : first + j; };
    MatvecTask::Half& half = *reinterpret_cast<MatvecTask::Half*>(context.scratch);
    if (task.addr[kArgNorm] == 0) {
      convert<X>(task, context, 16, rows, half, row);
      return;
    }
    // Which virtual warp squares what hangs on W's packed tile: a factor for each size of them.
    const u32 tiles = (task.param[MatvecTask::kN] + 15) / 16, most = task.param[kRowTiles];
    const u32 sizes = (tiles < most ? 0 : most) | tiles % most;
#pragma unroll 1
    for (u32 log2 = 0; sizes >> log2 != 0; ++log2) {
      if ((sizes >> log2 & 1) == 0) continue;
      convert<X>(task, context, 16u >> log2, rows, half, row);
      context.sync();
      if (context.thread < rows) {
        const u32 squares = shared_address(half.squares[context.thread]);
        f32* to = arg<f32>(task, kArgFactors) + (task.tile[0] * kSizes + log2) * kRows;
        to[context.thread] = MatvecTask::row_factor(squares, log2, task.param[MatvecTask::kK],
                                                    param_f32(task, MatvecTask::kEps));
      }
      context.sync();
    }
  }

  // The task's chunks, by `groups` virtual warps.
  template <u32 X, class Row>
  GPURT_FN static void convert(const TaskRecord& task, const BodyContext& context, u32 groups,
                               u32 rows, MatvecTask::Half& half, Row row) {
    using Activations = MatvecActivations<X, kRows, true>;
    const u32 k = task.param[MatvecTask::kK], lane = context.thread % 32;
    const u64 from = reinterpret_cast<u64>(context.address<const u8>(task, kArgX));
    const u32 block = task.tile[0] / kTiles, tile = task.tile[0] % kTiles;
    u32* to = arg<u32>(task, kArgY) + (u64{block} * ((k + 63) / 64) * kTiles + tile) * 256 + lane;
#pragma unroll 1
    for (u32 v = context.thread / 32; v < groups; v += kTeamWarps) {
      Activations x;
      x.start(from, k, task.tile[1] + v, rows, 0, row);
      f32 squares[Activations::kLoads] = {};
#pragma unroll 1
      for (u32 chunk = task.tile[1] + v; chunk < task.tile[2]; chunk += groups) {
        u32 pair[8];
        x.load(0, 0);
        if ((task.payload_mask >> kArgX & 1) != 0) x.wait(0, 0);
        x.convert(0, 0, task.addr[kArgNorm], pair, squares);
        x.advance(groups);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) to[chunk * kTiles * 256 + i * 32] = pair[i];
      }
      MatvecTask::store_squares(shared_address(half.squares), v, Activations::sum_squares(squares));
    }
  }
};

}  // namespace gpurt
