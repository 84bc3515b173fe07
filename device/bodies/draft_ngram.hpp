// draft_ngram: a drafter that needs no model. graphs/ops/draft_ngram.py has the definition.
//
// Runs after `sample` and before advance. It keeps every sequence's tokens by position: those of
// the step's rows, and the one that the target sampled after the last row it accepted. What
// proposals left behind that is not read before it is written again.
#pragma once
#include "../acceptance.hpp"
#include "../ngram.hpp"
#include "context.hpp"

namespace gpurt {

struct draft_ngram {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32* const sampled = arg<const u32>(record, 0);
    u32* const history = arg<u32>(record, 1);
    Proposals* const proposals = arg<Proposals>(record, 2);
    const u32 width = record.param[0];
    for (u32 r = 0; r < context.step->rows; ++r) {
      const RowState& row = context.rows[r];
      history[u64{row.slot} * width + row.position] = row.token;
    }
    const u32 count = context.step->sample_count;
    for (u32 first = 0; first < count;) {
      const RowState& anchor = context.rows[context.sample_rows[first]];
      const u32 last =
          first + accepted_proposals(context.rows, context.sample_rows, sampled, count, first);
      const u32 position = anchor.position + last - first + 1;
      Proposals& to = proposals[anchor.slot];
      if (position < width) {
        u32* const tokens = history + u64{anchor.slot} * width;
        tokens[position] = sampled[last];
        propose(record, tokens, position + 1, to);
      } else {
        to.count = 0;
      }
      first += block_rows(context.rows, context.sample_rows, count, first);
    }
    return kFaultNone;
  }

 private:
  static void propose(const TaskRecord& record, const u32* tokens, u32 length, Proposals& to) {
    const u32 longest = record.param[2];
    u64 best = 0;
    for (u32 end = length - 1; end-- > 0 && best >> 32 < longest;) {
      const u64 rank = match_rank(tokens, length, end, longest);
      if (rank > best) best = rank;
    }
    propose_after(tokens, length, best, longest, record.param[1], to);
  }
};

}  // namespace gpurt
