// The layout of every wire struct as the compiler sees it: {struct: (size, {field: (offset,
// size)})}. tests/unit/test_wire.py compares it with gpurt/wire.py.
// wire_constants() does the same for enumerators and limits.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>

#include "task_record.hpp"
#include "trace.hpp"

namespace gpurt {

// X(field) for every field of a struct; one list a struct, in the order of task_record.hpp.
// clang-format off
#define GPURT_FIELDS_Wait(X) X(counter) X(signals_per_step)
#define GPURT_FIELDS_TaskRecord(X) \
  X(stream_base) X(stream_bytes) X(body) X(flags) X(task_index) X(op_index) \
  X(wait_count) X(signal_count) X(layer) X(payload_mask) X(wait) X(signal) X(tile) \
  X(addr) X(param)
#define GPURT_FIELDS_Segment(X) X(policy) X(begin) X(end) X(cursor)
#define GPURT_FIELDS_Variant(X) \
  X(rows) X(segment_begin) X(segment_end) X(root_begin) X(root_count) X(reserved)
#define GPURT_FIELDS_CounterInfo(X) \
  X(signals_per_step) X(successor_begin) X(successor_count) X(queue)
#define GPURT_FIELDS_Cursor(X) X(head) X(pad0) X(tail) X(pad1)
#define GPURT_FIELDS_Published(X) X(cursor) X(tiles_per_slot)
#define GPURT_FIELDS_Absent(X) X(counter) X(slot_begin) X(slot_end) X(signals_per_slot)
#define GPURT_FIELDS_Decision(X) \
  X(live) X(slots) X(absent_begin) X(absent_count) X(published_count) X(reserved) \
  X(published)
#define GPURT_FIELDS_RowState(X) X(token) X(slot) X(position) X(flags)
#define GPURT_FIELDS_StepState(X) \
  X(step) X(rows) X(sample_count) X(phase) X(variant) X(round) X(rows_capacity) X(reserved)
#define GPURT_FIELDS_RequestRecord(X) \
  X(sequence) X(kind) X(flags) X(prompt_tokens) X(max_tokens) X(temperature) X(top_k) \
  X(top_p) X(stop_count) X(seed) X(cancel) X(kept_tokens) X(follows) \
  X(stop_ids)
#define GPURT_FIELDS_RequestOutput(X) \
  X(token_count) X(finish_reason) X(steps) X(begin_ns) X(first_token_ns) X(end_ns) \
  X(first_step) X(last_step) X(kept_tokens) X(verify_steps) X(accepted)
#define GPURT_FIELDS_Proposals(X) X(count) X(tokens)
#define GPURT_FIELDS_SlotState(X) \
  X(active) X(entry) X(position) X(prompt_tokens) X(produced) X(max_tokens) \
  X(last_token) X(kind) X(flags) X(stop_count) X(temperature) X(top_k) X(top_p) \
  X(sample_index) X(seed) X(stop_ids) X(verify_steps) X(accepted)
#define GPURT_FIELDS_Fault(X) \
  X(kind) X(worker) X(task) X(counter) X(step) X(seen) X(needed) X(waited_ns) X(detail)
#define GPURT_FIELDS_HostControl(X) \
  X(submit_tail) X(exit_request) X(abort_request) X(cancel_count) X(pad0) X(submit_head) \
  X(kernel_state) X(workers_in) X(heartbeat) X(idle_since_ns) X(launch) X(ranks_in) X(pad1) \
  X(fault)
#define GPURT_FIELDS_DeviceControl(X) \
  X(steps_open) X(turns) X(pad0) X(mirror_submit_tail) X(mirror_exit) X(mirror_cancel) X(abort) \
  X(exit) X(idle) X(workers_in) X(submit_head) X(cancel_seen) X(launch) X(order_count) X(pad1) \
  X(rounds) X(slow_step) X(slow_bound_ns) X(pad2)
#define GPURT_FIELDS_RankControl(X) X(in) X(abort) X(pad)
#define GPURT_FIELDS_StepOrder(X) X(stamp) X(kind) X(checks) X(check) X(next_variant) X(pad)
#define GPURT_FIELDS_Span(X) X(begin) X(task) X(step) X(wait) X(stall) X(run) X(chosen)
#define GPURT_FIELDS_StepSummary(X) X(step) X(begin_ns) X(end_ns) X(rows) X(phase) X(variant)
#define GPURT_FIELDS_Program(X) \
  X(records) X(segments) X(lists) X(list_offsets) X(counters) X(counter_infos) \
  X(successors) X(arrived) X(ready_slots) X(cursors) X(step_state) X(slots) \
  X(device_control) X(host_control) X(requests) X(outputs) X(prompt_tokens) \
  X(output_tokens) X(spans) X(span_counts) X(sampled_spans) X(sampled_counts) \
  X(summaries) X(wait_timeout_ns) X(linger_ns) X(residency_ns) X(tick_ns_x1024) \
  X(first_step) X(payload_set_bytes) X(held_tickets) X(task_count) X(segment_count) \
  X(worker_count) X(counter_count) X(rows_capacity) X(slot_count) X(queue_capacity) \
  X(context_capacity) X(span_capacity) X(summary_capacity) X(sample_period) \
  X(vocab_size) X(prefill_rows) X(team_warps) X(variant_count) X(reserved) X(decisions) X(absents) \
  X(symmetric) X(peers) X(rank_counters) X(rank) X(rank_count) X(rank_counter_count) \
  X(reserved1) X(slot_owners) X(variants)

#define GPURT_STRUCTS(X) \
  X(Wait) X(TaskRecord) X(Segment) X(Variant) X(CounterInfo) X(Cursor) X(Published) X(Absent) \
  X(Decision) X(RowState) X(StepState) \
  X(RequestRecord) X(RequestOutput) X(Proposals) X(SlotState) X(Fault) X(HostControl) \
  X(DeviceControl) X(RankControl) X(StepOrder) X(Span) X(StepSummary) X(Program)
// clang-format on

inline pybind11::dict wire_layout() {
  namespace py = pybind11;
  py::dict layout;
#define GPURT_FIELD(NAME) fields[#NAME] = py::make_tuple(offsetof(S, NAME), sizeof(S::NAME));
#define GPURT_STRUCT(NAME)                                                              \
  {                                                                                     \
    using S = NAME;                                                                     \
    py::dict fields;                                                                    \
    GPURT_FIELDS_##NAME(GPURT_FIELD) layout[#NAME] = py::make_tuple(sizeof(S), fields); \
  }
  GPURT_STRUCTS(GPURT_STRUCT)
#undef GPURT_STRUCT
#undef GPURT_FIELD
  return layout;
}

// clang-format off
#define GPURT_CONSTANTS(X) \
  X(kWaitsPerTask) X(kSignalsPerTask) X(kAddrsPerTask) X(kParamsPerTask) X(kStopIdsPerRequest) \
  X(kProposalsPerSlot) X(kVariantsPerPlan) X(kTurnCount) X(kCounterStride) X(kRanksMax) \
  X(kRankCounter) X(kSpanCountStride) X(kSpansUnpublished) X(kNoSample) \
  X(kF32) X(kF16) X(kBf16) X(kI32) X(kU32) X(kU8) X(kQ41) X(kQ80) X(kNvfp4) X(kE4m3) \
  X(kTaskAdvance) \
  X(kTaskPayloadIn) \
  X(kTaskPayloadOut) X(kTaskRearm) X(kTaskDecides) X(kTaskExpertStream) X(kTaskWakes) X(kOnlyWait) \
  X(kTaskOwnRows) X(kTaskRing) X(kAddrSampleRows) X(kAddrRows) X(kPublishedPerDecision) \
  X(kPlaceEnd) X(kParamDecision) X(kParamExpertStage) X(kParamExpertSignals) \
  X(kParamExpertCounter) X(kParamExpertStride) X(kExpertWords) X(kAddrLiveSlots) \
  X(kAddrExpertId) X(kPolicyStatic) X(kPolicyClaim) \
  X(kPolicyReady) X(kPolicyDynamic) X(kRowSample) X(kRowProposal) X(kPhasePlain) \
  X(kPhasePrefill) X(kPhaseDecode) X(kRequestSteps) X(kRequestGenerate) X(kFinishNone) \
  X(kFinishStop) X(kFinishLength) X(kFinishCancelled) X(kFinishFault) X(kFinishSteps) \
  X(kRequestIgnoreStop) X(kKernelAbsent) X(kKernelRunning) X(kKernelEnding) X(kFaultNone) \
  X(kFaultEdgeTimeout) X(kFaultPayloadTimeout) X(kFaultStreamTimeout) X(kFaultQueueTimeout) \
  X(kFaultNonFinite) X(kFaultHostBody) X(kFaultCheckIn) X(kFaultCapacity) X(kFaultPeer) \
  X(kFaultRanksDiffer) X(kFaultRankLost) X(kOrderStep) X(kOrderIdle) X(kOrderExit)
// clang-format on

inline pybind11::dict wire_constants() {
  pybind11::dict constants;
#define GPURT_CONSTANT(NAME) constants[#NAME] = static_cast<u32>(NAME);
  GPURT_CONSTANTS(GPURT_CONSTANT)
#undef GPURT_CONSTANT
  return constants;
}

}  // namespace gpurt
