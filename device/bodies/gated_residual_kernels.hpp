// gated_residual at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// Columns [begin, end) of one row. scale: 1 / sqrt(mean square + eps) of the whole row.
GPURT_SIMD_FN void gate_columns(const GatedTask& task, u64 row, const f32* branch, f32 scale) {
  const f32* const stream = task.stream + row * task.hidden;
  f32* const y = task.y + row * task.hidden;
  const Vf by = splat(scale);
  for (u32 i = task.begin; i < task.end; i += kLanes) {
    const u32 n = task.end - i < kLanes ? task.end - i : kLanes;
    Vf v = load_upto(branch + i, n);
    if (task.gain) v = mul(v, load_upto(task.gain + i, n));
    const Vf kept = mul(load_upto(task.alpha + i, n), load_upto(stream + i, n));
    v = fma(load_upto(task.beta + i, n), mul(v, by), kept);
    if (n == kLanes) {
      store(y + i, v);
    } else {
      store_part(y + i, v, n);
    }
  }
}

/// A row of the branch: where it lies, or put together from the slots of all ranks in `room`.
GPURT_SIMD_FN const f32* branch_row(const GatedTask& task, u64 row, f32* room) {
  if (task.branch.ranks == 1) return task.branch.row(0, row);
  for (u32 i = 0; i < task.hidden; ++i) room[i] = slots_element(task.branch, row, i);
  return room;
}

GPURT_SIMD_FN void gated_residual_run(const GatedTask& task, const BodyContext& context) {
  Workspace workspace(context, Workspace::padded<f32>(task.hidden));
  f32* const room = workspace.take<f32>(task.hidden);
  for (u32 row = 0; row < context.step->rows; ++row) {
    const f32* const branch = branch_row(task, row, room);
    gate_columns(task, row, branch, norm_scale(branch, task.gain, task.hidden, task.eps));
    if (task.normed.to != nullptr) store_normed(task.normed, row, task.y + u64{row} * task.hidden);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
