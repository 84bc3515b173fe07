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
  static_assert(kAttentionSpan % (kVirtualWarps * Whole::kChunk) == 0, "spans begin with warp 0");

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Whole::look_up(task, context, context.step->rows);
    attend();
  }

  GPURT_FN static void attend() {
    const AttentionShape& s = Whole::shape();
    u32 last = 0;  // span of the longest row
#pragma unroll 1
    for (u32 row = 0; row < s.rows; ++row)
      last = max(last, Whole::place(row).position / kAttentionSpan);
    if (s.split > last) return;  // all threads: nothing lies in its spans yet
    ask_first(s.split * kAttentionSpan);
#pragma unroll 1
    for (u32 first = 0; first < s.rows; first = Whole::queries_end(first)) {
      const u32 end = Whole::queries_end(first);
      const u32 kv_rows = first == 0 && !Whole::kKeysAreThere ? s.rows : 0;
      Whole::make_vectors(Crew::team(), kv_rows, first, end - first);
      team_sync();
#pragma unroll 1
      for (u32 row = first; row < end;) row = fold(row, first, end);
    }
  }

  // This task's spans of the tile that begins with `row`, all heads; the row behind the tile.
  __device__ __noinline__ static u32 fold(u32 row, u32 first, u32 end) {
    const AttentionTile whole = Whole::tile_at(row, end);
    const AttentionShape& s = Whole::shape();
    Waits waits = kNoWaits;
#pragma unroll 1
    for (u32 span = s.split; span * kAttentionSpan < whole.end; span += s.splits) {
      AttentionTile tile = whole;
      tile.end = min(whole.end, (span + 1) * kAttentionSpan);
      if (tile.end <= tile.seen) continue;
#pragma unroll 1
      for (tile.head = 0; tile.head < GROUP; tile.head += Whole::kHeads) {
        Whole::take_heads(tile, tile.head);
        if constexpr (Whole::kInTurns) {
          const auto sums = Whole::sums_of(tile, first, span * kAttentionSpan);
#pragma unroll 1
          for (u32 low = 0; low < tile.columns(); low += Whole::kParked) {
            const u32 high = min(low + Whole::kParked, tile.columns());
            Whole::park(sums, low, high);
            team_sync();
            leave(tile, span, low, high);
            team_sync();
          }
        } else {
          Whole::fold(tile, first, span * kAttentionSpan, waits);
          team_sync();
          leave(tile, span, 0, tile.columns());
          team_sync();
        }
      }
    }
    return row + whole.rows;
  }

 private:
  // What its warps read first, from position `from` on, into L2: asked while the queries are still
  // on their way.
  GPURT_FN static void ask_first(u32 from) {
    if constexpr (Whole::kInTurns) {
      const AttentionTile tile = Whole::tile_at(0, Whole::shape().rows);
      const typename Whole::Cache cache = Whole::cache_of(Whole::place(0).slot);
      u32 begin = tile.template start<Whole::kChunk>(threadIdx.x / 32, from);
#pragma unroll 1
      for (u32 i = 0; i < 2 && begin < tile.end; ++i, begin += Whole::Fold::kStride)
        Whole::Fold::ask(cache, cache.page(begin), begin, threadIdx.x % 32);
    }
  }

  // Sums of the columns [low, high) of a tile over a span, of rows that see some of it. Trip counts
  // are equal for a whole warp.
  GPURT_FN static void leave(const AttentionTile& tile, u32 span, u32 low, u32 high) {
    const AttentionShape& s = Whole::shape();
    const AttentionSpans spans{s.kv_heads, s.spans, GROUP, D};
    constexpr u32 kFours = D / 4;
    const u32 jobs = (high - low) * kFours, lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 base = threadIdx.x - lane; base < jobs; base += kTeamThreads) {
      const u32 at = min(base + lane, jobs - 1);
      const u32 column = low + at / kFours, row = tile.row_of(column), four = at % kFours;
      f32 out[4], top;
      const f32 total = Whole::merge_sums(column - low, four, out, top);
      const Place& place = Whole::place(row);
      const u32 end = min(place.end(), tile.end);
      if (base + lane >= jobs || end <= span * kAttentionSpan || end <= Whole::seen_from(place))
        continue;
      f32* to = s.partials + spans.word(row, s.kv_head, span, tile.head_of(column));
      *reinterpret_cast<float4*>(to + four * 4) = make_float4(out[0], out[1], out[2], out[3]);
      if (four == 0) to[D] = top, to[D + 1] = total;
    }
  }
};

}  // namespace gpurt
