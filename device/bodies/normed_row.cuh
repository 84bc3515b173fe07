// A row's last step in bodies that make whole rows of a stream: R(y) * norm, for who reads it next.
//
// Matvecs would each norm y anew, and convert it, in every task.
#pragma once
#include "fragments.cuh"
#include "row_norm.cuh"

namespace gpurt {

// y: of this row, by the team's own stores, which lie in front of a barrier. squares: its own.
GPURT_FN void store_normed(const BodyContext& context, const f32* y,
                           const RowNorm::Partial& squares, const f32* norm, f32 eps,
                           const RowsByFours& normed, u32 row) {
  constexpr u32 kAtOnce = 4;
  const u32 pieces = normed.width / 4;
  const u32 apart = normed.apart(kTeamThreads / 16);
  const f32 by = RowNorm::scale(squares, normed.width, eps);
#pragma unroll 1
  for (u32 base = 0; base < pieces; base += kAtOnce * kTeamThreads) {
    const u32 first = base + context.thread;
    const auto piece = [&](u32 j) { return min(first + j * kTeamThreads, pieces - 1); };
    const u64 to = normed.place(row, first);
    float4 v[kAtOnce], weight[kAtOnce];
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      v[j] = read4(y, piece(j));
      weight[j] = read4(norm, piece(j));
    }
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      normed.store(to + j * apart, mul4(scale4(v[j], by), weight[j]),
                   first + j * kTeamThreads < pieces);
    }
  }
}

}  // namespace gpurt
