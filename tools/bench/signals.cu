// Ways to signal, wait and pass on inside a block, without records and bodies: each an entry of its
// own, made by tools/bench/signals.py. A stage ends when every block has signalled it.
#include "counter.hpp"
#include "ptx.cuh"

namespace gpurt {

struct Setup {
  u64 words;   // zero: counters, then flags
  u64 sink;    // spans, a line a block
  u64 failed;  // u32
  u64 times;   // u64[4]: cycles of block 0, of its storer's signals, of its fences; of the polls
  u32 rounds;
  u32 blocks;
};

constexpr u32 kPollsMax = 1u << 20;
constexpr u32 kRing = 64;  // counters that take turns
constexpr u32 kTeam = 16;
constexpr u32 kSlots = 8;

enum Poller : u32 { kByTeam, kByOne, kByTwo, kByThree };
enum Hand : u32 { kByBarrier, kByMbarrier, kByWord };
enum Signaller : u32 { kStorer, kTeamThread, kEachAlone };
enum Send : u32 { kAtomRelease, kRedRelease, kRelaxed, kFenceRed, kFlags, kFenceOnly };

struct Shared {
  u64 done[kSlots];
  u64 met[kSlots];
  u32 seen[4];  // by poller: stages that it has seen met
  alignas(16) u8 record[256];
};

GPURT_FN void red_add(u64* to, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
GPURT_FN void red_add_release(u64* to, u64 v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}

}  // namespace gpurt

extern "C" __constant__ gpurt::Setup setup = {};

namespace gpurt {

GPURT_FN u64* counter_of(u32 stage, u32 shards) {
  return at<u64>(setup.words) + u64{stage % kRing} * shards * 8;
}
GPURT_FN u32* flags_of(u32 stage) {
  return at<u32>(setup.words) + (1u << 16) + (stage % kRing) * 256;
}

GPURT_FN void store_span(u32 turn) {
  uint4* span = at<uint4>(setup.sink) + (u64{blockIdx.x} * 64 + turn % 32 * 2);
  span[0] = make_uint4(turn, turn, turn, turn);
  span[1] = make_uint4(turn, turn, turn, turn);
}

// All lanes of a warp, once: whether the stage is over.
template <u32 SHARDS, u32 SEND>
GPURT_FN bool is_over(u32 stage) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (SEND == kFlags) {
    // Words of all blocks, a lane four or five of them.
    const u32* flags = flags_of(stage);
    const u32 want = stage / kRing + 1;
    bool all = true;
#pragma unroll
    for (u32 i = 0; i < 5; ++i) {
      const u32 block = lane + 32 * i;
      if (block < setup.blocks) all = all && load_acquire(flags + block) >= want;
    }
    return __all_sync(~0u, all);
  } else {
    const u64 target = u64{stage / kRing + 1} * setup.blocks;
    if constexpr (SHARDS == 1) {
      bool met = true;
      if (lane == 0) met = load_acquire(counter_of(stage, 1)) >= target;
      return __all_sync(~0u, met);
    } else {
      u32 sum = 0;
      if (lane < SHARDS) sum = static_cast<u32>(load_acquire(counter_of(stage, SHARDS) + lane * 8));
      return __reduce_add_sync(~0u, sum) >= static_cast<u32>(target);
    }
  }
}

// REST: between polls; below 1000 cycles, else nanoseconds + 1000.
template <u32 SHARDS, u32 SEND, u32 REST = 0>
GPURT_FN bool wait_over(u32 stage) {
  for (u32 polls = 0; !is_over<SHARDS, SEND>(stage); ++polls) {
    if (REST > 0 && REST < 1000) {
      const u32 since = clock_cycles_low();
      while (clock_cycles_low() - since < REST) {
      }
    }
    if (REST >= 1000) __nanosleep(REST - 1000);
    if (polls > kPollsMax) {
      store_relaxed(at<u32>(setup.failed), 1u);
      return false;
    }
  }
  return true;
}

// One thread.
template <u32 SHARDS, u32 SEND>
GPURT_FN void signal(u32 stage) {
  u64* counter = counter_of(stage, SHARDS) + blockIdx.x % SHARDS * 8;
  if constexpr (SEND == kAtomRelease) {
    add_release(counter, 1);
  } else if constexpr (SEND == kRedRelease) {
    red_add_release(counter, 1);
  } else if constexpr (SEND == kRelaxed) {
    red_add(counter, 1);
  } else if constexpr (SEND == kFenceRed) {
    fence_acq_rel_gpu();
    red_add(counter, 1);
  } else {
    store_release(flags_of(stage) + blockIdx.x, stage / kRing + 1);
  }
}

// The team waits for the stage before: who polls, and how the other warps are told.
template <u32 POLLER, u32 HAND, u32 SEND, u32 SHARDS, u32 REST>
GPURT_FN void pass_stage(Shared& shared, u32 turn) {
  if constexpr (HAND == kByBarrier) {
    if (threadIdx.x < 32) wait_over<SHARDS, SEND, REST>(turn - 1);
    bar_sync(1, kTeam * 32);
  } else if constexpr (HAND == kByMbarrier) {
    const u32 met = shared_address(&shared.met[turn % kSlots]), parity = turn / kSlots & 1;
    for (u32 polls = 0; !mbarrier_try_wait(met, parity) && polls < kPollsMax;) ++polls;
  } else {
    const u32 seen = shared_address(&shared.seen[0]);
    for (u32 polls = 0, most = 0; most < turn && polls < kPollsMax; ++polls) {
#pragma unroll
      for (u32 i = 0; i < POLLER; ++i) {
        const u32 one = ld_shared_acquire_u32(seen + 4 * i);
        most = most > one ? most : one;
      }
    }
  }
}

template <u32 POLLER, u32 HAND, u32 SIGNALLER, u32 SEND, u32 SHARDS, u32 REST>
GPURT_FN void run_team(Shared& shared) {
  const u32 lane = threadIdx.x % 32;
  for (u32 turn = 0; turn < setup.rounds; ++turn) {
    if constexpr (SIGNALLER == kEachAlone) {  // one warp does it all
      if (threadIdx.x >= 32) return;
      if (turn != 0 && !wait_over<SHARDS, SEND>(turn - 1)) return;
      if (lane == 0) signal<SHARDS, SEND>(turn);
      __syncwarp();
      continue;
    }
    if (turn != 0) pass_stage<POLLER, HAND, SEND, SHARDS, REST>(shared, turn);
    if constexpr (SIGNALLER == kTeamThread) {
      bar_sync(2, kTeam * 32);
      if (threadIdx.x == 0) signal<SHARDS, SEND>(turn);
    } else {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&shared.done[turn % kSlots]));
    }
  }
}

