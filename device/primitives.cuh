// What the GPU's own primitives cost: one kernel each, for `gpurt bench --case primitives`.
//
// Arguments lie in `primitive`, which the host fills before each launch; words start at zero. Every
// wait ends after kPollsMax looks: it sets `failed`, and the figure does not count.
#pragma once
#include "counter.hpp"
#include "ptx.cuh"

namespace gpurt {

struct Primitive {
  u64 words;    // u32 [1 << 20], zero
  u64 failed;   // u32, zero
  u32 rounds;   // round trips, barriers or tickets
  u32 blocks;   // of the launch; the last one answers a hop
  u32 pollers;  // warps of a block that take part
  u32 kind;     // of a hop, see `Hop`
};

enum Hop : u32 { kHopRelaxed, kHopReleaseAcquire, kHopDataFenceFlag };

constexpr u32 kPollsMax = 1u << 22;
constexpr u32 kApart = 64;  // words between two that different SMs write

GPURT_FN bool wait_for(const u32* word, u32 value, bool acquire, u32* failed) {
  for (u32 polls = 0; polls < kPollsMax; ++polls) {
    if ((acquire ? load_acquire(word) : load_relaxed(word)) >= value) return true;
  }
  store_relaxed(failed, 1u);
  return false;
}

GPURT_FN void send(u32* word, u32* data, u32 value, u32 kind) {
  if (kind == kHopDataFenceFlag) {
    store_relaxed(data, value);
    fence_acq_rel_gpu();
  }
  if (kind == kHopReleaseAcquire)
    store_release(word, value);
  else
    store_relaxed(word, value);
}

}  // namespace gpurt

extern "C" __constant__ gpurt::Primitive primitive = {};

// Two blocks bounce a number.
extern "C" __global__ void __launch_bounds__(32, 1) hop() {
  using namespace gpurt;
  if (threadIdx.x != 0 || (blockIdx.x != 0 && blockIdx.x != primitive.blocks - 1)) return;
  u32* there = at<u32>(primitive.words);
  u32* back = there + kApart;
  u32* data = there + 2 * kApart;
  const bool acquire = primitive.kind != kHopRelaxed;
  for (u32 i = 1; i <= primitive.rounds; ++i) {
    if (blockIdx.x == 0) {
      send(there, data, i, primitive.kind);
      if (!wait_for(back, i, acquire, at<u32>(primitive.failed))) return;
    } else {
      if (!wait_for(there, i, acquire, at<u32>(primitive.failed))) return;
      send(back, data + kApart, i, primitive.kind);
    }
  }
}

// Every poller adds one and waits until all have.
extern "C" __global__ void __launch_bounds__(512, 1) grid_barrier() {
  using namespace gpurt;
  if (threadIdx.x % 32 != 0 || threadIdx.x / 32 >= primitive.pollers) return;
  u32* arrived = at<u32>(primitive.words);
  const u32 all = primitive.blocks * primitive.pollers;
  for (u32 i = 1; i <= primitive.rounds; ++i) {
    add_release(arrived, 1u);
    if (!wait_for(arrived, all * i, true, at<u32>(primitive.failed))) return;
  }
}

// All claimers draw tickets of one word until `rounds` are gone.
extern "C" __global__ void __launch_bounds__(512, 1) claim() {
  using namespace gpurt;
  if (threadIdx.x % 32 != 0 || threadIdx.x / 32 >= primitive.pollers) return;
  u32* next = at<u32>(primitive.words);
  while (add_relaxed(next, 1u) < primitive.rounds) {
  }
}
