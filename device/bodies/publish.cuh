// publish on the GPU: this rank's part of a value into every rank's slot.
#pragma once
#include "context.cuh"

namespace gpurt {

struct publish {
  // Rows of a collective's value in this step.
  GPURT_FN static u32 value_rows(const BodyContext& context, u32 per_row, bool sampled) {
    return (sampled ? context.step->sample_count : context.step->rows) * per_row;
  }

  // Four columns a thread where rows are made of whole fours; a value's last tile may be narrow.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[0] % 4 == 0) {
      copy<float4>(task, context);
    } else {
      copy<f32>(task, context);
    }
  }

 private:
  template <class Piece>
  GPURT_FN static void copy(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kSize = sizeof(Piece) / sizeof(f32);
    const Piece* part = context.address<const Piece>(task, 0);
    Piece* slots = context.address<Piece>(task, 1);
    const u32 width = task.param[0] / kSize, ranks = task.param[1], per_row = task.param[2];
    const u32 rows = value_rows(context, per_row, task.param[3] != 0);
    const u64 slot = u64(width) * context.step->rows_capacity * per_row;
    const u32 begin = task.tile[0] / kSize, columns = task.tile[1] / kSize - begin;
    const Program& program = *context.program;
    const bool alone = program.rank_count == 1;
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u64 i = u64(at / columns) * width + begin + at % columns;
      const Piece value = part[i];
#pragma unroll 4
      for (u32 rank = 0; rank < ranks; ++rank) {
        Piece* to =
            alone ? slots + rank * slot : on_rank(program, slots, rank) + program.rank * slot;
        to[i] = value;
      }
    }
  }
};

}  // namespace gpurt