GPURT_FN void wait_done(Shared& shared, u32 turn) {
  const u32 done = shared_address(&shared.done[turn % kSlots]);
  for (u32 polls = 0; !mbarrier_try_wait(done, turn / kSlots & 1) && polls < kPollsMax;) ++polls;
}

template <u32 SEND, u32 SHARDS, u32 SPANS>
GPURT_FN void run_storer(Shared& shared) {
  const bool is_first = threadIdx.x % 32 == 0;
  u64 sends = 0, fences = 0;
  for (u32 turn = 0; turn < setup.rounds; ++turn) {
    wait_done(shared, turn);
    if (is_first && SEND == kFenceOnly) {
      const u32 a = clock_cycles_low();
      fence_acq_rel_gpu();
      const u32 b = clock_cycles_low();
      const u64 old = add_relaxed(counter_of(turn, SHARDS) + blockIdx.x % SHARDS * 8, 1);
      const u32 c = clock_cycles_low() + static_cast<u32>(old >> 63);
      fences += b - a;
      sends += c - b;
    } else if (is_first) {
      signal<SHARDS, SEND>(turn);
    }
    if (SPANS && is_first) store_span(turn);
    __syncwarp();
  }
  if (is_first && blockIdx.x == 0) {
    at<u64>(setup.times)[1] = sends;
    at<u64>(setup.times)[2] = fences;
  }
}

// Poller `me` of so many; they start apart.
template <u32 POLLERS, u32 HAND, u32 SEND, u32 SHARDS>
GPURT_FN void run_poller(Shared& shared, u32 me) {
  const u32 since = clock_cycles_low();
  while (clock_cycles_low() - since < me * 700 / POLLERS) {
  }
  for (u32 turn = 0; turn < setup.rounds; ++turn) {
    if (turn != 0 && !wait_over<SHARDS, SEND>(turn - 1)) break;
    if (threadIdx.x % 32 == 0) {
      if constexpr (HAND == kByMbarrier) {
        mbarrier_arrive(shared_address(&shared.met[turn % kSlots]));
      } else {
        st_shared_release_u32(shared_address(&shared.seen[me]), turn);
      }
    }
    __syncwarp();
  }
}

