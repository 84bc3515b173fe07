// gated_residual at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// Columns [begin, end) of one row. scale: 1 / sqrt(mean square + eps) of the whole row.
GPURT_SIMD_FN void gate_columns(const GatedTask& task, u64 row, f32 scale) {
  const f32* const branch = task.branch + row * task.hidden;
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

GPURT_SIMD_FN void gated_residual_run(const GatedTask& task, u32 rows) {
  for (u32 row = 0; row < rows; ++row) {
    const f32* const branch = task.branch + u64{row} * task.hidden;
    gate_columns(task, row, norm_scale(branch, task.gain, task.hidden, task.eps));
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
