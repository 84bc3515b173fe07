// The arithmetic of matvec at one SIMD level. Included by simd_each.hpp, so without a guard.
//
// A kernel computes NR rows of W times R rows of x with one accumulator a pair, so that W is
// unpacked once for R rows and x is loaded once for NR. Pairs never mix: each sum sees the same
// additions whatever NR and R are.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kChunk = 64;  // rows of W between epilogues; even, since swiglu pairs rows
constexpr u32 kGroup = 4;   // rows of W whose block scales are converted together

/// The step's rows as kernels read them. Columns past k are zero up to the stride.
struct PreparedRows {
  f32* x;       // [rows, x_stride]
  i16* codes;   // [rows, k], block formats only
  f32* scales;  // [rows, scale_stride]: per block the scale, and for q4_1 then scale * sum(codes)
  u64 x_stride;
  u64 scale_stride;
};

// ---- rows ------------------------------------------------------------------------------------
/// Rounds 32 activations to 16 bits. Returns their scale: NaN if any is not finite, so that what is
/// computed from them is NaN too.
GPURT_SIMD_FN f32 quantise_block(const f32* x, i16* codes) {
  Vf largest = splat(0.0F);
  Vf poison = splat(0.0F);  // NaN once x is infinite or NaN, else 0
  for (u32 i = 0; i < kBlock; i += kLanes) {
    const Vf v = load(x + i);
    largest = max(largest, max(v, sub(splat(0.0F), v)));
    poison = fma(v, splat(0.0F), poison);
  }
  const f32 limit = max_of(largest);
  // Below 1e-30 the reciprocal would overflow; such a block counts as zero.
  const Vf inverse = splat(limit > 1e-30F ? 32767.0F / limit : 0.0F);
  for (u32 i = 0; i < kBlock; i += kLanes) store_codes(codes + i, mul(load(x + i), inverse));
  return (limit > 1e-30F ? limit / 32767.0F : 0.0F) + sum_of(poison);
}

GPURT_SIMD_FN void quantise_row(const f32* x, u32 k, bool with_sums, i16* codes, f32* scales) {
  for (u32 b = 0; b < k / kBlock; ++b) {
    const f32 scale = quantise_block(x + b * kBlock, codes + b * kBlock);
    if (!with_sums) {
      scales[b] = scale;
      continue;
    }
    i32 sum = 0;
    for (u32 i = 0; i < kBlock; ++i) sum += codes[b * kBlock + i];
    scales[2 * b] = scale;
    // The rounded values' sum, not the true one: the two errors of a block then cancel in part.
    scales[2 * b + 1] = scale * static_cast<f32>(sum);
  }
}

GPURT_SIMD_FN void prepare_row(const MatvecTask& task, const PreparedRows& rows, u32 row) {
  const u64 source = (task.row_index ? task.row_index[row] : row) * u64{task.k};
  f32* const x = rows.x + row * rows.x_stride;
  if (task.x_dtype == kF32) {
    copy_row(static_cast<const f32*>(task.x) + source, x, task.k, rows.x_stride);
  } else if (task.x_dtype == kF16) {
    copy_row(static_cast<const F16*>(task.x) + source, x, task.k, rows.x_stride);
  } else {
    copy_row(static_cast<const Bf16*>(task.x) + source, x, task.k, rows.x_stride);
  }
  if (task.norm) normalise_row(x, task.norm, task.k, task.eps);
  if (!rows.codes) return;
  f32* const scales = rows.scales + row * rows.scale_stride;
  for (u64 i = 0; i < rows.scale_stride; i += kLanes) store(scales + i, splat(0.0F));
  quantise_row(x, task.k, task.w_dtype == kQ41, rows.codes + row * u64{task.k}, scales);
}

// ---- kernels ---------------------------------------------------------------------------------
/// W of plain floats.
template <class W>
struct FloatKernel {
  const W* w;
  PreparedRows x;
  u32 k;
  f32* z;  // [rows, kChunk]

