// Where things lie in `routes`: which experts each row of a step goes to. Host and device.
// graphs/ops/route.py draws the layout and names its letters; `RoutesLayout` there is this one.
#pragma once
#include "../types.hpp"

namespace gpurt {

struct RoutesLayout {
  u32 rows;     // that the step can carry: StepState::rows_capacity
  u32 experts;  // E: those that may have a slot
  u32 top_k;    // T

  static constexpr u32 kActive = 0;  // word: slots in use
  static constexpr u32 kPairs = 1;   // word: pairs of the step
  // Words of a slot: its expert, the rows that chose it, then (row, pair) for each.
  static constexpr u32 kExpert = 0;
  static constexpr u32 kCount = 1;
  static constexpr u32 kUsers = 2;
  // Words of a pair: its slot, then its weight as float bits.
  static constexpr u32 kSlot = 0;
  static constexpr u32 kWeight = 1;
  static constexpr u32 kNoSlot = 0xFFFFFFFFU;  // of a pair whose expert another rank has

  // Experts that one step can touch at most.
  GPURT_FN u32 slots() const {
    const u32 pairs = rows * top_k;
    return experts < pairs ? experts : pairs;
  }

  // First word of a slot. A reader of slots needs neither experts nor top_k.
  GPURT_FN u32 slot(u32 index) const { return 2 + index * (2 + 2 * rows); }

  // First word of a pair.
  GPURT_FN u32 pair(u32 index) const { return slot(slots()) + 2 * index; }
};

}  // namespace gpurt
