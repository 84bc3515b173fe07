// Ranks: what several devices that run one plan tell each other beside data. Rank counters are in
// counter.hpp; everything here lies in symmetric memory and crosses it at system scope.
//
//   in      rank r, once its workers are there -> every rank: in[r] = launch
//   order   rank 0 -> every other rank: the next StepState, or idle, or leave
//   abort   who gives up -> every other rank
//
// What a step is depends on moments: which request had come, who was cancelled. So rank 0 alone
// decides, and the others get its StepState. All compute the same tokens from the same logits; an
// order carries a check of those that rank 0 took, which every rank compares with its own.
//
// Two StepOrders are enough: rank 0 gives the one after the next only after a step, in which it
// waited for every rank (gpurt/planner/check_ranks.py), and whoever runs that step has taken the
// order to. An order without a step in between, idle or exit, comes once.
//
// Nothing is reset, so no late store of an earlier launch can undo anything: words name the launch.
#pragma once
#include "bodies/context.hpp"

namespace gpurt {

GPURT_FN DeviceControl* device_control(const Program& program) {
  return at<DeviceControl>(program.device_control);
}
GPURT_FN HostControl* host_control(const Program& program) {
  return at<HostControl>(program.host_control);
}

GPURT_FN u64 peer(const Program& program, u32 rank) {
  return at<const u64>(program.peers)[rank];
}
GPURT_FN RankControl* rank_control(const Program& program, u32 rank) {
  return at<RankControl>(peer(program, rank));
}

// ---- in ---------------------------------------------------------------------------------------
// By the controller. What this launch reset is released: only now may others signal here.
GPURT_COLD void announce(const Program& program) {
  if (program.rank_count == 1) return;
  const u64 launch = device_control(program)->launch;
  for (u32 rank = 0; rank < program.rank_count; ++rank)
    store_release_system(&rank_control(program, rank)->in[program.rank], launch);
}

GPURT_COLD bool all_ranks_in(const Program& program) {
  if (program.rank_count == 1) return true;
  const u64 launch = device_control(program)->launch;
  const RankControl* own = rank_control(program, program.rank);
  u32 in = 0;
  for (u32 rank = 0; rank < program.rank_count; ++rank)
    if (load_acquire_system(&own->in[rank]) == launch) ++in;
  store_relaxed_system(&host_control(program)->ranks_in, in);
  return in == program.rank_count;
}

// ---- abort ------------------------------------------------------------------------------------
GPURT_COLD void tell_abort(const Program& program) {
  const u64 word = u64{device_control(program)->launch} << 8U | (program.rank + 1);
  for (u32 rank = 0; rank < program.rank_count; ++rank)
    if (rank != program.rank) store_release_system(&rank_control(program, rank)->abort, word);
}

// Who gave up in this launch, or rank_count.
GPURT_FN u32 rank_that_aborted(const Program& program) {
  const u64 word = load_acquire_system(&rank_control(program, program.rank)->abort);
  const bool is_now = word >> 8U == device_control(program)->launch;
  return is_now ? static_cast<u32>(word & 0xFFU) - 1 : program.rank_count;
}

// ---- orders -----------------------------------------------------------------------------------
// What a step is, here or in an StepOrder.
struct StepParts {
  SlotState* slots;
  StepState* state;
  RowState* rows;
  u32* sample_rows;
};

GPURT_FN StepParts own_parts(const Program& program) {
  return {at<SlotState>(program.slots), step_state(program), step_rows(program),
          step_sample_rows(program)};
}

// They follow the StepOrder.
GPURT_FN StepParts order_parts(const Program& program, StepOrder* order) {
  SlotState* slots = reinterpret_cast<SlotState*>(order + 1);
  StepState* state = reinterpret_cast<StepState*>(slots + program.slot_count);
  RowState* rows = reinterpret_cast<RowState*>(state + 1);
  return {slots, state, rows, reinterpret_cast<u32*>(rows + program.rows_capacity)};
}

GPURT_FN u64 order_bytes(const Program& program) {
  const u64 bytes = sizeof(StepOrder) + u64{program.slot_count} * sizeof(SlotState) +
                    sizeof(StepState) +
                    u64{program.rows_capacity} * (sizeof(RowState) + sizeof(u32));
  return (bytes + 63) / 64 * 64;
}

GPURT_COLD void copy_step(const Program& program, const StepParts& to, const StepParts& from) {
  *to.state = *from.state;
  for (u32 i = 0; i < from.state->rows; ++i) to.rows[i] = from.rows[i];
  for (u32 i = 0; i < from.state->sample_count; ++i) to.sample_rows[i] = from.sample_rows[i];
  for (u32 i = 0; i < program.slot_count; ++i) to.slots[i] = from.slots[i];
}

GPURT_FN u64 order_stamp(const Program& program, u64 number) {
  return u64{device_control(program)->launch} << 40U | number;
}

GPURT_FN StepOrder* order_of(const Program& program, u32 rank, u64 number) {
  return at<StepOrder>(peer(program, rank) + sizeof(RankControl) +
                       (number & 1U) * order_bytes(program));
}

// What the step sampled, in one word. FNV-1a, by token.
GPURT_COLD u64 sampled_check(const Program& program) {
  u64 check = 0xCBF29CE484222325u;
  const u32* sampled = step_sampled(program);
  for (u32 i = 0; i < step_state(program)->sample_count; ++i)
    check = (check ^ sampled[i]) * 0x100000001B3u;
  return check;
}

// By rank 0's owner of admission, before it opens the step itself. kOrderStep: its StepState and
// slots are those of the step; next_variant: of the one after. check: of the step that ended, or
// null.
GPURT_COLD void give_order(const Program& program, u32 kind, const u64* check, u32 next_variant) {
  if (program.rank_count == 1) return;
  const u64 number = ++device_control(program)->order_count;
  for (u32 rank = 1; rank < program.rank_count; ++rank) {
    StepOrder* order = order_of(program, rank, number);
    order->kind = kind;
    order->checks = check != nullptr ? 1 : 0;
    order->check = check != nullptr ? *check : 0;
    order->next_variant = next_variant;
    if (kind == kOrderStep) copy_step(program, order_parts(program, order), own_parts(program));
    store_release_system(&order->stamp, order_stamp(program, number));
  }
}

// For the other ranks. The order that the next number names, and whether it is there.
GPURT_FN StepOrder* next_order(const Program& program) {
  return order_of(program, program.rank, device_control(program)->order_count + 1);
}

GPURT_FN bool has_order(const Program& program) {
  const u64 number = device_control(program)->order_count + 1;
  return load_acquire_system(&next_order(program)->stamp) == order_stamp(program, number);
}

}  // namespace gpurt
