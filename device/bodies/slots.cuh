// Reads slots of a collective on the GPU, piece by piece.
#pragma once
#include "../payload.cuh"
#include "context.cuh"
#include "slots.hpp"

namespace gpurt {

GPURT_FN void add_piece(f32& sum, f32 value) {
  sum += value;
}
GPURT_FN void add_piece(float4& sum, const float4& value) {
  sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
}

// The same of two ranks, which is the usual case: behind the data's arrival there is but the sum.
template <class Piece>
GPURT_FN Piece pair_piece(const SlotsOf<Piece>& slots, u32 index, u32 i, const Piece& first,
                          bool has_first, bool payload) {
  const Piece* from = slots.row(0, index) + i;
  const auto place = [&](u32 j) { return from + j * slots.slot; };
  Piece parts[2] = {load_piece(place(0)), load_piece(place(1))};
  whole_pieces(parts, payload, place);
  Piece total = parts[0];
  if (has_first) total = first, add_piece(total, parts[0]);
  add_piece(total, parts[1]);
  return total;
}

// Piece `i` of a row of the sum, which begins with `first`, if there is one. AT_ONCE: ranks whose
// loads are under way at once. payload: each is waited for.
template <u32 AT_ONCE, class Piece>
GPURT_FN Piece slots_piece(const SlotsOf<Piece>& slots, u32 index, u32 i, const Piece& first,
                           bool has_first, bool payload) {
  if constexpr (AT_ONCE > 2) {  // a look at eight of two would be four at each
    if (slots.ranks == 2) return pair_piece(slots, index, i, first, has_first, payload);
  }
  const Piece* from = slots.row(0, index) + i;
  Piece total = first;
#pragma unroll 1
  for (u32 base = 0; base < slots.ranks; base += AT_ONCE) {
    const auto place = [&](u32 j) { return from + min(base + j, slots.ranks - 1) * slots.slot; };
    Piece parts[AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) parts[j] = load_piece(place(j));
    whole_pieces(parts, payload, place);
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) {
      if (base + j >= slots.ranks) break;
      if (base + j == 0 && !has_first) {
        total = parts[0];  // 0 + x would lose the sign of a zero
      } else {
        add_piece(total, parts[j]);
      }
    }
  }
  return total;
}

}  // namespace gpurt
