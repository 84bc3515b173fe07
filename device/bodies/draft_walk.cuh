// draft_walk on the GPU: a path through the candidates of one slot's block.
//
// The contract is in graphs/ops/draft_walk.py.
//   1. a warp a mask's row: the best of its candidates; team barrier
//   2. mask by mask: a warp a candidate makes its value, with the token chosen before; barrier; one
//      thread chooses; barrier
#pragma once
#include "elements.cuh"
#include "lane_best.cuh"
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
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 slot = task.tile[0], samples = context.step->sample_count;
    u32 first = 0, masks = 0;  // the same for all threads
    while (first < samples && slot_of_sample(context, first) != slot) ++first;
    while (first + masks < samples && masks < kProposalsPerSlot &&
           slot_of_sample(context, first + masks) == slot)
      ++masks;
    if (masks == 0) return;
    collect(task, context, first, masks, scratch);
    if (context.thread == 0)
      scratch.chosen = context.rows[context.sample_rows[first] - 1].token;  // the anchor
    context.sync();
    Proposals& to = context.address<Proposals>(task, 5)[slot];
    u32 count = 0;
    for (; count < masks; ++count) {
      values(task, context, first + count, count, scratch);
      context.sync();
      if (context.thread == 0) choose(task, context.slots[slot], count, scratch, to);
      context.sync();
      if (scratch.is_end != 0) break;
    }
    if (context.thread == 0) to.count = count;
  }

 private:
  __device__ static u32 slot_of_sample(const BodyContext& context, u32 j) {
    return context.rows[context.sample_rows[j]].slot;
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
        best.offer(is_there ? arg<const f32>(task, 0)[row + i] : LaneBest::none(),
                   is_there ? arg<const u32>(task, 1)[row + i] : 0, top_k);
      }
      scratch.score[mask][lane] = lane < top_k ? best.value : LaneBest::none();
      scratch.id[mask][lane] = best.id;
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
        const f32* hidden = arg<const f32>(task, 2) + u64(row) * rank;
        for (u32 r = lane; r < rank; r += 32)
          sum = fmaf(element(task, 3, scratch.chosen, r) * hidden[r],
                     element(task, 4, scratch.id[mask][i], r), sum);
      }
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) scratch.value[i] = scratch.score[mask][i] + sum;
    }
  }

  // Column `r` of a token's row of a codebook.
  __device__ static f32 element(const TaskRecord& task, u32 book, u32 token, u32 r) {
    const u64 at = u64(token) * task.param[2] + r;
    const u32 dtype = task.param[3];
    if (dtype == kF32) return arg<const f32>(task, book)[at];
    const u16 half = arg<const u16>(task, book)[at];
    return dtype == kBf16 ? __uint_as_float(u32(half) << 16) : f32_from_f16(half);
  }

  // One thread. Finite values in falling order, then as `sample` draws.
  __device__ static void choose(const TaskRecord& task, const SlotState& slot, u32 mask,
                                Scratch& scratch, Proposals& to) {
    u32 kept = 0;
    for (u32 i = 0; i < task.param[1]; ++i) {
      const f32 value = scratch.value[i];
      if (!(fabsf(value) <= 3.402823466e38f)) continue;  // infinite, or NaN
      u32 place = kept++;
      for (; place > 0 && scratch.value[scratch.order[place - 1]] < value; --place)
        scratch.order[place] = scratch.order[place - 1];
      scratch.order[place] = i;
    }
    scratch.is_end = kept == 0;
    if (kept == 0) return;
    u32 place = 0;
    if (slot.temperature > 0) {
      if (slot.top_k > 0 && slot.top_k < kept) kept = slot.top_k;
      // The row before samples the token of this one's position.
      place = draw(slot, kept, sample::uniform_24(slot.seed, scratch.position[mask] - 1), scratch);
    }
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
