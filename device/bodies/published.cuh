// Results that a body stores on every rank itself, where a publish would copy them (planner
// direct.py). Four parameters of its task say where:
//   ranks    0: y is an ordinary argument
//   stride   floats from a row to the next
//   part     floats from a rank's place to the next rank's
//   share    columns that go to one rank alone, the first ones to rank 0; 0: all go to all
#pragma once
#include "context.cuh"

// 1 if a matvec of the plan does: the generated bodies.gen.cuh says so. Other kernels hold no word
// of it.
#ifndef GPURT_PUBLISHED
#define GPURT_PUBLISHED 0
#endif

namespace gpurt {

constexpr bool kMatvecPublished = GPURT_PUBLISHED != 0;

struct Copies {
  // Where an element goes, on the first rank that gets it. param: the first of the four. y: where
  // the argument lies on this rank.
  GPURT_FN static u64 first_of(const u32* param, u64 y, u32 row, u32 column) {
    const u32 share = param[3], target = share == 0 ? 0 : column / share;
    const u64 place = y + (u64{row} * param[1] + (column - target * share)) * 4;
    const Program& program = gpurt_program;
    if (program.rank_count == 1) return place + u64{target} * param[2] * 4;
    return place + u64{program.rank} * param[2] * 4 - program.symmetric +
           at<const u64>(program.peers)[target];
  }

  GPURT_FN static u32 count_of(const u32* param) { return param[3] == 0 ? param[0] : 1; }

  // Of copy `i`, from the first one's place.
  GPURT_FN static u64 offset_of(const u32* param, u32 i) {
    const Program& program = gpurt_program;
    if (program.rank_count == 1) return u64{i} * param[2] * 4;
    const u64* peers = at<const u64>(program.peers);
    return i == 0 ? 0 : peers[i] - peers[0];
  }

  // One word to all that get it, canonical: it may be payload. Any lanes.
  GPURT_FN static void put(const u32* param, u64 y, u32 row, u32 column, f32 value) {
    const u64 to = first_of(param, y, row, column);
#pragma unroll 1
    for (u32 i = 0; i < count_of(param); ++i)
      st_relaxed_u32(to + offset_of(param, i), canonical_f32(__float_as_uint(value)));
  }
};

// What goes to all ranks, or is an ordinary argument: where it begins on one of those that get it,
// asked long before there is something to store. Lanes ask for a copy each.
struct CopyOf {
  u32 count;   // copies
  u32 stride;  // floats from a row to the next
  u64 base;    // of copy `i`; of the first one if there is no such copy

  // param: the four. y: where the argument lies on this rank. width: of its rows, if it is
  // ordinary.
  GPURT_FN CopyOf(const u32* param, u64 y, u32 width, u32 i)
      : count(max(param[0], 1u)), stride(param[0] == 0 ? width : param[1]), base(y) {
    const Program& program = gpurt_program;
    if (param[0] == 0) return;
    // The next rank's first: what goes over a link takes longest.
    const u32 copy = (i < count ? program.rank + 1 + i : 0) % count;
    base += u64{program.rank_count == 1 ? copy : program.rank} * param[2] * 4;
    if (program.rank_count > 1) base += at<const u64>(program.peers)[copy] - program.symmetric;
  }

  GPURT_FN u64 place(u32 row, u32 column) const { return base + (u64{row} * stride + column) * 4; }
};

}  // namespace gpurt
