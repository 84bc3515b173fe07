// advance: the last task of every step. It decides what the next step is, with no host in between.
//
//   harvest  each sequence's sampled token, and with a drafter all that it accepted -> output ring;
//            is the sequence done?
//   admit    queued requests -> free slots
//   build    rows of the next StepState: decode rows first, then prompt chunks while rows last;
//            what is left is for proposals, which stand behind their sequence's decode row
//   open     steps_open + 1, or idle = 1: then the controller owns admission
//
// With several variants a step's turn, which says whose tasks it runs, is fixed while the step
// before it is opened: workers stream a step's weights before the step opens.
//
//   open s   rows of s, at most the rows of its variant -> turn of s + 1: the smallest variant that
//            holds what then waits for a row -> steps_open
//
// So a prompt that comes while others decode begins with a step of the decode variant, and so does
// one that comes after a sequence that ended by a stop id.
// Of several ranks only rank 0 does this; the others take its order (ranks.hpp).
//
// Run by ONE thread, after all tasks of its step; the release of steps_open passes on what it
// wrote. Portable: on the GPU it is one thread on the critical path, where each load that waits for
// the one before is a trip to L2. So what it needs each step lies in device memory; words that
// others may change are asked for together (Look), without an acquire, which would empty L1;
// nothing that it wrote is read back. Host memory is only written, except at admission, for prompt
// rows, and after a cancel.
#pragma once
#include "acceptance.hpp"
#include "bodies/context.hpp"
#include "queue.hpp"
#include "ranks.hpp"
#include "slow_steps.hpp"
#include "task_source.hpp"

