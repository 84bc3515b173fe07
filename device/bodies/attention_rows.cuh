// attention for steps of many rows: sixteen of them at a time are what attention.cuh takes.
//
// graphs/ops/attention_rows_cuda.py has the contract. A task has rows [begin, end) of the step, in
// the halves of tile[3]. It either writes their keys and values, or attends: all rows' are in the
// cache then, so a task makes no vectors but its queries. Sixteen rows are seen through a record
// whose arguments begin with the first of them; all else, bits too, is attention_of's, and with
// spans attention_split_of's, of which the task has all. A chunk of positions is read for eight
// columns at a time (attention_mma_tiles.cuh), whose sums take the whole weight ring.
#pragma once
#include "attention_split.cuh"
#include "ring_body.cuh"

namespace gpurt {

template <u32 D, u32 GROUP, u32 CACHE, bool EXTRAS, bool SPLIT>
struct attention_rows_of {
  static constexpr u32 kTiles = 2;
  using Whole = attention_of<D, GROUP, CACHE, EXTRAS, SPLIT, kTiles>;
  static constexpr u32 kRows = Whole::kRowsMax;
  enum Arg : u32 { kArgQ = 0, kArgKv = 1, kArgOut = 7, kArgPartials = 8 };

  struct Scratch {
    typename Whole::Scratch whole;
    TaskRecord view;
  };
  static_assert(sizeof(Scratch) <= kRingBytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 begin = task.tile[3] & 0xFFFF, end = min(task.tile[3] >> 16, context.step->rows);
#pragma unroll 1
    for (u32 first = begin; first < end; first += kRows) {
      const u32 count = min(end - first, kRows);
      BodyContext of_view = context;
      of_view.rows += first;
      if (context.thread == 0) see_from(task, first, scratch.view);
      if (context.thread < count)
        scratch.whole.place[context.thread] = Whole::Place::of(task, of_view);
      context.sync();
      if (task.addr[kArgQ] == 0) {
        Whole::make_vectors(scratch.view, of_view, count, 0, 0);
      } else {
        attend(scratch.view, of_view, count);
      }
      context.sync();
    }
  }

 private:
  // The task as if the step began with row `first`.
  GPURT_FN static void see_from(const TaskRecord& task, u32 first, TaskRecord& view) {
    const u32 heads = task.param[0], kv_heads = task.param[1];
    const u32 q_heads = EXTRAS && task.param[11] != 0 ? 2 * heads : heads;
    const AttentionSpans spans{kv_heads, task.param[14], GROUP, D};
    view = task;
    if (view.addr[kArgQ] != 0) view.addr[kArgQ] += u64{first} * q_heads * D * 4;
    view.addr[kArgKv] += u64{first} * 2 * kv_heads * D * 4;
    view.addr[kArgOut] += u64{first} * heads * D * 4;
    view.addr[kArgPartials] += spans.word(first, 0, 0, 0) * 4;
  }

  GPURT_FN static void attend(const TaskRecord& view, const BodyContext& context, u32 count) {
    if constexpr (!SPLIT) Whole::read_first_pages(view, context, 0, min(count, Whole::kQueryRows));
#pragma unroll 1
    for (u32 first = 0; first < count; first += Whole::kQueryRows) {
      const u32 end = min(first + Whole::kQueryRows, count);
      Whole::make_vectors(view, context, 0, first, end - first);
      context.sync();
      u32 next = first;
#pragma unroll 1
      for (u32 row = first; row < end; row = next) {
        if constexpr (SPLIT) {
          using Split = attention_split_of<D, GROUP, CACHE, EXTRAS, kTiles>;
          next = Split::fold(view, context, row, first, end);
        } else {
          next = Whole::attend(view, context, row, first, end);
        }
      }
    }
  }
};

}  // namespace gpurt
