// draft_walk: a path through the candidates of a block. graphs/ops/draft_walk.py has the contract.
#pragma once
#include <cmath>

#include "embed.hpp"
#include "sample.hpp"

namespace gpurt::host {

/// A draft_walk task, decoded, with its temporary arrays.
struct WalkTask {
  const f32* scores;      // [rows, n]
  const u32* ids;         // [rows, n]
  const f32* hidden;      // [rows, rank]; null: no selector
  const u8* predecessor;  // [vocab, rank]
  const u8* successor;    // [vocab, rank]
  u32 n, top_k, rank, dtype;
  u64* keys;     // [n]
  f32* pair;     // [rank]: predecessor times hidden
  f32* after;    // [rank]
  f32* value;    // [top_k]
  f32* weights;  // [top_k]
  u32* tokens;   // [top_k]
};

/// The best candidates of a row that have a finite value, and their values. Returns how many.
inline u32 walk_values(const WalkTask& task, u32 row, u32 before) {
  const f32* const scores = task.scores + u64{row} * task.n;
  const u32* const ids = task.ids + u64{row} * task.n;
  for (u32 i = 0; i < task.n; ++i) task.keys[i] = u64{falling_key(scores[i])} << 32 | i;
  // Places are in the order of ids: equal scores keep it.
  const u32 kept = std::min(task.top_k, task.n);
  std::partial_sort(task.keys, task.keys + kept, task.keys + task.n);
  const u64 stride = row_bytes(task.dtype, task.rank);
  if (task.hidden) {
    embed_row(task.dtype, task.predecessor + before * stride, task.rank, task.pair);
    const f32* const hidden = task.hidden + u64{row} * task.rank;
    for (u32 r = 0; r < task.rank; ++r) task.pair[r] *= hidden[r];
  }
  u32 count = 0;
  for (u32 i = 0; i < kept; ++i) {
    const u32 at = static_cast<u32>(task.keys[i]);
    f32 value = scores[at];
    if (!std::isfinite(value)) continue;  // also where a chunk had no candidate
    if (task.hidden) {
      embed_row(task.dtype, task.successor + ids[at] * stride, task.rank, task.after);
      for (u32 r = 0; r < task.rank; ++r) value += task.pair[r] * task.after[r];
    }
    if (!std::isfinite(value)) continue;
    task.value[count] = value;
    task.tokens[count++] = ids[at];
  }
  return count;
}

/// The place of the chosen one of `count` values.
inline u32 walk_choice(const WalkTask& task, u32 count, const SlotState& slot, u32 position) {
  u32 best = 0;
  for (u32 i = 1; i < count; ++i)
    if (task.value[i] > task.value[best]) best = i;
  if (slot.temperature == 0.0F) return best;
  for (u32 i = 0; i < count; ++i)
    task.weights[i] = std::exp((task.value[i] - task.value[best]) / slot.temperature);
  Candidates candidates(task.value, task.weights, count, task.keys);
  return pick_token(candidates, slot, sample_uniform(slot.seed, position));
}

}  // namespace gpurt::host

namespace gpurt {

struct draft_walk {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    using W = host::Workspace;
    host::WalkTask task{};
    task.scores = arg<const f32>(record, 0);
    task.ids = arg<const u32>(record, 1);
    task.hidden = arg<const f32>(record, 2);
    task.predecessor = arg<const u8>(record, 3);
    task.successor = arg<const u8>(record, 4);
    task.n = record.param[0];
    task.top_k = record.param[1];
    task.rank = record.param[2];
    task.dtype = record.param[3];
    W workspace(context, W::padded<u64>(task.n) + 2 * W::padded<f32>(task.rank) +
                             3 * W::padded<f32>(task.top_k));
    task.keys = workspace.take<u64>(task.n);
    task.pair = workspace.take<f32>(task.rank);
    task.after = workspace.take<f32>(task.rank);
    task.value = workspace.take<f32>(task.top_k);
    task.weights = workspace.take<f32>(task.top_k);
    task.tokens = workspace.take<u32>(task.top_k);
    walk(task, context, record.tile[0], arg<Proposals>(record, 5)[record.tile[0]]);
    return kFaultNone;
  }

 private:
  static void walk(const host::WalkTask& task, const BodyContext& context, u32 slot,
                   Proposals& to) {
    u32 before = kNoSample, count = 0;
    for (u32 j = 0; j < context.step->sample_count; ++j) {
      const RowState* const row = context.rows + context.sample_rows[j];
      if (row->slot != slot) continue;
      if (before == kNoSample) before = row[-1].token;  // the anchor's row is in front
      const u32 found = host::walk_values(task, j, before);
      if (found == 0) break;
      // The row before samples the token of this one's position.
      const u32 place = host::walk_choice(task, found, context.slots[slot], row->position - 1);
      before = task.tokens[place];
      to.tokens[count++] = before;
    }
    if (before != kNoSample) to.count = count;
  }
};

}  // namespace gpurt
