// draft_walk on the GPU: a path, or a tree, through the candidates of one slot's block.
//
// The contract is in graphs/ops/draft_walk.py.
//   1. a warp a mask's row: the best of its candidates; team barrier
//   2. mask by mask: a warp a candidate makes its value, with the token chosen before; barrier; one
//      warp takes the best, or one thread draws; barrier
// Of a tree, node by node instead: the values of the newest node's candidates; barrier; one warp
// takes the likeliest of all that are no node yet; barrier.
// Masks stand in series, so what counts is one mask's trips: whatever rows of the codebooks may be
// wanted are asked for in 1, and a product's loads are all under way at once. Rows of codebooks
// have a multiple of 8 columns.
#pragma once
#include "elements.cuh"
#include "lane_best.cuh"
#include "row_path.hpp"
#include "sample.cuh"

namespace gpurt {

struct draft_walk {
  static constexpr u32 kBest = 32;

  struct Scratch {
    f32 score[kProposalsPerSlot][kBest];
    u32 id[kProposalsPerSlot][kBest];
    u32 position[kProposalsPerSlot];
    f32 value[kBest];
    u32 order[kBest];
    f32 weight[kBest];
    u32 chosen;  // a token
    u32 is_end;
  };
  // Nodes by number, the anchor first, and all their children: -infinity where one is a node.
  struct Tree {
    Scratch walk;
    f32 node_path[kProposalsPerSlot + 1];  // logarithm of a path's probability
    u32 node_depth[kProposalsPerSlot + 1];
    f32 path[kProposalsPerSlot][kBest];
    u32 child[kProposalsPerSlot][kBest];
  };
  static_assert(sizeof(Tree) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 slot = task.tile[0];
    u32 first = 0, masks = 0;  // the same for all threads
    find_masks(context, slot, first, masks);
    if (masks == 0) return;
    collect(task, context, first, masks, scratch);
    if (context.thread == 0) {
      scratch.chosen = context.rows[context.sample_rows[first] - 1].token;  // the anchor
      if (task.addr[2] != 0) ask_for(task, 3, scratch.chosen);
    }
    context.sync();
    Proposals& to = context.address<Proposals>(task, 5)[slot];
    if constexpr (GPURT_TREES != 0) {
      u32* parents = context.address<u32>(task, 6) + slot * kProposalsPerSlot;
      if (context.slots[slot].temperature == 0)
        return grow(task, context, first, masks, to, parents);
      if (context.thread < kProposalsPerSlot) parents[context.thread] = context.thread;
    }
    u32 count = 0;
    for (; count < masks; ++count) {
      values(task, context, first + count, count, scratch);
      context.sync();
      if (context.slots[slot].temperature == 0) {
        if (context.thread < 32) choose_best(task.param[1], count, scratch, to);
      } else if (context.thread == 0) {
        choose(task, context.slots[slot], count, scratch, to);
      }
      context.sync();
      if (scratch.is_end != 0) break;
    }
    if (context.thread == 0) to.count = count;
  }

 private:
  // The samples of a slot, which lie side by side: a lane each.
  GPURT_FN static void find_masks(const BodyContext& context, u32 slot, u32& first, u32& masks) {
    const u32 samples = context.step->sample_count, lane = context.thread % 32;
#pragma unroll 1
    for (u32 base = 0; base < samples; base += 32) {
      const u32 j = base + lane;
      const bool is_own = j < samples && context.rows[context.sample_rows[j]].slot == slot;
      const u32 bits = __ballot_sync(~0u, is_own);
      if (bits == 0) continue;
      if (masks == 0) first = base + __ffs(static_cast<i32>(bits)) - 1;
      masks = min(masks + __popc(bits), kProposalsPerSlot);
    }
  }

  __device__ static void collect(const TaskRecord& task, const BodyContext& context, u32 first,
                                 u32 masks, Scratch& scratch) {
    const u32 n = task.param[0], top_k = task.param[1], lane = context.thread % 32;
#pragma unroll 1
    for (u32 mask = context.thread / 32; mask < masks; mask += context.team_threads / 32) {
      const u64 row = u64(first + mask) * n;
      LaneBest best;
#pragma unroll 1
      for (u32 i = lane; i - lane < n; i += 32) {
        const bool is_there = i < n;
        best.offer(is_there ? context.address<const f32>(task, 0)[row + i] : LaneBest::none(),
                   is_there ? context.address<const u32>(task, 1)[row + i] : 0, top_k);
      }
      scratch.score[mask][lane] = lane < top_k ? best.value : LaneBest::none();
      scratch.id[mask][lane] = best.id;
      if (task.addr[2] != 0 && lane < top_k && best.value > LaneBest::none()) {
        ask_for(task, 4, best.id);
        if (mask + 1 < masks) ask_for(task, 3, best.id);
      }
      if (lane == 0)
        scratch.position[mask] = context.rows[context.sample_rows[first + mask]].position;
    }
  }

