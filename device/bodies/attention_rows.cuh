// attention for steps of many rows: sixteen of them at a time are what attention.cuh takes.
//
// graphs/ops/attention_rows_cuda.py has the contract. A task has rows [begin, end) of the step, in
// the halves of tile[3]. It either writes their keys and values, or attends: all rows' are in the
// cache then, so a task makes no vectors but its queries. Sixteen rows are seen through a shape
// whose arguments begin with the first of them; all else, bits too, is attention_of's. Of one span
// a warp has tiles for itself, and the team's chunks in common (attention_alone.cuh). With more it
// is attention_split_of's, of which the task has all spans: a chunk of positions is read for eight
// columns at a time (attention_mma_tiles.cuh), whose sums take the whole weight ring.
#pragma once
#include "attention_alone.cuh"
#include "attention_split.cuh"
#include "ring_body.cuh"

namespace gpurt {

template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS, bool SPLIT>
struct attention_rows_of {
  static constexpr u32 kTiles = 2;
  using Whole = attention_of<D, GROUP, CACHE, EXTRAS, SPLIT, kTiles>;
  static constexpr u32 kRows = Whole::kRowsMax;
  enum Arg : u32 { kArgQ };

  static_assert(sizeof(typename Whole::Scratch) <= kRingBytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32 begin = task.tile[3] & 0xFFFF, end = min(task.tile[3] >> 16, context.step->rows);
#pragma unroll 1
    for (u32 first = begin; first < end; first += kRows) {
      const u32 count = min(end - first, kRows);
      BodyContext of_part = context;
      of_part.rows += first;
      Whole::look_up(task, of_part, count);
      if (threadIdx.x == 0) begin_with(first, Whole::scratch().shape);
      team_sync();
      if (task.addr[kArgQ] == 0) {
        Whole::make_vectors(Crew::team(), count, 0, 0);
      } else {
        attend();
      }
      team_sync();
    }
  }

 private:
  // The task as if the step began with row `first`.
  GPURT_FN static void begin_with(u32 first, AttentionShape& s) {
    const u32 q_heads = EXTRAS && s.gated ? 2 * s.heads : s.heads;
    const AttentionSpans spans{s.kv_heads, s.spans, GROUP, D};
    s.q += u64{first} * q_heads * D;
    s.kv += u64{first} * 2 * s.kv_heads * D;
    s.out += u64{first} * s.heads * D;
    if constexpr (SPLIT) s.partials += spans.word(first, 0, 0, 0);
  }

  GPURT_FN static void attend() {
    if constexpr (Whole::kIsAlone) {
      attend_alone();
    } else if constexpr (SPLIT) {
      attention_split_of<D, GROUP, CACHE, EXTRAS, kTiles>::attend();
    } else {
      Whole::attend();
    }
  }

  // As many rows at a time as there is room for queries.
  GPURT_FN static void attend_alone() {
    const AttentionShape& s = Whole::shape();
    using Alone = AttentionAlone<Whole, D, GROUP, CACHE, EXTRAS, SPLIT>;
#pragma unroll 1
    for (u32 first = s.row_begin; first < s.row_end; first = Whole::queries_end(first)) {
      const u32 end = Whole::queries_end(first);
      Whole::make_vectors(Crew::team(), 0, first, end - first);
      team_sync();
      static_assert(Alone::kScratch <= kRingBytes);
      Alone::attend(first, end);
      team_sync();
    }
  }
};

}  // namespace gpurt
