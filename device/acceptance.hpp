// Acceptance: how many of a block's proposals the target made too.
//
//   row      t0 (last token)   d1          d2          d3        positions n .. n + 3
//   sampled  t1                t2          t3          -         the target's choice after each row
//            d1 == t1          d2 == t2    d3 != t3              accepted: 2
//   committed: t1 t2 t3; t3 is fed next, at position n + 3, over the K/V that d3 left there
//
// In a tree (row_path.hpp) a proposal is compared with what its parent's row sampled, and of the
// children of one row the first that is right goes on.
//
// The rule is the same for greedy and for sampled decoding. `sample` draws each row's token from
// the target's distribution with a number of (seed, position) alone, so a proposal d is accepted
// with probability p(d), and a token that differs has the distribution of p without d: the
// rejection rule for a drafter that gives one token and no probabilities. And since the number
// drawn at a position does not depend on what was proposed, the text is that of decoding without a
// drafter, token for token. One function decides, for the drafter that goes on from the committed
// tokens and for advance, which commits them.
#pragma once
#include "row_path.hpp"

namespace gpurt {

// Rows of the block that begins with sample row `first`: its anchor and its proposals.
GPURT_FN u32 block_rows(const RowState* rows, const u32* sample_rows, u32 sample_count, u32 first) {
  u32 end = first + 1;
  while (end < sample_count && (rows[sample_rows[end]].flags & kRowProposal) != 0) ++end;
  return end - first;
}

// How many proposals of that block are accepted, if it is a chain. sampled: by sample row, as
// sample_rows is.
GPURT_FN u32 accepted_proposals(const RowState* rows, const u32* sample_rows, const u32* sampled,
                                u32 sample_count, u32 first) {
  u32 count = 0;
  for (u32 next = first + 1; next < sample_count; ++next, ++count) {
    const RowState& row = rows[sample_rows[next]];
    if ((row.flags & kRowProposal) == 0 || row.token != sampled[next - 1]) break;
  }
  return count;
}

// The rows of that block which the target agrees with, as bits: bit 0 is the anchor. What it
// samples after each of them is committed.
GPURT_FN u32 accepted_rows(const RowState* rows, const u32* sample_rows, const u32* sampled,
                           u32 sample_count, u32 first) {
  const bool is_tree = first + 1 < sample_count && row_ancestors(rows[sample_rows[first + 1]]) != 0;
  if (!is_tree)
    return (2u << accepted_proposals(rows, sample_rows, sampled, sample_count, first)) - 1;
  const u32 length = block_rows(rows, sample_rows, sample_count, first);
  u32 accepted = 1, last = 0;
  for (u32 i = 1; i < length; ++i) {
    const RowState& row = rows[sample_rows[first + i]];
    if (parent_row(row, i) != last || row.token != sampled[first + last]) continue;
    accepted |= 1u << i;
    last = i;
  }
  return accepted;
}

GPURT_FN bool is_stop_id(const SlotState& slot, u32 token) {
  for (u32 i = 0; i < slot.stop_count; ++i)
    if (slot.stop_ids[i] == token) return true;
  return false;
}

// Whether a sequence that commits in this step what `rows` of its block sampled may use a proposal
// in the next. No more than a guess that saves work: advance decides, which also knows of cancels.
GPURT_FN bool wants_proposals(const SlotState& slot, const u32* sampled, u32 rows) {
  if (slot.produced + bit_count(rows) + 2 > slot.max_tokens) return false;  // one comes without
  if ((slot.flags & kRequestIgnoreStop) != 0) return true;
  for (; rows != 0; rows &= ~(1u << highest_bit(rows)))
    if (is_stop_id(slot, sampled[highest_bit(rows)])) return false;
  return true;
}

}  // namespace gpurt
