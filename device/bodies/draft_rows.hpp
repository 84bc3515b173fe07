// draft_rows: the rows of a block drafter, as a table. graphs/ops/draft_rows.py has the definition.
#pragma once
#include "context.hpp"
#include "draft_table.hpp"

namespace gpurt {

struct draft_rows {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    make_draft_table(record, *context.step, context.rows, context.sample_rows,
                     arg<const u32>(record, 0), context.slots, arg<StepState>(record, 1));
    return kFaultNone;
  }
};

}  // namespace gpurt
