// block_conv on the GPU: a convolution along the rows of a block.
//
// The contract is in graphs/ops/block_conv.py. A tile is some columns of one row, all of them with
// `normed`. Widths are multiples of 4, and groups of channels powers of two: four columns lie in
// one group, or four coefficients are read. Loads depend on nothing but the row's place: those of
// several granules are under way at once.
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
    const RowsByFours y{context.place(task, kY), task.param[0], task.param[7], task.param[8]};
    const u32 apart = y.apart(kApart / 16);
#pragma unroll 1
    for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
      f32 sum = 0;
#pragma unroll 1
      for (u32 base = begin; base < end; base += kAtOnce * kApart) {
        const u32 i = base + v * 32 + context.thread % 32;
        const u32 count = i < end ? (end - i + kApart - 1) / kApart : 0;
        const u64 to = y.place(row, i);
        float4 made[kAtOnce];
        convolve(task, context, row, before, i, count, made);
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) {
          y.store(to + j * apart, made[j], j < count);
          if (j < count) sum = RowNorm::add4(made[j], sum);
        }
      }
      RowNorm::keep(squares, v, sum);
    }
    if (task.addr[kNormed] == 0) return;
    context.sync();
    const RowsByFours normed{context.place(task, kNormed), y.width, task.param[9], task.param[10]};
    store_normed(context, at<const f32>(y.place(row, 0)), squares, arg<const f32>(task, kNorm),
                 param_f32(task, 4), normed, row);
  }

 private:
  static constexpr u32 kX = 0, kD = 1, kBase = 2, kResidual = 3, kY = 4, kNorm = 5, kNormed = 6;
  static constexpr u32 kAtOnce = 2;                      // granules of a thread's
  static constexpr u32 kTaps = 2;                        // likewise
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

  GPURT_FN static u32 group_log2(const TaskRecord& task) { return 31 - __clz(task.param[2]); }

  // Where a tap's part of a thread's first granule lies.
  struct Tap {
    u64 x;
    const f32* d;
    const f32* w;
  };

  GPURT_FN static Tap tap_of(const TaskRecord& task, const BodyContext& context,
                             const RowsByFours& x, u32 row, u32 tap, u32 i) {
    const u32 side = task.param[3], taps = task.param[1], log2 = group_log2(task);
    const u32 at_d = ((row * 2 + side) * taps + tap) * (x.width >> log2) + (4 * i >> log2);
    return {x.place(row - tap, i), context.address<const f32>(task, kD) + at_d,
            base_of(task, tap) + 4 * i};
  }

  // Granules i, i + kApart, ... of a row, `count` of them. What was there before d, and d before x
  // of a sum of ranks, is asked for before either is waited for.
  __device__ static void convolve(const TaskRecord& task, const BodyContext& context, u32 row,
                                  u32 before, u32 i, u32 count, float4 (&y)[kAtOnce]) {
    const u32 hidden = task.param[0], log2 = group_log2(task);
    const RowsByFours x{context.place(task, kX), hidden, task.param[5], task.param[6]};
    const u32 x_apart = x.apart(kApart / 16), d_apart = 4 * kApart >> log2;
    const f32* residual = context.address<const f32>(task, kResidual);
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      y[j] = make_float4(0, 0, 0, 0);
      if (residual != nullptr && j < count)
        y[j] = read4(residual + u64{row} * hidden, i + j * kApart);
    }
#pragma unroll 1
    for (u32 first = 0; first <= before; first += kTaps) {
      const Tap tap[kTaps] = {
          tap_of(task, context, x, row, first, i),
          tap_of(task, context, x, row, min(first + 1, before), i),
      };
      const u32 taps = before - first + 1;
      const auto is_there = [&](u32 n) { return n % kAtOnce < count && n / kAtOnce < taps; };
      const auto x_of = [&](u32 n) { return x.load(tap[n / kAtOnce].x + n % kAtOnce * x_apart); };
      const auto d_of = [&](u32 n) { return tap[n / kAtOnce].d + n % kAtOnce * d_apart; };
      float4 z[kTaps * kAtOnce], w[kTaps * kAtOnce];
      f32 own[kTaps * kAtOnce];
#pragma unroll
      for (u32 n = 0; n < kTaps * kAtOnce; ++n) {
        z[n] = w[n] = make_float4(0, 0, 0, 0), own[n] = 0;
        if (!is_there(n)) continue;
        w[n] = read4(tap[n / kAtOnce].w, n % kAtOnce * kApart);
        own[n] = load_piece(d_of(n));
        z[n] = x_of(n);
      }
      whole_pieces(own, polls_input(task, kD), d_of);
#pragma unroll
      for (u32 n = 0; n < kTaps * kAtOnce; ++n) {
        float4 more = make_float4(own[n], own[n], own[n], own[n]);
        if (log2 < 2 && is_there(n)) more = coefficients(d_of(n), log2, polls_input(task, kD));
        w[n] = make_float4(w[n].x + more.x, w[n].y + more.y, w[n].z + more.z, w[n].w + more.w);
      }
      load_missing(z, polls_input(task, kX), x_of);
#pragma unroll
      for (u32 n = 0; n < kTaps * kAtOnce; ++n)
        y[n % kAtOnce] = fma4(w[n], x.floats(z[n]), y[n % kAtOnce]);
    }
  }

  // Dynamic coefficients of four columns that do not lie in one group, from the first one's on.
  __device__ static float4 coefficients(const f32* d, u32 log2, bool payload) {
    const auto of = [&](u32 column) {
      const f32* from = d + (column >> log2);
      return whole_word(load_word(from), from, payload);
    };
    return make_float4(of(0), of(1), of(2), of(3));
  }
};

}  // namespace gpurt
