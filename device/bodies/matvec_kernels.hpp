// The arithmetic of matvec at one SIMD level. Included by simd_each.hpp, so without a guard.
//
// A kernel computes NR rows of W times R rows of x (four, or one alone) with one accumulator a
// pair: W is unpacked once for R rows, x is loaded once for NR. Pairs never mix: each sum sees the
// same additions whatever NR and R are.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kChunk = 64;   // rows of W between epilogues; even, since swiglu pairs rows
constexpr u32 kGroup = 4;    // rows of W whose block scales are converted together
constexpr u32 kQuad = 4;     // rows of x that share one pass over W
constexpr u32 kCodes = 128;  // activations rounded at a time: four blocks
constexpr u32 kLine = 64;    // bytes of a cache line
// Rows of W side by side are as many short streams, which the hardware prefetcher does not follow:
// cold weights came at 5 to 7 GB/s. Asked for 4 KB ahead (2 KB and 8 KB: no better) they come at 12
// to 17 GB/s a core. Past the tile lies what this or another worker reads next.
constexpr u32 kPrefetchBytes = 4096;

/// The step's rows as kernels read them. Rows go in quads; a last quad of one row alone is kept
/// apart, because one row is what decoding has. Others are filled up with rows of zeros.
struct PreparedRows {
  f32* x;       // [padded rows, x_stride], zero past k
  i16* codes;   // [padded rows, x_stride], block formats only
  f32* quads;   // [quads, blocks, 2, 4]: four rows' scales of a block, then scale * sum(codes)
  f32* single;  // [blocks, 2]: the same of a row alone
  u64 x_stride;
  u32 rows;         // of the step
  u32 padded_rows;  // with the rows of zeros
};

constexpr u32 padded_rows(u32 rows) {
  return rows % kQuad < 2 ? rows : rows / kQuad * kQuad + kQuad;
}

// ---- rows ------------------------------------------------------------------------------------
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

GPURT_SIMD_FN void quantise_row(const PreparedRows& rows, u32 row, u32 blocks) {
  const u64 at = row * rows.x_stride;
  const bool alone = row + 1 == rows.padded_rows && row % kQuad == 0;
  f32* scales = alone ? rows.single : rows.quads + row / kQuad * u64{8} * blocks + row % kQuad;
  const u32 step = alone ? 2 : 8;
  const u32 to_sum = alone ? 1 : 4;
  for (u32 b = 0; b < blocks; b += 4) {
    Quad scale;
    Quad sum;
    quantise_blocks(rows.x + at + b * kBlock, rows.codes + at + b * kBlock, scale, sum);
    for (u32 i = 0; i < 4 && b + i < blocks; ++i, scales += step) {
      scales[0] = scale[i];
      scales[to_sum] = sum[i];
    }
  }
}

GPURT_SIMD_FN void prepare_row(const MatvecTask& task, const PreparedRows& rows, u32 row) {
  f32* const x = rows.x + row * rows.x_stride;
  if (row < rows.rows) {
    const u64 from = (task.row_index ? task.row_index[row] : row) * u64{task.k};
    if (task.x_dtype == kF32) {
      copy_row(static_cast<const f32*>(task.x) + from, x, task.k, rows.x_stride);
    } else if (task.x_dtype == kF16) {
      copy_row(static_cast<const F16*>(task.x) + from, x, task.k, rows.x_stride);
    } else {
      copy_row(static_cast<const Bf16*>(task.x) + from, x, task.k, rows.x_stride);
    }
    if (task.norm) normalise_row(x, task.norm, task.k, task.eps);
  } else {
    std::memset(x, 0, rows.x_stride * sizeof(f32));
  }
  if (rows.codes) quantise_row(rows, row, task.k / kBlock);
}

// ---- kernels ---------------------------------------------------------------------------------
/// Asks for `size_bytes` of W that will be read kPrefetchBytes after `w`.
GPURT_SIMD_FN void prefetch(const u8* w, u64 size_bytes) {
  for (u64 i = 0; i < size_bytes; i += kLine) __builtin_prefetch(w + kPrefetchBytes + i);
}

/// Four rows' results of one row of W.
GPURT_SIMD_FN void store_rows(f32* z, Quad sums) {
  for (u32 r = 0; r < kQuad; ++r) z[r * kChunk] = sums[r];
}

/// W of plain floats.
template <class W>
struct FloatKernel {
  const W* w;
  PreparedRows x;
  u32 k;
  f32* z;  // [padded rows, kChunk]

