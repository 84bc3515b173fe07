// Chunks of a slot's positions on their way through shared memory, for a whole team.
//
// In the order of attention_alone.cuh: the keys of all chunks, two at a time, then keys and values
// of virtual warp 0's, of 1's, and so on. Each thread copies its pieces of 16 bytes (cp.async) of
// what a table, made once, has for a step, kAhead steps before they are needed: what sixteen warps
// would each read from L2 is read once. Pieces of a row lie exchanged, by a number that hangs on
// its position, so that what a warp reads at once lies in different banks: keys of 8 rows side by
// side, or values of every other one of 8.
#pragma once
#include "attention_mma.cuh"
#include "attention_span.hpp"

namespace gpurt {

template <u32 D, u32 CACHE, bool EXTRAS>
struct AttentionChunks {
  using Cache = AttentionCache<D, CACHE, EXTRAS>;
  using Eight = typename Elements<CACHE>::Eight;
  static constexpr u32 kPositions = AttentionMma<D, CACHE, EXTRAS>::kChunk;
  static constexpr u32 kAhead = 4;
  static constexpr u32 kHalf = kPositions * Cache::kRowBytes;  // keys; behind them others or values
  static constexpr u32 kStep = 2 * kHalf;
  static constexpr u32 kPieces = kStep / 16;
  static constexpr u32 kEach = (kPieces + kTeamThreads - 1) / kTeamThreads;  // a thread's
  // Of a span; of a window rows side by side, and those of a block, see some more.
  static constexpr u32 kChunksMax = kAttentionSpan / kPositions + 16;
  static constexpr u32 kEntries = 2 * (kChunksMax / 2 + kChunksMax + kAhead);

  struct alignas(128) Room {
    u8 steps[kAhead + 1][kStep];
    u64 from[kEntries];  // of each step the addresses of both halves; 0: nothing
  };
  u32 steps, from;   // shared addresses: of the room; of what is asked for next
  u32 asked, taken;  // where the next step comes to lie, and the one to take

  // Chunks [first, end), one at least. By all threads.
  GPURT_FN void start(Room& room, const Cache& cache, u32 first, u32 end) {
    const u32 count = end - first, both = (count + 1) / 2 * 2;
    for (u32 i = threadIdx.x; i < both + 2 * count + 2 * kAhead; i += kTeamThreads) {
      if (i >= count && (i < both || i >= both + 2 * count)) room.from[i] = 0;
      if (i >= count) continue;
      const u32 chunk = first + i;
      const u64 key = cache.key(cache.page(chunk * kPositions), chunk * kPositions);
      room.from[i] = key;
      // Behind those of the virtual warps before, and its own before.
      u32 place = i / kVirtualWarps;
      for (u32 v = 0; v < chunk % kVirtualWarps; ++v) {
        const u32 offset = (v - first) % kVirtualWarps;
        place += offset < count ? (count - offset + kVirtualWarps - 1) / kVirtualWarps : 0;
      }
      room.from[both + 2 * place] = key;
      room.from[both + 2 * place + 1] = key + cache.values;
    }
    steps = shared_address(room.steps), from = shared_address(room.from);
    asked = taken = 0;
    team_sync();
#pragma unroll 1
    for (u32 i = 0; i < kAhead; ++i) ask();
  }

  // The next step, by all threads: until the next call it may be read at this address.
  GPURT_FN u32 take() {
    wait_copies<kAhead - 1>();
    team_sync();  // all threads' copies; and all are done with the step before
    ask();
    const u32 at = steps + taken;
    taken = behind(taken);
    return at;
  }

  // Where 8 elements of a row lie in its half, from byte `from` on, of the first 128.
  GPURT_FN static u32 place(u32 row, u32 from) {
    return row * Cache::kRowBytes + (from ^ exchange(row) * 16);
  }
  // These, and those of each STRIDE elements further on: rows' first 128 bytes, and their last
  // ones, are each exchanged among themselves.
  template <u32 STRIDE>
  GPURT_FN static void read(u32 at, Eight (&eights)[D / STRIDE]) {
#pragma unroll
    for (u32 b = 0; b < D / STRIDE; ++b) {
      const u32 further = b * STRIDE * Cache::kElementBytes;
      read8((at ^ further % 128) + further / 128 * 128, eights[b]);
    }
  }

 private:
  GPURT_FN static u32 exchange(u32 row) { return (row / 2 % 4 * 2) ^ (row % 2 * 4); }
  GPURT_FN static u32 behind(u32 at) { return at == kAhead * kStep ? 0 : at + kStep; }
  GPURT_FN static void read8(u32 at, uint4& eight) { eight = ld_shared_b128(at); }
  GPURT_FN static void read8(u32 at, uint2& eight) { eight = ld_shared_b64(at); }

  GPURT_FN void ask() {
#pragma unroll
    for (u32 n = 0; n < kEach; ++n) {
      const u32 byte = (n * kTeamThreads + threadIdx.x) * 16;
      if (kPieces % kTeamThreads != 0 && byte >= kStep) continue;
      const uint2 words = ld_shared_b64(from + byte / kHalf * 8);
      const u64 half = u64{words.y} << 32 | words.x;
      const u32 row = byte / Cache::kRowBytes % kPositions;
      if (half != 0)
        copy16_to_shared(steps + asked + (byte ^ exchange(row) * 16), half + byte % kHalf);
    }
    from += 16;
    asked = behind(asked);
    commit_copies();
  }
};

}  // namespace gpurt