// Brings a record a stage.
GPURT_FN void run_records(Shared& shared) {
  const u32 to = shared_address(shared.record);
  for (u32 turn = 0; turn < setup.rounds; ++turn) {
    wait_done(shared, turn);
    const u64 from = setup.words + (1u << 19) + u64{turn % 64} * 33792 + blockIdx.x * 256;
    for (u32 i = 0; i < 16; ++i) copy16_to_shared(to + 16 * i, from + 16 * i);
    wait_all_copies();
  }
}

// SPANS: the storer stores one behind each signal. NOISE: another warp brings a record a stage.
template <u32 POLLER, u32 HAND, u32 SIGNALLER, u32 SEND, u32 SHARDS, u32 SPANS, u32 NOISE,
          u32 REST = 0>
__device__ __forceinline__ void stages() {
  __shared__ Shared shared;
  const u32 warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < kSlots; ++i) {
      mbarrier_init(shared_address(&shared.done[i]), kTeam);
      mbarrier_init(shared_address(&shared.met[i]), 1);
    }
    for (u32 i = 0; i < 4; ++i) shared.seen[i] = 0;
    fence_mbarrier_init();
  }
  __syncthreads();
  const u64 began = clock_cycles();
  if (warp < kTeam) {
    run_team<POLLER, HAND, SIGNALLER, SEND, SHARDS, REST>(shared);
    if (threadIdx.x == 0 && blockIdx.x == 0) at<u64>(setup.times)[0] = clock_cycles() - began;
  } else if (warp == kTeam) {
    if constexpr (SIGNALLER == kStorer) run_storer<SEND, SHARDS, SPANS>(shared);
  } else if (warp < kTeam + 4) {
    if constexpr (POLLER != 0) {
      if (warp - kTeam - 1 < POLLER)
        run_poller<POLLER, HAND, SEND, SHARDS>(shared, warp - kTeam - 1);
    }
  } else if (NOISE && threadIdx.x % 32 == 0) {
    run_records(shared);
  }
}

// ---- a fence alone: what it waits for ----------------------------------------------------------
// BEFORE: the thread stored 32 bytes so many cycles before, in tens; 0: it stored nothing.
// OTHERS: 0 nobody; 1 a warp polls with acquire; 2 a warp polls relaxed; 3 a warp stores all the
// time; 4 a warp loads lines.
template <u32 BEFORE, u32 OTHERS, u32 KIND>
__device__ __forceinline__ void fences() {
  __shared__ u32 over;
  if (threadIdx.x == 0) over = 0;
  __syncthreads();
  volatile u32* is_over = &over;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0 && lane == 0) {
    u64 sum = 0;
    for (u32 i = 0; i < setup.rounds; ++i) {
      if (BEFORE != 0) store_span(i);
      const u32 since = clock_cycles_low();
      while (clock_cycles_low() - since < (BEFORE == 0 ? 500 : BEFORE * 10)) {
      }
      const u32 a = clock_cycles_low();
      if (KIND == 0) asm volatile("fence.acq_rel.gpu;" ::: "memory");
      if (KIND == 1) asm volatile("fence.acq_rel.cta;" ::: "memory");
      if (KIND == 2) asm volatile("fence.sc.gpu;" ::: "memory");
      if (KIND == 3) store_release(at<u32>(setup.words) + blockIdx.x * 32, i);
      if (KIND == 4) load_acquire(at<u32>(setup.words) + blockIdx.x * 32);
      if (KIND == 5) load_relaxed(at<u32>(setup.words));
      if (KIND == 6) add_relaxed(at<u32>(setup.words) + blockIdx.x * 32, 1);
      if (KIND == 7) asm volatile("fence.acq_rel.sys;" ::: "memory");
      if (KIND == 8) add_relaxed(at<u32>(setup.words), 1);
      if (KIND == 9) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      sum += clock_cycles_low() - a;
    }
    *is_over = 1;
    if (blockIdx.x == 0) at<u64>(setup.times)[2] = sum;
  } else if (warp == 1 && lane == 0 && OTHERS != 0) {
    u32 kept = 0;
    for (u32 i = 0; *is_over == 0; ++i) {
      u32* word = at<u32>(setup.words) + 4096 +
                  (OTHERS == 3 || OTHERS == 4 ? blockIdx.x * 1024 + i % 32 * 32 : 0);
      if (OTHERS == 1) kept += load_acquire(word);
      if (OTHERS == 2) kept += load_relaxed(word);
      if (OTHERS == 3) store_relaxed(word, i);
      if (OTHERS == 4) kept += load_relaxed(word);
    }
    if (kept == 12345) store_relaxed(at<u32>(setup.words) + 1, kept);
  }
}

}  // namespace gpurt
