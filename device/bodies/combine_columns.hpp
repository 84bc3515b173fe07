// combine_columns: this rank's columns of y = sum over a row's experts of weight * R(x).
// graphs/ops/combine_columns.py has the contract, route.py the layout of `routes`.
#pragma once
#include "context.hpp"
#include "reduce_squares.hpp"
#include "routes.hpp"

namespace gpurt {

struct combine_columns {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32 width = record.param[0], top_k = record.param[2];
    const RoutesLayout layout{context.step->rows_capacity, record.param[4], top_k};
    const u32 end = record.tile[3] < context.step->rows ? record.tile[3] : context.step->rows;
    for (u32 row = record.tile[2]; row < end; ++row) {
      f32* const y = arg<f32>(record, 3) + u64{row} * width;
      for (u32 t = 0; t < top_k; ++t) {
        const u32 pair = row * top_k + t;
        const u32 weight = arg<const u32>(record, 2)[layout.pair(pair) + RoutesLayout::kWeight];
        const f32 factor = std::bit_cast<f32>(weight) * scale(record, row, t);
        const f32* const x = arg<const f32>(record, 0) + u64{pair} * width;
        for (u32 i = 0; i < width; ++i) y[i] = t == 0 ? x[i] * factor : y[i] + x[i] * factor;
      }
    }
    return kFaultNone;
  }

 private:
  /// 1 / sqrt(mean square + eps) of a row's pair `t`.
  static f32 scale(const TaskRecord& record, u32 row, u32 t) {
    const u32 ranks = record.param[1], top_k = record.param[2];
    const f32* const squares = arg<const f32>(record, 1) + u64{row} * ranks * top_k * kSquareSums;
    f32 sum = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
      const f32* const of = squares + (u64{rank} * top_k + t) * kSquareSums;
      sum += (of[0] + of[1]) + (of[2] + of[3]);
    }
    const f32 mean = sum / static_cast<f32>(ranks * record.param[0]);
    return 1.0F / __builtin_sqrtf(mean + param_f32(record, 3));
  }
};

}  // namespace gpurt
