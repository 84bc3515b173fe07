// Paths: a sequence's proposals may be a tree, of which the target verifies every branch at once.
//
//   block       row 0   1   2   3   4    the anchor, and proposals behind their parents
//   parent          -   0   1   0   3
//   position        n  n+1 n+2 n+1 n+2   the depth in the tree
//   place           n  n+1 n+2 n+3 n+4   where the row's keys and values lie, until
//   attention_commit ancestors       -  011 ... 01001 11001   bits: rows of the block, the row's
//   own with them
//
// A row sees what lies before the block, and of the block its ancestors: position after position,
// as without a drafter, so its sums have the same bits. In a chain every place is the position, and
// rows have no ancestors set.
#pragma once
#include "task_record.hpp"

#ifndef GPURT_TREES  // whether a plan verifies trees: kernels of others hold no word of them
#define GPURT_TREES (!GPURT_ON_DEVICE)
#endif

namespace gpurt {

GPURT_FN u32 bit_count(u32 bits) {
#if GPURT_ON_DEVICE
  return static_cast<u32>(__popc(bits));
#else
  return static_cast<u32>(__builtin_popcount(bits));
#endif
}

// bits: not 0.
GPURT_FN u32 highest_bit(u32 bits) {
#if GPURT_ON_DEVICE
  return 31u - static_cast<u32>(__clz(static_cast<i32>(bits)));
#else
  return 31U - static_cast<u32>(__builtin_clz(bits));
#endif
}

GPURT_FN u32 row_ancestors(const RowState& row) {
  return GPURT_TREES != 0 ? row.flags >> kRowAncestorsShift : 0;
}

// The parent, in a block that is a tree, of its row `index`, a proposal.
GPURT_FN u32 parent_row(const RowState& row, u32 index) {
  return highest_bit(row_ancestors(row) & ~(1u << index));
}

// Position of the anchor of a block that is a tree.
GPURT_FN u32 block_begin(u32 position, u32 ancestors) {
  return position + 1 - bit_count(ancestors);
}

// Where the keys and values of a row at `position` lie, as a position.
GPURT_FN u32 place_of_row(u32 position, u32 ancestors) {
  return ancestors == 0 ? position : block_begin(position, ancestors) + highest_bit(ancestors);
}

// Where a row finds the keys and values of a position that it sees. begin: of its block.
GPURT_FN u32 place_seen(u32 position, u32 begin, u32 ancestors) {
  if (position <= begin) return position;
  for (u32 n = position - begin; n != 0; --n) ancestors &= ancestors - 1;
  return begin + highest_bit(ancestors & (~ancestors + 1));
}

// Whether a row sees some position at another place.
GPURT_FN bool is_on_branch(u32 ancestors) {
  return (ancestors & (ancestors + 1)) != 0;
}

}  // namespace gpurt
