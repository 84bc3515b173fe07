// What attention works on at a time: a tile of columns, each a query head of a row, that see
// positions of one slot; and where those positions lie in the cache.
//
// Chunk c of a slot's positions belongs to virtual warp c % 16, whatever the team's size. Each
// leaves a partial for every column: D sums, their maximum and total. They are merged in the order
// of virtual warps, so that sums hang on positions alone: not on the rows beside, the context, the
// team or the worker.
#pragma once
#include "attention_shape.cuh"
#include "elements.cuh"

namespace gpurt {

constexpr u32 kVirtualWarps = 16;
constexpr u32 kAttentionColumns = 4;    // of a tile, at most: half of an mma's n
constexpr f32 kNothingSeen = -3.0e38f;  // finite: a difference of two is 0, not NaN

// Floats of a column's partial: D sums, maximum, total, two to align the next to 16 bytes.
template <u32 D>
constexpr u32 kPartialFloats = D + 4;

// Heads [head, head + heads) of rows [row, row + rows), which are of one slot. They see positions
// from `seen` on, up to `end`; each row its own part of them.
struct alignas(16) AttentionTile {
  u32 row, rows, head, heads;
  u32 seen, end;

  GPURT_FN u32 columns() const { return rows * heads; }
  GPURT_FN u32 row_of(u32 column) const { return row + column / heads; }
  GPURT_FN u32 head_of(u32 column) const { return head + column % heads; }
  // First position of a virtual warp's first chunk from position `from` on, a chunk's beginning.
  template <u32 CHUNK>
  GPURT_FN u32 start(u32 warp, u32 from) const {
    const u32 chunk = max(seen, from) / CHUNK;
    return (chunk + (warp - chunk) % kVirtualWarps) * CHUNK;
  }
};

// What a lane's two columns see.
struct alignas(16) AttentionBounds {
  u32 seen[2], end[2];

  template <bool WINDOWED>
  GPURT_FN bool has(u32 column, u32 position) const {
    return position < end[column] && (!WINDOWED || position >= seen[column]);
  }
};

// Where a slot's keys and values lie, of one kv head. RING: pages are a ring.
template <u32 D, u32 CACHE, bool RING>
struct alignas(16) AttentionCache {
  static constexpr u32 kElementBytes = sizeof(typename Elements<CACHE>::Eight) / 8;
  static constexpr u32 kRowBytes = D * kElementBytes;  // of a position

  u64 keys;            // of position 0 of page 0
  u64 values;          // bytes from a key to its value
  const u32* pages;    // the slot's
  u32 page_bytes;      // from one page to the next
  u32 page_log2;       // positions a page
  u32 pages_per_slot;  // of a ring
  u32 pages_inverse;
  Branch branch;  // whose positions may lie elsewhere

  GPURT_FN u32 page(u32 position) const {
    const u32 at = position >> page_log2;
    return pages[RING ? at - divided(at, pages_inverse) * pages_per_slot : at];
  }
  GPURT_FN u64 key(u32 page, u32 position) const {
    const u32 offset = position & ((1u << page_log2) - 1);
    return keys + u64(page) * page_bytes + offset * kRowBytes;
  }
  // Bytes from a position's place to where the branch has it.
  GPURT_FN u64 detour(u32 position) const {
    if (!branch.is_elsewhere(position)) return 0;
    const u32 place = branch.place(position);
    return key(page(place), place) - key(page(position), position);
  }
};

// What a warp folds, in shared memory: beside its sums there are no registers for it, and what the
// compiler puts into local memory in their place is a trip to L2 each time, since every acquire on
// the SM empties its L1.
template <class Cache>
struct AttentionView {
  Cache cache;
  AttentionTile tile;
  AttentionBounds bounds[2];  // of lane % 2

  // By all lanes of the warp that will read it. of_lane: what the lane's columns see.
  GPURT_FN void set(const Cache& of_slot, const AttentionTile& of_columns,
                    const AttentionBounds& of_lane, u32 lane) {
    __syncwarp();  // who read what was here before
    if (lane < 2) bounds[lane] = of_lane;
    if (lane == 0) cache = of_slot, tile = of_columns;
    __syncwarp();
  }
};

// Read here and now, not kept from an earlier time.
template <class T>
GPURT_FN T shared_copy(const T& from) {
  static_assert(alignof(T) == 16);
  union Copy {
    uint4 word[sizeof(T) / 16];
    T whole;
    GPURT_FN Copy() {}
  } copy;
#pragma unroll
  for (u32 i = 0; i < sizeof(T) / 16; ++i)
    copy.word[i] = ld_shared_b128(shared_address(&from) + i * 16);
  return copy.whole;
}

}  // namespace gpurt
