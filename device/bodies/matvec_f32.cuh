// matvec_f32 on the GPU: matvec with `exact`, in float32 from end to end: y = softcap(scale W xn).
//
// For weights where bf16 would change what a model decides: a router. The contract is in
// graphs/ops/matvec.py; W stays row-major float32. A task computes 4 rows of W (the last one may
// have fewer) for some rows of the step, one granule of y each. K is dealt granule by granule to 16
// virtual warps, whatever the team; a virtual warp takes 4 step rows at a time, so that W comes
// from memory once and then from the caches. Payload inputs are polled, payload outputs stored as
// granules: their rows are whole granules.
#pragma once
#include "../payload.cuh"
#include "matvec_scale.cuh"
#include "published.cuh"
#include "row_norm.cuh"
#include "rows.cuh"

namespace gpurt {

struct matvec_f32 {
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgResidual, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kEps, kYRanks = 11 };
  static constexpr u32 kRowsMax = 16;
  static constexpr u32 kOutputs = 4;  // rows of W
  static constexpr u32 kBlock = 4;    // step rows at a time

  struct Scratch {
    RowNorm::Partial sum[kRowsMax][kOutputs];
    RowNorm::Partial squares[kRowsMax];
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  GPURT_FN static void prefetch(const TaskRecord& task) {
    const u32 k = task.param[kK];
    prefetch_to_l2(task.addr[kArgW] + u64{task.tile[0]} * k * 4,
                   (task.tile[1] - task.tile[0]) * k * 4);
    if (task.addr[kArgNorm] != 0) prefetch_to_l2(task.addr[kArgNorm], k * 4);
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const TileRows rows = TileRows::of(task, context);
    if (rows.begin >= rows.end) return;  // all threads
#pragma unroll 1
    for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
#pragma unroll 1
      for (u32 first = rows.begin; first < rows.end; first += kBlock) {
        if (rows.end - first == 1) {
          multiply<1>(task, context, v, first, rows.end);
        } else {
          multiply<kBlock>(task, context, v, first, rows.end);
        }
      }
    }
    context.sync();
    const Scratch& scratch = *reinterpret_cast<const Scratch*>(context.scratch);
    const u32 k = task.param[kK];
    for (u32 row = rows.begin + context.thread; row < rows.end; row += context.team_threads) {
      const f32 norm = task.addr[kArgNorm] == 0 ? 1.0f
                                                : RowNorm::scale(scratch.squares[row - rows.begin],
                                                                 k, param_f32(task, kEps));
      f32 y[kOutputs];
#pragma unroll
      for (u32 i = 0; i < kOutputs; ++i)
        y[i] = scaled(task, RowNorm::total(scratch.sum[row - rows.begin][i]) * norm);
      put(task, context, row, y);
    }
  }

 private:
  // The outputs of a row, on every rank if so.
  GPURT_FN static void put(const TaskRecord& task, const BodyContext& context, u32 row,
                           const f32 (&y)[kOutputs]) {
    const u64 base = reinterpret_cast<u64>(context.address<f32>(task, kArgY));
    const u32* published = task.param + kYRanks;
    if (kMatvecPublished && published[0] != 0) {
      const u64 first = Copies::first_of(published, base, row, task.tile[0]);
      u64 far[kRanksMax];  // under way together
#pragma unroll
      for (u32 i = 0; i < kRanksMax; ++i)
        far[i] = i < published[0] ? Copies::offset_of(published, i) : 0;
#pragma unroll
      for (u32 i = 0; i < kRanksMax; ++i) {
        if (i < published[0]) store_granule(first + far[i], y[0], y[1], y[2], y[3]);
      }
      return;
    }
    const u64 to = base + (u64(row) * task.param[kN] + task.tile[0]) * 4;
    if ((task.payload_mask & (1 << kArgY)) != 0) return store_granule(to, y[0], y[1], y[2], y[3]);
#pragma unroll
    for (u32 i = 0; i < kOutputs; ++i) {
      if (task.tile[0] + i < task.tile[1]) at<f32>(to)[i] = y[i];
    }
  }

  // A granule of some rows of x.
  template <u32 BLOCK>
  struct Granules {
    uint4 x[BLOCK];

