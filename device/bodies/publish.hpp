// publish: this rank's part of a value to every rank. graphs/ops/publish.py has the
// contract.
#pragma once
#include "context.hpp"

namespace gpurt {

namespace host {

/// Rows of a collective's value that this step has: all rows, or the sampled ones, times the rows
/// of the value that each has.
inline u32 value_rows(const BodyContext& context, u32 per_row, bool sampled) {
  return (sampled ? context.step->sample_count : context.step->rows) * per_row;
}

/// This rank's slot in `rank`'s memory; slots of one rank alone are all its own. slot: floats from
/// one to the next.
inline f32* my_slot(const BodyContext& context, f32* slots, u32 rank, u64 slot) {
  const Program& program = *context.program;
  if (program.rank_count == 1) return slots + rank * slot;
  return on_rank(program, slots, rank) + program.rank * slot;
}

}  // namespace host

struct publish {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    const f32* const part = arg<const f32>(record, 0);
    f32* const slots = arg<f32>(record, 1);
    const u64 width = record.param[0];
    const u32 ranks = record.param[1];
    const u32 per_row = record.param[2];
    const u32 rows = host::value_rows(context, per_row, record.param[3] != 0);
    const u64 stride = record.param[4];
    const bool scatters = record.param[5] != 0;
    const u64 part_width = scatters ? width * ranks : width;
    const bool beside = record.param[6] != 0;
    const u64 slot = beside ? width : stride * per_row * context.step->rows_capacity;
    for (u32 rank = 0; rank < ranks; ++rank) {
      f32* const to = host::my_slot(context, slots, rank, slot);
      const f32* const from = part + (scatters ? rank * width : 0);
      for (u64 row = 0; row < rows; ++row) {
        for (u64 i = record.tile[0]; i < record.tile[1]; ++i) {
          to[row * stride + i] = from[row * part_width + i];
        }
      }
    }
    return kFaultNone;
  }
};

}  // namespace gpurt
