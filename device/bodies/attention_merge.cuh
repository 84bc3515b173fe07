// attention_merge on the GPU: a row's heads from the sums of its spans, folded in their order.
//
// The contract is in graphs/ops/attention_merge.py; attention_split.cuh leaves the sums. A task
// handles all rows for one kv head, or some of many, four outputs a thread. Floor: rows * heads *
// (D + 4) words a span, from L2.
#pragma once
#include "attention_output.cuh"
#include "attention_span.hpp"
#include "elements.cuh"

namespace gpurt {

struct attention_merge {
  enum Arg : u32 { kArgPartials, kArgQ, kArgOut };
  enum Param : u32 { kHeads, kKvHeads, kHeadDim, kWindow, kOutEps, kSpans };

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[kHeadDim] == 64) return run_of<64>(task, context);
    run_of<128>(task, context);
  }

 private:
  // Trip counts are equal for a whole warp, since the norm and polls for the gate are collective; a
  // lane beyond the last output repeats it, and stores nothing.
  template <u32 D>
  __device__ __noinline__ static void run_of(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kFours = D / 4;
    static_assert(32 % kFours == 0, "a head's outputs lie in one warp");
    const u32 heads = task.param[kHeads], group = heads / task.param[kKvHeads];
    const AttentionSpans spans{task.param[kKvHeads], task.param[kSpans], group, D};
    const u32 lane = context.thread % 32, packed = task.tile[3];  // rows; 0: all
    const u32 first = packed & 0xFFFF, rows = context.step->rows;
    const u32 last = packed == 0 ? rows : min(packed >> 16, rows);
    const u32 jobs = first < last ? (last - first) * group * kFours : 0;
    const f32 out_eps = param_f32(task, kOutEps);
    const bool q_payload = (task.payload_mask >> kArgQ & 1) != 0;
#pragma unroll 1
    for (u32 base = context.thread - lane; base < jobs; base += context.team_threads) {
      const u32 at = min(base + lane, jobs - 1), four = at % kFours * 4;
      const u32 row = first + at / (group * kFours), h = at / kFours % group;
      const u32 column = (task.tile[0] * group + h) * D + four;
      const f32* q = context.address<const f32>(task, kArgQ);
      // Gates lie behind all query heads of a row.
      const u64 gates = reinterpret_cast<u64>(q + (u64(row) * 2 + 1) * heads * D + column);
      uint4 gate{};
      if (q != nullptr) gate = ld_relaxed_b128(gates);
      f32 out[4];
      const f32 sum = fold(task, spans, row, context.rows[row].position, h, four, out);
      __syncwarp();
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[i] = __fdividef(out[i], sum);
      if (out_eps > 0) norm_head<D>(out_eps, out);
      if (q != nullptr) gate_head(gate, gates, q_payload, out);
      f32* to = context.address<f32>(task, kArgOut) + u64(row) * heads * D + column;
      if (base + lane < jobs)
        store_granule(reinterpret_cast<u64>(to), out[0], out[1], out[2], out[3]);
    }
  }

  // Four sums of a head over all spans that the row sees; returns their total.
  GPURT_FN static f32 fold(const TaskRecord& task, const AttentionSpans& spans, u32 row,
                           u32 position, u32 h, u32 four, f32 (&out)[4]) {
    const u32 window = task.param[kWindow], d = spans.head_dim;
    const u32 seen = window == 0 || position < window ? 0 : position + 1 - window;
    const u32 begin = seen / kAttentionSpan, end = position / kAttentionSpan;
    const f32* from = arg<const f32>(task, kArgPartials) + spans.word(row, task.tile[0], begin, h);
    const u64 stride = u64{spans.group} * (d + kPartialPad);
    f32 top = from[d], sum = from[d + 1];
    const float4 one = *reinterpret_cast<const float4*>(from + four);
    out[0] = one.x, out[1] = one.y, out[2] = one.z, out[3] = one.w;
#pragma unroll 4
    for (u32 span = begin + 1; span <= end; ++span) {
      from += stride;
      const float4 x = *reinterpret_cast<const float4*>(from + four);
      const f32 larger = fmaxf(top, from[d]);
      const f32 mine = ex2_approx_ftz(top - larger), theirs = ex2_approx_ftz(from[d] - larger);
      sum = fmaf(from[d + 1], theirs, sum * mine);
      out[0] = fmaf(x.x, theirs, out[0] * mine), out[1] = fmaf(x.y, theirs, out[1] * mine);
      out[2] = fmaf(x.z, theirs, out[2] * mine), out[3] = fmaf(x.w, theirs, out[3] * mine);
      top = larger;
    }
    return sum;
  }
};

}  // namespace gpurt