  // Values of one mask's candidates; those that are no candidates keep -infinity.
  __device__ static void values(const TaskRecord& task, const BodyContext& context, u32 row,
                                u32 mask, Scratch& scratch) {
    const u32 top_k = task.param[1], rank = task.param[2], lane = context.thread % 32;
#pragma unroll 1
    for (u32 i = context.thread / 32; i < top_k; i += context.team_threads / 32) {
      f32 sum = 0;
      if (task.addr[2] != 0 && scratch.score[mask][i] > LaneBest::none()) {
        const f32* hidden = context.address<const f32>(task, 2) + u64(row) * rank;
        const u64 a = u64(scratch.chosen) * rank, b = u64(scratch.id[mask][i]) * rank;
        if (task.param[3] == kF32) {
          sum = product<kF32>(task, hidden, a, b);
        } else if (task.param[3] == kBf16) {
          sum = product<kBf16>(task, hidden, a, b);
        } else {
          sum = product<kF16>(task, hidden, a, b);
        }
      }
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) scratch.value[i] = scratch.score[mask][i] + sum;
    }
  }

  __device__ static void grow(const TaskRecord& task, const BodyContext& context, u32 first,
                              u32 masks, Proposals& to, u32* parents) {
    Tree& tree = *reinterpret_cast<Tree*>(context.scratch);
    if (context.thread == 0) tree.node_path[0] = 0, tree.node_depth[0] = 0;
    context.sync();
    u32 node = 0;
#pragma unroll 1
    for (; node < task.param[4]; ++node) {
      const u32 depth = tree.node_depth[node];
      if (depth < masks) values(task, context, first + depth, depth, tree.walk);
      context.sync();
      if (context.thread < 32) {
        add_children(node, depth < masks ? task.param[1] : 0, tree);
        take_likeliest(node, tree, to, parents);
      }
      context.sync();
      if (tree.walk.is_end != 0) break;
    }
    if (context.thread == 0) to.count = node;
  }

  // One warp, a candidate a lane; the first `count` are there.
  __device__ static void add_children(u32 node, u32 count, Tree& tree) {
    const u32 lane = threadIdx.x % 32;
    const f32 given = lane < count ? tree.walk.value[lane] : LaneBest::none();
    const f32 value = finite(given);
    f32 top = value;
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const bool is_there = value > LaneBest::none();
    f32 sum = is_there ? expf(value - top) : 0;
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const f32 share = is_there ? value - top - logf(sum) : LaneBest::none();
    tree.path[node][lane] = tree.node_path[node] + share;
    if (is_there) tree.child[node][lane] = tree.walk.id[tree.node_depth[node]][lane];
  }

  // One warp: of all children, by the lane that has them.
  __device__ static void take_likeliest(u32 node, Tree& tree, Proposals& to, u32* parents) {
    const u32 lane = threadIdx.x % 32;
    f32 best = LaneBest::none();
    u32 from = 0;  // parent, and the lane below it: of equal ones the first
#pragma unroll 1
    for (u32 parent = 0; parent <= node; ++parent) {
      if (tree.path[parent][lane] > best) best = tree.path[parent][lane], from = parent;
    }
    from = from * kBest + lane;
    take_largest(best, from);
    if (lane != 0) return;
    const u32 parent = from / kBest;
    tree.walk.is_end = !(best > LaneBest::none());
    if (tree.walk.is_end != 0) return;
    tree.walk.chosen = tree.child[parent][from % kBest];
    tree.node_path[node + 1] = best;
    tree.node_depth[node + 1] = tree.node_depth[parent] + 1;
    tree.path[parent][from % kBest] = LaneBest::none();
    to.tokens[node] = tree.walk.chosen;
    parents[node] = parent;
  }

