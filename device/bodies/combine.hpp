// combine: y = sum over a row's experts of weight * R(d * gain), plus a residual.
// graphs/ops/combine.py has the contract, route.py the layout of `routes`.
//
// The norm comes before the sum, so it cannot be folded into the next matrix. Each tile of columns
// makes the scales of all pairs of a row for itself; without a gain it reads its own columns only.
#pragma once
#include "context.hpp"
#include "norm.hpp"
#include "routes.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

/// A combine task, decoded.
struct CombineTask {
  const f32* d;         // [rows * top_k, width]
  const u32* pairs;     // (slot, weight) of pair 0, then of all others
  const f32* gain;      // [width]; null: no norm
  const f32* residual;  // [rows, width]; null: none
  f32* y;               // [rows, width]
  u32 width, top_k;
  f32 eps;
  u32 begin, end;  // columns

  /// Whether this rank has the pair's expert, and with it the pair's row of d.
  bool is_here(u64 pair) const {
    return pairs[2 * pair + RoutesLayout::kSlot] != RoutesLayout::kNoSlot;
  }
};

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "combine_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt {

struct combine {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    host::CombineTask task{};
    const u32* const routes = arg<const u32>(record, 1);
    task.d = arg<const f32>(record, 0);
    task.gain = arg<const f32>(record, 2);
    task.residual = arg<const f32>(record, 3);
    task.y = arg<f32>(record, 4);
    task.width = record.param[0];
    task.top_k = record.param[1];
    task.eps = param_f32(record, 2);
    const RoutesLayout layout{context.step->rows_capacity, record.param[3], task.top_k};
    task.pairs = routes + layout.pair(0);
    task.begin = record.tile[0];
    task.end = record.tile[1];
    GPURT_AT_LEVEL(combine_run, task, context);
    return kFaultNone;
  }
};

}  // namespace gpurt
