// attention_commit: what a step committed of a tree, moved to its positions.
// graphs/ops/attention_commit.py has the contract.
#pragma once
#include <cstring>

#include "../acceptance.hpp"
#include "context.hpp"

namespace gpurt::host {

/// An attention_commit task, decoded: two caches [pages, kv_heads, page, head], bytes of a head.
struct CommitTask {
  u8* caches[2];
  const u32* page_table;  // [slots, pages_per_slot]
  u32 kv_heads, page, pages_per_slot;
  u64 head_bytes;

  u64 offset(u32 slot, u32 head, u32 position) const {
    const u32 index = position / page % pages_per_slot;
    const u64 entry = page_table[u64{slot} * pages_per_slot + index];
    return ((entry * kv_heads + head) * page + position % page) * head_bytes;
  }
};

inline CommitTask read_commit(const TaskRecord& record) {
  CommitTask task{};
  task.caches[0] = arg<u8>(record, 1);
  task.caches[1] = arg<u8>(record, 2);
  task.page_table = arg<const u32>(record, 3);
  task.kv_heads = record.param[0];
  task.head_bytes = record.param[1];
  task.page = record.param[2];
  task.pages_per_slot = record.param[3];
  return task;
}

}  // namespace gpurt::host

namespace gpurt {

struct attention_commit {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const host::CommitTask task = host::read_commit(record);
    const u32* const sampled = arg<const u32>(record, 0);
    const u32 count = context.step->sample_count;
    for (u32 first = 0; first < count;) {
      const u32 accepted = accepted_rows(context.rows, context.sample_rows, sampled, count, first);
      const RowState& anchor = context.rows[context.sample_rows[first]];
      // In the order of depths: no place is written before what lies there has moved.
      for (u32 row = 1, depth = 1; accepted >> row != 0; ++row) {
        if ((accepted >> row & 1) == 0) continue;
        if (row != depth) move(task, anchor.slot, anchor.position + row, anchor.position + depth);
        ++depth;
      }
      first += block_rows(context.rows, context.sample_rows, count, first);
    }
    return kFaultNone;
  }

 private:
  static void move(const host::CommitTask& task, u32 slot, u32 from, u32 to) {
    for (u8* const cache : task.caches) {
      for (u32 head = 0; head < task.kv_heads; ++head) {
        std::memcpy(cache + task.offset(slot, head, to), cache + task.offset(slot, head, from),
                    task.head_bytes);
      }
    }
  }
};

}  // namespace gpurt
