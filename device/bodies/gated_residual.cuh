// gated_residual on the GPU: y = alpha * stream + beta * R(branch * gain).
//
// The contract is in graphs/ops/gated_residual.py. A tile is a range of columns and of rows; it
// makes the mean square of its whole rows for itself (row_norm.cuh). Widths are multiples of 4.
#pragma once
#include "row_norm.cuh"
#include "rows.cuh"
#include "slots.cuh"

namespace gpurt {

struct gated_residual {
  static constexpr u32 kRowsMax = 16;

  struct Scratch {
    RowNorm::Partial partial[kRowsMax];
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    if (rows.begin >= rows.end) return;  // all threads
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 hidden = task.param[0];
    const f32 eps = param_f32(task, 1);
    const f32* gain = arg<const f32>(task, 1);
    const u32 stride = task.param[5] / 4;
    const SlotsOf<float4> branch{context.address<const float4>(task, 0),
                                 u64(stride) * context.step->rows_capacity,
                                 stride,
                                 task.param[2] / 4,
                                 task.param[3],
                                 task.param[4] == kSlotsSum};
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      RowNorm::sum(scratch.partial[row - rows.begin], hidden / 4, context, [&](u32 i, f32 sum) {
        return RowNorm::add4(gained(branch, row, gain, i), sum);
      });
    }
    context.sync();
    const u32 first = task.tile[0] / 4, fours = (task.tile[1] - task.tile[0]) / 4;
    for (u32 at = context.thread; at < (rows.end - rows.begin) * fours;
         at += context.team_threads) {
      const u32 here = at / fours, i = first + at % fours;
      const u64 row = u64(rows.begin + here) * hidden;
      const f32 scale = RowNorm::scale(scratch.partial[here], hidden, eps);
      const float4 kept =
          mul4(read4(arg<const f32>(task, 3), i), read4(arg<const f32>(task, 2) + row, i));
      const float4 normed = scale4(gained(branch, rows.begin + here, gain, i), scale);
      const float4 y = fma4(read4(arg<const f32>(task, 4), i), normed, kept);
      reinterpret_cast<float4*>(arg<f32>(task, 5) + row)[i] = y;
    }
  }

 private:
  // Granule `i` of a row of the branch, of one rank or put together from all; of these one after
  // another, since registers for more loads at once would be spilled by other bodies of a kernel.
  GPURT_FN static float4 gained(const SlotsOf<float4>& branch, u32 row, const f32* gain, u32 i) {
    const float4 v = slots_piece<1, float4>(branch, row, i, nullptr);
    return gain == nullptr ? v : mul4(v, read4(gain, i));
  }
};

}  // namespace gpurt
