// Where expert_matvec's units come from: the ring, as the loader brings them, or memory.
#pragma once
#include "../stream.cuh"

namespace gpurt {

constexpr u32 kExpertWarps = 16;  // virtual warps; a round is a unit for each

// Units as the ring brings them, in the order in which they are taken.
template <class Unit>
struct ExpertRing {
  static constexpr u32 kRoundBytes = kExpertWarps * Unit::kBytes;
  static constexpr u32 kRounds = kStageRoom / kRoundBytes;
  static_assert(kRounds > 0);
  StageCursor cursor;
  u32 turn;
  u32 round = 0;               // of the stage
  typename Unit::Place place;  // of the next unit: beside 52 instructions of dequantisation every
                               // one spent on addresses counts

  GPURT_FN void take(Unit& unit) {
    if (round == 0) {
      const u32 stall = wait_stage(cursor);
      if (stall != 0) trace_stall(turn, stall);
      const u32 first = shared_address(shared().ring[cursor.stage]);
      place.start(first + threadIdx.x / 32 * Unit::kBytes, threadIdx.x % 32);
    }
    unit.load(place);
    place.advance(kRoundBytes);
    if (++round == kRounds) next();
  }
  // After the last unit: the task's last stage may be a short one.
  GPURT_FN void end() {
    if (round != 0) next();
  }

 private:
  GPURT_FN void next() {
    release_stage(cursor);
    cursor.advance();
    round = 0;
  }
};

// Units of one virtual warp, straight from memory.
template <class Unit>
struct ExpertMemory {
  u64 from;
  GPURT_FN void take(Unit& unit) {
    unit.load(from, threadIdx.x % 32);
    from += kExpertWarps * Unit::kBytes;
  }
};

}  // namespace gpurt
