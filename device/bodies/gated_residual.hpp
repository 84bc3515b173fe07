// gated_residual: y = alpha * stream + beta * R(branch * gain) and normed = R(y) * norm, for every
// row of a step. graphs/ops/gated_residual.py has the contract.
//
// A tile is a range of columns and makes the mean square of the whole row for itself: reading a row
// again from L2 costs less than one more task and its edges. With `normed` it has all columns.
#pragma once
#include "context.hpp"
#include "norm.hpp"
#include "simd.hpp"
#include "slots.hpp"
#include "workspace.hpp"

namespace gpurt::host {

/// A gated_residual task, decoded.
struct GatedTask {
  Slots branch;       // of one rank, or of a collective
  const f32* gain;    // [hidden]; null: ones
  const f32* stream;  // [rows, hidden]
  const f32* alpha;   // [hidden]
  const f32* beta;    // [hidden]
  f32* y;             // [rows, hidden]
  u32 hidden;
  f32 eps;
  u32 begin, end;  // columns
  NormedRows normed;
};

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "gated_residual_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt {

struct gated_residual {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    host::GatedTask task{};
    task.gain = arg<const f32>(record, 1);
    task.stream = arg<const f32>(record, 2);
    task.alpha = arg<const f32>(record, 3);
    task.beta = arg<const f32>(record, 4);
    task.y = arg<f32>(record, 5);
    task.hidden = record.param[0];
    task.eps = param_f32(record, 1);
    const u32 stride = record.param[3];
    const u64 slot = u64{stride} * context.step->rows_capacity;
    task.branch = {arg<const f32>(record, 0), slot, stride, record.param[2]};
    task.begin = record.tile[0];
    task.end = record.tile[1];
    task.normed = {arg<const f32>(record, 6), arg<void>(record, 7), task.hidden,
                   param_f32(record, 4), record.param[5] == kBf16};
    GPURT_AT_LEVEL(gated_residual_run, task, context);
    return kFaultNone;
  }
};

}  // namespace gpurt
