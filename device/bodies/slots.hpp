// Slots of a collective as those who read them see them: all ranks' parts, added in rank order.
// Host and device; slots.cuh reads on the GPU. graphs/ops/collect.py has the contract.
#pragma once
#include "../types.hpp"

namespace gpurt {

// Piece: f32, or four of them. Sizes are counted in pieces.
template <class Piece>
struct SlotsOf {
  const Piece* base;
  u64 slot;    // between the slots of two ranks
  u32 stride;  // between two rows
  u32 ranks;

  // Row `index` of rank `rank`'s part.
  GPURT_FN const Piece* row(u32 rank, u64 index) const {
    return base + rank * slot + index * stride;
  }
};

using Slots = SlotsOf<f32>;

// Element `i` of a row of the sum, which begins with `*first`, if there is one.
GPURT_FN f32 slots_element(const Slots& slots, u64 index, u32 i, const f32* first = nullptr) {
  f32 total = slots.row(0, index)[i];
  if (first != nullptr) total = *first + total;
  for (u32 rank = 1; rank < slots.ranks; ++rank) total += slots.row(rank, index)[i];
  return total;
}

}  // namespace gpurt
