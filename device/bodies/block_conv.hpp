// block_conv: a convolution along the rows of a block. graphs/ops/block_conv.py has the contract.
#pragma once
#include <algorithm>

#include "context.hpp"
#include "norm.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

/// A block_conv task, decoded.
struct ConvTask {
  const void* x;        // [rows, hidden] f32 or bf16
  const f32* d;         // [rows, 2, taps, hidden / group]
  const f32* base;      // [2, taps, hidden], from this side on
  const f32* residual;  // [rows, hidden]; null: zeros
  f32* y;               // [hidden], a row
  u32 hidden, taps, group, side;
  u32 begin, end;  // columns

  /// Coefficients of one row and tap.
  const f32* dynamic(u32 row, u32 tap) const {
    return d + ((u64{row} * 2 + side) * taps + tap) * (hidden / group);
  }
};

/// How many rows before `row` belong to its block, up to `most`.
inline u32 rows_before(const RowState* rows, u32 row, u32 most) {
  u32 count = 0;
  while (count < most && count < row && rows[row - count - 1].slot == rows[row].slot &&
         rows[row - count - 1].position + count + 1 == rows[row].position)
    ++count;
  return count;
}

/// y += (base + d) * x[row - tap]
template <class T>
inline void conv_tap(const ConvTask& task, u32 row, u32 tap) {
  const T* const from = static_cast<const T*>(task.x) + u64{row - tap} * task.hidden;
  const f32* const base = task.base + u64{tap} * task.hidden;
  const f32* const dynamic = task.dynamic(row, tap);
  for (u32 i = task.begin; i < task.end; ++i)
    task.y[i] += (base[i] + dynamic[i / task.group]) * to_f32(from[i]);
}

}  // namespace gpurt::host

namespace gpurt {

struct block_conv {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    host::ConvTask task{};
    task.x = arg<const void>(record, 0);
    task.d = arg<const f32>(record, 1);
    task.residual = arg<const f32>(record, 3);
    task.hidden = record.param[0];
    task.taps = record.param[1];
    task.group = record.param[2];
    task.side = record.param[3];
    task.base = arg<const f32>(record, 2) + u64{task.side} * task.taps * task.hidden;
    task.begin = record.tile[0];
    task.end = record.tile[1];
    const bool x_is_bf16 = record.param[5] == kBf16, y_is_bf16 = record.param[7] == kBf16;
    const host::NormedRows normed{arg<const f32>(record, 5), arg<void>(record, 6), task.hidden,
                                  param_f32(record, 4), record.param[9] == kBf16};
    host::Workspace workspace(context, host::Workspace::padded<f32>(task.hidden));
    f32* const room = workspace.take<f32>(task.hidden);
    const u32 rows = std::min(record.tile[3], context.step->rows);
    for (u32 row = record.tile[2]; row < rows; ++row) {
      const u64 at = u64{row} * task.hidden;
      task.y = y_is_bf16 ? room : arg<f32>(record, 4) + at;
      run_row(task, context.rows, row, x_is_bf16);
      if (y_is_bf16) {
        auto* const y = arg<host::Bf16>(record, 4) + at;
        for (u32 i = task.begin; i < task.end; ++i) y[i] = host::to_bf16(room[i]);
      }
      if (normed.to != nullptr) GPURT_AT_LEVEL(store_normed, normed, row, task.y);
    }
    return kFaultNone;
  }

 private:
  static void run_row(const host::ConvTask& task, const RowState* rows, u32 row, bool x_is_bf16) {
    const u64 at = u64{row} * task.hidden;
    for (u32 i = task.begin; i < task.end; ++i)
      task.y[i] = task.residual ? task.residual[at + i] : 0.0F;
    const u32 before = host::rows_before(rows, row, task.taps - 1);
    for (u32 tap = 0; tap <= before; ++tap) {
      if (x_is_bf16) {
        host::conv_tap<host::Bf16>(task, row, tap);
      } else {
        host::conv_tap<f32>(task, row, tap);
      }
    }
  }
};

}  // namespace gpurt
