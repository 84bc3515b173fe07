// route on the GPU: which experts each row of a step goes to, and `routes`, grouped by expert.
//
// The contract and the layout are in graphs/ops/route.py.
//   1. a warp a row: scores as ordered keys, the T largest one by one, weights; team barrier
//   2. every pair sets its row's bit at its expert; team barrier
//   3. which experts are in use, a bit each: an expert's slot is the number of bits below its own;
//      team barrier
//   4. slots and pairs, each written whole by one thread
// A row is one warp's work, and the rest counts bits: so the team's size changes nothing.
// A logit that is no finite number, or a bias that is NaN, is a Fault, as on the host.
#pragma once
#include "../payload.cuh"
#include "context.cuh"
#include "routes.hpp"

namespace gpurt {

struct route {
  enum Param : u32 {
    kExperts,
    kTopK,
    kKind,
    kFactor,
    kNormTopK,
    kForcedCount,
    kForcedSlots,
    kFirst,  // of the experts that get slots, counted from it; others are other ranks'
    kOwn,
  };
  static constexpr u32 kSigmoid = 0;
  static constexpr f32 kSumFloor = 1e-15f;  // the model's own: a sum of sigmoids may be 0
  static constexpr u32 kRowsMax = 16;
  static constexpr u32 kTopMax = 32;  // a lane each
  static constexpr u32 kExpertsMax = 1024;
  static constexpr u32 kKeyWords = 5632;
  static constexpr u32 kNone = 0xFFFFFFFFu;
  static constexpr u32 kAtOnce = 8;

  struct Scratch {
    u32 keys[kKeyWords];     // of as many warps' rows as there is room for
    u32 users[kExpertsMax];  // bit r: row r chose the expert, counted from the first of our own
    u32 in_use[kExpertsMax / 32];
    u32 chosen[kRowsMax * kTopMax];  // of every pair
    f32 weight[kRowsMax * kTopMax];
    u32 bad[kRowsMax];  // the first expert whose score is none
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 experts = task.param[kExperts], rows = context.step->rows;
    const u32 first = task.param[kFirst], own = task.param[kOwn];
    const u32 pairs = rows * task.param[kTopK], warp = context.thread / 32;
    for (u32 e = context.thread; e < own; e += context.team_threads) scratch.users[e] = 0;
    const u32 warps = min(context.team_threads / 32, kKeyWords / experts);
#pragma unroll 1
    for (u32 row = warp; warp < warps && row < rows; row += warps)
      choose(task, context, scratch, row, scratch.keys + warp * experts);
    context.sync();
    if (stops(task, context, scratch, rows)) return;
    for (u32 p = context.thread; p < pairs; p += context.team_threads) {
      const u32 e = scratch.chosen[p] - first;  // below the first: u32 wraps round
      if (e < own) atomicOr(&scratch.users[e], 1u << p / task.param[kTopK]);
    }
    context.sync();
    for (u32 base = warp * 32; base < own; base += context.team_threads) {
      const u32 e = base + context.thread % 32;
      const u32 bits = __ballot_sync(~0u, e < own && scratch.users[e] != 0);
      if (context.thread % 32 == 0) scratch.in_use[base / 32] = bits;
    }
    context.sync();
    group(task, context, scratch, pairs);
  }

  // A score's place in ascending order, above 0; -0 equals +0.
  GPURT_FN static u32 key_of(f32 x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  GPURT_FN static u64 larger(u64 a, u64 b) { return a > b ? a : b; }

  template <class T, class Join>
  GPURT_FN static T over_warp(T value, Join join) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }

  GPURT_FN static f32 sigmoid(f32 x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

  // One row, one warp. A lane owns the experts that leave its number modulo 32, so keys pass
  // between no lanes.
  __device__ __noinline__ static void choose(const TaskRecord& task, const BodyContext& context,
                                             Scratch& scratch, u32 row, u32* keys) {
    const u32 experts = task.param[kExperts], top_k = task.param[kTopK];
    const u32 lane = context.thread % 32;
    const bool is_sigmoid = task.param[kKind] == kSigmoid;
    const f32* logits = context.address<const f32>(task, 0) + u64(row) * experts;
    const bool polls = polls_input(task, 0);
    const f32* bias = is_sigmoid ? arg<const f32>(task, 1) : nullptr;
    u64 mine = 0;  // the lane's best: key, then the lower expert
    u32 bad = kNone;
    f32 largest = __uint_as_float(0xFF800000u);
    for (u32 base = lane; base < experts; base += 32 * kAtOnce) {
      f32 x[kAtOnce], shift[kAtOnce];  // their loads are under way at once
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 e = min(base + 32 * i, experts - 1);
        x[i] = load_word(logits + e);
        shift[i] = bias != nullptr ? bias[e] : -0.0f;  // changes nothing, not even a zero's sign
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 e = base + 32 * i;
        if (e >= experts) break;
        x[i] = whole_word(x[i], logits + e, polls);
        const f32 score = (is_sigmoid ? sigmoid(x[i]) : x[i]) + shift[i];
        if ((x[i] - x[i] != 0.0f || score != score) && bad == kNone) bad = e;
        largest = fmaxf(largest, x[i]);
        keys[e] = key_of(score);
        mine = larger(mine, u64(keys[e]) << 32 | ~e);
      }
    }
    bad = over_warp(bad, [](u32 a, u32 b) { return min(a, b); });
    if (lane == 0) scratch.bad[row] = bad;
    const u32 choice = task.addr[3] == 0 ? largest_scores(keys, experts, top_k, mine, lane)
                                         : forced(task, context, row, lane);
    f32 p = 0;
    if (is_sigmoid) {
      if (lane < top_k && choice < experts) p = sigmoid(load_word(logits + choice));
    } else {
      largest = over_warp(largest, [](f32 a, f32 b) { return fmaxf(a, b); });
      f32 total = 0;
      for (u32 e = lane; e < experts; e += 32) total += expf(load_word(logits + e) - largest);
      total = over_warp(total, [](f32 a, f32 b) { return a + b; });
      if (lane < top_k && choice < experts)
        p = __fdiv_rn(expf(load_word(logits + choice) - largest), total);
    }
    put(task, scratch, row, choice, p, lane);
  }

