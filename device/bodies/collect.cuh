// collect on the GPU: all ranks' parts into one value, summed in rank order or side by side.
#pragma once
#include "publish.cuh"

namespace gpurt {

struct collect {
  static constexpr u32 kSum = 0;

  static constexpr u32 kAtOnce = 8;

  // Four columns a thread where rows are made of whole fours.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[0] % 4 == 0) {
      gather<float4>(task, context);
    } else {
      gather<f32>(task, context);
    }
  }

 private:
  GPURT_FN static void add(f32& sum, f32 value) { sum += value; }
  GPURT_FN static void add(float4& sum, const float4& value) {
    sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
  }

  template <class Piece>
  GPURT_FN static void gather(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kSize = sizeof(Piece) / sizeof(f32);
    const Piece* slots = context.address<const Piece>(task, 0);
    Piece* y = context.address<Piece>(task, 1);
    const Piece* residual = context.address<const Piece>(task, 2);
    const u32 width = task.param[0] / kSize, ranks = task.param[1], per_row = task.param[3];
    const bool summed = task.param[2] == kSum;
    const u32 rows = publish::value_rows(context, per_row, task.param[4] != 0);
    const u64 slot = u64(width) * context.step->rows_capacity * per_row;
    const u64 y_width = summed ? width : u64(width) * ranks;
    const u32 begin = task.tile[0] / kSize, columns = task.tile[1] / kSize - begin;
    const u32 first = begin / width;  // the rank; 0 if summed
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u32 row = at / columns, column = begin + at % columns;
      const Piece* from = slots + u64(row) * width + (column - first * width);
      if (!summed) {
        y[row * y_width + column] = from[first * slot];
        continue;
      }
      Piece value{};
      if (residual != nullptr) value = residual[u64(row) * width + column];
#pragma unroll 1
      for (u32 base = 0; base < ranks; base += kAtOnce) {
        Piece parts[kAtOnce];  // their loads are under way at once
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          if (base + i < ranks) parts[i] = from[(base + i) * slot];
        }
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) {
          if (base + i >= ranks) break;
          if (base + i == 0 && residual == nullptr) {
            value = parts[0];  // 0 + x would lose the sign of a zero
          } else {
            add(value, parts[i]);
          }
        }
      }
      y[row * y_width + column] = value;
    }
  }
};

}  // namespace gpurt
