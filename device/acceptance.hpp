// Acceptance: how many of a block's proposals the target made too.
//
//   row      t0 (last token)   d1          d2          d3        positions n .. n + 3
//   sampled  t1                t2          t3          -         the target's choice after each row
//            d1 == t1          d2 == t2    d3 != t3              accepted: 2
//   committed: t1 t2 t3; t3 is fed next, at position n + 3, over the K/V that d3 left there
//
// The rule is the same for greedy and for sampled decoding. `sample` draws each row's token from
// the target's distribution with a number of (seed, position) alone, so a proposal d is accepted
// with probability p(d), and a token that differs has the distribution of p without d: the
// rejection rule for a drafter that gives one token and no probabilities. And since the number
// drawn at a position does not depend on what was proposed, the text is that of decoding without a
// drafter, token for token. One function decides, for the drafter that goes on from the committed
// tokens and for advance, which commits them.
#pragma once
#include "task_record.hpp"

namespace gpurt {

// Rows of the block that begins with sample row `first`: its anchor and its proposals.
GPURT_FN u32 block_rows(const RowState* rows, const u32* sample_rows, u32 sample_count, u32 first) {
  u32 end = first + 1;
  while (end < sample_count && (rows[sample_rows[end]].flags & kRowProposal) != 0) ++end;
  return end - first;
}

// sampled: by sample row, as sample_rows is.
GPURT_FN u32 accepted_proposals(const RowState* rows, const u32* sample_rows, const u32* sampled,
                                u32 sample_count, u32 first) {
  u32 count = 0;
  for (u32 next = first + 1; next < sample_count; ++next, ++count) {
    const RowState& row = rows[sample_rows[next]];
    if ((row.flags & kRowProposal) == 0 || row.token != sampled[next - 1]) break;
  }
  return count;
}

GPURT_FN bool is_stop_id(const SlotState& slot, u32 token) {
  for (u32 i = 0; i < slot.stop_count; ++i)
    if (slot.stop_ids[i] == token) return true;
  return false;
}

// Whether a sequence that commits `count` tokens in this step may use a proposal in the next. No
// more than a guess that saves work: advance decides, which also knows of cancels.
GPURT_FN bool wants_proposals(const SlotState& slot, const u32* committed, u32 count) {
  if (slot.produced + count + 2 > slot.max_tokens) return false;  // one comes without
  if ((slot.flags & kRequestIgnoreStop) != 0) return true;
  for (u32 i = 0; i < count; ++i)
    if (is_stop_id(slot, committed[i])) return false;
  return true;
}

}  // namespace gpurt
