// Activations in the order in which matvec's warps read them: 8 rows x 64 columns side by side.
//
// A chunk of 64 columns, the row tiles of 8 in turn; in each, granule by granule of a row's part (8
// in bf16, 16 in f32): those c, c + 4, ... of all 8 rows that lane (g, c) reads as its first,
// second, ... load. So a load of a warp is 512 bytes in a row, four lines of L2; of rows side by
// side it is half of a line each of eight, and an SM gets 20 bytes a cycle in place of 34 (H200).
// A granule of bf16, which payload is stored and polled by, is eight columns of a row either way.
// The planner (fragments.py) chooses it where all that touch a buffer know it, and says so by a
// parameter: the number of row tiles that the buffer has; 0: rows side by side.
#pragma once
#include "elements.cuh"

// 1 if a task of the plan reads such a buffer: the generated bodies.gen.cuh says so. Other kernels
// hold no word of it.
#ifndef GPURT_FRAGMENTS
#define GPURT_FRAGMENTS 0
#endif
#ifndef GPURT_MAKES_FRAGMENTS  // the same for a matvec's y
#define GPURT_MAKES_FRAGMENTS 0
#endif

namespace gpurt {

constexpr bool kFragments = GPURT_FRAGMENTS != 0;
constexpr bool kMakesFragments = GPURT_MAKES_FRAGMENTS != 0;
constexpr u32 kFragmentBytes = 512;  // from a lane's granule to its next one

// Byte at which an element lies, of ELEMENT_BYTES, in a buffer of `tiles` row tiles.
template <u32 ELEMENT_BYTES>
GPURT_FN u32 fragment_place(u32 row, u32 column, u32 tiles) {
  constexpr u32 kEach = 16 / ELEMENT_BYTES;  // elements of a granule
  const u32 granule = column % 64 / kEach, chunk = column / 64;
  return (chunk * tiles + row / 8) * (8 * 64 * ELEMENT_BYTES) + granule / 4 * kFragmentBytes +
         (row % 8 * 4 + granule % 4) * 16 + column % kEach * ELEMENT_BYTES;
}

// Rows of an argument in float32 or bf16, as bodies read and write them: columns 4i .. 4i + 3.
struct RowsByFours {
  u64 base;
  u32 width;         // of a row
  u32 dtype, tiles;  // parameters of the argument; tiles: as above

  GPURT_FN u64 place(u32 row, u32 i) const {
    if (kFragments && tiles != 0) return base + fragment_place<2>(row, 4 * i, tiles);
    return base + (u64{row} * width + 4 * i) * (dtype == kBf16 ? 2 : 4);
  }

  // Bytes from a place in a row to the one so many chunks of 64 columns behind it.
  GPURT_FN u32 apart(u32 chunks) const {
    const u32 together = kFragments && tiles != 0 ? tiles * 8 : 1;  // rows
    return chunks * together * 64 * (dtype == kBf16 ? 2 : 4);
  }

  // To a place. All lanes of a warp: a lane's four columns lie beside its neighbour's, and two make
  // a granule of bf16, stored at once as payload needs it. is_there: nothing is stored where it is
  // not.
  GPURT_FN void store(u64 to, const float4& v, bool is_there) const {
    if (dtype != kBf16) {
      if (is_there) store_granule(to, v.x, v.y, v.z, v.w);
      return;
    }
    const uint2 own = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
    const uint2 next = make_uint2(__shfl_down_sync(~0u, own.x, 1), __shfl_down_sync(~0u, own.y, 1));
    if (!is_there) return;
    if (width % 8 != 0) {
      *at<uint2>(to) = own;
    } else if (threadIdx.x % 2 == 0) {
      st_relaxed_b128(to, make_uint4(own.x, own.y, next.x, next.y));
    }
  }

  // What lies there, and the floats that it means: loads of several are under way at once.
  GPURT_FN float4 load(u64 from) const {
    if (dtype != kBf16) return load_piece(at<const float4>(from));
    const uint2 pairs = ld_relaxed_b64(from);
    return make_float4(__uint_as_float(pairs.x), __uint_as_float(pairs.y), 0, 0);
  }
  GPURT_FN float4 floats(const float4& v) const {
    if (dtype != kBf16) return v;
    return make_float4(bf16_low(__float_as_uint(v.x)), bf16_high(__float_as_uint(v.x)),
                       bf16_low(__float_as_uint(v.y)), bf16_high(__float_as_uint(v.y)));
  }
};

}  // namespace gpurt
