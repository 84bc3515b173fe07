// gated_residual on the GPU: y = alpha * stream + beta * R(branch * gain), normed = R(y) * norm.
//
// The contract is in graphs/ops/gated_residual.py. A tile is a range of columns and of rows; it
// makes the mean square of its whole rows for itself (row_norm.cuh). Widths are multiples of 4.
// With `normed` a tile is one whole row. Its granules are dealt to threads as for the norm in all
// passes, so a thread norms the y that it wrote itself: the barrier is for the sum alone. Where a
// thread has few of them they stay in registers, and loads are under way over the barriers.
#pragma once
#include "../ptx.cuh"
#include "normed_row.cuh"
#include "rows.cuh"
#include "slots.cuh"

namespace gpurt {

struct gated_residual {
  static constexpr u32 kRowsMax = 16;

  struct Scratch {
    RowNorm::Partial partial[kRowsMax];  // of the branch
    RowNorm::Partial of_y;
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  GPURT_FN static void prefetch(const TaskRecord& task) {
    const u32 bytes = (task.tile[1] - task.tile[0]) * 4;
    for (const u32 i : {3u, 4u, kNorm}) {
      if (task.addr[i] != 0) prefetch_to_l2(task.addr[i] + u64{task.tile[0]} * 4, bytes);
    }
    if (task.addr[1] != 0) prefetch_to_l2(task.addr[1], task.param[0] * 4);
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    if (rows.begin >= rows.end) return;  // all threads
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 hidden = task.param[0], first = task.tile[0] / 4;
    const u32 fours = (task.tile[1] - task.tile[0]) / 4;
    const f32 eps = param_f32(task, 1);
    const f32* gain = arg<const f32>(task, 1);
    const u32 stride = task.param[3] / 4;
    const SlotsOf<float4> slots{context.address<const float4>(task, 0),
                                u64(stride) * context.step->rows_capacity, stride, task.param[2]};
    const Branch branch{slots, polls_input(task, 0)};
    if (can_hold(task, slots)) return hold_row(task, context, branch, rows.begin, scratch);
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      RowNorm::sum(scratch.partial[row - rows.begin], hidden / 4, context, [&](u32 i, f32 sum) {
        return RowNorm::add4(gained(branch, row, gain, i), sum);
      });
    }
    context.sync();
#pragma unroll 1
    for (u32 row = rows.begin; row < rows.end; ++row) {
      const f32 scale = RowNorm::scale(scratch.partial[row - rows.begin], hidden, eps);
      RowNorm::sum(scratch.of_y, fours, context, [&](u32 i, f32 sum) {
        return RowNorm::add4(add_granule(task, branch, row, first + i, scale), sum);
      });
    }
    if (task.addr[kNormed] == 0) return;
    context.sync();
    store_normed(context, arg<const f32>(task, 5) + u64{rows.begin} * hidden, scratch.of_y,
                 arg<const f32>(task, kNorm), param_f32(task, 4), normed_of(task), rows.begin);
  }

 private:
  static constexpr u32 kNorm = 6, kNormed = 7;  // arguments
  static constexpr u32 kHeld = 4;               // granules of a row that a thread keeps

  struct Branch {
    SlotsOf<float4> slots;
    bool payload;
  };

  GPURT_FN static bool can_hold(const TaskRecord& task, const SlotsOf<float4>& slots) {
    return kTeamWarps == RowNorm::kVirtual && task.addr[kNormed] != 0 && slots.ranks == 1 &&
           task.param[0] / 4 <= kHeld * kTeamThreads;
  }

  // A whole row of up to kHeld granules a thread, one rank's or gathered. Loads depend on nothing
  // but the row's place: those of the next phase go out before the barrier that this one ends with.
  GPURT_FN static void hold_row(const TaskRecord& task, const BodyContext& context,
                                const Branch& branch, u32 row, Scratch& scratch) {
    const u32 hidden = task.param[0], pieces = hidden / 4, warp = context.thread / 32;
    const u64 begin = u64(row) * hidden;
    const f32* gain = arg<const f32>(task, 1);
    const auto at = [&](u32 j) { return min(context.thread + j * kTeamThreads, pieces - 1); };
    const float4* from = branch.slots.row(0, row);
    float4 v[kHeld], kept[kHeld], beta[kHeld];
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) v[j] = load_piece(from + at(j));
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) {
      kept[j] = mul4(read4(arg<const f32>(task, 3), at(j)),
                     read4(arg<const f32>(task, 2) + begin, at(j)));
    }
    whole_pieces(v, branch.payload, [&](u32 j) { return from + at(j); });
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) {
      if (gain != nullptr) v[j] = mul4(v[j], read4(gain, at(j)));
    }
    RowNorm::keep(scratch.partial[0], warp, squares_of(v, context.thread, pieces));
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) beta[j] = read4(arg<const f32>(task, 4), at(j));
    context.sync();
    const f32 scale = RowNorm::scale(scratch.partial[0], hidden, param_f32(task, 1));
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) v[j] = fma4(beta[j], scale4(v[j], scale), kept[j]);
    RowNorm::keep(scratch.of_y, warp, squares_of(v, context.thread, pieces));
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) kept[j] = read4(arg<const f32>(task, kNorm), at(j));
    context.sync();
    const f32 by = RowNorm::scale(scratch.of_y, hidden, param_f32(task, 4));
    const RowsByFours normed = normed_of(task);
    const u64 to = normed.place(row, context.thread);
    const u32 apart = normed.apart(kTeamThreads / 16);
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) {
      const bool is_there = context.thread + j * kTeamThreads < pieces;
      if (is_there) reinterpret_cast<float4*>(arg<f32>(task, 5) + begin)[at(j)] = v[j];
      normed.store(to + j * apart, mul4(scale4(v[j], by), kept[j]), is_there);
    }
  }

  // Of the granules that this thread has, as RowNorm::sum() goes through them.
  GPURT_FN static f32 squares_of(const float4 (&v)[kHeld], u32 thread, u32 pieces) {
    f32 sum = 0;
#pragma unroll
    for (u32 j = 0; j < kHeld; ++j) {
      if (thread + j * kTeamThreads < pieces) sum = RowNorm::add4(v[j], sum);
    }
    return sum;
  }

  GPURT_FN static RowsByFours normed_of(const TaskRecord& task) {
    return {task.addr[kNormed], task.param[0], task.param[5], task.param[6]};
  }

  // Granule `i` of a row of the branch, of one rank or put together from all; of these one after
  // another, since registers for more loads at once would be spilled by other bodies of a kernel.
  GPURT_FN static float4 gained(const Branch& branch, u32 row, const f32* gain, u32 i) {
    const float4 v = slots_piece<1, float4>(branch.slots, row, i, {}, false, branch.payload);
    return gain == nullptr ? v : mul4(v, read4(gain, i));
  }

  // Granule `i` of a row of y, stored. scale: of the row's norm.
  GPURT_FN static float4 add_granule(const TaskRecord& task, const Branch& branch, u32 row, u32 i,
                                     f32 scale) {
    const u64 begin = u64(row) * task.param[0];
    const float4 kept =
        mul4(read4(arg<const f32>(task, 3), i), read4(arg<const f32>(task, 2) + begin, i));
    const float4 normed = scale4(gained(branch, row, arg<const f32>(task, 1), i), scale);
    const float4 y = fma4(read4(arg<const f32>(task, 4), i), normed, kept);
    reinterpret_cast<float4*>(arg<f32>(task, 5) + begin)[i] = y;
    return y;
  }
};

}  // namespace gpurt
