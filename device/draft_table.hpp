// The table of a block drafter's rows, made by one thread on both sides: bodies/draft_rows.
#pragma once
#include "acceptance.hpp"

namespace gpurt {

// Parameters of the record: rows of a block, rows of the table, positions of a sequence, the mask.
GPURT_FN void make_draft_table(const TaskRecord& task, const StepState& step, const RowState* rows,
                               const u32* sample_rows, const u32* sampled, const SlotState* slots,
                               StepState* table) {
  const u32 block = task.param[0], capacity = task.param[1], context = task.param[2];
  RowState* to = reinterpret_cast<RowState*>(table + 1);
  u32* to_samples = reinterpret_cast<u32*>(to + capacity);
  u32 made = 0, samples = 0;
  for (u32 first = 0; first < step.sample_count;) {
    const RowState& begin = rows[sample_rows[first]];
    const u32 accepted = accepted_rows(rows, sample_rows, sampled, step.sample_count, first);
    const u32 anchor = begin.position + bit_count(accepted);
    if (anchor < context && made + block <= capacity &&
        wants_proposals(slots[begin.slot], sampled + first, accepted)) {
      to[made] = {sampled[first + highest_bit(accepted)], begin.slot, anchor, 0};
      for (u32 i = 1; i < block; ++i) {
        to[made + i] = {task.param[3], begin.slot, anchor + i, kRowSample};
        to_samples[samples++] = made + i;
      }
      made += block;
    }
    first += block_rows(rows, sample_rows, step.sample_count, first);
  }
  *table = step;
  table->rows = made;
  table->sample_count = samples;
  table->rows_capacity = capacity;
}

}  // namespace gpurt
