// route: which experts each row of a step goes to, and `routes`, which groups the rows by expert.
// graphs/ops/route.py has the contract and the layout.
//
//   logits of a row -> p, scores -> its T experts by ascending id, their weights     every row
//   all choices -> slots by ascending expert, pairs by ascending row                 once
//
// A logit or a bias that is not a number leaves no order to choose by: a Fault. So does a logit of
// infinity, which a network makes only by overflow; a bias of -infinity closes an expert.
#pragma once
#include "context.hpp"
#include "routes.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "workspace.hpp"

namespace gpurt::host {

constexpr u32 kRouteSigmoid = 0;
constexpr u32 kRouteSoftmax = 1;
constexpr f32 kWeightFloor = 1e-15F;  // the model's own: a sum of sigmoids may be 0

/// A route task, decoded.
struct RouteTask {
  const f32* logits;  // [rows, experts]
  const f32* bias;    // [experts]; null: zeros, and with softmax
  u32* routes;
  u32 experts, top_k, kind;
  f32 factor;
  bool norm_topk;
  const u32* forced;  // [forced_count, top_k] experts in the choice's place; null: natural
  u32 forced_count, forced_slots;
  u32 first, own;  // experts [first, first + own) get slots; others are other ranks'
  RoutesLayout layout;
};

}  // namespace gpurt::host

#define GPURT_EACH_LEVEL "route_kernels.hpp"
#include "simd_each.hpp"

namespace gpurt::host {

/// The `count` largest scores, equal ones by lower index; `chosen` comes out by ascending index.
inline void choose_experts(const f32* scores, u32 experts, u32 count, u32* chosen) {
  u32 found = 0;
  for (u32 e = 0; e < experts; ++e) {
    if (found == count && !(scores[e] > scores[chosen[count - 1]])) continue;
    u32 at = found < count ? found++ : count - 1;
    for (; at > 0 && scores[e] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  for (u32 i = 1; i < count; ++i) {
    const u32 e = chosen[i];
    u32 at = i;
    for (; at > 0 && chosen[at - 1] > e; --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
}

/// The experts that the table has for a row's token.
inline void take_forced(const RouteTask& task, const RowState& row, u32* chosen) {
  const u64 number = u64{row.position} * task.forced_slots + row.slot;
  const u32* const entry = task.forced + number % task.forced_count * task.top_k;
  for (u32 i = 0; i < task.top_k; ++i) chosen[i] = entry[i];
}

/// weights[i] of a row's chosen experts, from their p.
inline void weigh_experts(const RouteTask& task, const f32* p, const u32* chosen, f32* weights) {
  f32 divisor = task.kind == kRouteSigmoid ? kWeightFloor : 1.0F;
  if (task.kind == kRouteSigmoid || task.norm_topk) {
    f32 sum = 0.0F;
    for (u32 i = 0; i < task.top_k; ++i) sum += p[chosen[i]];
    divisor = task.kind == kRouteSigmoid ? sum + kWeightFloor : sum;
  }
  for (u32 i = 0; i < task.top_k; ++i) weights[i] = p[chosen[i]] / divisor * task.factor;
}

/// Writes `routes` from every row's chosen experts and weights. slot_of: [experts], scratch.
inline void group_by_expert(const RouteTask& task, u32 rows, const u32* chosen, const f32* weights,
                            u32* slot_of) {
  using L = RoutesLayout;
  const u32 pairs = rows * task.top_k;
  for (u32 e = 0; e < task.experts; ++e) slot_of[e] = L::kNoSlot;
  for (u32 pair = 0; pair < pairs; ++pair) slot_of[chosen[pair]] = 0;
  u32 active = 0;
  for (u32 e = 0; e < task.experts; ++e) {
    if (slot_of[e] == L::kNoSlot) continue;
    if (e - task.first >= task.own) {  // also those below the first: u32 wraps round
      slot_of[e] = L::kNoSlot;
      continue;
    }
    u32* const slot = task.routes + task.layout.slot(active);
    slot[L::kExpert] = e - task.first;
    slot[L::kCount] = 0;
    slot_of[e] = active++;
  }
  for (u32 pair = 0; pair < pairs; ++pair) {
    const u32 index = slot_of[chosen[pair]];
    if (index != L::kNoSlot) {
      u32* const slot = task.routes + task.layout.slot(index);
      u32* const user = slot + L::kUsers + 2 * slot[L::kCount]++;
      user[0] = pair / task.top_k;
      user[1] = pair;
    }
    u32* const words = task.routes + task.layout.pair(pair);
    words[L::kSlot] = index;
    words[L::kWeight] = std::bit_cast<u32>(weights[pair]);
  }
  task.routes[L::kActive] = active;
  task.routes[L::kPairs] = pairs;
}

inline RouteTask read_route(const TaskRecord& record, const BodyContext& context) {
  RouteTask task{};
  task.logits = arg<const f32>(record, 0);
  task.routes = arg<u32>(record, 2);
  task.experts = record.param[0];
  task.top_k = record.param[1];
  task.kind = record.param[2];
  task.bias = task.kind == kRouteSigmoid ? arg<const f32>(record, 1) : nullptr;
  task.factor = param_f32(record, 3);
  task.norm_topk = record.param[4] != 0;
  task.forced = arg<const u32>(record, 3);
  task.forced_count = record.param[5];
  task.forced_slots = record.param[6];
  task.first = record.param[7];
  task.own = record.param[8];
  task.layout = {context.step->rows_capacity, task.own, task.top_k};
  return task;
}

}  // namespace gpurt::host

namespace gpurt {

struct route {
  static u32 run(const TaskRecord& record, BodyContext& context) {
    using W = host::Workspace;
    const host::RouteTask task = host::read_route(record, context);
    const u32 rows = context.step->rows;
    const u64 padded = host::padded_lanes(task.experts);
    const u64 pairs = u64{rows} * task.top_k;
    W workspace(context, 2 * W::padded<f32>(padded) + W::padded<f32>(pairs) +
                             W::padded<u32>(pairs) + W::padded<u32>(task.experts));
    f32* const p = workspace.take<f32>(padded);
    f32* const scores = workspace.take<f32>(padded);
    f32* const weights = workspace.take<f32>(pairs);
    u32* const chosen = workspace.take<u32>(pairs);
    u32* const slot_of = workspace.take<u32>(task.experts);
    for (u32 row = 0; row < rows; ++row) {
      const f32* const logits = task.logits + row * u64{task.experts};
      GPURT_AT_LEVEL(score_experts, task, logits, p, scores);
      for (u32 e = 0; e < task.experts; ++e) {
        const bool finite = logits[e] - logits[e] == 0.0F;
        if (finite && scores[e] == scores[e]) continue;
        context.detail[0] = row;
        context.detail[1] = e;
        context.detail[2] = finite ? 1 : 0;  // argument index: bias, logits
        return kFaultNonFinite;
      }
      u32* const row_chosen = chosen + row * u64{task.top_k};
      if (task.forced == nullptr) {
        host::choose_experts(scores, task.experts, task.top_k, row_chosen);
      } else {
        host::take_forced(task, context.rows[row], row_chosen);
      }
      host::weigh_experts(task, p, row_chosen, weights + row * u64{task.top_k});
    }
    host::group_by_expert(task, rows, chosen, weights, slot_of);
    return kFaultNone;
  }
};

}  // namespace gpurt