namespace gpurt {

GPURT_FN RequestRecord* request_record(const Program& program, u32 entry) {
  return at<RequestRecord>(program.requests) + entry;
}
GPURT_FN RequestOutput* request_output(const Program& program, u32 entry) {
  return at<RequestOutput>(program.outputs) + entry;
}
GPURT_FN StepSummary* step_summary(const Program& program, u64 step) {
  return at<StepSummary>(program.summaries) + step % program.summary_capacity;
}

// What others may have changed, as of one moment. The words only grow, so an old one costs a step.
struct Look {
  u64 submit_tail;
  u32 exit;
  u32 cancel;
};

GPURT_FN Look look_at(const DeviceControl* control) {
  return {load_relaxed(&control->mirror_submit_tail), load_relaxed(&control->mirror_exit),
          load_relaxed(&control->mirror_cancel)};
}

// A graph's drafter, as its advance task names it: arguments 1 and 2, parameter 0.
struct Drafter {
  const Proposals* proposals;  // by slot; null: there is none
  const u32* parents;          // by slot and proposal, as rows of the block; null: it makes chains
  u32 limit;                   // of one block
};

// The reason is stored last: who sees it sees the whole output.
GPURT_FN void finish_request(const Program& program, u32 entry, u32 reason, u64 step, u32 steps,
                             u64 now_ns) {
  RequestOutput* output = request_output(program, entry);
  output->steps = steps;
  output->last_step = step;
  output->end_ns = now_ns;
  store_release_system(&output->finish_reason, reason);
}

// Appends one token. Returns why the sequence ends with it, or kFinishNone.
GPURT_FN u32 append_token(const Program& program, SlotState& slot, u32 token) {
  const u64 ring = u64{slot.entry} * program.context_capacity;
  store_relaxed_system(at<u32>(program.output_tokens) + ring + slot.produced, token);
  ++slot.produced;
  slot.last_token = token;
  if ((slot.flags & kRequestIgnoreStop) == 0 && is_stop_id(slot, token)) return kFinishStop;
  const bool is_full = slot.position >= program.context_capacity;
  return slot.produced >= slot.max_tokens || is_full ? kFinishLength : kFinishNone;
}

// Goes on, after the token of a block's first row, with those of the rows whose proposals were
// right, up to the one that ends the sequence.
GPURT_FN u32 append_accepted(const Program& program, SlotState& slot, u32 reason, bool verifies) {
  const u32* sampled = step_sampled(program);
  const u32 accepted = accepted_rows(step_rows(program), step_sample_rows(program), sampled,
                                     step_state(program)->sample_count, slot.sample_index);
  u32 depth = 0;
  for (u32 row = 1; accepted >> row != 0 && reason == kFinishNone; ++row) {
    if ((accepted >> row & 1) == 0) continue;
    ++slot.position;  // the proposal's K/V are in place
    ++slot.accepted[depth++];
    reason = append_token(program, slot, sampled[slot.sample_index + row]);
  }
  if (verifies) ++slot.verify_steps;
  return reason;
}

// Appends what this step sampled, if anything. Returns why the sequence ends, or kFinishNone.
GPURT_FN u32 harvest_tokens(const Program& program, SlotState& slot, const Drafter& drafter,
                            u64 now_ns) {
  if (slot.sample_index == kNoSample) return kFinishNone;
  RequestOutput* output = request_output(program, slot.entry);
  const bool verifies = slot.produced != 0;  // the first token comes from the prompt
  if (slot.produced == 0) output->first_token_ns = now_ns;
  u32 reason = append_token(program, slot, step_sampled(program)[slot.sample_index]);
  if (drafter.proposals != nullptr) reason = append_accepted(program, slot, reason, verifies);
  store_release_system(&output->token_count, slot.produced);
  return reason;
}

GPURT_FN void store_acceptance(const Program& program, const SlotState& slot) {
  RequestOutput* output = request_output(program, slot.entry);
  output->verify_steps = slot.verify_steps;
  for (u32 i = 0; i < kProposalsPerSlot; ++i) output->accepted[i] = slot.accepted[i];
}

GPURT_FN void harvest_slot(const Program& program, SlotState& slot, u64 step,
                           const Drafter& drafter, u64 now_ns, bool cancel_changed) {
  ++slot.active;
  u32 reason = kFinishNone;
  if (slot.kind == kRequestSteps) {
    if (++slot.produced >= slot.max_tokens) reason = kFinishSteps;
  } else {
    reason = harvest_tokens(program, slot, drafter, now_ns);
  }
  if (reason == kFinishNone && cancel_changed &&
      load_acquire_system(&request_record(program, slot.entry)->cancel) != 0)
    reason = kFinishCancelled;
  if (reason == kFinishNone) return;
  if (drafter.proposals != nullptr) store_acceptance(program, slot);
  finish_request(program, slot.entry, reason, step, slot.active - 1, now_ns);
  slot.active = 0;
}

GPURT_FN void fill_slot_state(SlotState& slot, const RequestRecord& request, u32 entry,
                              u32 position) {
  slot.entry = entry;
  slot.position = position;
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
  slot.verify_steps = 0;
  for (u32 i = 0; i < kProposalsPerSlot; ++i) slot.accepted[i] = 0;
  slot.active = 1;
}

// A free slot, of `count`: the one that still holds the K/V which the request goes on from, else
// the first; `count` if there is none.
GPURT_FN u32 choose_slot(const Program& program, const RequestRecord& request, u32 count) {
  const SlotState* slots = at<const SlotState>(program.slots);
  const u64* owners = at<const u64>(program.slot_owners);
  u32 first = count;
  for (u32 i = count; i-- != 0;) {
    if (slots[i].active != 0) continue;
    if (request.follows != 0 && owners[i] == request.follows) return i;
    first = i;
  }
  return first;
}

// The request has the slot from now on. Where the slot's K/V are those that it goes on from, it
// begins behind the tokens that both share.
GPURT_FN void take_slot(const Program& program, u32 index, const RequestRecord& request,
                        u32 entry) {
  u64& owner = at<u64>(program.slot_owners)[index];
  const bool goes_on = request.follows != 0 && owner == request.follows;
  const u32 kept = goes_on ? request.kept_tokens : 0;
  owner = request.sequence + 1;
  request_output(program, entry)->kept_tokens = kept;
  fill_slot_state(at<SlotState>(program.slots)[index], request, entry, kept);
}

// Queued requests -> free slots, oldest first. A plain graph runs one request at a time: its inputs
// are buffers that all rows share.
GPURT_FN void admit(const Program& program, u64 next_step, const Look& look, u64 now_ns) {
  DeviceControl* control = device_control(program);
  u64 head = control->submit_head;
  if (look.exit != 0 || head >= look.submit_tail) return;
  const u64 tail = load_acquire(&control->mirror_submit_tail);  // their records are to be read
  const u32 slot_count = program.vocab_size == 0 ? 1 : program.slot_count;
  for (; head < tail; ++head) {
    const u32 entry = static_cast<u32>(head % program.queue_capacity);
    const RequestRecord* request = request_record(program, entry);
    const u32 slot = choose_slot(program, *request, slot_count);
    if (slot == slot_count) break;
    RequestOutput* output = request_output(program, entry);
    output->begin_ns = now_ns;
    output->first_step = next_step;
    if (load_acquire_system(&request->cancel) != 0) {
      finish_request(program, entry, kFinishCancelled, next_step, 0, now_ns);
    } else {
      take_slot(program, slot, *request, entry);
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
  u32 capacity;  // of the step's variant
  u32 phase;     // of the first row
};

GPURT_FN void add_sample_row(const Program& program, SlotState& slot, StepRowCounts& counts) {
  step_sample_rows(program)[counts.samples] = counts.rows;
  slot.sample_index = counts.samples++;
}

GPURT_FN void build_decode_row(const Program& program, SlotState& slot, u32 slot_index,
                               StepRowCounts& counts) {
  counts.phase = kPhaseDecode;  // decode rows come first
  add_sample_row(program, slot, counts);
  set_row(step_rows(program)[counts.rows++], slot.last_token, slot_index, slot.position++,
          kRowSample);
}

// Rows for proposals, and the sequences that have not had their share of them.
struct Spare {
  u32 rows;
  u32 sequences;
};

// Of an active sequence, without a drafter: its decode row or the next chunk of its prompt.
GPURT_FN u32 wanted_rows(const Program& program, const SlotState& slot) {
  if (slot.position >= slot.prompt_tokens) return 1;
  const u32 left = slot.prompt_tokens - slot.position;
  return left < program.prefill_rows ? left : program.prefill_rows;
}

// What is left once every sequence has its row or its prompt chunk: a drafter delays nobody's
// prompt.
GPURT_FN Spare spare_rows(const Program& program, u32 capacity) {
  const SlotState* slots = at<const SlotState>(program.slots);
  Spare spare = {capacity, 0};
  for (u32 i = 0; i < program.slot_count; ++i) {
    const SlotState& slot = slots[i];
    if (slot.active == 0) continue;
    if (slot.position >= slot.prompt_tokens) ++spare.sequences;
    const u32 wanted = wanted_rows(program, slot);
    spare.rows -= wanted < spare.rows ? wanted : spare.rows;
  }
  return spare;
}

// How many of a slot's proposals are worth a row: not past its last token or the context, and not
// from one on that is no token at all.
GPURT_FN u32 usable_proposals(const Program& program, const SlotState& slot,
                              const Proposals& proposals, u32 limit) {
  u32 n = proposals.count < kProposalsPerSlot ? proposals.count : kProposalsPerSlot;
  if (n > limit) n = limit;
  const u32 to_produce = slot.max_tokens - slot.produced - 1;  // one comes without
  if (n > to_produce) n = to_produce;
  const u32 positions = program.context_capacity - slot.position;
  if (n > positions) n = positions;
  for (u32 i = 0; i < n; ++i)
    if (proposals.tokens[i] >= program.vocab_size) return i;
  return n;
}

// The row of the block that proposal i follows: one before its own, whatever the drafter says.
GPURT_FN u32 parent_of(const u32* parents, u32 i) {
  return parents[i] < i ? parents[i] : i;
}

// Whether the first n proposals are more than one path.
GPURT_FN bool has_branches(const u32* parents, u32 n) {
  for (u32 i = 0; i < n; ++i)
    if (parent_of(parents, i) != i) return true;
  return false;
}

// Row i + 1 of a block that is a tree. parent: its row, of that number.
GPURT_FN void put_on_branch(RowState& row, u32 i, const RowState& parent, u32 number) {
  const u32 ancestors = (number == 0 ? 1u : row_ancestors(parent)) | 2u << i;
  row.position = parent.position + 1;
  row.flags |= ancestors << kRowAncestorsShift;
}

// Behind the decode row of their sequence. Their positions are not the sequence's until accepted.
GPURT_FN void build_proposal_rows(const Program& program, const SlotState& slot, u32 slot_index,
                                  const Drafter& drafter, Spare& spare, StepRowCounts& counts) {
  const Proposals& proposals = drafter.proposals[slot_index];
  const u32 share = spare.rows / spare.sequences--;
  const u32 limit = drafter.limit < share ? drafter.limit : share;
  const u32 n = usable_proposals(program, slot, proposals, limit);
  const u32* parents = drafter.parents;
  if (parents != nullptr) parents += u64{slot_index} * kProposalsPerSlot;
  const bool is_tree = parents != nullptr && has_branches(parents, n);
  RowState* block = step_rows(program) + counts.rows - 1;
  for (u32 i = 0; i < n; ++i) {
    step_sample_rows(program)[counts.samples++] = counts.rows++;
    set_row(block[i + 1], proposals.tokens[i], slot_index, slot.position + i,
            kRowSample | kRowProposal);
    if (is_tree)
      put_on_branch(block[i + 1], i, block[parent_of(parents, i)], parent_of(parents, i));
  }
  spare.rows -= n;
}

// The next chunk of a prompt; only its last row wants logits.
GPURT_FN void build_prefill_rows(const Program& program, SlotState& slot, u32 slot_index,
                                 StepRowCounts& counts) {
  u32 n = wanted_rows(program, slot);
  const u32 space = counts.capacity - counts.rows;
  if (n > space) n = space;
  const u32* prompt =
      at<const u32>(program.prompt_tokens) + u64{slot.entry} * program.context_capacity;
  constexpr u32 kAtOnce = 8;  // the prompt lies in the host's memory: these loads go out together
  for (u32 first = 0; first < n; first += kAtOnce) {
    const u32 count = n - first < kAtOnce ? n - first : kAtOnce;
    u32 token[kAtOnce];
    for (u32 i = 0; i < kAtOnce; ++i) token[i] = prompt[slot.position + (i < count ? i : 0)];
    for (u32 i = 0; i < count; ++i, ++slot.position) {
      const bool is_last = slot.position + 1 == slot.prompt_tokens;
      if (is_last) add_sample_row(program, slot, counts);
      set_row(step_rows(program)[counts.rows++], token[i], slot_index, slot.position,
              is_last ? u32{kRowSample} : 0);
    }
  }
}

// A plain graph's rows are all of them, the same in every step.
GPURT_FN StepRowCounts build_plain(const Program& program, u32 capacity) {
  StepRowCounts counts = {0, 0, capacity, kPhasePlain};
  const SlotState& slot = at<const SlotState>(program.slots)[0];
  if (slot.active == 0) return counts;
  counts.rows = capacity;
  if (slot.produced == 0)
    for (u32 i = 0; i < counts.rows; ++i) set_row(step_rows(program)[i], 0, 0, i, 0);
  return counts;
}

GPURT_FN StepRowCounts build_rows(const Program& program, u64 step, u32 capacity,
                                  const Drafter& drafter) {
  if (program.vocab_size == 0) return build_plain(program, capacity);
  StepRowCounts counts = {0, 0, capacity, kPhasePrefill};
  SlotState* slots = at<SlotState>(program.slots);
  const u32 n = program.slot_count;
  // With more sequences than rows the first one served rotates, so that none starves.
  const u32 first = n > capacity ? static_cast<u32>(step % n) : 0;
  u32 waiting = 0;  // sequences whose prompt is not yet through
  Spare spare = {0, 0};
  if (drafter.proposals != nullptr) spare = spare_rows(program, capacity);
  for (u32 i = 0; i < n; ++i) {
    const u32 index = first + i < n ? first + i : first + i - n;
    SlotState& slot = slots[index];
    if (slot.active == 0) continue;
    slot.sample_index = kNoSample;
    if (slot.position < slot.prompt_tokens) {
      ++waiting;
    } else if (counts.rows < capacity) {
      build_decode_row(program, slot, index, counts);
      if (spare.rows != 0) build_proposal_rows(program, slot, index, drafter, spare, counts);
    }
  }
  for (u32 i = 0; i < n && waiting != 0 && counts.rows < capacity; ++i) {
    const u32 index = first + i < n ? first + i : first + i - n;
    SlotState& slot = slots[index];
    if (slot.active == 0 || slot.position >= slot.prompt_tokens) continue;
    build_prefill_rows(program, slot, index, counts);
    --waiting;
  }
  return counts;
}

// Whether the step that is built gives the sequence its last token, whatever that is.
GPURT_FN bool is_last_step(const SlotState& slot) {
  return slot.sample_index != kNoSample && slot.produced + 1 >= slot.max_tokens;
}

// For the step after the one that is built: the smallest variant that holds a row or a prompt chunk
// of every sequence, else the largest; and the largest if none will be left, as for the first step
// of a launch: the next one begins with a prompt.
GPURT_FN u32 fitting_variant(const Program& program) {
  const SlotState* slots = at<const SlotState>(program.slots);
  u32 wanted = 0;
  for (u32 i = 0; i < program.slot_count; ++i)
    if (slots[i].active != 0 && !is_last_step(slots[i])) wanted += wanted_rows(program, slots[i]);
  if (wanted == 0) return program.variant_count - 1;
  u32 variant = 0;
  while (variant + 1 < program.variant_count && program.variants[variant].rows < wanted) ++variant;
  return variant;
}

// Before the step in front of it opens. A release: whoever loads it has seen that the step whose
// turn it replaces is over.
GPURT_FN void fix_turn(const Program& program, u64 step, u32 variant) {
  DeviceControl* control = device_control(program);
  const u64 round = ++control->rounds[variant];
  store_release(&control->turns[step % kTurnCount], make_turn(round, variant));
}

// The next step, which is what the StepState has: from here on workers run it. next_variant: of the
// one after.
GPURT_COLD void open_step(const Program& program, const StepState& state, u32 next_variant,
                          u64 now_ns) {
  if (program.summary_capacity != 0) {
    StepSummary* summary = step_summary(program, state.step);
    summary->step = state.step;
    summary->begin_ns = now_ns;
    summary->end_ns = 0;
    summary->rows = state.rows;
    summary->phase = static_cast<u16>(state.phase);
    summary->variant = static_cast<u16>(state.variant);
  }
  if (program.variant_count != 1) fix_turn(program, state.step + 1, next_variant);
  push_roots(program, program.variants[state.variant], state.round);
  store_release(&device_control(program)->steps_open, state.step + 1);
}

// By whoever owns admission: advance, or the controller while idle. Opens the next step, or sets
// idle if there is nothing to run. The controller needs no drafter: nothing was decoding.
// sampled: what ranks compare; null: no step has ended since they did.
GPURT_COLD void start_next_step(const Program& program, u64 step, const Look& look, u64 now_ns,
                                const Drafter& drafter = {nullptr, nullptr, 0},
                                const u64* sampled = nullptr) {
  DeviceControl* control = device_control(program);
  admit(program, step, look, now_ns);
  u64 turn = make_turn(step_count(program, step), 0);
  if (program.variant_count != 1) turn = load_relaxed(&control->turns[step % kTurnCount]);
  const Variant& variant = program.variants[turn_variant(turn)];
  const StepRowCounts counts = build_rows(program, step, variant.rows, drafter);
  if (counts.rows == 0) {
    if (sampled != nullptr) give_order(program, kOrderIdle, sampled, 0);
    store_relaxed_system(&host_control(program)->idle_since_ns, now_ns);
    store_release(&control->idle, 1);
    return;
  }
  const StepState state = {
      step,         counts.rows, counts.samples, counts.phase, turn_variant(turn), turn_round(turn),
      variant.rows, {}};
  *step_state(program) = state;
  const u32 next_variant = program.variant_count == 1 ? 0 : fitting_variant(program);
  give_order(program, kOrderStep, sampled, next_variant);
  open_step(program, state, next_variant, now_ns);
}

GPURT_FN void harvest(const Program& program, u64 step, const Drafter& drafter, const Look& look,
                      u64 now_ns) {
  DeviceControl* control = device_control(program);
  const bool cancel_changed = look.cancel != control->cancel_seen;
  if (cancel_changed) control->cancel_seen = look.cancel;
  SlotState* slots = at<SlotState>(program.slots);
  for (u32 i = 0; i < program.slot_count; ++i)
    if (slots[i].active != 0)
      harvest_slot(program, slots[i], step, drafter, now_ns, cancel_changed);
}

// At the end of `step`. record: of the advance task.
GPURT_FN void advance(const Program& program, const TaskRecord& record, u64 step) {
  DeviceControl* control = device_control(program);
  const Look look = look_at(control);
  const u64 now_ns = clock_ns();
  if (program.summary_capacity != 0) {
    StepSummary* summary = step_summary(program, step);
    summary->end_ns = now_ns;
    mark_if_slow(control, *summary, now_ns);
  }
  const Drafter drafter = {at<const Proposals>(record.addr[1]), at<const u32>(record.addr[2]),
                           record.param[0]};
  const bool leads = program.rank == 0;
  if (leads) harvest(program, step, drafter, look, now_ns);
  store_relaxed_system(&host_control(program)->heartbeat, step_count(program, step));
  if (!leads) {  // its controller opens the next step, once rank 0 says which
    store_release(&control->idle, 1);
    return;
  }
  const u64 sampled = program.rank_count > 1 ? sampled_check(program) : 0;
  start_next_step(program, step + 1, look, now_ns, drafter, &sampled);
}

}  // namespace gpurt
