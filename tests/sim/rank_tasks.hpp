// The tasks of a simulated step of ranks: what all ranks have in common.
#pragma once
#include <vector>

#include "types.hpp"

namespace gpurt::sim {

enum class Kind : u32 { kPublish, kReduce, kCollect, kRearm, kSample, kAdvance };

struct Task {
  Kind kind;
  u32 collective;
  u32 tile;
};

// What all ranks have in common.
struct Shape {
  u32 ranks, workers, collectives, tiles;
  bool claims;
  bool two_shots;  // all collectives: scatter in publish's place, then reduce
  bool payload;    // all collectives
  std::vector<Task> tasks;
};

}  // namespace gpurt::sim