    // `from` lies in row 0. A row beyond the last one is that one again.
    GPURT_FN void load(u64 from, u32 row_bytes, u32 first, u32 rows) {
#pragma unroll
      for (u32 b = 0; b < BLOCK; ++b)
        x[b] = ld_relaxed_b128(from + u64{min(first + b, rows - 1)} * row_bytes);
    }
    GPURT_FN bool missing() const {
      bool any = false;
#pragma unroll
      for (u32 b = 0; b < BLOCK; ++b) any |= is_sentinel(x[b]);
      return any;
    }
    // All lanes of a warp, converged.
    GPURT_FN void wait(u64 from, u32 row_bytes, u32 first, u32 rows) {
      for (u32 polls = 0; payload_missing(missing(), polls);) load(from, row_bytes, first, rows);
    }
    GPURT_FN float4 operator[](u32 b) const {
      return make_float4(__uint_as_float(x[b].x), __uint_as_float(x[b].y), __uint_as_float(x[b].z),
                         __uint_as_float(x[b].w));
    }
  };

  struct Weights {
    float4 row[kOutputs];

    // Granule i of each; a row beyond `last` is never stored.
    GPURT_FN void load(const f32* w, u32 k, u32 last, u32 i) {
#pragma unroll
      for (u32 o = 0; o < kOutputs; ++o) row[o] = read4(w + u64(min(o, last)) * k, i);
    }
  };

  // Part `v` of the sums of step rows [first, first + BLOCK).
  template <u32 BLOCK>
  __device__ __noinline__ static void multiply(const TaskRecord& task, const BodyContext& context,
                                               u32 v, u32 first, u32 rows) {
    constexpr u32 kStride = RowNorm::kVirtual * 32;
    const u32 k = task.param[kK], granules = k / 4, lane = context.thread % 32;
    const u64 x = reinterpret_cast<u64>(context.address<const f32>(task, kArgX));
    const f32* w = arg<const f32>(task, kArgW) + u64(task.tile[0]) * k;
    const f32* norm = arg<const f32>(task, kArgNorm);
    const bool payload = (task.payload_mask & (1 << kArgX)) != 0;
    const u32 last = task.tile[1] - task.tile[0] - 1;
    f32 sum[kOutputs][BLOCK] = {};
    f32 squares[BLOCK] = {};
    Weights weights;
    Granules<BLOCK> granule;
    const u32 begin = min(v * 32 + lane, granules - 1);
    weights.load(w, k, last, begin);
    granule.load(x + u64{begin} * 16, k * 4, first, rows);
    // Trip counts are equal for a whole warp: it polls together.
#pragma unroll 1
    for (u32 base = v * 32; base < granules; base += kStride) {
      const u32 i = min(base + lane, granules - 1), next = min(base + kStride + lane, granules - 1);
      const float4 factors = norm != nullptr ? read4(norm, i) : make_float4(1, 1, 1, 1);
      const Weights now = weights;
      if (payload) granule.wait(x + u64{i} * 16, k * 4, first, rows);
      const bool valid = base + lane < granules;
      float4 in[BLOCK];
#pragma unroll
      for (u32 b = 0; b < BLOCK; ++b) {
        in[b] = valid ? granule[b] : make_float4(0, 0, 0, 0);
        squares[b] = RowNorm::add4(in[b], squares[b]);
        if (norm != nullptr) in[b] = mul4(in[b], factors);
      }
      weights.load(w, k, last, next);
      granule.load(x + u64{next} * 16, k * 4, first, rows);
#pragma unroll
      for (u32 o = 0; o < kOutputs; ++o) {
#pragma unroll
        for (u32 b = 0; b < BLOCK; ++b) sum[o][b] = dot4(now.row[o], in[b], sum[o][b]);
      }
    }
    keep<BLOCK>(context, v, first - task.tile[2], rows - task.tile[2], sum, squares);
  }

  // A virtual warp's sums, for the end of the task; rows counted from the tile's first.
  template <u32 BLOCK>
  GPURT_FN static void keep(const BodyContext& context, u32 v, u32 first, u32 rows,
                            const f32 (&sum)[kOutputs][BLOCK], const f32 (&squares)[BLOCK]) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
#pragma unroll
    for (u32 b = 0; b < BLOCK; ++b) {
      const u32 row = min(first + b, kRowsMax - 1);
      const bool stores = context.thread % 32 == 0 && first + b < rows;
      const f32 square = over_warp(squares[b]);
      if (stores) scratch.squares[row][v] = square;
#pragma unroll
      for (u32 o = 0; o < kOutputs; ++o) {
        const f32 all = over_warp(sum[o][b]);
        if (stores) scratch.sum[row][o][v] = all;
      }
    }
  }

  GPURT_FN static f32 dot4(const float4& a, const float4& b, f32 sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
  }

  GPURT_FN static f32 over_warp(f32 value) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }

  GPURT_FN static f32 scaled(const TaskRecord& task, f32 z) {
    return scale_and_cap(z, param_f32(task, kMatvecScale), param_f32(task, kMatvecSoftcap));
  }
};

}  // namespace gpurt
