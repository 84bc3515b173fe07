// block_conv on the GPU: a convolution along the rows of a block.
//
// The contract is in graphs/ops/block_conv.py. A tile is some columns of one row, all of them with
// `normed`. Widths are multiples of 4, and a group of channels is too or is one of 1 and 2: four
// columns lie in one group or four coefficients are read. Loads depend on nothing but the row's
// place: those of several granules are under way at once.
#pragma once
#include "normed_row.cuh"

namespace gpurt {

struct block_conv {
  struct Scratch {
    RowNorm::Partial of_y;
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  GPURT_FN static void prefetch(const TaskRecord& task) {
    const u32 bytes = (task.tile[1] - task.tile[0]) * 4;
#pragma unroll 1
    for (u32 tap = 0; tap < task.param[1]; ++tap)
      prefetch_to_l2(reinterpret_cast<u64>(base_of(task, tap) + task.tile[0]), bytes);
    if (task.addr[kNorm] != 0) prefetch_to_l2(task.addr[kNorm], task.param[0] * 4);
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 row = task.tile[2], begin = task.tile[0] / 4, end = task.tile[1] / 4;
    if (row >= context.step->rows) return;  // all threads
    RowNorm::Partial& squares = reinterpret_cast<Scratch*>(context.scratch)->of_y;
    const u32 before = rows_before(context, row, task.param[1] - 1);
    const RowsByFours y{task.addr[kY], task.param[0], task.param[7], task.param[8]};
#pragma unroll 1
    for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
      f32 sum = 0;
#pragma unroll 1
      for (u32 i = begin + v * 32 + context.thread % 32; i < end; i += kAtOnce * kApart) {
        const u32 count = (end - i + kApart - 1) / kApart;
        float4 made[kAtOnce];
        convolve(task, context, row, before, i, count, made);
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) {
          if (j >= count) break;
          y.store(row, i + j * kApart, made[j]);
          sum = RowNorm::add4(made[j], sum);
        }
      }
      RowNorm::keep(squares, v, sum);
    }
    if (task.addr[kNormed] == 0) return;
    context.sync();
    const RowsByFours normed{task.addr[kNormed], task.param[0], task.param[9], task.param[10]};
    store_normed(context, arg<const f32>(task, kY) + u64{row} * y.width, squares,
                 arg<const f32>(task, kNorm), param_f32(task, 4), normed, row);
  }

 private:
  static constexpr u32 kX = 0, kD = 1, kBase = 2, kResidual = 3, kY = 4, kNorm = 5, kNormed = 6;
  static constexpr u32 kAtOnce = 2;                      // granules of a thread's
  static constexpr u32 kApart = RowNorm::kVirtual * 32;  // from one of them to the next

  // Of a tap of the task's side.
  GPURT_FN static const f32* base_of(const TaskRecord& task, u32 tap) {
    return arg<const f32>(task, kBase) + u64{task.param[3] * task.param[1] + tap} * task.param[0];
  }

  // How many rows in front belong to the row's block, up to `most`.
  __device__ static u32 rows_before(const BodyContext& context, u32 row, u32 most) {
    u32 count = 0;
    while (count < most && count < row &&
           context.rows[row - count - 1].slot == context.rows[row].slot &&
           context.rows[row - count - 1].position + count + 1 == context.rows[row].position)
      ++count;
    return count;
  }

  // Granules i, i + kApart, ... of a row, `count` of them.
  __device__ static void convolve(const TaskRecord& task, const BodyContext& context, u32 row,
                                  u32 before, u32 i, u32 count, float4 (&y)[kAtOnce]) {
    const u32 hidden = task.param[0], taps = task.param[1], group = task.param[2];
    const RowsByFours x{reinterpret_cast<u64>(context.address<u8>(task, kX)), hidden, task.param[5],
                        task.param[6]};
    const f32* residual = context.address<const f32>(task, kResidual);
    u32 of_group[kAtOnce];
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      of_group[j] = 4 * (i + j * kApart) / group;
      y[j] = make_float4(0, 0, 0, 0);
      if (residual != nullptr && j < count)
        y[j] = read4(residual + u64{row} * hidden, i + j * kApart);
    }
#pragma unroll 1
    for (u32 tap = 0; tap <= before; ++tap) {
      const f32* base = base_of(task, tap);
      const f32* d = context.address<const f32>(task, kD) +
                     ((u64{row} * 2 + task.param[3]) * taps + tap) * (hidden / group);
      const u64 from = x.place(row - tap, i);
      const u32 apart = x.apart(kApart / 16);
      float4 z[kAtOnce], w[kAtOnce];
      f32 own[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        z[j] = w[j] = make_float4(0, 0, 0, 0), own[j] = 0;
        if (j >= count) continue;
        z[j] = x.load(from + j * apart);
        own[j] = load_piece(d + of_group[j]);
        w[j] = read4(base, i + j * kApart);
      }
      whole_pieces(z, polls_input(task, kX),
                   [&](u32 j) { return at<const float4>(from + j * apart); });
      whole_pieces(own, polls_input(task, kD), [&](u32 j) { return d + of_group[j]; });
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        float4 more = make_float4(own[j], own[j], own[j], own[j]);
        if (group % 4 != 0 && j < count)
          more = coefficients(d, group, i + j * kApart, polls_input(task, kD));
        more = make_float4(w[j].x + more.x, w[j].y + more.y, w[j].z + more.z, w[j].w + more.w);
        y[j] = fma4(more, x.floats(z[j]), y[j]);
      }
    }
  }

  // A row's dynamic coefficients of four columns that do not lie in one group.
  __device__ static float4 coefficients(const f32* d, u32 group, u32 i, bool payload) {
    const auto of = [&](u32 column) {
      const f32* from = d + column / group;
      return whole_word(load_word(from), from, payload);
    };
    return make_float4(of(4 * i), of(4 * i + 1), of(4 * i + 2), of(4 * i + 3));
  }
};

}  // namespace gpurt
