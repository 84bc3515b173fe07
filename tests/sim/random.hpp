// A seeded generator: the only source of chance in a simulation, so that a seed replays exactly.
#pragma once
#include "types.hpp"

namespace gpurt::sim {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  explicit Random(u64 seed) : state_(seed) {}

  u64 next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    u64 z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // Uniform in [0, bound); the bias of a 64-bit remainder is far below what a test could see.
  u32 below(u32 bound) { return static_cast<u32>(next() % bound); }
  u32 between(u32 low, u32 high) { return low + below(high - low + 1); }
  bool chance(u32 percent) { return below(100) < percent; }

 private:
  u64 state_;
};

}  // namespace gpurt::sim
