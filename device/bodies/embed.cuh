// embed on the GPU: x[r] = table[token[r]], as float32.
//
// The table is row-major as stored: f32, f16, bf16, or GGUF's q4_1 and q8_0 blocks of 32. With eps
// > 0 a row is normed: mean squares of all rows, a barrier, then each element is read again. A
// scale comes last.
#pragma once
#include "elements.cuh"
#include "row_norm.cuh"
#include "rows.cuh"

// 1 if an embed of the plan norms: the generated bodies.gen.cuh says so.
#ifndef GPURT_EMBED_NORMS
#define GPURT_EMBED_NORMS 0
#endif
#ifndef GPURT_EMBED_SCALES  // the same for a scale
#define GPURT_EMBED_SCALES 0
#endif

namespace gpurt {

struct embed {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 hidden = task.param[0], code = task.param[1];
    f32* x = context.address<f32>(task, 1);
    const u32 eights = hidden / 8;
    if constexpr (GPURT_EMBED_NORMS != 0) {
      if (param_f32(task, 2) > 0) return run_normed(task, context);
    }
    const TileRows rows = TileRows::of(task, context);
    for (u32 at = rows.begin * eights + context.thread; at < rows.end * eights;
         at += context.team_threads) {
      const u32 row = at / eights, column = at % eights * 8;
      f32 value[8];
      read(task.addr[0], code, hidden, context.rows[row].token, column, value);
      if constexpr (GPURT_EMBED_SCALES != 0) {
#pragma unroll
        for (u32 e = 0; e < 8; ++e) value[e] *= param_f32(task, 3);
      }
      store8(x + u64(row) * hidden + column, value);
    }
  }

  static constexpr u32 kRowsMax = 16;

  struct Scratch {
    RowNorm::Partial partial[kRowsMax];
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ __noinline__ static void run_normed(const TaskRecord& task,
                                                 const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 hidden = task.param[0], code = task.param[1], eights = hidden / 8;
    const TileRows rows = TileRows::of(task, context);
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      const u32 token = context.rows[row].token;
      RowNorm::sum(scratch.partial[row - rows.begin], eights, context, [&](u32 i, f32 sum) {
        f32 v[8];
        read(task.addr[0], code, hidden, token, i * 8, v);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
        return sum;
      });
    }
    context.sync();
    f32* x = context.address<f32>(task, 1);
    for (u32 at = rows.begin * eights + context.thread; at < rows.end * eights;
         at += context.team_threads) {
      const u32 row = at / eights, column = at % eights * 8;
      f32 scale = RowNorm::scale(scratch.partial[row - rows.begin], hidden, param_f32(task, 2));
      if constexpr (GPURT_EMBED_SCALES != 0) scale *= param_f32(task, 3);
      f32 value[8];
      read(task.addr[0], code, hidden, context.rows[row].token, column, value);
#pragma unroll
      for (u32 e = 0; e < 8; ++e) value[e] *= scale;
      store8(x + u64(row) * hidden + column, value);
    }
  }

  // Columns [column, column + 8) of one row of the table.
  __device__ static void read(u64 table, u32 code, u32 hidden, u32 token, u32 column, f32 (&x)[8]) {
    const u64 at = u64(token) * hidden + column;
    switch (code) {
      case kF32:
        return Elements<kF32>::unpack8(Elements<kF32>::read8(table, at, true), x);
      case kF16:
        return Elements<kF16>::unpack8(Elements<kF16>::read8(table, at, true), x);
      case kBf16:
        return Elements<kBf16>::unpack8(Elements<kBf16>::read8(table, at, true), x);
      case kQ80:
        return read_q8_0(reinterpret_cast<const u8*>(table + at / 32 * 34), column % 32, x);
      default:
        return read_q4_1(reinterpret_cast<const u8*>(table + at / 32 * 20), column % 32, x);
    }
  }

  // Block: f16 scale, 32 signed codes. Read by byte: blocks of 34 bytes are aligned to 2.
  __device__ static void read_q8_0(const u8* block, u32 first, f32 (&x)[8]) {
    const f32 scale = f32_from_f16(*reinterpret_cast<const u16*>(block));
    for (u32 i = 0; i < 8; ++i) {
      x[i] = scale * static_cast<f32>(static_cast<signed char>(block[2 + first + i]));
    }
  }

  // Block: f16 scale, f16 minimum, 16 bytes; the low nibbles are elements 0..15.
  __device__ static void read_q4_1(const u8* block, u32 first, f32 (&x)[8]) {
    const f32 scale = f32_from_f16(*reinterpret_cast<const u16*>(block));
    const f32 minimum = f32_from_f16(*reinterpret_cast<const u16*>(block + 2));
    for (u32 i = 0; i < 8; ++i) {
      const u32 byte = block[4 + first % 16 + i];
      x[i] = __fadd_rn(__fmul_rn(scale, static_cast<f32>(first < 16 ? byte & 15 : byte >> 4)),
                       minimum);
    }
  }
};

}  // namespace gpurt