  GPURT_SIMD_FN void begin(u32 n, u32 count) const {
    if (x.padded_rows < kQuad) return;
    prefetch(reinterpret_cast<const u8*>(w + n * u64{k}), count * u64{k} * sizeof(W));
  }

  /// NR rows of W with R rows of x: four, or one alone.
  template <int NR, int R>
  GPURT_SIMD_FN void tile(u32 n, u32 row) const {
    const W* const w0 = w + n * u64{k};
    const f32* const x0 = x.x + row * x.x_stride;
    Vf sum[NR][R];
    for (int j = 0; j < NR; ++j) {
      for (int r = 0; r < R; ++r) sum[j][r] = splat(0.0F);
    }
    const u32 whole = k / kLanes * kLanes;
    for (u32 i = 0; i < whole; i += kLanes) {
      Vf weights[NR];
      if constexpr (R == 1) {
        prefetch(reinterpret_cast<const u8*>(w0 + u64{i} * NR), NR * kLanes * sizeof(W));
      }
      for (int j = 0; j < NR; ++j) weights[j] = load(w0 + static_cast<u64>(j) * k + i);
      for (int r = 0; r < R; ++r) {
        const Vf v = load(x0 + static_cast<u64>(r) * x.x_stride + i);
        for (int j = 0; j < NR; ++j) sum[j][r] = fma(weights[j], v, sum[j][r]);
      }
    }
    if (whole < k) {
      for (int r = 0; r < R; ++r) {
        const Vf v = load(x0 + static_cast<u64>(r) * x.x_stride + whole);
        for (int j = 0; j < NR; ++j) {
          const Vf tail = load_part(w0 + static_cast<u64>(j) * k + whole, k - whole);
          sum[j][r] = fma(tail, v, sum[j][r]);
        }
      }
    }
    for (int j = 0; j < NR; ++j) {
      const u32 at = row * kChunk + n + static_cast<u32>(j);
      if constexpr (R == 1) {
        z[at] = sum_of(sum[j][0]);
      } else {
        store_rows(z + at, sums_of(sum[j]));
      }
    }
  }
};

/// How a block format lies in memory: f16 scale, for q4_1 an f16 minimum, then the codes.
struct Q41 {
  static constexpr u32 kBytes = kQ41Bytes;
  static constexpr bool kHasMinimum = true;
  GPURT_SIMD_FN static Qblock unpack(const u8* block) { return unpack_q4_1(block + 4); }
};
struct Q80 {
  static constexpr u32 kBytes = kQ80Bytes;
  static constexpr bool kHasMinimum = false;
  GPURT_SIMD_FN static Qblock unpack(const u8* block) { return unpack_q8_0(block + 2); }
};

/// W in blocks of 32 codes: the sum over blocks of (d * dx) * sum(codes * xcodes), and the sum of
/// m * xsum. Both run block by block, the second in its own chain, for one row and for four.
template <class Format>
struct BlockKernel {
  const u8* w;
  PreparedRows x;
  u32 blocks;
  f32* factors;  // [kGroup, blocks, 2]: d and m as floats, for quads
  f32* z;        // [padded rows, kChunk]

  /// Converts the scales of rows [n, n + count) of W once for all quads of rows of x.
  GPURT_SIMD_FN void begin(u32 n, u32 count) const {
    if (x.padded_rows < kQuad) return;
    const u8* block = w + n * u64{blocks} * Format::kBytes;
    prefetch(block, count * u64{blocks} * Format::kBytes);
    for (u32 i = 0; i < count * blocks; ++i, block += Format::kBytes) {
      store_pair(factors + 2 * i, load_halves(block));
    }
  }

  template <int NR, int R>
  GPURT_SIMD_FN void tile(u32 n, u32 row) const {
    if constexpr (R == 1) {
      tile_single<NR>(n, row);
    } else {
      tile_quad<NR>(n, row);
    }
  }

