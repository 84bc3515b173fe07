// draft_walk: a path, or a tree, through the candidates of a block. graphs/ops/draft_walk.py has
// the contract.
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
  u32 nodes;     // of a tree
  u64* keys;     // [n]
  f32* pair;     // [rank]: predecessor times hidden
  f32* after;    // [rank]
  f32* value;    // [top_k]
  f32* weights;  // [top_k]
  u32* tokens;   // [top_k]
  // Children of all nodes of a tree, [nodes * top_k]: the logarithm of a path's probability, its
  // last token, and the node before it.
  f32* path;
  u32* child;
  u32* parent;
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

/// Adds the children of a node, whose path has that logarithm, to `pooled` others. Returns how many
/// there are then.
inline u32 walk_children(const WalkTask& task, u32 row, u32 node, u32 token, f32 path, u32 pooled) {
  const u32 count = walk_values(task, row, token);
  if (count == 0) return pooled;
  const f32 top = *std::max_element(task.value, task.value + count);
  f32 sum = 0;
  for (u32 i = 0; i < count; ++i) sum += std::exp(task.value[i] - top);
  for (u32 i = 0; i < count; ++i, ++pooled) {
    task.path[pooled] = path + (task.value[i] - top - std::log(sum));
    task.child[pooled] = task.tokens[i];
    task.parent[pooled] = node;
  }
  return pooled;
}

/// The likeliest nodes behind an anchor. first: row of the first mask. Returns how many.
inline u32 walk_tree(const WalkTask& task, u32 first, u32 masks, u32 anchor, u32* tokens,
                     u32* parents) {
  u32 depth[kProposalsPerSlot + 1] = {};  // by node; 0 is the anchor
  f32 path[kProposalsPerSlot + 1] = {};
  u32 pooled = 0, node = 0;
  for (; node < task.nodes; ++node) {
    const u32 token = node == 0 ? anchor : tokens[node - 1];
    if (depth[node] < masks)
      pooled = walk_children(task, first + depth[node], node, token, path[node], pooled);
    const f32* const best = std::max_element(task.path, task.path + pooled);
    if (pooled == 0 || *best == -__builtin_inff()) break;
    const u64 at = static_cast<u64>(best - task.path);
    tokens[node] = task.child[at];
    parents[node] = task.parent[at];
    depth[node + 1] = depth[parents[node]] + 1;
    path[node + 1] = task.path[at];
    task.path[at] = -__builtin_inff();
  }
  return node;
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
    task.nodes = record.param[4];
    const u64 children = u64{task.nodes} * task.top_k;
    W workspace(context, W::padded<u64>(task.n) + 2 * W::padded<f32>(task.rank) +
                             3 * W::padded<f32>(task.top_k) + 3 * W::padded<f32>(children));
    task.keys = workspace.take<u64>(task.n);
    task.pair = workspace.take<f32>(task.rank);
    task.after = workspace.take<f32>(task.rank);
    task.value = workspace.take<f32>(task.top_k);
    task.weights = workspace.take<f32>(task.top_k);
    task.tokens = workspace.take<u32>(task.top_k);
    task.path = workspace.take<f32>(children);
    task.child = workspace.take<u32>(children);
    task.parent = workspace.take<u32>(children);
    walk(task, context, record);
    return kFaultNone;
  }

 private:
  static void walk(const host::WalkTask& task, const BodyContext& context,
                   const TaskRecord& record) {
    const u32 slot = record.tile[0];
    const auto slot_of = [&](u32 j) { return context.rows[context.sample_rows[j]].slot; };
    u32 first = 0, masks = 0;
    while (first < context.step->sample_count && slot_of(first) != slot) ++first;
    while (first + masks < context.step->sample_count && slot_of(first + masks) == slot) ++masks;
    if (masks == 0) return;
    const u32 anchor = context.rows[context.sample_rows[first] - 1].token;
    Proposals& to = arg<Proposals>(record, 5)[slot];
    u32* const parents = arg<u32>(record, 6);
    u32* const own_parents = parents ? parents + u64{slot} * kProposalsPerSlot : nullptr;
    if (own_parents && context.slots[slot].temperature == 0.0F) {
      to.count = host::walk_tree(task, first, masks, anchor, to.tokens, own_parents);
      return;
    }
    to.count = chain(task, context, first, masks, anchor, to.tokens);
    if (own_parents)
      for (u32 i = 0; i < to.count; ++i) own_parents[i] = i;
  }

  static u32 chain(const host::WalkTask& task, const BodyContext& context, u32 first, u32 masks,
                   u32 before, u32* tokens) {
    u32 count = 0;
    for (; count < masks; ++count) {
      const RowState& row = context.rows[context.sample_rows[first + count]];
      const u32 found = host::walk_values(task, first + count, before);
      if (found == 0) break;
      // The row before samples the token of this one's position.
      const u32 place = host::walk_choice(task, found, context.slots[row.slot], row.position - 1);
      tokens[count] = before = task.tokens[place];
    }
    return count;
  }
};

}  // namespace gpurt
