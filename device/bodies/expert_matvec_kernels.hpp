// expert_matvec at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// z of even rows of W times scale[0], of odd rows times scale[1]. A chunk begins at an even row.
GPURT_SIMD_FN void scale_row(f32* z, f32 even, f32 odd) {
  alignas(64) f32 pattern[kLanes];
  for (u32 i = 0; i < kLanes; ++i) pattern[i] = i % 2 == 0 ? even : odd;
  const Vf scale = load(pattern);
  for (u32 i = 0; i < kChunk; i += kLanes) store(z + i, mul(load(z + i), scale));
}

/// Rows [n, n + count) of W are in z; writes their part of every pair's row of y.
GPURT_SIMD_FN void finish_expert_chunk(const ExpertTask& task, f32* z, u32 n, u32 count) {
  const MatvecTask& matvec = task.matvec;
  const u32 begin = matvec.swiglu ? n / 2 : n;
  const u32 width = matvec.swiglu ? count / 2 : count;
  for (u32 row = 0; row < matvec.rows; ++row) {
    f32* const sums = z + row * kChunk;
    if (task.w_scale) scale_row(sums, task.w_scale[0], task.w_scale[matvec.swiglu ? 1 : 0]);
    if (matvec.swiglu) swiglu_row(sums);
    const u64 pair = task.users[2 * row + 1];
    std::memcpy(static_cast<f32*>(matvec.y) + pair * matvec.y_columns() + begin, sums,
                width * sizeof(f32));
  }
}

GPURT_SIMD_FN void expert_run(const ExpertTask& task, const BodyContext& context) {
  using W = Workspace;
  thread_local RowMemory memory;
  MatvecTask matvec = task.matvec;
  const u64 z_count = u64{padded_rows(matvec.rows)} * kChunk;
  Workspace workspace(context, W::padded<u32>(matvec.rows) + W::padded<f32>(z_count) +
                                   W::padded<f32>(factor_count(matvec)));
  u32* const row_index = workspace.take<u32>(matvec.rows);
  f32* const z = workspace.take<f32>(z_count);
  f32* const factors = workspace.take<f32>(factor_count(matvec));
  for (u32 row = 0; row < matvec.rows; ++row) {
    row_index[row] = task.users[2 * row + (task.x_per_pair ? 1 : 0)];
  }
  matvec.row_index = row_index;
  if (!memory.holds(matvec)) prepare_rows(matvec, memory);
  for (u32 n = matvec.n_begin; n < matvec.n_end; n += kChunk) {
    const u32 width = matvec.n_end - n < kChunk ? matvec.n_end - n : kChunk;
    sweep_chunk(matvec, memory.rows(), n, width, z, factors);
    finish_expert_chunk(task, z, n, width);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