  // Expert number `lane` of the `top_k` best; beyond: any. mine: the lane's best, from its keys.
  GPURT_FN static u32 largest_scores(u32* keys, u32 experts, u32 top_k, u64 mine, u32 lane) {
    u32 choice = 0;
#pragma unroll 1
    for (u32 i = 0; i < top_k; ++i) {
      const u32 e = ~static_cast<u32>(over_warp(mine, larger));
      if (lane == i) choice = e;
      if (lane != e % 32) continue;
      if (e < experts) keys[e] = 0;  // always, but for a row of NaN
      mine = 0;
      for (u32 other = lane; other < experts; other += 32) {
        if (keys[other] != 0) mine = larger(mine, u64(keys[other]) << 32 | ~other);
      }
    }
    __syncwarp();
    return choice;
  }

  // What the table has for the row's token.
  GPURT_FN static u32 forced(const TaskRecord& task, const BodyContext& context, u32 row,
                             u32 lane) {
    const RowState& state = context.rows[row];
    const u32 top_k = task.param[kTopK];
    const u64 number = u64{state.position} * task.param[kForcedSlots] + state.slot;
    const u64 entry = number % task.param[kForcedCount] * top_k;
    return arg<const u32>(task, 3)[entry + min(lane, top_k - 1)];
  }

  // A row's experts by ascending id, with their weights.
  GPURT_FN static void put(const TaskRecord& task, Scratch& scratch, u32 row, u32 choice, f32 p,
                           u32 lane) {
    const u32 top_k = task.param[kTopK];
    u32 rank = 0;
    for (u32 i = 0; i < top_k; ++i) rank += __shfl_sync(~0u, choice, i) < choice ? 1 : 0;
    f32 sum = 0;
    for (u32 i = 0; i < top_k; ++i) {
      const u32 from = __ballot_sync(~0u, lane < top_k && rank == i);
      sum += __shfl_sync(~0u, p, from == 0 ? 0 : __ffs(static_cast<i32>(from)) - 1);
    }
    f32 divisor = 1.0f;
    if (task.param[kKind] == kSigmoid) {
      divisor = sum + kSumFloor;
    } else if (task.param[kNormTopK] != 0) {
      divisor = sum;
    }
    if (lane >= top_k) return;
    scratch.chosen[row * top_k + rank] = choice;
    scratch.weight[row * top_k + rank] = __fdiv_rn(p, divisor) * param_f32(task, kFactor);
  }

  // Whether a score is no number: then nothing is written. The same for all threads. first: the
  // step's row that the task takes for its first.
  GPURT_FN static bool stops(const TaskRecord& task, const BodyContext& context,
                             const Scratch& scratch, u32 rows, u32 first = 0) {
    u32 row = 0;
    while (row < rows && scratch.bad[row] == kNone) ++row;
    if (row == rows) return false;
    if (context.thread == 0) {
      const u32 e = scratch.bad[row];
      const f32 x = context.address<const f32>(task, 0)[u64(row) * task.param[kExperts] + e];
      const u32 which = x - x == 0.0f ? 1 : 0;  // argument: bias, logits
      report_fault(context, task, kFaultNonFinite, first + row, e, which);
    }
    return true;
  }

  // Bits below e's own.
  template <class Kept>
  GPURT_FN static u32 slot_of(const Kept& scratch, u32 e) {
    u32 count = __popc(scratch.in_use[e / 32] & ((1u << e % 32) - 1));
    for (u32 word = 0; word < e / 32; ++word) count += __popc(scratch.in_use[word]);
    return count;
  }

  GPURT_FN static void group(const TaskRecord& task, const BodyContext& context,
                             const Scratch& scratch, u32 pairs) {
    using L = RoutesLayout;
    const u32 own = task.param[kOwn], top_k = task.param[kTopK];
    const L layout{context.step->rows_capacity, own, top_k};
    u32* routes = context.address<u32>(task, 2);
    for (u32 e = context.thread; e < own; e += context.team_threads) {
      if (scratch.users[e] == 0) continue;
      u32* slot = routes + layout.slot(slot_of(scratch, e));
      slot[L::kExpert] = e;
      slot[L::kCount] = __popc(scratch.users[e]);
    }
    for (u32 p = context.thread; p < pairs; p += context.team_threads) {
      const u32 e = scratch.chosen[p] - task.param[kFirst], row = p / top_k;
      const u32 index = e < own ? slot_of(scratch, e) : L::kNoSlot;
      if (e < own) {
        const u32 before = __popc(scratch.users[e] & ((1u << row) - 1));
        u32* user = routes + layout.slot(index) + L::kUsers + 2 * before;
        user[0] = row;
        user[1] = p;
      }
      u32* pair = routes + layout.pair(p);
      pair[L::kSlot] = index;
      pair[L::kWeight] = __float_as_uint(scratch.weight[p]);
    }
    if (context.thread == 0) {
      const u32 last = own - 1;
      routes[L::kActive] = slot_of(scratch, last) + (scratch.users[last] != 0 ? 1 : 0);
      routes[L::kPairs] = pairs;
    }
  }
};

}  // namespace gpurt
