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
#include "matvec_rows.hpp"
#include "matvec_task.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

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
