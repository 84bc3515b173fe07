// The arithmetic of matvec at one SIMD level. Included by simd_each.hpp, so without a guard.
//
// A kernel computes NR rows of W times R rows of x (four, or one alone) with one accumulator a
// pair: W is unpacked once for R rows, x is loaded once for NR. Pairs never mix: each sum sees the
// same additions whatever NR and R are.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kChunk = 64;  // rows of W between epilogues; even, since swiglu pairs rows
constexpr u32 kGroup = 4;   // rows of W whose block scales are converted together
constexpr u32 kLine = 64;   // bytes of a cache line
// Rows of W side by side are as many short streams, which the hardware prefetcher does not follow:
// cold weights came at 5 to 7 GB/s. Asked for 4 KB ahead (2 KB and 8 KB: no better) they come at 12
// to 17 GB/s a core. Past the tile lies what this or another worker reads next.
constexpr u32 kPrefetchBytes = 4096;

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

/// W in nvfp4. Elements are exact as floats, so each sum has the bits that W in f32 would give.
struct Nvfp4Kernel {
  const u8* w;
  PreparedRows x;
  u32 blocks;
  f32* z;  // [padded rows, kChunk]

  GPURT_SIMD_FN void begin(u32 n, u32 count) const {
    if (x.padded_rows < kQuad) return;
    const u64 w_stride = u64{blocks} * kNvfp4Bytes;
    prefetch(w + n * w_stride, count * w_stride);
  }

