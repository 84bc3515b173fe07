// advance: the last task of every step. It decides what the next step is, with no host in between.
//
//   harvest  each sequence's sampled token -> output ring; is the sequence done?
//   admit    queued requests -> free slots
//   build    rows of the next StepState: decode rows first, then prompt chunks while rows last
//   open     steps_open + 1, or idle = 1: then the controller owns admission
//
// Run by ONE thread, after all tasks of its step; the release of steps_open passes on what it
// wrote. Portable: on the GPU it is one thread on the critical path, so what it needs each step
// lies in device memory and is read once; host memory is only written, except at admission, for
// prompt rows, and after a cancel.
#pragma once
#include "bodies/context.hpp"
#include "queue.hpp"

namespace gpurt {

GPURT_FN DeviceControl* device_control(const Program& program) {
  return at<DeviceControl>(program.device_control);
}
GPURT_FN HostControl* host_control(const Program& program) {
  return at<HostControl>(program.host_control);
}
GPURT_FN RequestRecord* request_record(const Program& program, u32 entry) {
  return at<RequestRecord>(program.requests) + entry;
}
GPURT_FN RequestOutput* request_output(const Program& program, u32 entry) {
  return at<RequestOutput>(program.outputs) + entry;
}
GPURT_FN StepSummary* step_summary(const Program& program, u64 step) {
  return at<StepSummary>(program.summaries) + step % program.summary_capacity;
}

// The reason is stored last: who sees it sees the whole output.
GPURT_FN void finish_request(const Program& program, u32 entry, u32 reason, u64 step, u32 steps,
                             u64 now_ns) {
  RequestOutput* output = request_output(program, entry);
  output->steps = steps;
  output->last_step = step;
  output->end_ns = now_ns;
  store_release_system(&output->finish_reason, reason);
}

GPURT_FN bool is_stop_id(const SlotState& slot, u32 token) {
  for (u32 i = 0; i < slot.stop_count; ++i)
    if (slot.stop_ids[i] == token) return true;
  return false;
}

// Appends this step's token, if the step sampled one. Returns why the sequence ends, or
// kFinishNone.
GPURT_FN u32 harvest_token(const Program& program, SlotState& slot, u64 now_ns) {
  if (slot.sample_index == kNoSample) return kFinishNone;
  const u32 token = step_sampled(program)[slot.sample_index];
  const u64 ring = u64{slot.entry} * program.context_capacity;
  store_relaxed_system(at<u32>(program.output_tokens) + ring + slot.produced, token);
  RequestOutput* output = request_output(program, slot.entry);
  if (slot.produced == 0) output->first_token_ns = now_ns;
  ++slot.produced;
  slot.last_token = token;
  store_release_system(&output->token_count, slot.produced);
  if ((slot.flags & kRequestIgnoreStop) == 0 && is_stop_id(slot, token)) return kFinishStop;
  const bool is_full = slot.position >= program.context_capacity;
  return slot.produced >= slot.max_tokens || is_full ? kFinishLength : kFinishNone;
}

GPURT_FN void harvest_slot(const Program& program, SlotState& slot, u64 step, u64 now_ns,
                           bool cancel_changed) {
  ++slot.active;
  u32 reason = kFinishNone;
  if (slot.kind == kRequestSteps) {
    if (++slot.produced >= slot.max_tokens) reason = kFinishSteps;
  } else {
    reason = harvest_token(program, slot, now_ns);
  }
  if (reason == kFinishNone && cancel_changed &&
      load_acquire_system(&request_record(program, slot.entry)->cancel) != 0)
    reason = kFinishCancelled;
  if (reason == kFinishNone) return;
  finish_request(program, slot.entry, reason, step, slot.active - 1, now_ns);
  slot.active = 0;
}

GPURT_FN void fill_slot_state(SlotState& slot, const RequestRecord& request, u32 entry) {
  slot.entry = entry;
  slot.position = 0;
  slot.prompt_tokens = request.prompt_tokens;
  slot.produced = 0;
  slot.max_tokens = request.max_tokens;
  slot.last_token = 0;
  slot.kind = request.kind;
  slot.flags = request.flags;
  slot.stop_count = request.stop_count;
  slot.temperature = request.temperature;
  slot.top_k = request.top_k;
  slot.top_p = request.top_p;
  slot.sample_index = kNoSample;
  slot.seed = request.seed;
  for (u32 i = 0; i < request.stop_count; ++i) slot.stop_ids[i] = request.stop_ids[i];
  slot.active = 1;
}

// Queued requests -> free slots, oldest first. A plain graph runs one request at a time: its inputs
// are buffers that all rows share.
GPURT_FN void admit(const Program& program, u64 next_step, u64 now_ns) {
  DeviceControl* control = device_control(program);
  if (load_relaxed(&control->mirror_exit) != 0) return;
  const u64 tail = load_acquire(&control->mirror_submit_tail);
  u64 head = control->submit_head;
  if (head >= tail) return;
  SlotState* slots = at<SlotState>(program.slots);
  const u32 slot_count = program.vocab_size == 0 ? 1 : program.slot_count;
  for (u32 i = 0; i < slot_count && head < tail;) {
    if (slots[i].active != 0) {
      ++i;
      continue;
    }
    const u32 entry = static_cast<u32>(head % program.queue_capacity);
    ++head;
    RequestOutput* output = request_output(program, entry);
    output->begin_ns = now_ns;
    output->first_step = next_step;
    const RequestRecord* request = request_record(program, entry);
    if (load_acquire_system(&request->cancel) != 0) {
      finish_request(program, entry, kFinishCancelled, next_step, 0, now_ns);
    } else {
      fill_slot_state(slots[i], *request, entry);
    }
  }
  control->submit_head = head;
  store_release_system(&host_control(program)->submit_head, head);
}

GPURT_FN void set_row(RowState& row, u32 token, u32 slot, u32 position, u32 flags) {
  row.token = token;
  row.slot = slot;
  row.position = position;
  row.flags = flags;
}

struct StepRowCounts {
  u32 rows;
  u32 samples;
};

GPURT_FN void add_sample_row(const Program& program, SlotState& slot, StepRowCounts& counts) {
  step_sample_rows(program)[counts.samples] = counts.rows;
  slot.sample_index = counts.samples++;
}

GPURT_FN void build_decode_row(const Program& program, SlotState& slot, u32 slot_index,
                               StepRowCounts& counts) {
  add_sample_row(program, slot, counts);
  set_row(step_rows(program)[counts.rows++], slot.last_token, slot_index, slot.position++,
          kRowSample);
}

// The next chunk of a prompt; only its last row wants logits.
GPURT_FN void build_prefill_rows(const Program& program, SlotState& slot, u32 slot_index,
                                 StepRowCounts& counts) {
  u32 n = slot.prompt_tokens - slot.position;
  const u32 space = program.rows_capacity - counts.rows;
  if (n > space) n = space;
  if (n > program.prefill_rows) n = program.prefill_rows;
  const u32* prompt =
      at<const u32>(program.prompt_tokens) + u64{slot.entry} * program.context_capacity;
  for (u32 i = 0; i < n; ++i, ++slot.position) {
    const bool is_last = slot.position + 1 == slot.prompt_tokens;
    if (is_last) add_sample_row(program, slot, counts);
    set_row(step_rows(program)[counts.rows++], prompt[slot.position], slot_index, slot.position,
            is_last ? u32{kRowSample} : 0);
  }
}

// A plain graph's rows are all of them, the same in every step.
GPURT_FN StepRowCounts build_plain(const Program& program) {
  StepRowCounts counts = {0, 0};
  const SlotState& slot = at<const SlotState>(program.slots)[0];
  if (slot.active == 0) return counts;
  counts.rows = program.rows_capacity;
  if (slot.produced == 0)
    for (u32 i = 0; i < counts.rows; ++i) set_row(step_rows(program)[i], 0, 0, i, 0);
  return counts;
}

GPURT_FN StepRowCounts build_rows(const Program& program, u64 step) {
  if (program.vocab_size == 0) return build_plain(program);
  StepRowCounts counts = {0, 0};
  SlotState* slots = at<SlotState>(program.slots);
  const u32 n = program.slot_count;
  // With more sequences than rows the first one served rotates, so that none starves.
  const u32 first = n > program.rows_capacity ? static_cast<u32>(step % n) : 0;
  u32 waiting = 0;  // sequences whose prompt is not yet through
  for (u32 i = 0; i < n; ++i) {
    const u32 index = first + i < n ? first + i : first + i - n;
    SlotState& slot = slots[index];
    if (slot.active == 0) continue;
    slot.sample_index = kNoSample;
    if (slot.position < slot.prompt_tokens) {
      ++waiting;
    } else if (counts.rows < program.rows_capacity) {
      build_decode_row(program, slot, index, counts);
    }
  }
  for (u32 i = 0; i < n && waiting != 0 && counts.rows < program.rows_capacity; ++i) {
    const u32 index = first + i < n ? first + i : first + i - n;
    SlotState& slot = slots[index];
    if (slot.active == 0 || slot.position >= slot.prompt_tokens) continue;
    build_prefill_rows(program, slot, index, counts);
    --waiting;
  }
  return counts;
}

// By whoever owns admission: advance, or the controller while idle. Opens the next step, or sets
// idle if there is nothing to run.
GPURT_FN void start_next_step(const Program& program, u64 now_ns) {
  DeviceControl* control = device_control(program);
  const u64 step = load_relaxed(&control->steps_open);
  admit(program, step, now_ns);
  const StepRowCounts counts = build_rows(program, step);
  if (counts.rows == 0) {
    store_relaxed_system(&host_control(program)->idle_since_ns, now_ns);
    store_release(&control->idle, 1);
    return;
  }
  StepState* state = step_state(program);
  state->step = step;
  state->rows = counts.rows;
  state->sample_count = counts.samples;
  state->phase = kPhasePlain;
  if (program.vocab_size != 0) {
    const RowState& first = step_rows(program)[0];
    const SlotState& slot = at<const SlotState>(program.slots)[first.slot];
    state->phase = first.position >= slot.prompt_tokens ? kPhaseDecode : kPhasePrefill;
  }
  if (program.summary_capacity != 0) {
    StepSummary* summary = step_summary(program, step);
    summary->step = step;
    summary->begin_ns = now_ns;
    summary->end_ns = 0;
    summary->rows = counts.rows;
    summary->phase = state->phase;
  }
  push_roots(program, step);
  store_release(&control->steps_open, step + 1);
}

GPURT_FN void advance(const Program& program) {
  DeviceControl* control = device_control(program);
  const u64 now_ns = clock_ns();
  const u64 step = load_relaxed(&control->steps_open) - 1;
  if (program.summary_capacity != 0) step_summary(program, step)->end_ns = now_ns;
  const u32 cancel_count = load_acquire(&control->mirror_cancel);
  const bool cancel_changed = cancel_count != control->cancel_seen;
  if (cancel_changed) control->cancel_seen = cancel_count;
  SlotState* slots = at<SlotState>(program.slots);
  for (u32 i = 0; i < program.slot_count; ++i)
    if (slots[i].active != 0) harvest_slot(program, slots[i], step, now_ns, cancel_changed);
  store_relaxed_system(&host_control(program)->heartbeat, step_round(program, step));
  start_next_step(program, now_ns);
}

}  // namespace gpurt
