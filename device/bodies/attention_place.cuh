// Which positions a row of attention sees: up to its own, or with blocks to the end of its block;
// with a window no further than that on either side.
#pragma once
#include "context.cuh"
#include "row_path.hpp"

namespace gpurt {

// Where a row finds the positions that it sees. In kernels without trees: in their place.
template <bool TREES>
struct BranchOf {
  GPURT_FN static BranchOf of(u32, u32) { return {}; }
  GPURT_FN bool is_elsewhere(u32) const { return false; }
  GPURT_FN u32 place(u32 position) const { return position; }
};

template <>
struct BranchOf<true> {
  u32 ancestors, begin;  // of a row that finds some elsewhere, else 0; where its block begins
  GPURT_FN static BranchOf of(u32 position, u32 ancestors) {
    return {is_on_branch(ancestors) ? ancestors : 0, block_begin(position, ancestors)};
  }
  GPURT_FN bool is_elsewhere(u32 position) const { return ancestors != 0 && position > begin; }
  GPURT_FN u32 place(u32 position) const { return place_seen(position, begin, ancestors); }
};
using Branch = BranchOf<GPURT_TREES != 0>;

// The first position that a row sees.
GPURT_FN u32 first_seen(u32 window, u32 position) {
  return window == 0 || position < window ? 0 : position + 1 - window;
}

template <bool EXTRAS>
struct PlaceOf {
  u32 slot, position, path;
  GPURT_FN u32 end() const { return position + 1; }  // of what the row sees
  GPURT_FN u32 ancestors() const { return GPURT_TREES != 0 ? path : 0; }

  // Of row `index` of context.rows.
  __device__ static PlaceOf of(const TaskRecord&, const BodyContext& context, u32 index) {
    const RowState row = context.rows[index];
    return {row.slot, row.position, row_ancestors(row)};
  }
};

template <>
struct PlaceOf<true> {
  u32 slot, position, path, until;
  GPURT_FN u32 end() const { return until; }
  GPURT_FN u32 ancestors() const { return GPURT_TREES != 0 ? path : 0; }

  __device__ static PlaceOf of(const TaskRecord& task, const BodyContext& context, u32 index) {
    const RowState row = context.rows[index];
    const u32 path = row_ancestors(row);
    if (task.param[13] == 0) return {row.slot, row.position, path, row.position + 1};
    u32 last = index;
    while (last + 1 < context.step->rows && context.rows[last + 1].slot == row.slot) ++last;
    const u32 end = context.rows[last].position + 1, window = task.param[8];
    const bool is_cut = window != 0 && row.position + window < end;
    return {row.slot, row.position, path, is_cut ? row.position + window : end};
  }
};

}  // namespace gpurt
