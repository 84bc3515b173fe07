// matvec_f32 on the GPU: matvec with `exact`, in float32 from end to end: y = softcap(scale W xn).
//
// For weights where bf16 would change what a model decides: a router. The contract is in
// graphs/ops/matvec.py; W stays row-major float32. A task computes 4 rows of W (the last one may
// have fewer) for some rows of the step, one granule of y each. K is dealt granule by granule to 16
// virtual warps, whatever the team. W, times the norm's factors, is in registers before the edges
// of the task are met (K up to 8192), and stays there for all its rows. Payload inputs are polled,
// payload outputs stored as granules: their rows are whole granules.
#pragma once
#include "../stream.cuh"
#include "matvec_scale.cuh"
#include "published.cuh"
#include "row_norm.cuh"
#include "rows.cuh"

namespace gpurt {

struct matvec_f32 {
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgResidual, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kEps, kYRanks = 11 };
  static constexpr bool kEntersEarly = true;
  static constexpr u32 kRowsMax = 16;
  static constexpr u32 kOutputs = 4;  // rows of W
  static constexpr u32 kKept = 4;     // granules of a row that a lane has in registers: a part of K
  static constexpr u32 kStride = RowNorm::kVirtual * 32;
  static constexpr u32 kPart = kKept * kStride;

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
    const u32 granules = task.param[kK] / 4, lane = context.thread % 32;
    TileRows rows{task.tile[2], task.tile[2] + 1};
    bool waits = true;  // until then all of it is gone through once for its code
    store(*context.slot, context.scratch, rows, false);
#pragma unroll 1
    for (u32 v = context.thread / 32; v < RowNorm::kVirtual; v += context.team_threads / 32) {
      u32 first = v * 32 + lane;
      do {
        Weights weights;
        weights.load(task, first);
        for (;;) {
#pragma unroll 1
          for (u32 row = rows.begin; row < rows.end; ++row) {
            Sums sums{};
            sums.add(task, context, weights, row, first, !waits);
            sums.keep(task, context, v, row - rows.begin, first < kPart);
          }
          if (!waits) break;
          waits = false;
          if (!wait_edges(context)) return;
          rows = TileRows::of(task, context);
          if (rows.begin >= rows.end) return;  // all threads
        }
        first += kPart;
      } while (first - lane < granules);
    }
    context.sync();
    store(*context.slot, context.scratch, rows, true);
  }

 private:
  // Granule `first + i * kStride` of each of the rows of W, times the norm's factors; zeros beyond.
  struct Weights {
    float4 w[kKept][kOutputs];

    GPURT_FN void load(const TaskRecord& task, u32 first) {
      const u32 k = task.param[kK], last = task.tile[1] - task.tile[0] - 1;
      const f32* from = arg<const f32>(task, kArgW) + u64(task.tile[0]) * k;
      const f32* norm = arg<const f32>(task, kArgNorm);
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        const u32 at = min(first + i * kStride, k / 4 - 1);
#pragma unroll
        for (u32 o = 0; o < kOutputs; ++o) w[i][o] = read4(from + u64(min(o, last)) * k, at);
      }
#pragma unroll
      for (u32 i = 0; norm != nullptr && i < kKept; ++i) {
        const float4 factors = read4(norm, min(first + i * kStride, k / 4 - 1));
#pragma unroll
        for (u32 o = 0; o < kOutputs; ++o) w[i][o] = mul4(w[i][o], factors);
      }
    }
  };

  // A lane's part of a row's sums.
  struct Sums {
    f32 sum[kOutputs];
    f32 squares;

    // All lanes of a warp, converged: they poll together.
    GPURT_FN void add(const TaskRecord& task, const BodyContext& context, const Weights& weights,
                      u32 row, u32 first, bool polls) {
      const u32 granules = task.param[kK] / 4;
      const bool payload = polls && (task.payload_mask & (1 << kArgX)) != 0;
      const u64 from =
          reinterpret_cast<u64>(context.address<const f32>(task, kArgX)) + u64(row) * granules * 16;
      uint4 x[kKept];
      bool any;
      u32 looks = 0;
      do {
        any = false;
#pragma unroll
        for (u32 i = 0; i < kKept; ++i)
          x[i] = ld_relaxed_b128(from + u64{min(first + i * kStride, granules - 1)} * 16);
#pragma unroll
        for (u32 i = 0; i < kKept; ++i) any |= is_sentinel(x[i]);
      } while (payload_missing(payload && any, looks));
#pragma unroll
      for (u32 i = 0; i < kKept; ++i) {
        if (first + i * kStride >= granules) break;
        const float4 in = float4_of(x[i]);
        squares = RowNorm::add4(in, squares);
#pragma unroll
        for (u32 o = 0; o < kOutputs; ++o) sum[o] = dot4(weights.w[i][o], in, sum[o]);
      }
    }

    // The sum over the warp, added to that of earlier parts of K. Of four outputs at once: each
    // exchange leaves a lane half of those it had.
    GPURT_FN void keep(const TaskRecord& task, const BodyContext& context, u32 v, u32 row,
                       bool is_first) const {
      Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
      const u32 lane = context.thread % 32;
      const bool high = (lane & 16) != 0, odd = (lane & 8) != 0;
      const f32 a = exchanged(sum[0], sum[2], high, 16), b = exchanged(sum[1], sum[3], high, 16);
      f32 all = exchanged(a, b, odd, 8);
#pragma unroll
      for (u32 step = 4; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
      if (lane % 8 == 0) put_sum(scratch.sum[row][lane / 8][v], all, is_first);
      if (task.addr[kArgNorm] == 0) return;
      f32 square = squares;
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
      if (lane == 0) put_sum(scratch.squares[row][v], square, is_first);
    }
  };

  GPURT_FN static void put_sum(f32& to, f32 sum, bool is_first) { to = is_first ? sum : to + sum; }

  // One of two values, of this lane and of the one `step` away, which has the other's sum.
  GPURT_FN static f32 exchanged(f32 low, f32 high, bool is_high, u32 step) {
    return (is_high ? high : low) + __shfl_xor_sync(~0u, is_high ? low : high, step);
  }

  // A lane an output: the sums of all virtual warps; then a granule of four lanes, on every rank if
  // so, the ranks dealt to these lanes. Called twice: first for its code alone, and stores nothing.
  __device__ __noinline__ static void store(Slot& slot, u8* room, TileRows rows, bool is_real) {
    const TaskRecord& task = slot.record;
    const BodyContext context = context_of(slot, room);
    const Scratch& scratch = *reinterpret_cast<const Scratch*>(room);
    const u32 outputs = (rows.end - rows.begin) * kOutputs, lane = context.thread % 32;
#pragma unroll 1
    for (u32 base = context.thread - lane; base < outputs; base += context.team_threads) {
      const u32 i = min(base + lane, outputs - 1), row = i / kOutputs;
      f32 y = total(scratch.sum[row][i % kOutputs]);
      if (task.addr[kArgNorm] != 0) {
        const f32 square = __fdiv_rn(total(scratch.squares[row]), static_cast<f32>(task.param[kK]));
        y *= rsqrtf(square + param_f32(task, kEps));
      }
      y = scaled(task, y);
      f32 four[kOutputs];
#pragma unroll
      for (u32 o = 0; o < kOutputs; ++o)
        four[o] = __shfl_sync(~0u, y, (lane & ~(kOutputs - 1)) + o);
      put(task, context, rows.begin + row, lane % kOutputs, y, four,
          is_real && base + lane < outputs);
    }
  }

  // RowNorm::total() by wide loads.
  GPURT_FN static f32 total(const RowNorm::Partial& partial) {
    const float4* parts = reinterpret_cast<const float4*>(partial);
    float4 chain{};
#pragma unroll
    for (u32 i = 0; i < RowNorm::kVirtual / 4; ++i) {
      const float4 part = parts[i];
      chain = make_float4(chain.x + part.x, chain.y + part.y, chain.z + part.z, chain.w + part.w);
    }
    return (chain.x + chain.y) + (chain.z + chain.w);
  }

  // Output `o` of the four, or all of them on this lane's ranks: every fourth.
  GPURT_FN static void put(const TaskRecord& task, const BodyContext& context, u32 row, u32 o,
                           f32 own, const f32 (&four)[kOutputs], bool stores) {
    const u64 base = reinterpret_cast<u64>(context.address<f32>(task, kArgY));
    const u32* published = task.param + kYRanks;
    if (kMatvecPublished && published[0] != 0) {
      const u64 first = Copies::first_of(published, base, row, task.tile[0]);
      u64 far[kRanksMax / kOutputs];  // under way together
#pragma unroll
      for (u32 i = 0; i < kRanksMax / kOutputs; ++i)
        far[i] = Copies::offset_of(published, min(o + i * kOutputs, published[0] - 1));
#pragma unroll
      for (u32 i = 0; i < kRanksMax / kOutputs; ++i) {
        if (stores && o + i * kOutputs < published[0])
          store_granule(first + far[i], four[0], four[1], four[2], four[3]);
      }
      return;
    }
    const u64 to = base + (u64(row) * task.param[kN] + task.tile[0]) * 4;
    if ((task.payload_mask & (1 << kArgY)) != 0) {
      if (stores && o == 0) store_granule(to, four[0], four[1], four[2], four[3]);
    } else if (stores && task.tile[0] + o < task.tile[1]) {
      at<f32>(to)[o] = own;
    }
  }

  GPURT_FN static f32 dot4(const float4& a, const float4& b, f32 sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
  }

  GPURT_FN static f32 scaled(const TaskRecord& task, f32 z) {
    return scale_and_cap(z, param_f32(task, kMatvecScale), param_f32(task, kMatvecSoftcap));
  }
};

}  // namespace gpurt