  GPURT_SIMD_FN void begin(u32, u32) const {}

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
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < NR; ++j) {
        z[(row + static_cast<u32>(r)) * kChunk + n + static_cast<u32>(j)] = sum_of(sum[j][r]);
      }
    }
  }
};

/// How a block format lies in memory: `kHalves` f16 (scale, then minimum), then the codes.
struct Q41 {
  static constexpr u32 kBytes = kQ41Bytes;
  static constexpr u32 kHalves = 2;
  GPURT_SIMD_FN static Qblock unpack(const u8* block) { return unpack_q4_1(block + 4); }
};
struct Q80 {
  static constexpr u32 kBytes = kQ80Bytes;
  static constexpr u32 kHalves = 1;
  GPURT_SIMD_FN static Qblock unpack(const u8* block) { return unpack_q8_0(block + 2); }
};

/// W in blocks of 32 codes: sum over blocks of (d * dx) * sum(codes * xcodes) + m * xsum.
template <class Format>
struct BlockKernel {
  const u8* w;
  PreparedRows x;
  u32 blocks;
  F16* halves;    // [kGroup, x.scale_stride]
  f32* factors;   // the same as floats
  f32* products;  // [8, x.scale_stride]: factors times a row's scales
  f32* z;         // [rows, kChunk]

  /// Converts the scales of rows [n, n + count) of W, for all rows of x.
  GPURT_SIMD_FN void begin(u32 n, u32 count) const {
    const u64 stride = x.scale_stride;
    for (u32 j = 0; j < count; ++j) {
      const u8* block = w + (n + j) * u64{blocks} * Format::kBytes;
      F16* to = halves + j * stride;
      for (u32 b = 0; b < blocks; ++b) {
        std::memcpy(to, block, Format::kHalves * sizeof(F16));
        to += Format::kHalves;
        block += Format::kBytes;
      }
    }
    for (u64 i = 0; i < count * stride; i += kLanes) store(factors + i, load(halves + i));
  }

  template <int NR, int R>
  GPURT_SIMD_FN void tile(u32 n, u32 row) const {
    const u64 stride = x.scale_stride;
    const u64 w_stride = u64{blocks} * Format::kBytes;
    const u64 k = u64{blocks} * kBlock;
    const u8* block = w + n * w_stride;
    const i16* codes = x.codes + row * k;
    const f32* scale = products;
    Vf minimum[NR][R];
    scale_blocks<NR, R>(n, row, minimum);
    Qacc acc[NR][R];
    for (int j = 0; j < NR; ++j) {
      for (int r = 0; r < R; ++r) acc[j][r] = zero_acc();
    }
    for (u32 b = 0; b < blocks; ++b) {
      Qblock q[NR];
      for (int j = 0; j < NR; ++j) q[j] = Format::unpack(block + static_cast<u64>(j) * w_stride);
      for (int r = 0; r < R; ++r) {
        const i16* const v = codes + static_cast<u64>(r) * k;
        for (int j = 0; j < NR; ++j) {
          const f32* const s = scale + static_cast<u64>(j * R + r) * stride;
          acc[j][r] = add_scaled(acc[j][r], dot_block(q[j], v), s);
        }
      }
      block += Format::kBytes;
      codes += kBlock;
      scale += Format::kHalves;
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < NR; ++j) {
        f32 sum = sum_of_acc(acc[j][r]);
        if constexpr (Format::kHalves == 2) sum += sum_of_odd(minimum[j][r]);
        z[(row + static_cast<u32>(r)) * kChunk + n + static_cast<u32>(j)] = sum;
      }
    }
  }

 private:
  /// products = factors * scales. The odd lanes of `minimum` sum m * xsum.
  template <int NR, int R>
  GPURT_SIMD_FN void scale_blocks(u32 n, u32 row, Vf (&minimum)[NR][R]) const {
    const u64 stride = x.scale_stride;
    for (int j = 0; j < NR; ++j) {
      const f32* const factor = factors + (n % kGroup + static_cast<u32>(j)) * stride;
      for (int r = 0; r < R; ++r) {
        const f32* const scale = x.scales + (row + static_cast<u32>(r)) * stride;
        f32* const product = products + static_cast<u64>(j * R + r) * stride;
        Vf sum = splat(0.0F);
        for (u64 i = 0; i < stride; i += kLanes) {
          const Vf v = mul(load(factor + i), load(scale + i));
          store(product + i, v);
          sum = add(sum, v);
        }
        minimum[j][r] = sum;
      }
    }
  }
};

