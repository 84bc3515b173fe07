// route for steps of many rows, second half: all pairs, grouped by expert.
//
// graphs/ops/route_rows_cuda.py has the contract. A thread an expert looks at all pairs in their
// order: so users stand in that order, and the team's size changes nothing. 2048 pairs take it some
// 10 us, twice through shared memory.
#pragma once
#include "route.cuh"

namespace gpurt {

struct route_group {
  enum Arg : u32 { kArgChosen, kArgRoutes };
  static constexpr u32 kPairsMax = 8192;
  static constexpr u32 kNone = 0xFFFF;

  struct Scratch {
    u32 expert[kPairsMax / 2];  // of each pair, two in a word; kNone: another rank's
    u32 users[route::kExpertsMax];
    u32 in_use[route::kExpertsMax / 32];
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    using L = RoutesLayout;
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 own = task.param[route::kOwn], top_k = task.param[route::kTopK];
    const u32 pairs = context.step->rows * top_k, words = (pairs + 1) / 2;
    const u32* chosen = arg<const u32>(task, kArgChosen);
    for (u32 i = context.thread; i < words; i += context.team_threads)
      scratch.expert[i] =
          expert_of(task, chosen, 2 * i, pairs) | expert_of(task, chosen, 2 * i + 1, pairs) << 16;
    context.sync();
    for (u32 base = context.thread / 32 * 32; base < own; base += context.team_threads) {
      const u32 e = base + context.thread % 32;
      u32 users = 0;
      each(scratch, words, e, [&](u32) { ++users; });
      if (e < own) scratch.users[e] = users;
      const u32 bits = __ballot_sync(~0u, e < own && users != 0);
      if (context.thread % 32 == 0) scratch.in_use[base / 32] = bits;
    }
    context.sync();
    const L layout{context.step->rows_capacity, own, top_k};
    u32* routes = arg<u32>(task, kArgRoutes);
    for (u32 e = context.thread; e < own; e += context.team_threads) {
      if (scratch.users[e] == 0) continue;
      const u32 index = slot_of(scratch, e);
      u32* slot = routes + layout.slot(index);
      slot[L::kExpert] = e;
      slot[L::kCount] = scratch.users[e];
      u32* user = slot + L::kUsers;
      each(scratch, words, e, [&](u32 p) {
        user[0] = p / top_k;
        user[1] = p;
        user += 2;
        routes[layout.pair(p) + L::kSlot] = index;
      });
    }
    for (u32 p = context.thread; p < pairs; p += context.team_threads) {
      routes[layout.pair(p) + L::kWeight] = chosen[2 * p + 1];
      if (chosen[2 * p] - task.param[route::kFirst] >= own)
        routes[layout.pair(p) + L::kSlot] = L::kNoSlot;
    }
    if (context.thread == 0) {
      const u32 last = own - 1;
      routes[L::kActive] = slot_of(scratch, last) + (scratch.users[last] != 0 ? 1 : 0);
      routes[L::kPairs] = pairs;
    }
  }

 private:
  // Experts in use below e.
  GPURT_FN static u32 slot_of(const Scratch& scratch, u32 e) {
    u32 count = __popc(scratch.in_use[e / 32] & ((1u << e % 32) - 1));
    for (u32 word = 0; word < e / 32; ++word) count += __popc(scratch.in_use[word]);
    return count;
  }

  // Counted from the first of our own.
  GPURT_FN static u32 expert_of(const TaskRecord& task, const u32* chosen, u32 p, u32 pairs) {
    const u32 e = p < pairs ? chosen[2 * p] - task.param[route::kFirst] : kNone;
    return e < task.param[route::kOwn] ? e : kNone;
  }

  // Pairs of expert e, ascending.
  template <class Visit>
  GPURT_FN static void each(const Scratch& scratch, u32 words, u32 e, Visit visit) {
#pragma unroll 4
    for (u32 i = 0; i < words; ++i) {
      const u32 two = scratch.expert[i];
      if ((two & 0xFFFF) == e) visit(2 * i);
      if (two >> 16 == e) visit(2 * i + 1);
    }
  }
};

}  // namespace gpurt
