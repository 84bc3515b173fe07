// collect on the GPU: all ranks' parts into one value, summed in rank order or side by side.
#pragma once
#include "publish.cuh"

namespace gpurt {

struct collect {
  static constexpr u32 kSum = 0;

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const f32* slots = context.address<const f32>(task, 0);
    f32* y = context.address<f32>(task, 1);
    const f32* residual = context.address<const f32>(task, 2);
    const u32 width = task.param[0], ranks = task.param[1], per_row = task.param[3];
    const bool summed = task.param[2] == kSum;
    const u32 rows = publish::value_rows(context, per_row, task.param[4] != 0);
    const u64 slot = u64(width) * context.step->rows_capacity * per_row;
    const u64 y_width = summed ? width : u64(width) * ranks;
    const u32 begin = task.tile[0], columns = task.tile[1] - begin;
    const u32 first = begin / width;  // the rank; 0 if summed
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u32 row = at / columns, column = begin + at % columns;
      const f32* from = slots + u64(row) * width + (column - first * width);
      f32 value = from[first * slot];
      if (residual != nullptr) value = residual[u64(row) * width + column] + value;
      for (u32 rank = 1; summed && rank < ranks; ++rank) value += from[rank * slot];
      y[row * y_width + column] = value;
    }
  }
};

}  // namespace gpurt
