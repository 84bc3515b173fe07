// reduce: this rank's columns of a sum over all ranks, in their place on every rank.
// graphs/ops/reduce.py has the contract.
#pragma once
#include "context.hpp"
#include "publish.hpp"
#include "slots.hpp"

namespace gpurt {

struct reduce {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32 width = record.param[0];
    const u32 ranks = record.param[1];
    const u32 per_row = record.param[2];
    const u32 stride = record.param[3];
    const u64 slot = u64{stride} * context.step->rows_capacity * per_row;
    const Slots parts{arg<const f32>(record, 0), slot, stride, ranks};
    const f32* residual = arg<const f32>(record, 1);
    if (residual != nullptr) residual += u64{context.program->rank} * width;
    const u64 sums_stride = record.param[4];
    f32* const sums = arg<f32>(record, 2);
    const u64 rows = u64{context.step->rows} * per_row;
    for (u64 row = 0; row < rows; ++row) {
      for (u32 i = record.tile[0]; i < record.tile[1]; ++i) {
        const f32* const first = residual == nullptr ? nullptr : residual + row * ranks * width + i;
        const f32 sum = slots_element(parts, row, i, first);
        for (u32 rank = 0; rank < ranks; ++rank)
          host::my_slot(context, sums, rank, width)[row * sums_stride + i] = sum;
      }
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
