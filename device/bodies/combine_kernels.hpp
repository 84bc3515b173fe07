// combine at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// Columns [begin, end) of one row: pair after pair in ascending order, the residual last.
/// factors: each pair's weight, times the scale of its norm.
GPURT_SIMD_FN void combine_columns(const CombineTask& task, u64 row, const f32* factors) {
  const f32* const d = task.d + row * task.top_k * task.width;
  const u64 at = row * task.width;
  for (u32 i = task.begin; i < task.end; i += kLanes) {
    const u32 n = task.end - i < kLanes ? task.end - i : kLanes;
    const Vf gain = task.gain ? load_upto(task.gain + i, n) : splat(1.0F);
    Vf total = splat(0.0F);
    bool is_first = true;
    for (u32 t = 0; t < task.top_k; ++t) {
      if (!task.is_here(row * task.top_k + t)) continue;
      Vf v = load_upto(d + u64{t} * task.width + i, n);
      if (task.gain) v = mul(v, gain);
      total = is_first ? mul(v, splat(factors[t])) : fma(v, splat(factors[t]), total);
      is_first = false;
    }
    if (task.residual) total = add(total, load_upto(task.residual + at + i, n));
    if (n == kLanes) {
      store(task.y + at + i, total);
    } else {
      store_part(task.y + at + i, total, n);
    }
  }
}

GPURT_SIMD_FN void combine_run(const CombineTask& task, const BodyContext& context) {
  Workspace workspace(context, Workspace::padded<f32>(task.top_k));
  f32* const factors = workspace.take<f32>(task.top_k);
  for (u32 row = 0; row < context.step->rows; ++row) {
    for (u32 t = 0; t < task.top_k; ++t) {
      const u64 pair = u64{row} * task.top_k + t;
      if (!task.is_here(pair)) continue;
      factors[t] = std::bit_cast<f32>(task.pairs[2 * pair + RoutesLayout::kWeight]);
      if (!task.gain) continue;
      factors[t] *= norm_scale(task.d + pair * task.width, task.gain, task.width, task.eps);
    }
    combine_columns(task, row, factors);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
