// publish on the GPU: this rank's part of a value into every rank's slot.
#pragma once
#include "context.cuh"

namespace gpurt {

struct publish {
  // Rows of a collective's value in this step.
  GPURT_FN static u32 value_rows(const BodyContext& context, u32 per_row, bool sampled) {
    return (sampled ? context.step->sample_count : context.step->rows) * per_row;
  }

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const f32* part = context.address<const f32>(task, 0);
    f32* slots = context.address<f32>(task, 1);
    const u32 width = task.param[0], ranks = task.param[1], per_row = task.param[2];
    const u32 rows = value_rows(context, per_row, task.param[3] != 0);
    const u64 slot = u64(width) * context.step->rows_capacity * per_row;
    const u32 begin = task.tile[0], columns = task.tile[1] - begin;
    const Program& program = *context.program;
    const bool alone = program.rank_count == 1;
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u64 i = u64(at / columns) * width + begin + at % columns;
      const f32 value = part[i];
      for (u32 rank = 0; rank < ranks; ++rank) {
        f32* to = alone ? slots + rank * slot : on_rank(program, slots, rank) + program.rank * slot;
        to[i] = value;
      }
    }
  }
};

}  // namespace gpurt
