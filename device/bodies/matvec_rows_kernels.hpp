// How matvec prepares its rows at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// Rounds four blocks of activations to 16 bits. `scale` is NaN or infinite where a block holds
/// such a number, so that what is computed from it is too. `sum` is scale * sum(codes): of the
/// rounded values, not the true ones, since the two errors of a block then cancel in part.
GPURT_SIMD_FN void quantise_blocks(const f32* x, i16* codes, Quad& scale, Quad& sum) {
  Vf largest[4];
  for (u32 b = 0; b < 4; ++b) {
    largest[b] = splat(0.0F);
    for (u32 i = 0; i < kBlock; i += kLanes) {
      largest[b] = magnitude(largest[b], load(x + b * kBlock + i));
    }
  }
  const Quad limit = magnitudes_of(largest);
  // Below 1e-30 the reciprocal would overflow; such a block counts as zero. NaN is not below.
  const Quad zero{};
  const auto tiny = limit <= splat_quad(1e-30F);
  scale = tiny ? zero : limit * splat_quad(1.0F / 32767.0F);
  const Quad inverse = tiny ? zero : splat_quad(32767.0F) / limit;
  for (u32 b = 0; b < 4; ++b) {
    const Vf factor = splat(inverse[b]);
    for (u32 i = b * kBlock; i < (b + 1) * kBlock; i += kLanes) {
      store_codes(codes + i, mul(load(x + i), factor));
    }
  }
  sum = scale * code_sums_of(codes);
}

GPURT_SIMD_FN void quantise_row(const f32* x, const PreparedRows& rows, u32 row, u32 blocks) {
  i16* const codes = rows.codes + row * rows.x_stride;
  const bool alone = row + 1 == rows.padded_rows && row % kQuad == 0;
  f32* scales = alone ? rows.single : rows.quads + row / kQuad * u64{8} * blocks + row % kQuad;
  const u32 step = alone ? 2 : 8;
  const u32 to_sum = alone ? 1 : 4;
  for (u32 b = 0; b < blocks; b += 4) {
    Quad scale;
    Quad sum;
    quantise_blocks(x + b * kBlock, codes + b * kBlock, scale, sum);
    for (u32 i = 0; i < 4 && b + i < blocks; ++i, scales += step) {
      scales[0] = scale[i];
      scales[to_sum] = sum[i];
    }
  }
}

/// One row of the step as floats, normalised: zeros up to the stride, or only zeros past the rows.
GPURT_SIMD_FN void read_row(const MatvecTask& task, u32 row, f32* x, u64 stride) {
  if (row >= task.rows) {
    std::memset(x, 0, stride * sizeof(f32));
    return;
  }
  const void* const from = task.x_row(row);
  if (task.x_dtype == kF32) {
    copy_row(static_cast<const f32*>(from), x, task.k, stride);
  } else if (task.x_dtype == kF16) {
    copy_row(static_cast<const F16*>(from), x, task.k, stride);
  } else {
    copy_row(static_cast<const Bf16*>(from), x, task.k, stride);
  }
  if (task.norm) normalise_row(x, task.norm, task.k, task.eps);
}

GPURT_SIMD_FN void prepare_rows(const MatvecTask& task, RowMemory& memory) {
  const PreparedRows& rows = memory.keep(task);
  for (u32 row = 0; row < rows.padded_rows; ++row) {
    // Block formats need a row as floats only until it is rounded: one that stays in L1.
    f32* const x = rows.codes ? rows.x : rows.x + row * rows.x_stride;
    read_row(task, row, x, rows.x_stride);
    if (rows.codes) quantise_row(x, rows, row, task.k / kBlock);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
