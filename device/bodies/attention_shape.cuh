// What all of an attention task's functions read of it: worked out once, by one thread, into
// scratch.
//
// A function that is called takes it from there: a context or a record handed over by reference
// lies in local memory, and what is worked out anew in each function is code to fetch.
#pragma once
#include "attention_place.cuh"
#include "attention_span.hpp"

namespace gpurt {

// floor(2^32 / d) + 1, for divided().
GPURT_FN u32 inverse_of(u32 d) {
  return d == 1 ? 0 : ~0u / d + 1;
}
// n / d, for n * d below 2^32 and d above 1: a division is 25 instructions.
GPURT_FN u32 divided(u32 n, u32 inverse) {
  return inverse == 0 ? n : __umulhi(n, inverse);
}

struct AttentionRange {
  u32 begin, end;
  // In one word of the record; 0: all of `count`.
  GPURT_FN static AttentionRange of(u32 packed, u32 count) {
    return packed == 0 ? AttentionRange{0, count}
                       : AttentionRange{packed & 0xFFFF, min(packed >> 16, count)};
  }
};

struct AttentionShape {
  u64 k_cache, v_cache;
  const u32* page_table;
  const f32* rope;
  const f32* qk_norm;  // null: no norm, or one without weights
  const f32* q;
  const f32* kv;
  f32* out;
  f32* partials;
  u32 heads, kv_heads, kv_head, page_log2;
  u32 pages_per_slot, pages_inverse;
  f32 scale_log2e, eps;
  u32 rows;                                 // of the step, or of the part of it at hand
  u32 row_begin, row_end;                   // the task's
  u32 head_begin, head_end, heads_inverse;  // of the kv head's query heads, which are the task's
  u32 split, splits, spans;                 // spans s with s % splits == split are the task's
  bool q_payload, kv_payload;
  // With extras:
  bool rotates, norms, gated;
  u32 window;   // 0: all positions
  f32 out_eps;  // 0: no norm of the output

  template <bool EXTRAS, bool SPLIT>
  GPURT_FN static void make(const TaskRecord& task, const BodyContext& context, u32 group, u32 rows,
                            AttentionShape& s) {
    const u32* param = task.param;
    s.heads = param[0], s.kv_heads = param[1], s.kv_head = task.tile[0];
    s.page_log2 = 31 - __clz(static_cast<i32>(param[3]));  // a power of two
    s.pages_per_slot = param[4], s.pages_inverse = inverse_of(param[4]);
    s.scale_log2e = param_f32(task, 5) * 1.44269504f;
    s.eps = param_f32(task, 6);
    s.q = context.address<const f32>(task, 0);
    s.kv = context.address<const f32>(task, 1);
    s.k_cache = task.addr[2], s.v_cache = task.addr[3];
    s.page_table = arg<const u32>(task, 4);
    s.rope = arg<const f32>(task, 5);
    s.qk_norm = arg<const f32>(task, 6);
    s.out = context.address<f32>(task, 7);
    s.q_payload = (task.payload_mask & 1) != 0, s.kv_payload = (task.payload_mask & 2) != 0;
    s.rows = rows;
    const AttentionRange own = AttentionRange::of(SPLIT ? 0 : task.tile[1], rows);
    s.row_begin = own.begin, s.row_end = own.end;
    const AttentionRange heads = AttentionRange::of(SPLIT ? 0 : task.tile[2], ~0u);
    s.head_begin = heads.begin, s.head_end = min(heads.end, group);
    s.heads_inverse = inverse_of(s.head_end - s.head_begin);
    if constexpr (SPLIT) {
      s.partials = arg<f32>(task, 8);
      s.split = task.tile[1], s.splits = task.tile[2], s.spans = param[14];
    }
    s.window = 0;
    if constexpr (EXTRAS) {
      s.window = param[8];
      s.rotates = param[9] != 0;
      s.norms = param[10] != 0;
      if (param[10] != 1) s.qk_norm = nullptr;
      s.gated = param[11] != 0;
      s.out_eps = param_f32(task, 12);
    }
  }
};

}  // namespace gpurt