 private:
  template <int NR>
  GPURT_SIMD_FN void tile_single(u32 n, u32 row) const {
    const u64 w_stride = u64{blocks} * Format::kBytes;
    const u8* block = w + n * w_stride;
    const i16* codes = x.codes + row * x.x_stride;
    Qacc acc[NR];
    Pair minimum[NR];
    for (int j = 0; j < NR; ++j) {
      acc[j] = zero_acc();
      minimum[j] = Pair{};
    }
    const u8* ahead = block;
    for (u32 b = 0; b < blocks; ++b) {
      const Pair scale = load_pair(x.single + 2 * b);
      prefetch(ahead, NR * Format::kBytes);
      ahead += NR * Format::kBytes;
      for (int j = 0; j < NR; ++j) {
        const u8* const at = block + static_cast<u64>(j) * w_stride;
        const Pair product = mul_pair(load_halves(at), scale);
        if constexpr (Format::kHasMinimum) minimum[j] = add_pair(minimum[j], product);
        acc[j] = add_scaled(acc[j], GPURT_SIMD_LEVEL::dot_block(Format::unpack(at), codes),
                            first_of(product));
      }
      block += Format::kBytes;
      codes += kBlock;
    }
    for (int j = 0; j < NR; ++j) {
      const Qacc four[4] = {acc[j], acc[j], acc[j], acc[j]};
      z[row * kChunk + n + static_cast<u32>(j)] =
          acc_sums_of(four)[0] + (Format::kHasMinimum ? second_of(minimum[j]) : 0.0F);
    }
  }

  template <int NR>
  GPURT_SIMD_FN void tile_quad(u32 n, u32 row) const {
    const u64 w_stride = u64{blocks} * Format::kBytes;
    const u8* block = w + n * w_stride;
    const i16* codes = x.codes + row * x.x_stride;
    const f32* factor = factors + n % kGroup * u64{2} * blocks;
    const f32* scale = x.quads + row / kQuad * u64{8} * blocks;
    Qacc acc[NR][kQuad];
    Quad minimum[NR];
    for (int j = 0; j < NR; ++j) {
      for (u32 r = 0; r < kQuad; ++r) acc[j][r] = zero_acc();
      minimum[j] = Quad{};
    }
    for (u32 b = 0; b < blocks; ++b) {
      Qblock q[NR];
      alignas(16) f32 product[NR][kQuad];
      for (int j = 0; j < NR; ++j) {
        const f32* const two = factor + static_cast<u64>(j) * 2 * blocks;
        q[j] = Format::unpack(block + static_cast<u64>(j) * w_stride);
        store_quad(product[j], splat_quad(two[0]) * load_quad(scale));
        if constexpr (Format::kHasMinimum) {
          minimum[j] += splat_quad(two[1]) * load_quad(scale + kQuad);
        }
      }
      for (u32 r = 0; r < kQuad; ++r) {
        const i16* const v = codes + r * x.x_stride;
        for (int j = 0; j < NR; ++j) {
          acc[j][r] = add_scaled(acc[j][r], GPURT_SIMD_LEVEL::dot_block(q[j], v),
                                 broadcast(&product[j][r]));
        }
      }
      block += Format::kBytes;
      codes += kBlock;
      factor += 2;
      scale += 2 * kQuad;
    }
    for (int j = 0; j < NR; ++j) {
      const Quad zero{};
      store_rows(z + row * kChunk + n + static_cast<u32>(j),
                 acc_sums_of(acc[j]) + (Format::kHasMinimum ? minimum[j] : zero));
    }
  }
};

/// All pairs of `count` rows of W and all rows of x.
template <class Kernel>
GPURT_SIMD_FN void sweep(const Kernel& kernel, u32 count) {
  const u32 rows = kernel.x.padded_rows;
  for (u32 n = 0; n < count; n += kGroup) {
    const u32 left = count - n < kGroup ? count - n : kGroup;
    kernel.begin(n, left);
    u32 row = 0;
    for (; row + kQuad <= rows; row += kQuad) {
      u32 j = 0;
      for (; j + 2 <= left; j += 2) kernel.template tile<2, 4>(n + j, row);
      if (j < left) kernel.template tile<1, 4>(n + j, row);
    }
    if (row == rows) continue;
    if (left == kGroup) {
      kernel.template tile<4, 1>(n, row);
    } else {
      for (u32 j = 0; j < left; ++j) kernel.template tile<1, 1>(n + j, row);
    }
  }
}

// ---- epilogue --------------------------------------------------------------------------------
/// z[i] = silu(z[2i]) * z[2i+1], in place, for `count` results.
GPURT_SIMD_FN void swiglu_row(f32* z, u32 count) {
  f32 gate[kChunk / 2];
  f32 up[kChunk / 2];
  for (u32 i = 0; i < kChunk / 2; ++i) {
    gate[i] = i < count ? z[2 * i] : 0.0F;
    up[i] = i < count ? z[2 * i + 1] : 0.0F;
  }
  for (u32 i = 0; i < kChunk / 2; i += kLanes) {
    const Vf g = load(gate + i);
    const Vf below = add(splat(1.0F), exp_of(sub(splat(0.0F), g)));
    store(z + i, mul(div(g, below), load(up + i)));
  }
}

