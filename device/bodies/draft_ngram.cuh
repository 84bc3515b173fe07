// draft_ngram on the GPU: the team shares the search. The definition is in
// graphs/ops/draft_ngram.py; the matches and their order are those of ngram.hpp, on both sides.
#pragma once
#include "acceptance.hpp"
#include "context.cuh"
#include "ngram.hpp"

namespace gpurt {

struct draft_ngram {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32* sampled = context.address<const u32>(task, 0);
    u32* history = context.address<u32>(task, 1);
    Proposals* proposals = context.address<Proposals>(task, 2);
    const u32 width = task.param[0];
    for (u32 r = context.thread; r < context.step->rows; r += context.team_threads) {
      const RowState& row = context.rows[r];
      history[u64(row.slot) * width + row.position] = row.token;
    }
    const u32 count = context.step->sample_count;
    for (u32 first = 0; first < count;) {
      const RowState& anchor = context.rows[context.sample_rows[first]];
      const u32 last =
          first + accepted_proposals(context.rows, context.sample_rows, sampled, count, first);
      const u32 position = anchor.position + last - first + 1;
      Proposals& to = proposals[anchor.slot];
      if (position < width) {
        u32* tokens = history + u64(anchor.slot) * width;
        if (context.thread == 0) tokens[position] = sampled[last];
        propose(task, tokens, position + 1, to, context);
      } else if (context.thread == 0) {
        to.count = 0;
      }
      first += block_rows(context.rows, context.sample_rows, count, first);
    }
  }

 private:
  __device__ static void propose(const TaskRecord& task, const u32* tokens, u32 length,
                                 Proposals& to, const BodyContext& context) {
    context.sync();  // the history is whole, and the scratch free
    u64 best = 0;
    for (u32 end = context.thread; end + 1 < length; end += context.team_threads) {
      const u64 rank = match_rank(tokens, length, end, task.param[2]);
      best = rank > best ? rank : best;
    }
    for (u32 step = 1; step < 32; step *= 2) {
      const u64 other = __shfl_xor_sync(~0u, best, step);
      best = other > best ? other : best;
    }
    u64* warp_best = reinterpret_cast<u64*>(context.scratch);
    if (context.thread % 32 == 0) warp_best[context.thread / 32] = best;
    context.sync();
    if (context.thread != 0) return;
    for (u32 w = 0; w < context.team_threads / 32; ++w)
      best = warp_best[w] > best ? warp_best[w] : best;
    propose_after(tokens, length, best, task.param[2], task.param[1], to);
  }
};

}  // namespace gpurt
