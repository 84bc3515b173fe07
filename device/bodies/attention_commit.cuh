// attention_commit on the GPU: what a step committed of a tree, moved to its positions.
//
// The contract is in graphs/ops/attention_commit.py. A thread has the same words of every key, or
// of every value, and moves them in the order of depths: no place is written before what lies there
// has moved, and no thread waits for another.
#pragma once
#include "acceptance.hpp"
#include "context.cuh"

namespace gpurt {

struct attention_commit {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32* sampled = context.address<const u32>(task, 0);
    const u32 count = context.step->sample_count;
#pragma unroll 1
    for (u32 first = 0; first < count;) {
      const u32 accepted = accepted_rows(context.rows, context.sample_rows, sampled, count, first);
      if (is_on_branch(accepted)) {
        const RowState anchor = context.rows[context.sample_rows[first]];
        move_words(task, context, anchor.slot, anchor.position, accepted);
      }
      first += block_rows(context.rows, context.sample_rows, count, first);
    }
  }

 private:
  __device__ static void move_words(const TaskRecord& task, const BodyContext& context, u32 slot,
                                    u32 anchor, u32 accepted) {
    const u32 head_words = task.param[1] / 4, words = task.param[0] * head_words;
#pragma unroll 1
    for (u32 at = context.thread; at < 2 * words; at += context.team_threads) {
      const bool is_value = at >= words;
      const u32 word = is_value ? at - words : at, head = word / head_words;
      u32* cache = arg<u32>(task, is_value ? 2 : 1) + word % head_words;
      u32 depth = 1;
#pragma unroll 1
      for (u32 row = 1; accepted >> row != 0; ++row) {
        if ((accepted >> row & 1) == 0) continue;
        if (row != depth)
          cache[offset(task, slot, head, anchor + depth)] =
              cache[offset(task, slot, head, anchor + row)];
        ++depth;
      }
    }
  }

  // Words from a cache's start to (slot, position) of a head.
  __device__ static u64 offset(const TaskRecord& task, u32 slot, u32 head, u32 position) {
    const u32 page = task.param[2], pages = task.param[3];
    const u32 entry = arg<const u32>(task, 3)[slot * pages + position / page % pages];
    return ((u64(entry) * task.param[0] + head) * page + position % page) * (task.param[1] / 4);
  }
};

}  // namespace gpurt
