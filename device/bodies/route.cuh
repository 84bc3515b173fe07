// route on the GPU: which experts each row of a step goes to, and `routes`, grouped by expert.
//
// The contract and the layout are in graphs/ops/route.py.
//   1. a warp a row: scores as ordered keys, the T largest one by one, weights, and a bit for each
//      expert that it chose; team barrier
//   2. a warp a row, a lane a pair: its expert's slot is the number of bits below it in all rows'
//      words; who else chose it is its bit in each row's word. Slots and pairs, each written whole
//      by one lane
// A row is one warp's work, and the rest counts bits: so the team's size changes nothing.
// While logits are missing all of it is gone through once with whatever is there, and nothing is
// stored: so its code is in the instruction cache when they come.
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
  static constexpr u32 kMissing = 0xFFFFFFFEu;
  static constexpr u32 kAtOnce = 8;
  static constexpr u32 kWords = kExpertsMax / 32;  // a lane each
  static_assert(kWords == 32);

  struct Scratch {
    u32 keys[kKeyWords];             // of as many warps' rows as there is room for
    u32 has[kRowsMax][kWords];       // bit e % 32 of word e / 32: chosen, counted from our first
    u32 chosen[kRowsMax * kTopMax];  // of every pair
    f32 weight[kRowsMax * kTopMax];
    u32 bad[kRowsMax];  // the first expert whose score is none, kNone or kMissing
  };
  static_assert(sizeof(Scratch) <= BodyContext::scratch_bytes);

  __device__ static void run(const TaskRecord& task, const BodyContext& context) {
    Scratch& scratch = *reinterpret_cast<Scratch*>(context.scratch);
    const u32 experts = task.param[kExperts], rows = context.step->rows;
    const u32 warp = context.thread / 32;
    const u32 warps = min(context.team_threads / 32, kKeyWords / experts);
#pragma unroll 1
    for (bool waits = false;; waits = true) {
#pragma unroll 1
      for (u32 row = warp; warp < warps && row < rows; row += warps)
        choose(task, context, scratch, row, scratch.keys + warp * experts, waits);
      context.sync();
      const bool stores = !rows_where(scratch, rows, [](u32 bad) { return bad == kMissing; });
      if (stores && stops(task, context, scratch, rows)) return;
      group(task, context, scratch, rows, stores);
      if (stores) return;
      context.sync();
    }
  }

  // A score's place in ascending order, above 0; it is not -0.
  GPURT_FN static u32 key_of(f32 x) {
    const u32 bits = __float_as_uint(x);
    return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
  }
  GPURT_FN static f32 score_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
  }

  // To some 1e-7 of 1: beside the logits' own 1e-6 that decides nothing.
  GPURT_FN static f32 sigmoid(f32 x) {
    return rcp_approx_ftz(1.0f + ex2_approx_ftz(x * -1.44269504f));
  }

  GPURT_FN static bool is_bad(f32 logit, f32 score) {
    return !(fabsf(logit) < __uint_as_float(0x7F800000u)) || score != score;
  }

  // The best of a lane's experts, those that leave its number modulo 32: keys pass between no
  // lanes. Of equal ones the lowest.
  struct Best {
    u32 key, expert;

    GPURT_FN void look(u32 other_key, u32 other) {
      if (other_key <= key) return;
      key = other_key;
      expert = other;
    }
  };

  // One row, one warp. waits: until all logits are there; else whatever is there is taken.
  GPURT_FN static void choose(const TaskRecord& task, const BodyContext& context, Scratch& scratch,
                              u32 row, u32* keys, bool waits) {
    const u32 drawn = task.addr[3] == 0 ? kNone : forced(task, context, row);
    const u32 experts = task.param[kExperts], lane = context.thread % 32;
    const bool is_sigmoid = task.param[kKind] == kSigmoid, polls = polls_input(task, 0);
    const f32* logits = context.address<const f32>(task, 0) + u64(row) * experts;
    const f32* bias = is_sigmoid ? arg<const f32>(task, 1) : nullptr;
    scratch.has[row][lane] = 0;
    Best best{0, kNone};
    u32 looks = 0;
    bool missing = false, bad = false;
    f32 x[kAtOnce];  // of the last ones
#pragma unroll 1
    for (u32 base = lane; base - lane < experts; base += 32 * kAtOnce) {
      f32 shift[kAtOnce];  // all loads are under way at once
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i)
        shift[i] = bias != nullptr ? bias[min(base + 32 * i, experts - 1)] : 0.0f;  // -0 + 0 is 0
      bool any;
      do {
        any = false;
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i)
          x[i] = load_word(logits + min(base + 32 * i, experts - 1));
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) any |= __float_as_uint(x[i]) == kPayloadSentinel;
      } while (payload_missing(polls && waits && any, looks));
      missing |= any;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 e = base + 32 * i;
        if (e >= experts) break;
        const f32 score = (is_sigmoid ? sigmoid(x[i]) : x[i]) + shift[i];
        bad |= is_bad(x[i], score);
        keys[e] = key_of(score);
        best.look(keys[e], e);
      }
    }
    if (__any_sync(~0u, bad || missing)) {
      const u32 what = polls && !waits && __any_sync(~0u, missing)
                           ? kMissing
                           : first_bad(logits, bias, experts, lane);
      scratch.bad[row] = what;
    } else {
      scratch.bad[row] = kNone;
    }
    f32 largest = 0, total = 1;
    if (!is_sigmoid) total = sum_exponentials(keys, experts, best, lane, largest);
    const u32 choice = task.addr[3] == 0 ? largest_scores(task, keys, best, lane) : drawn;
    f32 logit = 0;  // of the choice
    if (experts > 32 * kAtOnce) {
      if (choice < experts) logit = load_word(logits + choice);
    } else {
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const f32 there = __shfl_sync(~0u, x[i], choice % 32);
        if (choice / 32 == i) logit = there;
      }
    }
    f32 p = is_sigmoid ? sigmoid(logit) : __fdividef(expf(logit - largest), total);
    if (choice >= experts) p = 0;
    put(task, scratch, row, choice, p, lane);
  }

  // The lowest one, if there is one. All lanes.
  __device__ __noinline__ static u32 first_bad(const f32* logits, const f32* bias, u32 experts,
                                               u32 lane) {
    u32 bad = kNone;
#pragma unroll 1
    for (u32 e = lane; e < experts && bad == kNone; e += 32) {
      const f32 x = load_word(logits + e);
      if (is_bad(x, bias != nullptr ? bias[e] : 0.0f)) bad = e;
    }
    return __reduce_min_sync(~0u, bad);
  }

  // Of the softmax over all scores, each less the largest.
  GPURT_FN static f32 sum_exponentials(const u32* keys, u32 experts, const Best& best, u32 lane,
                                       f32& largest) {
    largest = score_of(__reduce_max_sync(~0u, best.key));
    f32 total = 0;
    for (u32 e = lane; e < experts; e += 32) total += expf(score_of(keys[e]) - largest);
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    return total;
  }

  // Expert number `lane` of the T best; kNone beyond. best: the lane's own, from its keys.
  GPURT_FN static u32 largest_scores(const TaskRecord& task, u32* keys, Best best, u32 lane) {
    const u32 experts = task.param[kExperts], top_k = task.param[kTopK];
    u32 choice = kNone;
#pragma unroll 1
    for (u32 i = 0; i < top_k; ++i) {
      const u32 key = __reduce_max_sync(~0u, best.key);
      const u32 e = __reduce_min_sync(~0u, best.key == key ? best.expert : kNone);
      if (lane == i) choice = e;
      if (best.expert != e || e >= experts) continue;  // beyond: of a row of NaN
      keys[e] = 0;
      best = {0, kNone};
#pragma unroll 4
      for (u32 other = lane; other < experts; other += 32) best.look(keys[other], other);
    }
    __syncwarp();
    return choice;
  }

  // What the table has for the row's token: expert number `lane` of T; kNone beyond.
  GPURT_FN static u32 forced(const TaskRecord& task, const BodyContext& context, u32 row) {
    const RowState& state = context.rows[row];
    const u32 top_k = task.param[kTopK], lane = context.thread % 32;
    const u64 number = u64{state.position} * task.param[kForcedSlots] + state.slot;
    const u64 entry = number % task.param[kForcedCount] * top_k;
    return lane < top_k ? arg<const u32>(task, 3)[entry + lane] : kNone;
  }

  // A row's experts by ascending id, with their weights. A lane a choice, kNone beyond T, and its
  // p, 0 beyond.
  GPURT_FN static void put(const TaskRecord& task, Scratch& scratch, u32 row, u32 choice, f32 p,
                           u32 lane) {
    const u32 top_k = task.param[kTopK];
    u32 rank = 0;
#pragma unroll 1
    for (u32 base = 0; base < top_k; base += kAtOnce) {
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) rank += __shfl_sync(~0u, choice, base + i) < choice ? 1 : 0;
    }
    f32 divisor = 1.0f;
    if (task.param[kKind] == kSigmoid || task.param[kNormTopK] != 0) {
      divisor = p;
#pragma unroll
      for (u32 step = 16; step > 0; step /= 2) divisor += __shfl_xor_sync(~0u, divisor, step);
      if (task.param[kKind] == kSigmoid) divisor += kSumFloor;
    }
    __syncwarp();  // has[] is zero
    if (lane >= top_k) return;
    const u32 e = choice - task.param[kFirst];  // below the first: u32 wraps round
    if (e < task.param[kOwn]) atomicOr(&scratch.has[row][e / 32], 1u << e % 32);
    scratch.chosen[row * top_k + rank] = choice;
    scratch.weight[row * top_k + rank] = __fdividef(p, divisor) * param_f32(task, kFactor);
  }

  // A bit a row. The same for all threads.
  template <class Is>
  GPURT_FN static u32 rows_where(const Scratch& scratch, u32 rows, Is is) {
    const u32 lane = threadIdx.x % 32;
    return __ballot_sync(~0u, lane < rows && is(scratch.bad[lane % kRowsMax]));
  }

  // Whether a score is no number: then nothing is written. The same for all threads. first: the
  // step's row that the task takes for its first.
  GPURT_FN static bool stops(const TaskRecord& task, const BodyContext& context,
                             const Scratch& scratch, u32 rows, u32 first = 0) {
    const u32 bits = rows_where(scratch, rows, [](u32 bad) { return bad != kNone; });
    if (bits == 0) return false;
    if (context.thread == 0) {
      const u32 row = __ffs(static_cast<i32>(bits)) - 1, e = scratch.bad[row];
      const f32 x = context.address<const f32>(task, 0)[u64(row) * task.param[kExperts] + e];
      const u32 which = x - x == 0.0f ? 1 : 0;  // argument: bias, logits
      report_fault(context, task, kFaultNonFinite, first + row, e, which);
    }
    return true;
  }

  // Slots and pairs: a warp a row, a lane a pair.
  GPURT_FN static void group(const TaskRecord& task, const BodyContext& context,
                             const Scratch& scratch, u32 rows, bool stores) {
    using L = RoutesLayout;
    const u32 own = task.param[kOwn], top_k = task.param[kTopK], lane = context.thread % 32;
    const L layout{context.step->rows_capacity, own, top_k};
    u32* routes = context.address<u32>(task, 2);
#pragma unroll 1
    for (u32 row = context.thread / 32; row < rows; row += context.team_threads / 32) {
      const u32 p = row * top_k + lane;
      const u32 e = lane < top_k ? scratch.chosen[p] - task.param[kFirst] : own;
      const u32 word = e < own ? e / 32 : 0;
      u32 any = 0, users = 0;
#pragma unroll 4
      for (u32 other = 0; other < rows; ++other) {
        any |= scratch.has[other][lane];
        users |= (scratch.has[other][word] >> e % 32 & 1) << other;
      }
      u32 through = __popc(any);  // bits up to the lane's word
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 before = __shfl_up_sync(~0u, through, step);
        if (lane >= step) through += before;
      }
      const u32 below = __shfl_sync(~0u, any, word) & ((1u << e % 32) - 1);
      const u32 index = __shfl_sync(~0u, through - __popc(any), word) + __popc(below);
      if (!stores) continue;
      if (lane < top_k) {
        write2(routes + layout.pair(p), e < own ? index : L::kNoSlot,
               __float_as_uint(scratch.weight[p]));
      }
      if (e < own) {
        const u32 before = __popc(users & ((1u << row) - 1));
        u32* slot = routes + layout.slot(index);
        write2(slot + L::kUsers + 2 * before, row, p);
        if (before == 0) write2(slot, e, __popc(users));
      }
      if (row == 0 && lane == 31) write2(routes, through, rows * top_k);
    }
  }

  // Two words of `routes`; all of its parts begin at even ones.
  GPURT_FN static void write2(u32* to, u32 a, u32 b) {
    *reinterpret_cast<uint2*>(to) = make_uint2(a, b);
  }
};

}  // namespace gpurt
