// collect: the sum of all ranks' parts, in rank order.
// graphs/ops/collect.py has the contract.
#pragma once
#include "context.hpp"
#include "publish.hpp"
#include "slots.hpp"

namespace gpurt {

struct collect {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const u32 width = record.param[0];
    const u32 per_row = record.param[2];
    const u32 stride = record.param[4];
    const u64 slot = u64{stride} * context.step->rows_capacity * per_row;
    const Slots slots{arg<const f32>(record, 0), slot, stride, record.param[1]};
    f32* const y = arg<f32>(record, 1);
    const f32* const residual = arg<const f32>(record, 2);
    const u32 rows = host::value_rows(context, per_row, record.param[3] != 0);
    for (u64 row = 0; row < rows; ++row) {
      for (u32 i = record.tile[0]; i < record.tile[1]; ++i) {
        const u64 place = row * width + i;
        y[place] = slots_element(slots, row, i, residual == nullptr ? nullptr : residual + place);
      }
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
