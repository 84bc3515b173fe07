// attention_merge: a row's heads from the sums of its spans, folded in their order.
// graphs/ops/attention_merge.py has the contract; attention_kernels.hpp computes.
#pragma once
#include "attention.hpp"

namespace gpurt::host {

inline AttentionTask read_attention_merge(const TaskRecord& record) {
  AttentionTask task{};
  task.partials = arg<f32>(record, 0);
  task.q = arg<const f32>(record, 1);  // null: no gates
  task.out = arg<f32>(record, 2);
  task.heads = record.param[0];
  task.kv_heads = record.param[1];
  task.head_dim = record.param[2];
  task.window = record.param[3];
  task.out_eps = param_f32(record, 4);
  task.spans = record.param[5];
  task.kv_head = record.tile[0];
  task.group = task.heads / task.kv_heads;
  return task;
}

}  // namespace gpurt::host

namespace gpurt {

struct attention_merge {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    GPURT_AT_LEVEL(attention_merge_run, host::read_attention_merge(record), context);
    return kFaultNone;
  }
};

}  // namespace gpurt
