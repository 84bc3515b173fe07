// Which positions a row of attention sees: up to its own, or with blocks to the end of its block;
// with a window no further than that on either side.
#pragma once
#include "context.cuh"

namespace gpurt {

// The first position that a row sees.
GPURT_FN u32 first_seen(u32 window, u32 position) {
  return window == 0 || position < window ? 0 : position + 1 - window;
}

template <bool EXTRAS>
struct PlaceOf {
  u32 slot, position;
  GPURT_FN u32 end() const { return position + 1; }  // of what the row sees

  // Of this thread's row.
  __device__ static PlaceOf of(const TaskRecord&, const BodyContext& context) {
    const RowState row = context.rows[context.thread];
    return {row.slot, row.position};
  }
};

template <>
struct PlaceOf<true> {
  u32 slot, position, until;
  GPURT_FN u32 end() const { return until; }

  __device__ static PlaceOf of(const TaskRecord& task, const BodyContext& context) {
    const RowState row = context.rows[context.thread];
    if (task.param[13] == 0) return {row.slot, row.position, row.position + 1};
    u32 last = context.thread;
    while (last + 1 < context.step->rows && context.rows[last + 1].slot == row.slot) ++last;
    const u32 end = context.rows[last].position + 1, window = task.param[8];
    const bool is_cut = window != 0 && row.position + window < end;
    return {row.slot, row.position, is_cut ? row.position + window : end};
  }
};

}  // namespace gpurt