  template <int NR, int R>
  GPURT_SIMD_FN void tile(u32 n, u32 row) const {
    const u64 w_stride = u64{blocks} * kNvfp4Bytes;
    const u8* block = w + n * w_stride;
    const u8* ahead = block;
    const f32* x0 = x.x + row * x.x_stride;
    Vf sum[NR][R];
    for (int j = 0; j < NR; ++j) {
      for (int r = 0; r < R; ++r) sum[j][r] = splat(0.0F);
    }
    for (u32 b = 0; b < blocks; ++b, block += kNvfp4Bytes, ahead += NR * kNvfp4Bytes) {
      if constexpr (R == 1) prefetch(ahead, NR * kNvfp4Bytes);
      for (u32 i = 0; i < kNvfp4Block; i += kLanes, x0 += kLanes) {
        Vf weights[NR];
        for (int j = 0; j < NR; ++j) {
          const u8* const at = block + static_cast<u64>(j) * w_stride;
          weights[j] = mul(load_e2m1(at + i / 2), splat(kE4m3Values[at[kNvfp4Codes]]));
        }
        for (int r = 0; r < R; ++r) {
          const Vf v = load(x0 + static_cast<u64>(r) * x.x_stride);
          for (int j = 0; j < NR; ++j) sum[j][r] = fma(weights[j], v, sum[j][r]);
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
    GPURT_UNROLL
    for (int j = 0; j < NR; ++j) {
      GPURT_UNROLL
      for (u32 r = 0; r < kQuad; ++r) acc[j][r] = zero_acc();
      minimum[j] = Quad{};
    }
    for (u32 b = 0; b < blocks; ++b) {
      Qblock q[NR];
      alignas(16) f32 product[NR][kQuad];
      GPURT_UNROLL
      for (int j = 0; j < NR; ++j) {
        const f32* const two = factor + static_cast<u64>(j) * 2 * blocks;
        q[j] = Format::unpack(block + static_cast<u64>(j) * w_stride);
        store_quad(product[j], splat_quad(two[0]) * load_quad(scale));
        // Through memory on purpose: a broadcast from there is part of the multiplication, one from
        // a register costs two shuffles.
        asm volatile("" : "+m"(product[j]));
        if constexpr (Format::kHasMinimum) {
          minimum[j] += splat_quad(two[1]) * load_quad(scale + kQuad);
        }
      }
      GPURT_UNROLL
      for (u32 r = 0; r < kQuad; ++r) {
        const i16* const v = codes + r * x.x_stride;
        GPURT_UNROLL
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
    GPURT_UNROLL
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
      for (; j + kSide <= left; j += kSide) kernel.template tile<kSide, 4>(n + j, row);
      for (; j < left; ++j) kernel.template tile<1, 4>(n + j, row);
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
/// Scales a row of sums, then bounds them if there is a soft cap.
GPURT_SIMD_FN void cap_row(f32* z, f32 scale, f32 softcap) {
  const Vf cap = splat(softcap);
  for (u32 i = 0; i < kChunk; i += kLanes) {
    Vf v = mul(load(z + i), splat(scale));
    if (softcap > 0.0F) {  // tanh(u) = 1 - 2 / (e^2u + 1), right at both ends of exp
      const Vf power = exp_of(div(add(v, v), cap));
      const Vf tanh = sub(splat(1.0F), div(splat(2.0F), add(power, splat(1.0F))));
      v = fma(v, splat(0.0F), mul(cap, tanh));  // 0, but NaN for an infinity, which must show
    }
    store(z + i, v);
  }
}

/// z[i] = silu(z[2i]) * z[2i+1], in place, for a whole chunk: what lies past its rows is not used.
GPURT_SIMD_FN void swiglu_row(f32* z) {
  f32 gate[kChunk / 2];
  f32 up[kChunk / 2];
  for (u32 i = 0; i < kChunk / 2; ++i) {
    gate[i] = z[2 * i];
    up[i] = z[2 * i + 1];
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
    if (task.scale != 1.0F || task.softcap > 0.0F) cap_row(sums, task.scale, task.softcap);
    if (task.swiglu) swiglu_row(sums);
    if (task.y_dtype == kF32) {
      write_row(sums, residual, static_cast<f32*>(task.y) + at, width);
    } else if (task.y_dtype == kF16) {
      write_row(sums, residual, static_cast<F16*>(task.y) + at, width);
    } else {
      write_row(sums, residual, static_cast<Bf16*>(task.y) + at, width);
    }
  }
}

/// z of rows [n, n + count) of W. factors: scratch of block formats, factor_count(task) floats.
GPURT_SIMD_FN void sweep_chunk(const MatvecTask& task, const PreparedRows& rows, u32 n, u32 count,
                               f32* z, f32* factors) {
  const u8* const w = task.w + n * task.w_row_bytes;
  const u32 k = task.k;
  switch (task.w_dtype) {
    case kF32:
      return sweep(FloatKernel<f32>{reinterpret_cast<const f32*>(w), rows, k, z}, count);
    case kF16:
      return sweep(FloatKernel<F16>{reinterpret_cast<const F16*>(w), rows, k, z}, count);
    case kBf16:
      return sweep(FloatKernel<Bf16>{reinterpret_cast<const Bf16*>(w), rows, k, z}, count);
    case kNvfp4:
      return sweep(Nvfp4Kernel{w, rows, k / kNvfp4Block, z}, count);
    case kQ41:
      return sweep(BlockKernel<Q41>{w, rows, k / kBlock, factors, z}, count);
    default:
      return sweep(BlockKernel<Q80>{w, rows, k / kBlock, factors, z}, count);
  }
}

GPURT_SIMD_FN u64 factor_count(const MatvecTask& task) {
  return is_blocked(task.w_dtype) ? u64{2} * kGroup * (task.k / kBlock) : 0;
}

GPURT_SIMD_FN void matvec_run(const MatvecTask& task, const BodyContext& context) {
  using W = Workspace;
  thread_local RowMemory memory;
  if (!memory.holds(task)) prepare_rows(task, memory);
  const PreparedRows& rows = memory.rows();
  const u64 z_count = u64{rows.padded_rows} * kChunk;
  Workspace workspace(context, W::padded<f32>(z_count) + W::padded<f32>(factor_count(task)));
  f32* const z = workspace.take<f32>(z_count);
  f32* const factors = workspace.take<f32>(factor_count(task));

  for (u32 n = task.n_begin; n < task.n_end; n += kChunk) {
    const u32 width = task.n_end - n < kChunk ? task.n_end - n : kChunk;
    sweep_chunk(task, rows, n, width, z, factors);
    finish_chunk(task, z, n, width);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
