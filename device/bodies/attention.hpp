// attention: of one kv head, for every row of a step: q/k norm, rotary embedding, the cache write,
// then softmax(q k^T) v over positions 0..position of the row's slot. graphs/ops/attention.py has
// the contract; attention_kernels.hpp computes.
//
//   all rows: k, v -> cache       so a row sees the keys of earlier rows of the same step
//   each row: page by page        scores -> running maximum -> weights -> sums (online softmax)
//
// Bits: a page's sums are made in the order of its positions and folded in page by page, so they
// depend on the position alone: not on rows, on the context's capacity, or on what lies beyond.
#pragma once
#include "context.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

/// An attention task, decoded. Legend: D head dimension, G query heads of this kv head.
struct AttentionTask {
  const f32* q;           // [rows, heads * D]
  const f32* kv;          // [rows, 2 * kv_heads * D]
  void* k_cache;          // [pages, kv_heads, page, D]
  void* v_cache;          // the same
  const u32* page_table;  // [slots, pages_per_slot]
  const f32* rope;        // [context, D]
  const f32* qk_norm;     // [2, D]; null: none
  f32* out;               // [rows, heads * D]
  u32 heads, kv_heads, head_dim, page, pages_per_slot;
  f32 scale, eps;
  u32 cache_dtype;
  u32 kv_head;
  u32 group;  // G

  /// Elements from a cache's start to (slot, position) of this kv head.
  u64 cache_at(u32 slot, u32 position) const {
    const u64 entry = page_table[u64{slot} * pages_per_slot + position / page];
    return ((entry * kv_heads + kv_head) * page + position % page) * head_dim;
  }
};

inline AttentionTask read_attention(const TaskRecord& record) {
  AttentionTask task{};
  task.q = arg<const f32>(record, 0);
  task.kv = arg<const f32>(record, 1);
  task.k_cache = arg<void>(record, 2);
  task.v_cache = arg<void>(record, 3);
  task.page_table = arg<const u32>(record, 4);
  task.rope = arg<const f32>(record, 5);
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
  task.kv_head = record.tile[0];
  task.group = task.heads / task.kv_heads;
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
