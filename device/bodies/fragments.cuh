// Activations in the order in which matvec's warps read them: 8 rows x 64 columns side by side.
//
// A chunk of 64 columns, the row tiles of 8 in turn; in each, granule by granule of a row's part (8
// in bf16, 16 in f32): those c, c + 4, ... of all 8 rows that lane (g, c) reads as its first,
// second, ... load. So a load of a warp is 512 bytes in a row, four lines of L2; of rows side by
// side it is half of a line each of eight, and an SM gets 20 bytes a cycle in place of 34 (H200).
// The planner (fragments.py) chooses it where all that touch a buffer know it, and says so by a
// parameter: the number of row tiles that the buffer has; 0: rows side by side.
#pragma once
#include "../ptx.cuh"

// 1 if a task of the plan reads such a buffer: the generated bodies.gen.cuh says so. Other kernels
// hold no word of it.
#ifndef GPURT_FRAGMENTS
#define GPURT_FRAGMENTS 0
#endif

namespace gpurt {

constexpr bool kFragments = GPURT_FRAGMENTS != 0;
constexpr u32 kFragmentBytes = 512;  // from a lane's granule to its next one

// Byte at which an element lies, of ELEMENT_BYTES, in a buffer of `tiles` row tiles.
template <u32 ELEMENT_BYTES>
GPURT_FN u32 fragment_place(u32 row, u32 column, u32 tiles) {
  constexpr u32 kEach = 16 / ELEMENT_BYTES;  // elements of a granule
  const u32 granule = column % 64 / kEach, chunk = column / 64;
  return (chunk * tiles + row / 8) * (8 * 64 * ELEMENT_BYTES) + granule / 4 * kFragmentBytes +
         (row % 8 * 4 + granule % 4) * 16 + column % kEach * ELEMENT_BYTES;
}

// Columns 4i .. 4i + 3 of a row as bf16. width: of a row. tiles: as above.
GPURT_FN void store_bf16x4(u16* y, u32 row, u32 i, u32 width, u32 tiles, const float4& v) {
  u16* to = y + u64{row} * width + 4 * i;
  if (kFragments && tiles != 0) to = y + fragment_place<2>(row, 4 * i, tiles) / 2;
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
}

}  // namespace gpurt
