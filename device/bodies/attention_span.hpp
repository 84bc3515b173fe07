// Spans of positions: attention's sums are made span by span and folded in their order, by
// attention_merge where the context holds several. Host and device.
#pragma once
#include "../types.hpp"

namespace gpurt {

constexpr u32 kAttentionSpan = 2048;  // SPAN of graphs/ops/attention.py
constexpr u32 kPartialPad = 4;        // words behind a head's sums: maximum, total, two to align

struct AttentionSpans {
  u32 kv_heads, spans, group, head_dim;

  // First word of a query head's sums in `partials`: [rows, kv_heads, spans, group, D + pad].
  GPURT_FN u64 word(u32 row, u32 kv_head, u32 span, u32 head) const {
    const u64 at = ((u64{row} * kv_heads + kv_head) * spans + span) * group + head;
    return at * (head_dim + kPartialPad);
  }
};

}  // namespace gpurt
