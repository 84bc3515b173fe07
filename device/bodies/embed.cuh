// embed on the GPU: x[r] = table[token[r]], as float32.
//
// The contract is in graphs/ops/embed.py; a tile is a row. The table is row-major as stored: f32,
// f16, bf16, or GGUF's q4_1 and q8_0 blocks of 32. With eps > 0 the row is normed: its mean square,
// a barrier, then each element is read again. A scale comes last; behind it `normed`.
#pragma once
#include "elements.cuh"
#include "normed_row.cuh"
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
  struct Scratch {
    RowNorm::Partial squares[2];  // of a row of the table, of x
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      if (row != rows.begin) context.sync();  // the scratch was the last row's
      make_row(task, context, row);
    }
  }

 private:
  static constexpr u32 kNorm = 2, kNormed = 3;  // arguments

  __device__ static void make_row(const TaskRecord& task, const BodyContext& context, u32 row) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 hidden = task.param[0], code = task.param[1], eights = hidden / 8;
    const u32 token = context.rows[row].token;
    f32* x = context.address<f32>(task, 1) + u64{row} * hidden;
    f32 scale = 1;
    if constexpr (GPURT_EMBED_SCALES != 0) scale = param_f32(task, 3);
    // Of the table's row, if that is normed; then of x, which is stored. One loop, one reader.
#pragma unroll 1
    for (u32 pass = GPURT_EMBED_NORMS != 0 && param_f32(task, 2) > 0 ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
      for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
        f32 sum = 0;
#pragma unroll 1
        for (u32 i = v * 32 + context.thread % 32; i < eights; i += RowNorm::kVirtual * 32) {
          f32 value[8];
          read(task.addr[0], code, hidden, token, i * 8, value);
          if (pass != 0) {
#pragma unroll
            for (u32 e = 0; e < 8; ++e) value[e] *= scale;
            store8(x + i * 8, value);
          }
#pragma unroll
          for (u32 e = 0; e < 8; ++e) sum = fmaf(value[e], value[e], sum);
        }
        RowNorm::keep(scratch.squares[pass], v, sum);
      }
      if (pass != 0) break;
      context.sync();
      scale *= RowNorm::scale(scratch.squares[0], hidden, param_f32(task, 2));
    }
    if (task.addr[kNormed] == 0) return;
    context.sync();
    const RowsByFours normed{task.addr[kNormed], hidden, task.param[5], task.param[6]};
    store_normed(context, x, scratch.squares[1], arg<const f32>(task, kNorm), param_f32(task, 4),
                 normed, row);
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
