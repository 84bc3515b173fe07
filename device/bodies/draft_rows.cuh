// draft_rows on the GPU: a few words from a few words, so one thread makes them.
// graphs/ops/draft_rows.py has the definition.
#pragma once
#include "context.cuh"
#include "draft_table.hpp"

namespace gpurt {

struct draft_rows {
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (context.thread != 0) return;
    make_draft_table(task, *context.step, context.rows, context.sample_rows,
                     context.address<const u32>(task, 0), context.slots,
                     context.address<StepState>(task, 1));
  }
};

}  // namespace gpurt
