// collect: all ranks' parts into one value, summed in rank order or side by side.
// graphs/ops/collect.py has the contract.
#pragma once
#include "context.hpp"
#include "publish.hpp"

namespace gpurt {

struct collect {
  static constexpr u32 kSum = 0;

  static u32 run(const TaskRecord& record, BodyContext& context) {
    const f32* const slots = arg<const f32>(record, 0);
    f32* const y = arg<f32>(record, 1);
    const f32* const residual = arg<const f32>(record, 2);
    const u64 width = record.param[0];
    const u32 ranks = record.param[1];
    const bool summed = record.param[2] == kSum;
    const u32 per_row = record.param[3];
    const u32 rows = host::value_rows(context, per_row, record.param[4] != 0);
    const u64 slot = width * context.step->rows_capacity * per_row;
    const u64 y_width = summed ? width : width * ranks;
    for (u32 row = 0; row < rows; ++row) {
      for (u64 i = record.tile[0]; i < record.tile[1]; ++i) {
        const u64 rank = i / width;  // 0 if summed
        f32 value = slots[rank * slot + row * width + i % width];
        if (residual != nullptr) value = residual[row * width + i] + value;
        for (u32 r = 1; summed && r < ranks; ++r) value += slots[r * slot + row * width + i];
        y[row * y_width + i] = value;
      }
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
