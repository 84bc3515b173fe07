// What the first tile of an attention task waits for while it is folded, and who makes it.
//
//   all warps       a chunk's keys and values of earlier steps, asked for
//   for_queries()   team barrier: queries are in scratch
//   those warps     their chunks up to the step's own positions
//   the others      all of their chunks; then they make the step's keys and values
//   for_keys()      team barrier: these are in the cache
//   those warps     the chunks that hold them
// Every warp passes both barriers once and in this order, wherever in its chunks it does.
#pragma once
#include "attention_tile.cuh"

namespace gpurt {

constexpr u32 kAllWritten = ~0u;  // a position that no slot has

struct Waits {
  bool queries;  // are to be waited for
  u32 fresh;     // the first position whose keys and values are to be waited for

  GPURT_FN void for_queries() {
    if (!queries) return;
    team_sync();
    queries = false;
  }
  // Before a chunk of positions up to `end` is read.
  GPURT_FN void for_keys(u32 end) {
    if (end <= fresh) return;
    for_queries();
    team_sync();
    fresh = kAllWritten;
  }
};
constexpr Waits kNoWaits{false, kAllWritten};

// Warps that share work, and which of them this one is.
struct Crew {
  u32 index, count;

  GPURT_FN static Crew team() { return {threadIdx.x / 32, kTeamWarps}; }
  // All of the team, and warp `first` has the first job.
  GPURT_FN Crew from(u32 first) const { return {(index - first) % kTeamWarps, count}; }
  // Less `some` warps from `first` on, whose indices are then beyond the count.
  GPURT_FN Crew without(u32 first, u32 some) const {
    return {(index - first - some) % kTeamWarps, count - some};
  }
};

}  // namespace gpurt
