// block_conv on the GPU: a convolution along the rows of a block.
//
// The contract is in graphs/ops/block_conv.py. A tile is a range of columns and of rows; it makes
// the mean squares of whole rows, those in front too, for itself (row_norm.cuh). Widths are
// multiples of 4, and a group of channels is too or is one of 1 and 2: four columns lie in one
// group or four coefficients are read.
#pragma once
#include "fragments.cuh"
#include "row_norm.cuh"
#include "rows.cuh"

namespace gpurt {

struct block_conv {
  static constexpr u32 kRowsMax = 16;
  static constexpr u32 kYDtype = 5, kYFragments = 6;  // parameters

  struct Scratch {
    RowNorm::Partial partial[kRowsMax];
    u32 before[kRowsMax];  // rows of the same block in front
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 hidden = task.param[0], taps = task.param[1];
    const TileRows own = TileRows::of(task, context);
    const u32 begin = own.begin, rows = own.end;
    if (begin >= rows) return;  // all threads
    const f32* x = context.address<const f32>(task, 0);
    if (context.thread < rows) scratch.before[context.thread] = rows_before(context, taps - 1);
    if (task.addr[1] != 0) {
#pragma unroll 1
      for (u32 row = begin < taps ? 0 : begin + 1 - taps; row < rows; ++row)
        RowNorm::sum(scratch.partial[row], hidden / 4, context, [&](u32 i, f32 sum) {
          return RowNorm::add4(read4(x + u64(row) * hidden, i), sum);
        });
    }
    context.sync();
    const u32 first = task.tile[0] / 4, fours = (task.tile[1] - task.tile[0]) / 4;
    for (u32 at = context.thread; at < (rows - begin) * fours; at += context.team_threads)
      convolve(task, context, scratch, begin + at / fours, first + at % fours);
  }

 private:
  // Of this thread's row, up to `most`.
  __device__ static u32 rows_before(const BodyContext& context, u32 most) {
    const u32 row = context.thread;
    u32 count = 0;
    while (count < most && count < row &&
           context.rows[row - count - 1].slot == context.rows[row].slot &&
           context.rows[row - count - 1].position + count + 1 == context.rows[row].position)
      ++count;
    return count;
  }

  // Columns 4i .. 4i + 3 of one row.
  __device__ static void convolve(const TaskRecord& task, const BodyContext& context,
                                  const Scratch& scratch, u32 row, u32 i) {
    const u32 hidden = task.param[0], taps = task.param[1], side = task.param[3];
    const f32* gain = arg<const f32>(task, 1);
    const f32* base = arg<const f32>(task, 3) + u64(side) * taps * hidden;
    const f32* residual = context.address<const f32>(task, 4);
    const u64 at = u64(row) * hidden;
    float4 y = residual == nullptr ? make_float4(0, 0, 0, 0) : read4(residual + at, i);
#pragma unroll 1
    for (u32 tap = 0; tap <= scratch.before[row]; ++tap) {
      float4 z = read4(context.address<const f32>(task, 0) + at - u64(tap) * hidden, i);
      if (gain != nullptr) {
        const f32 scale = RowNorm::scale(scratch.partial[row - tap], hidden, param_f32(task, 4));
        z = mul4(scale4(z, scale), read4(gain, i));
      }
      const float4 constant = read4(base + u64(tap) * hidden, i);
      const float4 own = dynamic(task, context, row, tap, i);
      y = fma4(make_float4(constant.x + own.x, constant.y + own.y, constant.z + own.z,
                           constant.w + own.w),
               z, y);
    }
    if (task.param[kYDtype] == kBf16) {
      store_bf16x4(arg<u16>(task, 5), row, i, hidden, task.param[kYFragments], y);
    } else {
      reinterpret_cast<float4*>(arg<f32>(task, 5) + at)[i] = y;
    }
  }

  // The row's coefficients of four columns.
  __device__ static float4 dynamic(const TaskRecord& task, const BodyContext& context, u32 row,
                                   u32 tap, u32 i) {
    const u32 taps = task.param[1], group = task.param[2], groups = task.param[0] / group;
    const f32* d = context.address<const f32>(task, 2) +
                   ((u64(row) * 2 + task.param[3]) * taps + tap) * groups;
    return make_float4(d[4 * i / group], d[(4 * i + 1) / group], d[(4 * i + 2) / group],
                       d[(4 * i + 3) / group]);
  }
};

}  // namespace gpurt
