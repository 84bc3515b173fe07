// reduce_squares: sums parts of this rank's columns of each pair, times a gain, and their squares.
// graphs/ops/reduce_squares.py has the contract.
#pragma once
#include "context.hpp"
#include "slots.hpp"

namespace gpurt {

/// Sums of squares of a rank's columns of a pair, and the columns of a block: sum s is over blocks
/// s, s + kSquareSums, ...
constexpr u32 kSquareSums = 4;
constexpr u32 kSquareBlock = 128;

struct reduce_squares {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32 width = record.param[0], per_row = record.param[2], stride = record.param[3];
    const u64 slot = u64{stride} * context.step->rows_capacity * per_row;
    const Slots parts{arg<const f32>(record, 0), slot, stride, record.param[1]};
    const f32* const gain = arg<const f32>(record, 1);
    const u32 pairs = context.step->rows * per_row;
    const u32 end = record.tile[1] < pairs ? record.tile[1] : pairs;
    for (u32 pair = record.tile[0]; pair < end; ++pair) {
      f32* const x = arg<f32>(record, 2) + u64{pair} * width;
      f32 squares[kSquareSums] = {};
      for (u32 i = 0; i < width; ++i) {
        x[i] = slots_element(parts, pair, i) * gain[i];
        squares[i / kSquareBlock % kSquareSums] += x[i] * x[i];
      }
      f32* const y = arg<f32>(record, 3) + u64{pair} * kSquareSums;
      for (u32 i = 0; i < kSquareSums; ++i) y[i] = squares[i];
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
