// publish on the GPU: this rank's part of a value to every rank.
#pragma once
#include "../payload.cuh"
#include "context.cuh"

namespace gpurt {

struct publish {
  // Rows of a collective's value in this step.
  GPURT_FN static u32 value_rows(const BodyContext& context, u32 per_row, bool sampled) {
    return (sampled ? context.step->sample_count : context.step->rows) * per_row;
  }

  // This rank's slot in `rank`'s memory; slots of one rank alone are all its own. slot: their size.
  template <class Piece>
  GPURT_FN static Piece* my_slot(const BodyContext& context, Piece* slots, u32 rank, u64 slot) {
    if (gpurt_program.rank_count == 1) return slots + rank * slot;
    return on_rank(gpurt_program, slots, rank) + gpurt_program.rank * slot;
  }

  // Four columns a thread where rows are made of whole fours; a value's last tile may be narrow.
  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    if (task.param[0] % 4 == 0 && task.param[4] % 4 == 0) {
      copy<float4>(task, context);
    } else {
      copy<f32>(task, context);
    }
  }

 private:
  // Ranks whose loads, also of where their slots are, are under way at once: behind a store the
  // next one would wait for a trip to L2, since the compiler cannot know that slots and part lie
  // apart.
  static constexpr u32 kAtOnce = 8;

  template <class Piece>
  GPURT_FN static void copy(const TaskRecord& task, const BodyContext& context) {
    constexpr u32 kSize = sizeof(Piece) / sizeof(f32);
    const Piece* part = context.address<const Piece>(task, 0);
    Piece* slots = context.address<Piece>(task, 1);
    const u32 width = task.param[0] / kSize, ranks = task.param[1], per_row = task.param[2];
    const u32 rows = value_rows(context, per_row, task.param[3] != 0);
    const u32 stride = task.param[4] / kSize;
    const u64 slot =
        task.param[6] != 0 ? width : u64(stride) * context.step->rows_capacity * per_row;
    const u32 share = task.param[5] != 0 ? width : 0;  // of a part that is scattered
    const u64 part_width = share != 0 ? u64(width) * ranks : width;
    const bool polls = polls_input(task, 0), payload = arms_output(task, 1);
    const u32 begin = task.tile[0] / kSize, columns = task.tile[1] / kSize - begin;
    for (u32 at = context.thread; at < rows * columns; at += context.team_threads) {
      const u32 row = at / columns, column = begin + at % columns;
      const Piece* from = part + row * part_width + column;
      const u64 place = u64(row) * stride + column;
#pragma unroll 1
      for (u32 base = 0; base < ranks; base += kAtOnce) {
        Piece piece[kAtOnce], *to[kAtOnce];
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) {
          const u32 rank = min(base + j, ranks - 1);
          piece[j] = load_piece(from + rank * share);
          to[j] = my_slot(context, slots, rank, slot) + place;
        }
#pragma unroll
        for (u32 j = 0; j < kAtOnce; ++j) {
          if (base + j >= ranks) break;
          const Piece* at_rank = from + (base + j) * share;
          store_piece(to[j], whole_piece(piece[j], at_rank, polls), payload);
        }
      }
    }
  }
};

}  // namespace gpurt
