// Slots of a collective as those who read them see them: all ranks' parts, added in rank order or
// side by side. Host and device; slots.cuh reads on the GPU. graphs/ops/collect.py has the
// contract.
#pragma once
#include "../types.hpp"

namespace gpurt {

constexpr u32 kSlotsSum = 0;  // `kind`

// Piece: f32, or four of them. Sizes are counted in pieces.
template <class Piece>
struct SlotsOf {
  const Piece* base;
  u64 slot;    // between the slots of two ranks
  u32 stride;  // between two rows
  u32 width;   // columns of a slot that belong to the value
  u32 ranks;
  bool is_sum;

  // Row `index` of rank `rank`'s part.
  GPURT_FN const Piece* row(u32 rank, u64 index) const {
    return base + rank * slot + index * stride;
  }
};

using Slots = SlotsOf<f32>;

// Element `i` of a row of the value; a sum begins with `*first`, if there is one.
GPURT_FN f32 slots_element(const Slots& slots, u64 index, u32 i, const f32* first = nullptr) {
  if (!slots.is_sum) return slots.row(i / slots.width, index)[i % slots.width];
  f32 total = slots.row(0, index)[i];
  if (first != nullptr) total = *first + total;
  for (u32 rank = 1; rank < slots.ranks; ++rank) total += slots.row(rank, index)[i];
  return total;
}

}  // namespace gpurt
