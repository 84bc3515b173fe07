// reduce on the GPU: this rank's columns of a sum over all ranks, in their place on every rank.
#pragma once
#include "publish.cuh"
#include "slots.cuh"

namespace gpurt {

struct reduce {
  // Four columns a thread where rows are made of whole fours.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[0] % 4 == 0 && task.param[3] % 4 == 0 && task.param[4] % 4 == 0) {
      add_up<float4>(task, context);
    } else {
      add_up<f32>(task, context);
    }
  }

 private:
  template <class Piece>
  GPURT_FN static void add_up(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kSize = sizeof(Piece) / sizeof(f32);
    const u32 width = task.param[0] / kSize, ranks = task.param[1], per_row = task.param[2];
    const u32 stride = task.param[3] / kSize;
    const u64 slot = u64(stride) * context.step->rows_capacity * per_row;
    const u32 sums_stride = task.param[4] / kSize;
    const SlotsOf<Piece> parts{context.address<const Piece>(task, 0), slot, stride, ranks};
    const Piece* residual = context.address<const Piece>(task, 1);
    if (residual != nullptr) residual += u64(gpurt_program.rank) * width;
    Piece* sums = context.address<Piece>(task, 2);
    const u32 rows = context.step->rows * per_row;
    const u32 begin = task.tile[0] / kSize, columns = task.tile[1] / kSize - begin;
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u32 row = at / columns, column = begin + at % columns;
      const u64 place = u64(row) * ranks * width + column;
      Piece behind{};
      if (residual != nullptr)
        behind = whole_piece(load_piece(residual + place), residual + place, polls_input(task, 1));
      const Piece sum =
          slots_piece<8>(parts, row, column, behind, residual != nullptr, polls_input(task, 0));
#pragma unroll 4
      for (u32 rank = 0; rank < ranks; ++rank)
        store_piece(publish::my_slot(context, sums, rank, width) + u64(row) * sums_stride + column,
                    sum, arms_output(task, 2));
    }
  }
};

}  // namespace gpurt