  // A lane's part of the sum of a row of one codebook, times `hidden`, times a row of the other.
  // Eight columns a lane: of a row of up to 256 all loads are one trip.
  template <u32 CODE>
  GPURT_FN static f32 product(const TaskRecord& task, const f32* hidden, u64 a, u64 b) {
    f32 sum = 0;
#pragma unroll 1
    for (u32 r = threadIdx.x % 32 * 8; r < task.param[2]; r += 256) {
      const auto of_a = Elements<CODE>::read8(task.addr[3], a + r, true);
      const auto of_b = Elements<CODE>::read8(task.addr[4], b + r, true);
      const auto of_hidden = Elements<kF32>::read8(reinterpret_cast<u64>(hidden), r, true);
      f32 x[8], y[8], z[8];
      Elements<CODE>::unpack8(of_a, x);
      Elements<CODE>::unpack8(of_b, y);
      Elements<kF32>::unpack8(of_hidden, z);
#pragma unroll
      for (u32 e = 0; e < 8; ++e) sum = fmaf(x[e] * z[e], y[e], sum);
    }
    return sum;
  }

  // A token's row of a codebook, into L2: 100 MB of them lie in memory.
  GPURT_FN static void ask_for(const TaskRecord& task, u32 book, u32 token) {
    const u32 bytes = task.param[2] * (task.param[3] == kF32 ? 4 : 2);
    const u64 from = task.addr[book] + u64(token) * bytes;
#pragma unroll 1
    for (u32 at = 0; at < bytes; at += 128) prefetch_line_to_l2(from + at);
  }

  // -infinity for what is no candidate's value: NaN too.
  GPURT_FN static f32 finite(f32 value) {
    return fabsf(value) <= 3.402823466e38f ? value : LaneBest::none();
  }

  // A warp's largest value and the number that goes with it; of equal ones the lowest number.
  GPURT_FN static void take_largest(f32& best, u32& from) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) {
      const f32 other = __shfl_xor_sync(~0u, best, step);
      const u32 other_from = __shfl_xor_sync(~0u, from, step);
      if (other > best || (other == best && other_from < from)) best = other, from = other_from;
    }
  }

  // One warp: of finite values the largest, of equal ones the first.
  __device__ static void choose_best(u32 count, u32 mask, Scratch& scratch, Proposals& to) {
    const u32 lane = threadIdx.x % 32;
    const f32 given = lane < count ? scratch.value[lane] : LaneBest::none();
    f32 best = finite(given);
    u32 from = lane;
    take_largest(best, from);
    if (lane != 0) return;
    scratch.is_end = !(best > LaneBest::none());
    if (scratch.is_end != 0) return;
    scratch.chosen = scratch.id[mask][from];
    to.tokens[mask] = scratch.chosen;
  }

  // One thread, above temperature 0. Finite values in falling order, then as `sample` draws.
  __device__ static void choose(const TaskRecord& task, const SlotState& slot, u32 mask,
                                Scratch& scratch, Proposals& to) {
    u32 kept = 0;
    for (u32 i = 0; i < task.param[1]; ++i) {
      const f32 value = scratch.value[i];
      if (!(finite(value) > LaneBest::none())) continue;
      u32 place = kept++;
      for (; place > 0 && scratch.value[scratch.order[place - 1]] < value; --place)
        scratch.order[place] = scratch.order[place - 1];
      scratch.order[place] = i;
    }
    scratch.is_end = kept == 0;
    if (kept == 0) return;
    if (slot.top_k > 0 && slot.top_k < kept) kept = slot.top_k;
    // The row before samples the token of this one's position.
    const u32 uniform = sample::uniform_24(slot.seed, scratch.position[mask] - 1);
    const u32 place = draw(slot, kept, uniform, scratch);
    scratch.chosen = scratch.id[mask][scratch.order[place]];
    to.tokens[mask] = scratch.chosen;
  }

  // A place in the order, among the first `kept`.
  __device__ static u32 draw(const SlotState& slot, u32 kept, u32 uniform, Scratch& scratch) {
    const f32 top = scratch.value[scratch.order[0]];
    f32 total = 0;
    for (u32 i = 0; i < kept; ++i) {
      scratch.weight[i] = expf((scratch.value[scratch.order[i]] - top) / slot.temperature);
      total += scratch.weight[i];
    }
    if (slot.top_p < 1.0f) {
      f32 running = 0;
      u32 count = 0;
      while (count < kept && running < slot.top_p * total) running += scratch.weight[count++];
      kept = count < 1 ? 1 : count;
      total = running;
    }
    const f32 target = static_cast<f32>(uniform) * 0x1p-24f * total;
    f32 running = 0;
    for (u32 i = 0; i < kept; ++i) {
      running += scratch.weight[i];
      if (running > target) return i;
    }
    return kept - 1;
  }
};

}  // namespace gpurt
