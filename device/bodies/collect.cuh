// collect on the GPU: the sum of all ranks' parts, in rank order. Where it is but a part of a next
// sum, four more parameters say where it goes on all ranks, as of a matvec (published.cuh).
#pragma once
#include "publish.cuh"
#include "published.cuh"
#include "slots.cuh"

namespace gpurt {

struct collect {
  // Four columns a thread where rows are made of whole fours.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    const u32* published = task.param + kYRanks;
    if (task.param[0] % 4 == 0 && task.param[4] % 4 == 0 && published[1] % 4 == 0 &&
        published[2] % 4 == 0) {
      add_up<float4>(task, context);
    } else {
      add_up<f32>(task, context);
    }
  }

 private:
  static constexpr u32 kYRanks = 5;

  template <class Piece>
  GPURT_FN static void add_up(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kSize = sizeof(Piece) / sizeof(f32);
    constexpr u32 kAtOnce = kSize == 1 ? 2 : 8;  // narrow rows are rare
    const u32 width = task.param[0] / kSize, per_row = task.param[2];
    const u32 stride = task.param[4] / kSize;
    const u64 slot = u64(stride) * context.step->rows_capacity * per_row;
    const SlotsOf<Piece> slots{context.address<const Piece>(task, 0), slot, stride, task.param[1]};
    // Where the sum goes is asked while the parts are on their way: behind the wait for them it
    // would be a trip to L2 for each rank.
    const u32* published = task.param + kYRanks;
    const u64 y = reinterpret_cast<u64>(context.address<Piece>(task, 1));
    const CopyOf first{published, y, task.param[0], 0}, second{published, y, task.param[0], 1};
    const Piece* residual = context.address<const Piece>(task, 2);
    const bool polls = polls_input(task, 0), polls_residual = polls_input(task, 2);
    const bool arms = arms_output(task, 1);
    const u32 rows = publish::value_rows(context, per_row, task.param[3] != 0);
    const u32 begin = task.tile[0] / kSize, columns = task.tile[1] / kSize - begin;
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u32 row = at / columns, column = begin + at % columns;
      const u64 place = u64(row) * width + column;
      const u64 to[2] = {first.place(row, column * kSize), second.place(row, column * kSize)};
      Piece behind{};
      if (residual != nullptr)
        behind = whole_piece(load_piece(residual + place), residual + place, polls_residual);
      const Piece sum =
          slots_piece<kAtOnce>(slots, row, column, behind, residual != nullptr, polls);
      store_piece(reinterpret_cast<Piece*>(to[0]), sum, arms);
      if (first.count > 1) store_piece(reinterpret_cast<Piece*>(to[1]), sum, arms);
#pragma unroll 1
      for (u32 copy = 2; copy < first.count; ++copy) {
        const CopyOf further{published, y, task.param[0], copy};
        store_piece(reinterpret_cast<Piece*>(further.place(row, column * kSize)), sum, arms);
      }
    }
  }
};

}  // namespace gpurt