template <class Y>
GPURT_SIMD_FN void write_row(const f32* z, const f32* residual, Y* y, u32 count) {
  for (u32 i = 0; i < count; ++i) {
    from_f32(residual ? z[i] + residual[i] : z[i], y + i);
  }
}

/// Rows [n, n + count) of W are in z; writes their part of y.
GPURT_SIMD_FN void finish_chunk(const MatvecTask& task, f32* z, u32 n, u32 count) {
  const u32 begin = task.swiglu ? n / 2 : n;
  const u32 width = task.swiglu ? count / 2 : count;
  for (u32 row = 0; row < task.rows; ++row) {
    f32* const sums = z + row * kChunk;
    const u64 at = row * u64{task.y_columns()} + begin;
    const f32* const residual = task.residual ? task.residual + at : nullptr;
    if (task.swiglu) swiglu_row(sums, width);
    if (task.y_dtype == kF32) {
      write_row(sums, residual, static_cast<f32*>(task.y) + at, width);
    } else if (task.y_dtype == kF16) {
      write_row(sums, residual, static_cast<F16*>(task.y) + at, width);
    } else {
      write_row(sums, residual, static_cast<Bf16*>(task.y) + at, width);
    }
  }
}

/// Cuts the rows' arrays out of the workspace and fills them.
GPURT_SIMD_FN PreparedRows prepare_rows(const MatvecTask& task, PreparedRows rows,
                                        Workspace& workspace, bool blocked) {
  const u64 elements = rows.padded_rows * rows.x_stride;
  rows.x = workspace.take<f32>(elements);
  if (blocked) {
    rows.codes = workspace.take<i16>(elements);
    rows.quads = workspace.take<f32>(u64{2} * (task.k / kBlock) * rows.padded_rows);
    rows.single = workspace.take<f32>(u64{2} * (task.k / kBlock));
  }
  for (u32 row = 0; row < rows.padded_rows; ++row) prepare_row(task, rows, row);
  return rows;
}

GPURT_SIMD_FN void matvec_run(const MatvecTask& task, const BodyContext& context) {
  using W = Workspace;
  const bool blocked = task.w_dtype == kQ41 || task.w_dtype == kQ80;
  const u32 blocks = task.k / kBlock;
  PreparedRows rows{};
  rows.rows = task.rows;
  rows.padded_rows = padded_rows(task.rows);
  rows.x_stride = blocked ? (task.k + kCodes - 1) / kCodes * kCodes : padded_lanes(task.k);
  const u64 count = rows.padded_rows;
  u64 size_bytes = W::padded<f32>(count * rows.x_stride) + W::padded<f32>(count * kChunk);
  if (blocked) {
    size_bytes += W::padded<i16>(count * rows.x_stride) + W::padded<f32>(2 * count * blocks) +
                  W::padded<f32>(2 * blocks) + W::padded<f32>(2 * kGroup * blocks);
  }
  Workspace workspace(context, size_bytes);
  rows = prepare_rows(task, rows, workspace, blocked);
  f32* const z = workspace.take<f32>(count * kChunk);
  f32* const factors = blocked ? workspace.take<f32>(u64{2} * kGroup * blocks) : nullptr;

  for (u32 n = task.n_begin; n < task.n_end; n += kChunk) {
    const u32 width = task.n_end - n < kChunk ? task.n_end - n : kChunk;
    const u8* const w = task.w + n * task.w_row_bytes;
    switch (task.w_dtype) {
      case kF32:
        sweep(FloatKernel<f32>{reinterpret_cast<const f32*>(w), rows, task.k, z}, width);
        break;
      case kF16:
        sweep(FloatKernel<F16>{reinterpret_cast<const F16*>(w), rows, task.k, z}, width);
        break;
      case kBf16:
        sweep(FloatKernel<Bf16>{reinterpret_cast<const Bf16*>(w), rows, task.k, z}, width);
        break;
      case kQ41:
        sweep(BlockKernel<Q41>{w, rows, blocks, factors, z}, width);
        break;
      default:
        sweep(BlockKernel<Q80>{w, rows, blocks, factors, z}, width);
    }
    finish_chunk(task, z, n, width);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
