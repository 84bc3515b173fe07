// matvec: y = epilogue(W norm(x)) + residual, for every row of a step. graphs/ops/matvec.py has the
// contract; this file reads the record, matvec_kernels.hpp computes.
//
//   x rows -> prepare (norm; for block formats: 16-bit codes)      once per task
//   W rows, 64 at a time -> z (float sums)                         every W byte is read once
//   z -> swiglu, residual, conversion -> y
//
// Bits: the order of a sum is a function of K and the SIMD level, never of rows or tiles. How many
// rows share one pass over W changes which sums are computed side by side, not how each is.
// Block formats multiply their codes with activations rounded to 16 bits, one scale per 32 of them:
// integer sums are exact, and the rounding is 2^-16 of the block's largest activation. Measured
// against float64 that is about 1e-5 of a row's norm, below what the weights' own rounding costs.
#pragma once
#include "context.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

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
  u32 rows;
  u32 n, k;
  u32 n_begin, n_end;
  u32 w_dtype, x_dtype, y_dtype;
  f32 eps;
  bool swiglu;

  u32 y_columns() const { return swiglu ? n / 2 : n; }
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
    default:
      return u64{elements} * 2;  // f16, bf16
  }
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
  task.n_begin = record.tile[0];
  task.n_end = record.tile[1];
  task.w_row_bytes = row_bytes(task.w_dtype, task.k);
  return task;
}

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "matvec_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt {

struct matvec {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const host::MatvecTask task = host::read_matvec(record, context);
    if (task.rows == 0) return kFaultNone;  // a prefill step that wants no logits
    GPURT_AT_LEVEL(matvec_run, task, context);
    return kFaultNone;
  }
};

}  // namespace gpurt
