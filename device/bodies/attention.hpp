// attention: of one kv head, for every row of a step: q/k norm, rotary embedding, the cache write,
// then softmax(q k^T) v over the positions that the row sees. graphs/ops/attention.py has the
// contract; attention_kernels.hpp computes.
//
//   all rows: k, v -> cache       so a row sees the keys of earlier rows of the same step
//   each row: page by page        scores -> running maximum -> weights -> sums (online softmax)
//
// Bits: a page's sums are made in the order of its positions, each in the lane that its place in
// the page gives it, and folded in page by page. They depend on the position (and window) alone:
// not on rows, on the context's capacity, or on what lies beyond.
#pragma once
#include "../row_path.hpp"
#include "attention_span.hpp"
#include "context.hpp"
#include "e4m3.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

/// An attention task, decoded. Legend: D head dimension, G query heads of this kv head.
struct AttentionTask {
  const f32* q;           // [rows, heads * D]; if gated [rows, 2 * heads * D]: queries, then gates;
                          // null: the cache is written, and nothing attends
  const f32* kv;          // [rows, 2 * kv_heads * D]
  void* k_cache;          // [pages, kv_heads, page, D]
  void* v_cache;          // the same
  const u32* page_table;  // [slots, pages_per_slot]
  const f32* rope;        // [context, D]; null: nothing is rotated
  const f32* qk_norm;     // [2, D]
  f32* out;               // [rows, heads * D]; null: partials
  f32* partials;          // AttentionSpans
  u32 heads, kv_heads, head_dim, page, pages_per_slot;
  f32 scale, eps;
  u32 cache_dtype;
  u32 window;     // 0: all positions; else the last `window`, in a ring of pages
  u32 norm_kind;  // of q and k: 0 none, 1 with weights, 2 without
  bool gated;
  f32 out_eps;  // above 0: every query head's result is normed
  bool block;   // a row sees to the end of its block
  u32 kv_head;
  u32 group;  // G
  u32 spans;  // 0: all positions at once
  u32 split;  // has the spans s with s % splits == split
  u32 splits;

  /// Whether the task is the one that sums, and writes, what lies at a position.
  bool owns(u32 position) const {
    return spans == 0 || position / kAttentionSpan % splits == split;
  }

  /// Elements from a cache's start to (slot, position) of this kv head.
  u64 cache_at(u32 slot, u32 position) const {
    const u32 index = position / page % pages_per_slot;
    const u64 entry = page_table[u64{slot} * pages_per_slot + index];
    return ((entry * kv_heads + kv_head) * page + position % page) * head_dim;
  }

  /// The first position that a row at `position` sees.
  u32 first_seen(u32 position) const {
    return window != 0 && position + 1 > window ? position + 1 - window : 0;
  }

  /// The first position after those that row r of `count` sees.
  u32 end_seen(const RowState* rows, u32 count, u32 r) const {
    if (!block) return rows[r].position + 1;
    u32 last = r;
    while (last + 1 < count && rows[last + 1].slot == rows[r].slot) ++last;
    const u32 end = rows[last].position + 1;
    return window != 0 && rows[r].position + window < end ? rows[r].position + window : end;
  }
};

inline AttentionTask read_attention(const TaskRecord& record) {
  AttentionTask task{};
  task.q = arg<const f32>(record, 0);
  task.kv = arg<const f32>(record, 1);
  task.k_cache = arg<void>(record, 2);
  task.v_cache = arg<void>(record, 3);
  task.page_table = arg<const u32>(record, 4);
  task.rope = record.param[9] != 0 ? arg<const f32>(record, 5) : nullptr;
  task.qk_norm = arg<const f32>(record, 6);
  task.out = arg<f32>(record, 7);
  task.heads = record.param[0];
  task.kv_heads = record.param[1];
  task.head_dim = record.param[2];
  task.page = record.param[3];
  task.pages_per_slot = record.param[4];
  task.scale = param_f32(record, 5);
  task.eps = param_f32(record, 6);
  task.cache_dtype = record.param[7];
  task.window = record.param[8];
  task.norm_kind = record.param[10];
  task.gated = record.param[11] != 0;
  task.out_eps = param_f32(record, 12);
  task.block = record.param[13] != 0;
  task.kv_head = record.tile[0];
  task.group = task.heads / task.kv_heads;
  task.partials = arg<f32>(record, 8);
  task.spans = record.param[14];
  task.split = record.tile[1];
  task.splits = record.tile[2];
  return task;
}

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "attention_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt {

struct attention {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    GPURT_AT_LEVEL(attention_run, host::read_attention(record), context);
    return kFaultNone;
  }
};

}  // namespace gpurt
