// A matvec task, decoded, and the sizes of the formats it reads.
#pragma once
#include "context.hpp"
#include "nvfp4.hpp"

namespace gpurt::host {

/// A matvec task, decoded.
struct MatvecTask {
  const void* x;
  const u8* w;
  const f32* norm;      // null: none
  const f32* residual;  // null: none
  void* y;
  const u32* row_index;  // null: rows 0..rows-1; else the rows of x to use, in order
  u64 w_row_bytes;
  u64 x_row_bytes;
  u32 rows;
  u32 n, k;
  u32 n_begin, n_end;
  u32 w_dtype, x_dtype, y_dtype;
  f32 eps;
  f32 scale;    // of the sums
  f32 softcap;  // above 0: softcap * tanh(sum / softcap)
  bool swiglu;

  u32 y_columns() const { return swiglu ? n / 2 : n; }

  /// Row `row` of those to compute.
  const void* x_row(u32 row) const {
    return static_cast<const u8*>(x) + (row_index ? row_index[row] : row) * x_row_bytes;
  }
};

constexpr u32 kBlock = 32;  // elements of one block of q4_1 and q8_0
constexpr u32 kQ41Bytes = 20;
constexpr u32 kQ80Bytes = 34;

constexpr u64 row_bytes(u32 dtype, u32 elements) {
  switch (dtype) {
    case kF32:
      return u64{elements} * 4;
    case kQ41:
      return u64{elements} / kBlock * kQ41Bytes;
    case kQ80:
      return u64{elements} / kBlock * kQ80Bytes;
    case kNvfp4:
      return u64{elements} / kNvfp4Block * kNvfp4Bytes;
    default:
      return u64{elements} * 2;  // f16, bf16
  }
}

/// Formats whose codes are multiplied with rounded activations. Those of nvfp4 become floats.
constexpr bool is_blocked(u32 dtype) {
  return dtype == kQ41 || dtype == kQ80;
}

inline MatvecTask read_matvec(const TaskRecord& record, const BodyContext& context) {
  const bool sampled = record.param[4] != 0;
  MatvecTask task{};
  task.x = arg<const void>(record, 0);
  task.w = arg<const u8>(record, 1);
  task.norm = arg<const f32>(record, 2);
  task.residual = arg<const f32>(record, 3);
  task.y = arg<void>(record, 4);
  task.row_index = sampled ? context.sample_rows : nullptr;
  task.rows = sampled ? context.step->sample_count : context.step->rows;
  task.n = record.param[0];
  task.k = record.param[1];
  task.swiglu = record.param[2] == 1;
  task.eps = param_f32(record, 3);
  task.w_dtype = record.param[5];
  task.x_dtype = record.param[6];
  task.y_dtype = record.param[7];
  task.scale = param_f32(record, 8);
  task.softcap = param_f32(record, 9);
  task.n_begin = record.tile[0];
  task.n_end = record.tile[1];
  task.w_row_bytes = row_bytes(task.w_dtype, task.k);
  task.x_row_bytes = row_bytes(task.x_dtype, task.k);
  return task;
}

}  // namespace gpurt::host
