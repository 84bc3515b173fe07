// What simulated tasks compute: words that differ for every launch, task and round.
#pragma once
#include "random.hpp"

namespace gpurt::sim {

constexpr u64 kNoMoreLaunches = ~u64{0};

inline u64 mix(u64 chain, u64 value) {
  return Random(chain * 31 + value).next();
}

inline u64 data_word(u64 launch, u32 task, u64 round) {
  return mix(mix(launch, task), round);
}

// Never the sentinel: its top bit is clear.
inline u32 payload_word(u64 launch, u32 task, u64 round) {
  return static_cast<u32>(data_word(launch, task, round)) & 0x7FFFFFFFu;
}

}  // namespace gpurt::sim
