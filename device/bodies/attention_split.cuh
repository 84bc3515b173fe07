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

template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS = false, u32 TILES = 1>
struct attention_split_of {
  using Whole = attention_of<D, GROUP, CACHE, EXTRAS, true, TILES>;
  using Place = typename Whole::Place;
  using Scratch = typename Whole::Scratch;
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
#pragma unroll 1
    for (u32 first = 0; first < rows; first += Whole::kQueryRows) {
      const u32 end = min(first + Whole::kQueryRows, rows);
      Whole::make_vectors(task, context, first == 0 ? rows : 0, first, end - first);
      context.sync();
      u32 next = first;
#pragma unroll 1
      for (u32 row = first; row < end; row = next) next = fold(task, context, row, first, end);
    }
  }

  // This task's spans of the tile that begins with `row`, all heads; the row behind the tile.
  __device__ __noinline__ static u32 fold(const TaskRecord& task, const BodyContext& context,
                                          u32 row, u32 first, u32 end) {
    const AttentionTile whole = Whole::tile_at(task, context, row, end);
#pragma unroll 1
    for (u32 span = task.tile[1]; span * kAttentionSpan < whole.end; span += task.tile[2]) {
      AttentionTile tile = whole;
      tile.end = min(whole.end, (span + 1) * kAttentionSpan);
      if (tile.end <= tile.seen) continue;
#pragma unroll 1
      for (tile.head = 0; tile.head < GROUP; tile.head += Whole::kHeads) {
        tile.heads = min(Whole::kHeads, GROUP - tile.head);
        Whole::fold(task, context, tile, first, span * kAttentionSpan);
        context.sync();
        leave(task, context, tile, span);
        context.sync();
      }
    }
    return row + whole.rows;
  }

 private:
  // Sums of a tile over a span, of rows that see some of it.
  GPURT_FN static void leave(const TaskRecord& task, const BodyContext& context,
                             const AttentionTile& tile, u32 span) {
    const Scratch& scratch = Whole::scratch_of(context);
    const AttentionSpans spans{task.param[1], task.param[14], GROUP, D};
    constexpr u32 kFours = D / 4;
#pragma unroll 1
    for (u32 at = context.thread; at < tile.columns() * kFours; at += context.team_threads) {
      const u32 column = at / kFours, row = tile.row_of(column), four = at % kFours;
      const Place& place = scratch.place[row];
      const u32 end = min(place.end(), tile.end);
      if (end <= span * kAttentionSpan || end <= Whole::seen_from(task, place)) continue;
      f32 out[4], top;
      const f32 total = Whole::merge_sums(scratch, column, four, out, top);
      f32* to = arg<f32>(task, 8) + spans.word(row, task.tile[0], span, tile.head_of(column));
      *reinterpret_cast<float4*>(to + four * 4) = make_float4(out[0], out[1], out[2], out[3]);
      if (four == 0) to[D] = top, to[D + 1] = total;
    }
  }
};

}  // namespace gpurt
