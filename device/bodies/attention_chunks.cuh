// Chunks of a slot's positions on their way through shared memory, for a whole team.
//
// In the order of attention_alone.cuh: the keys of all chunks, then keys and values of virtual warp
// 0's, of 1's, and so on. Each thread copies its pieces of 16 bytes (cp.async), kAhead chunks
// before they are needed: what sixteen warps would each read from L2 is read once. Pieces of a row
// lie exchanged, by a number that hangs on its position, so that what a warp reads at once lies in
// different banks: keys of 8 rows side by side, or values of every other one of 8.
#pragma once
#include "attention_mma.cuh"

namespace gpurt {

template <u32 D, u32 CACHE, bool EXTRAS>
struct AttentionChunks {
  using Cache = AttentionCache<D, CACHE, EXTRAS>;
  using Eight = typename Elements<CACHE>::Eight;
  static constexpr u32 kPositions = AttentionMma<D, CACHE, EXTRAS>::kChunk;
  static constexpr u32 kAhead = 4;
  static constexpr u32 kHalf = kPositions * Cache::kRowBytes;  // keys; behind them values
  static constexpr u32 kRoom = (kAhead + 1) * 2 * kHalf;

  Cache cache;
  u32 room;         // shared address
  u32 first, end;   // chunks
  u32 chunk, page;  // the next to ask for, and where it lies
  bool values;      // with its values
  u32 asked, taken;

  // Chunks [first, end), one at least.
  GPURT_FN void start(u32 first_chunk, u32 end_chunk) {
    first = chunk = first_chunk, end = end_chunk;
    values = false, asked = taken = 0;
    page = cache.page(chunk * kPositions);
#pragma unroll 1
    for (u32 i = 0; i < kAhead; ++i) ask();
  }

  // A virtual warp's first chunk; `end` or more: it has none.
  GPURT_FN u32 first_of(u32 v) const { return first + (v - first) % kVirtualWarps; }

  // The next chunk, by all threads: until the next call it may be read at this address.
  GPURT_FN u32 take() {
    wait_copies<kAhead - 1>();
    team_sync();  // all threads' copies; and all are done with the chunk before
    ask();
    return place(taken++);
  }

  // 8 elements from byte `from` on of a row of a chunk's keys or values, and of each STRIDE further
  // ones.
  template <u32 STRIDE>
  GPURT_FN static void read(u32 at, u32 row, u32 from, Eight (&eights)[D / STRIDE]) {
    const u32 own = at + row * Cache::kRowBytes + from % 16, piece = from / 16 ^ exchange(row);
#pragma unroll
    for (u32 b = 0; b < D / STRIDE; ++b)
      read8(own + (piece ^ b * STRIDE * Cache::kElementBytes / 16) * 16, eights[b]);
  }

 private:
  GPURT_FN static u32 exchange(u32 row) { return (row / 2 % 4 * 2) ^ (row % 2 * 4); }
  GPURT_FN u32 place(u32 number) const { return room + number % (kAhead + 1) * 2 * kHalf; }
  GPURT_FN static void read8(u32 at, uint4& eight) { eight = ld_shared_b128(at); }
  GPURT_FN static void read8(u32 at, uint2& eight) { eight = ld_shared_b64(at); }

  GPURT_FN void ask() {
    if (chunk < end) {
      copy();
      step_on();
      if (chunk < end) page = cache.page(chunk * kPositions);
    }
    ++asked;
    commit_copies();
  }

  GPURT_FN void copy() const {
    constexpr u32 kPieces = Cache::kRowBytes / 16, kAll = kHalf / 16;
    const u64 from = cache.key(page, chunk * kPositions);
    const u32 to = place(asked);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (values ? 2 * kAll : kAll); i += kTeamThreads) {
      const u32 is_value = i / kAll, row = i / kPieces % kPositions, piece = i % kPieces;
      copy16_to_shared(
          to + is_value * kHalf + row * Cache::kRowBytes + (piece ^ exchange(row)) * 16,
          from + (is_value != 0 ? cache.values : 0) + i % kAll * 16);
    }
  }

  GPURT_FN void step_on() {
    u32 v = 0;
    if (values) {
      v = chunk % kVirtualWarps + 1;
      chunk += kVirtualWarps;
    } else {
      ++chunk;
    }
    if (chunk < end) return;
    values = true;
    for (chunk = end; v < kVirtualWarps && chunk >= end; ++v) chunk = first_of(v);
  }
};

}  // namespace gpurt