/// All pairs of `count` rows of W and `rows` rows of x.
template <class Kernel>
GPURT_SIMD_FN void sweep(const Kernel& kernel, u32 count, u32 rows) {
  for (u32 n = 0; n < count; n += kGroup) {
    const u32 left = count - n < kGroup ? count - n : kGroup;
    kernel.begin(n, left);
    u32 row = 0;
    for (; row + 4 <= rows; row += 4) {
      u32 j = 0;
      for (; j + 2 <= left; j += 2) kernel.template tile<2, 4>(n + j, row);
      if (j < left) kernel.template tile<1, 4>(n + j, row);
    }
    for (; row + 2 <= rows; row += 2) {
      u32 j = 0;
      for (; j + 2 <= left; j += 2) kernel.template tile<2, 2>(n + j, row);
      if (j < left) kernel.template tile<1, 2>(n + j, row);
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

GPURT_SIMD_FN void matvec_run(const MatvecTask& task, const BodyContext& context) {
  using W = Workspace;
  const bool blocks = task.w_dtype == kQ41 || task.w_dtype == kQ80;
  const u32 halves = task.w_dtype == kQ41 ? 2 : 1;
  PreparedRows rows{};
  rows.x_stride = padded_lanes(task.k);
  rows.scale_stride = padded_lanes(u64{task.k / kBlock} * halves);
  const u64 count = task.rows;
  const u64 stride = rows.scale_stride;
  u64 size_bytes = W::padded<f32>(count * rows.x_stride) + W::padded<f32>(count * kChunk);
  if (blocks) {
    size_bytes += W::padded<i16>(count * task.k) + W::padded<f32>(count * stride) +
                  W::padded<F16>(kGroup * stride) + W::padded<f32>(kGroup * stride) +
                  W::padded<f32>(8 * stride);
  }
  Workspace workspace(context, size_bytes);
  rows.x = workspace.take<f32>(count * rows.x_stride);
  f32* const z = workspace.take<f32>(count * kChunk);
  F16* half = nullptr;
  f32* factors = nullptr;
  f32* products = nullptr;
  if (blocks) {
    rows.codes = workspace.take<i16>(count * task.k);
    rows.scales = workspace.take<f32>(count * stride);
    half = workspace.take<F16>(kGroup * stride);
    factors = workspace.take<f32>(kGroup * stride);
    products = workspace.take<f32>(8 * stride);
    std::memset(half, 0, kGroup * stride * sizeof(F16));  // the padding must stay finite
  }
  for (u32 row = 0; row < task.rows; ++row) prepare_row(task, rows, row);

  for (u32 n = task.n_begin; n < task.n_end; n += kChunk) {
    const u32 width = task.n_end - n < kChunk ? task.n_end - n : kChunk;
    const u8* const w = task.w + n * task.w_row_bytes;
    switch (task.w_dtype) {
      case kF32:
        sweep(FloatKernel<f32>{reinterpret_cast<const f32*>(w), rows, task.k, z}, width, task.rows);
        break;
      case kF16:
        sweep(FloatKernel<F16>{reinterpret_cast<const F16*>(w), rows, task.k, z}, width, task.rows);
        break;
      case kBf16:
        sweep(FloatKernel<Bf16>{reinterpret_cast<const Bf16*>(w), rows, task.k, z}, width,
              task.rows);
        break;
      case kQ41:
        sweep(BlockKernel<Q41>{w, rows, task.k / kBlock, half, factors, products, z}, width,
              task.rows);
        break;
      default:
        sweep(BlockKernel<Q80>{w, rows, task.k / kBlock, half, factors, products, z}, width,
              task.rows);
    }
    finish_chunk(task, z, n, width);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
