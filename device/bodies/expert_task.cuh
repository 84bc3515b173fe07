// What expert_matvec's loops share: a task's arguments and cut, its partial sums, its factors.
#pragma once
#include "expert_activations.cuh"
#include "matvec_outputs.cuh"
#include "routes.hpp"

namespace gpurt {

struct ExpertTask {
  enum Arg : u32 { kArgX, kArgW, kArgNorm, kArgWScale, kArgRoutes, kArgY };
  enum Param : u32 { kN, kK, kEpilogue, kWDtype, kXPerPair, kTopK, kEps, kYRanks };
  static constexpr u32 kVirtual = MatvecTask::kVirtual;
  static constexpr u32 kGroupStride = MatvecTask::kGroupStride;
  static constexpr u32 kTilesMax = 4;  // T
  static constexpr u32 kPassPairs = 2;

  // Partial sums of two pairs. [.][row tile of the virtual warp][row][row group * G + K group]
  struct alignas(16) Pass {
    f32 part[kPassPairs][kTilesMax][16][kGroupStride];
    f32 squares[kPassPairs][kGroupStride];
  };
  // A team of 16 has three in turns: who writes one again knows that the storer has read it, or, of
  // tasks of many users, has passed a barrier since. A team of 1 keeps those of eight pairs.
  static constexpr u32 kPasses = kTeamWarps == 1 ? 4 : 3;
  static_assert(kPasses * sizeof(Pass) <= kScratchBytes);

  // What is read from the slot again and again takes no register over the loop: tile[3], k, norm.
  GPURT_FN static u32 groups_log2(const TaskRecord& task) { return task.tile[3] & 0xFF; }
  GPURT_FN static u32 warp_tiles(const TaskRecord& task) { return task.tile[3] >> 8; }

  // Rounds of 64 G columns.
  GPURT_FN static u32 rounds_of(const TaskRecord& task) {
    const u32 log2 = 6 + groups_log2(task);
    return (task.param[kK] + (1u << log2) - 1) >> log2;
  }

  struct Scales {
    f32 even, odd;  // of z of even and odd rows, if they make one output
  };

  GPURT_FN static Scales scales_of(const TaskRecord& task, u32 expert, f32 factor) {
    Scales scales{factor, factor};
    if (task.addr[kArgWScale] != 0) {
      const f32* of = arg<const f32>(task, kArgWScale) + 2 * expert;
      scales.even *= __ldg(of);
      scales.odd *= __ldg(of + (task.param[kEpilogue] == MatvecTask::kSwiglu ? 1 : 0));
    }
    return scales;
  }

  GPURT_FN static f32 norm_scale(const TaskRecord& task, const Pass& pass, u32 j) {
    const u32 from = shared_address(pass.squares[j]);
    const f32 squares = MatvecTask::sum_of(from, 4 - groups_log2(task));
    return rsqrtf(__fdividef(squares, static_cast<f32>(task.param[kK])) + param_f32(task, kEps));
  }
};

}  // namespace gpurt
