// expert_matvec: y = epilogue(W[e] norm(x)) for the rows that chose expert e, the expert of a slot.
// graphs/ops/expert_matvec.py has the contract, route.py the layout of `routes`.
//
//   slot of routes -> rows of x, gathered -> matvec's kernels -> z -> w_scale, swiglu -> rows of y
//
// Rows are gathered by matvec's own preparation, so a pair's bits are those that matvec would give
// its row alone: they do not depend on who shares the expert. A slot past the active ones is empty
// in this step, and its tasks return at once.
#pragma once
#include "../trace.hpp"
#include "context.hpp"
#include "matvec.hpp"
#include "routes.hpp"

namespace gpurt::host {

/// One tile of one slot. `matvec` has no row_index yet: expert_run gathers it from `users`.
struct ExpertTask {
  MatvecTask matvec;   // rows: of the slot; w: its expert's
  const u32* users;    // (row, pair) of each
  const f32* w_scale;  // [2] of the expert, of even and of odd rows of W; null: ones
  bool x_per_pair;     // rows of x belong to pairs, not to the step's rows
};

/// The task of a slot in use.
inline ExpertTask read_expert(const TaskRecord& record, const u32* slot) {
  ExpertTask task{};
  const u64 expert = slot[RoutesLayout::kExpert];
  MatvecTask& matvec = task.matvec;
  matvec.n = record.param[0];
  matvec.k = record.param[1];
  matvec.swiglu = record.param[2] == 1;
  matvec.w_dtype = record.param[3];
  task.x_per_pair = record.param[4] != 0;
  matvec.eps = param_f32(record, 6);
  matvec.x_dtype = kF32;
  matvec.y_dtype = kF32;
  matvec.w_row_bytes = row_bytes(matvec.w_dtype, matvec.k);
  matvec.x_row_bytes = row_bytes(kF32, matvec.k);
  matvec.x = arg<const void>(record, 0);
  matvec.w = arg<const u8>(record, 1) + expert * matvec.n * matvec.w_row_bytes;
  matvec.norm = arg<const f32>(record, 2);
  const f32* const w_scale = arg<const f32>(record, 3);
  task.w_scale = w_scale ? w_scale + 2 * expert : nullptr;
  matvec.y = arg<void>(record, 5);
  matvec.n_begin = record.tile[1];
  matvec.n_end = record.tile[2];
  matvec.rows = slot[RoutesLayout::kCount];
  task.users = slot + RoutesLayout::kUsers;
  return task;
}

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "expert_matvec_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt {

struct expert_matvec {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32* const routes = arg<const u32>(record, 4);
    const u32 slot = record.tile[0];
    if (slot >= routes[RoutesLayout::kActive]) return kFaultNone;
    const RoutesLayout layout{context.step->rows_capacity, 0, 0};
    const u32* const words = routes + layout.slot(slot);
    const host::ExpertTask task = host::read_expert(record, words);
    context.chosen = chosen_word(words[RoutesLayout::kExpert], words[RoutesLayout::kCount]);
    GPURT_AT_LEVEL(expert_run, task, context);
    return kFaultNone;
  }
};

}  // namespace gpurt
