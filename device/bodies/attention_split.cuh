// attention where the context holds several spans of positions: the sums of a task's spans.
//
// graphs/ops/attention.py has the contract. Tasks (kv head, split): a task has the spans s with
// s % splits == split. It writes the keys and values of the step's rows that lie there, so that no
// other task reads them, and leaves each span's sums in `partials`; attention_merge.cuh folds them.
// Inside a span all is as in attention.cuh: chunk c belongs to virtual warp c % 16, whose partials
// are merged in their order. So sums hang on positions alone, and a context of one span has the
// bits of attention_of.
#pragma once
#include "attention.cuh"

namespace gpurt {

template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS = false>
struct attention_split_of {
  using Whole = attention_of<D, GROUP, CACHE, EXTRAS, true>;
  using Place = typename Whole::Place;
  using Scratch = typename Whole::Scratch;
  using Shape = typename Whole::Shape;
  static constexpr u32 kWarpsLog2 = 4;  // of the virtual warps
  static_assert(kAttentionSpan % (kVirtualWarps * Whole::kChunk) == 0, "spans begin with warp 0");

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = Whole::scratch_of(context);
    const u32 rows = context.step->rows;
    if (context.thread < rows) scratch.place[context.thread] = Place::of(task, context);
    context.sync();
    u32 last = 0;  // span of the longest row
#pragma unroll 1
    for (u32 row = 0; row < rows; ++row)
      last = max(last, scratch.place[row].position / kAttentionSpan);
    if (task.tile[1] > last) return;  // all threads: nothing lies in its spans yet
    const u32 rows_at_once = min(Whole::kQueryRows, Whole::kItemsMax >> kWarpsLog2);
#pragma unroll 1
    for (u32 first = 0; first < rows; first += rows_at_once) {
      const u32 here = min(rows_at_once, rows - first);
      Whole::make_vectors(task, context, first == 0 ? rows : 0, first, here);
      context.sync();
#pragma unroll 1
      for (u32 span = task.tile[1]; span <= last; span += task.tile[2]) {
#pragma unroll 1
        for (u32 head = 0; head < GROUP; head += Whole::kHeads) {
          fold(task, context, first, here, head, span);
          context.sync();
          leave(task, context, first, here, head, span);
          context.sync();
        }
      }
    }
  }

 private:
  // What a row sees of a span: positions [begin, end), of them from `seen` on. None: end <= seen.
  struct Part {
    u32 begin, end, seen;
    GPURT_FN bool is_empty() const { return end <= begin || end <= seen; }
  };
  GPURT_FN static Part part_of(const TaskRecord& task, const Place& place, u32 span) {
    const u32 begin = span * kAttentionSpan;
    const u32 seen = EXTRAS ? first_seen(task.param[8], place.position) : 0;
    return {begin, min(place.end(), begin + kAttentionSpan), seen};
  }

  // (row, virtual warp) items over the team's warps, heads [head, head + kHeads).
  __device__ __noinline__ static void fold(const TaskRecord& task, const BodyContext& context,
                                           u32 first, u32 here, u32 head, u32 span) {
    const Shape s = Whole::shape_of(task, context);
    Scratch& scratch = Whole::scratch_of(context);
    const u32 lane = context.thread % 32;
#pragma unroll 1
    for (u32 item = context.thread / 32; item < here << kWarpsLog2;
         item += context.team_threads / 32) {
      const u32 row = item >> kWarpsLog2, warp = item % kVirtualWarps;
      const Place place = scratch.place[first + row];
      const Part part = part_of(task, place, span);
      const u32 start = part.begin + warp * Whole::kChunk;
      if (part.is_empty() || start >= part.end) continue;
      const Branch branch = Branch::of(place.position, row_ancestors(context.rows[first + row]));
      const auto sequence = Whole::sequence_of(s, place, part.seen, part.end, lane, branch);
      Whole::fold_heads(sequence, start, sequence.page(start), scratch.query[row], head, lane,
                        scratch.partial + item * Whole::kPartialFloats);
    }
  }

  // Four sums a thread, virtual warps in order.
  __device__ __noinline__ static void leave(const TaskRecord& task, const BodyContext& context,
                                            u32 first, u32 here, u32 head, u32 span) {
    const Scratch& scratch = Whole::scratch_of(context);
    const AttentionSpans spans{task.param[1], task.param[14], GROUP, D};
    constexpr u32 kFours = D / 4;
#pragma unroll 1
    for (u32 at = context.thread; at < here * Whole::kHeads * kFours; at += context.team_threads) {
      const u32 row = at / (Whole::kHeads * kFours), h = at / kFours % Whole::kHeads;
      const Part part = part_of(task, scratch.place[first + row], span);
      if (head + h >= GROUP || part.is_empty()) continue;
      const u32 chunks = (part.end - part.begin + Whole::kChunk - 1) / Whole::kChunk;
      const u32 warps = min(kVirtualWarps, chunks);
      const f32* from = scratch.partial + (row << kWarpsLog2) * Whole::kPartialFloats;
      from += h * Whole::kHeadFloats;
      f32 top = from[D];
      for (u32 w = 1; w < warps; ++w) top = fmaxf(top, from[w * Whole::kPartialFloats + D]);
      f32 sum = 0;
      float4 out = make_float4(0, 0, 0, 0);
#pragma unroll 2
      for (u32 w = 0; w < warps; ++w, from += Whole::kPartialFloats) {
        const f32 weight = ex2_approx_ftz(from[D] - top);
        const float4 x = *reinterpret_cast<const float4*>(from + at % kFours * 4);
        sum = fmaf(from[D + 1], weight, sum);
        out.x = fmaf(x.x, weight, out.x), out.y = fmaf(x.y, weight, out.y);
        out.z = fmaf(x.z, weight, out.z), out.w = fmaf(x.w, weight, out.w);
      }
      f32* to = arg<f32>(task, 8) + spans.word(first + row, task.tile[0], span, head + h);
      *reinterpret_cast<float4*>(to + at % kFours * 4) = out;
      if (at % kFours == 0) to[D] = top, to[D + 1] = sum;
    }
  }
};

}  // namespace gpurt
