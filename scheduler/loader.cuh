// Loader: two warps that run ahead of their team. One takes tasks, brings their records into the
// slots, finds experts, looks at edges and ends the team's loop; the other one streams weights.
//
//   loader    take (TaskSource) -> record copy -> slot_full     up to kSlotCount tasks if static
//             an expert's: its decider's counter -> which expert, into the slot; and whether its
//             edges are met, into the slot too
//             -> slot_known
//   streamer  slot_known -> its stages, in order: stage_empty -> bulk copy -> stage_full
//
// One lane of each. What the loader needs are trips to L2 in series, 4 us of a task of experts that
// streams for 4.4: while one lane did both, all stages were free when the next copy began. The
// streamer finds all it needs in the slot. A bulk copy takes one thread about 115 ns to issue, a
// 32 KB stage takes the memory a microsecond.
// Nothing in the loader blocks but the ends of rings: a queue that is still empty never holds up
// what concerns a task already taken.
// Weights depend on nothing, so they are fetched before any edge is met. Edges are the team's, but
// for those of experts' tasks: they are met long before nearly always, so each warp goes from one
// task to the next by a word of shared memory, without a barrier.
// A `ready` slot that nobody fills is waited for here alone, so here it times out.
#pragma once
#include "bodies.gen.cuh"
#include "controller.hpp"
#include "stream.cuh"
#include "task_source.hpp"

namespace gpurt {

// A task taken from a shared queue must not lie behind another in one worker's hands while others
// are idle: one runs, the next one's record and weights are under way.
constexpr u32 kQueueAhead = 2;
// Experts' tasks are many to a worker and of one size, and from one's end to the first byte of the
// task then drawn lie a signal, a draw, a record and the expert's words, in series: 5 us.
constexpr u32 kDynamicAhead = 4;
constexpr u32 kRestNs = 1000;
constexpr u32 kPollsPerRest = 16;  // of a `ready` slot
constexpr u32 kNoTask = 0xFFFFFFFFu;
constexpr u32 kCyclesPerLook = 200000;  // at abort, exit and the clock: a trip to L2

// Weights of the slots' tasks, in order, into the ring's stages.
struct Streamer {
  u32 issued = 0;  // stages filled
  StageCursor cursor{0, 0};

  // What a slot streams.
  struct Range {
    u64 from;
    u32 left;         // bytes
    u32 stage_bytes;  // how they are cut
    u32 voids;        // stages without bytes: its table has no rows, or the ring is its room
  };

  // Of a slot about which all is known. Whatever it waits for, the block's leaving ends it.
  __device__ void stream(const Slot& slot) {
    Range range{};
    if (!find(slot, range)) return;
    while (range.left != 0 || range.voids != 0) {
      if (!wait_empty()) return;
      const u32 bytes = range.left < range.stage_bytes ? range.left : range.stage_bytes;
      const u32 full = shared_address(&shared().stage_full[cursor.stage]);
      mbarrier_arrive_expect(full, bytes);
      if (range.voids == 0) {
        bulk_copy_to_shared(shared_address(shared().ring[cursor.stage]), range.from, bytes, full);
      } else {
        --range.voids;
      }
      range.from += bytes;
      range.left -= bytes;
      ++issued;
      cursor.advance();
    }
  }

  // Until the copies under way have landed: then the block may end.
  __device__ void drain() const {
    const u32 last = issued < kStageCount ? issued : kStageCount;
    for (u32 i = 0; i < last; ++i) {
      // Stage of the i-th newest copy, and the parity of the phase that it completes.
      const u32 index = issued - 1 - i;
      const u32 full = shared_address(&shared().stage_full[index % kStageCount]);
      while (!mbarrier_try_wait(full, index / kStageCount & 1)) {
      }
    }
  }

 private:
  // The phase before a barrier's first counts as complete, so a fresh stage is empty.
  __device__ bool wait_empty() const {
    const u32 empty = shared_address(&shared().stage_empty[cursor.stage]);
    while (!mbarrier_try_wait(empty, cursor.parity ^ 1)) {
      if (is_leaving()) return false;
    }
    return true;
  }

  // False: the block leaves.
  __device__ static bool find(const Slot& slot, Range& range) {
    if (is_leaving()) return false;
    const TaskRecord& record = slot.record;
    range = {record.stream_base, record.stream_bytes, kStageBytes, 0};
    if (streams_expert(record)) {
      if (slot.chosen[1] == 0) range.left = 0;
      range.from += u64{slot.chosen[0]} * record.param[kParamExpertStride] * 16;
      range.stage_bytes = record.param[kParamExpertStage] * 16;
    }
    if (range.left != 0 && has_own_rows(record) && !choose_rows(slot, range)) return false;
    // All stages, as they get free: the team has them until the task ends.
    if (GPURT_RING != 0 && (record.flags & kTaskRing) != 0) range.voids = kStageCount;
    return true;
  }

  // Whether the task's table will have rows: there are none where the step samples nothing. Its
  // body waits for the stage without bytes: else the task could end, and the step's words change,
  // before they are read here. False: the step is never opened.
  __device__ static bool choose_rows(const Slot& slot, Range& range) {
    const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
    while (load_acquire(&control->steps_open) <= slot.step) {
      if (is_leaving()) return false;
      pause();
    }
    if (step_state(gpurt_program)->sample_count == 0) range.left = 0, range.voids = 1;
    return true;
  }
};

struct Loader {
  TaskSource source;
  u32 fetched;   // slots filled
  u32 freed;     // slots given back by the storer
  u32 chosen;    // slots whose bodies have named what they will read themselves, and whose experts
                 // are found
  u32 looked;    // slots whose edges are known to be met, or are the team's business
  u32 guessed;   // the task whose record is on its way to the next slot, before a queue says so
  Wait decided;  // the decider that is known to have run in round `known_in`
  Wait met[2];   // edges that are known to be met in it
  u64 known_in;

  __device__ void start() {
    source.start(gpurt_program, blockIdx.x);
    fetched = freed = chosen = looked = 0;
    guessed = kNoTask;
    forget(~u64{0});
  }

  // ---- records ----------------------------------------------------------------------------------
  __device__ bool fetch() {
    while (freed != fetched &&
           mbarrier_test_wait(shared_address(&shared().slot_empty[freed % kSlotCount]),
                              slot_parity(freed)))
      ++freed;
    if (!may_take()) return false;
    u32 task = 0;
    u64 step = 0;
    Slot& slot = slot_of(fetched);
    const u32 polls = chosen == fetched && !must_look() ? kPollsPerRest : 1;
    if (source.next(task, step, polls) != Next::kTask) {
      if (guessed == kNoTask && source.expects(guessed)) copy_record(slot, guessed);
      return false;
    }
    if (guessed != task) {
      if (guessed != kNoTask) wait_all_copies();  // in flight to the same place
      copy_record(slot, task);
    }
    guessed = kNoTask;
    slot.step = step;
    slot.round = source.round;
    slot.kind = kSlotTask;
    slot.is_met = source.policy == kPolicyReady ? kMet : kNotMet;
    slot.chosen[1] = kNotChosen;
    slot.parked = slot.followed = 0;
    const u32 full = shared_address(&shared().slot_full[fetched % kSlotCount]);
    mbarrier_arrive_after_copies(full);
    mbarrier_arrive(full);  // a release: step, round and kind are visible with the record
    ++fetched;
    return true;
  }

  __device__ static void copy_record(Slot& slot, u32 task) {
    const u64 record = gpurt_program.records + u64{task} * sizeof(TaskRecord);
#pragma unroll
    for (u32 i = 0; i < sizeof(TaskRecord) / 16; ++i)
      copy16_to_shared(shared_address(&slot.record) + i * 16, record + i * 16);
  }

  // ---- experts and edges ------------------------------------------------------------------------
  __device__ static bool is_expert(u32 turn) { return streams_expert(slot_of(turn).record); }

  // Whose weights the task streams. False: its decider has not run yet.
  // The words go into the slot, and the team waits for them there (pass_edges): it need not fetch
  // them again, and no task ends, so that its decider's words may change, before they were read.
  // With them goes the trip of the next ticket.
  __device__ bool choose_expert(Slot& slot) {
    const TaskRecord& record = slot.record;
    if (!is_decided({record.param[kParamExpertCounter], record.param[kParamExpertSignals]},
                    slot.round))
      return false;
    source.draw_ahead();
    const u32* words = at<const u32>(record.addr[kAddrExpertId]);
    const u32 live = load_relaxed(at<const u32>(record.addr[kAddrLiveSlots]));
    u32 word[kExpertWords];
#pragma unroll
    for (u32 i = 0; i < kExpertWords; ++i) word[i] = load_relaxed(words + i);
    slot.chosen[0] = word[0];
    choose_sets(slot);
#pragma unroll
    for (u32 i = 2; i < kExpertWords; ++i) slot.chosen[i] = word[i];
    const bool is_live = record.tile[0] < live;
    st_shared_release_u32(shared_address(&slot.chosen[1]), is_live ? word[1] : 0);
    return true;
  }

  // Whether the edges of the oldest slot not looked at are met, if it has an expert and that is
  // known. True: one step was made.
  __device__ bool look() {
    if (GPURT_EXPERTS == 0) return false;
    if (looked < freed) looked = freed;
    if (looked >= chosen) return false;
    Slot& slot = slot_of(looked);
    if (is_expert(looked)) {
      if (slot.is_met == kNotMet && !are_edges_met(slot)) return false;
      st_shared_release_u32(shared_address(&slot.is_met), kMet);
      st_shared_release_u32(shared_address(&slot.met_turn), looked);
    }
    ++looked;
    return true;
  }

  // What a body reads itself, into L2; the expert of a task. True: one step was made.
  __device__ bool choose() {
    if (chosen == fetched ||
        !mbarrier_test_wait(shared_address(&shared().slot_full[chosen % kSlotCount]),
                            slot_parity(chosen)))
      return false;
    Slot& slot = slot_of(chosen);
    if (is_expert(chosen)) {
      if (!choose_expert(slot)) return false;
    } else {
      Bodies::prefetch(slot.record);
    }
    pass_on();
    return true;
  }

  // Slot `chosen` is the streamer's from here on.
  __device__ void pass_on() {
    mbarrier_arrive(shared_address(&shared().slot_known[chosen % kSlotCount]));
    ++chosen;
  }

  __device__ void forget(u64 round) {
    known_in = round;
    decided = met[0] = met[1] = {0, 0};
  }

  __device__ static bool is_same(const Wait& a, const Wait& b) {
    return a.counter == b.counter && a.signals_per_step == b.signals_per_step;
  }

  // Tasks of one operator often have the same edges: what is known costs no trip to L2.
  __device__ bool is_known(const Wait& wait) const {
    return is_same(wait, met[0]) || is_same(wait, met[1]) || is_same(wait, decided);
  }

  __device__ bool is_met(const Wait& wait, u64 round) {
    const u64 target = counter_target(wait, round);
    const bool is_met = is_rank_counter(wait.counter)
                            ? seen_of(gpurt_program, wait.counter, target).value >= target
                            : counter_is_met(counter_address(gpurt_program, wait.counter), target);
    if (is_met) met[0] = met[1], met[1] = wait;
    return is_met;
  }

  __device__ bool are_edges_met(const Slot& slot) {
    if (slot.round != known_in) forget(slot.round);
    for (u32 i = 0; i < slot.record.wait_count; ++i) {
      const Wait& wait = slot.record.wait[i];
      if (!is_known(wait) && !is_met(wait, slot.round)) return false;
    }
    return true;
  }

  // No warp may wait any longer for the edges of an experts' task, and all must take the same way.
  __device__ void give_up_edges() {
    for (u32 turn = freed; turn != fetched; ++turn) {
      wait_slot(turn);  // the record's copy ends, whatever happens
      Slot& slot = slot_of(turn);
      if (is_expert(turn) && (slot.is_met == kNotMet || slot.chosen[1] == kNotChosen))
        st_shared_release_u32(shared_address(&slot.is_met), kNeverMet);
    }
  }

  // Tasks of one decider follow one another: it is asked once a step, a trip to L2 less for each.
  __device__ bool is_decided(const Wait& wait, u64 round) {
    if (round != known_in) forget(round);
    if (is_same(wait, decided)) return true;
    if (!counter_is_met(counter_address(gpurt_program, wait.counter), counter_target(wait, round)))
      return false;
    decided = wait;
    return true;
  }

  // Whether the team may wait for what look() has not seen yet.
  __device__ bool must_look() const { return GPURT_EXPERTS != 0 && looked < chosen; }

  // Nothing could be done: let the hardware wait for what the loader needs next. A spin would take
  // issue slots from the team; a queue in global memory has nothing to wait on but polls.
  __device__ void rest() const {
    if (chosen != fetched) {
      mbarrier_try_wait_for(shared_address(&shared().slot_full[chosen % kSlotCount]),
                            slot_parity(chosen), kRestNs);
    } else if (fetched - freed >= slots_ahead()) {
      mbarrier_try_wait_for(shared_address(&shared().slot_empty[freed % kSlotCount]),
                            slot_parity(freed), kRestNs);
    }
  }

  // A ticket drawn while all wait for one edge goes to anybody: two tasks of the next stage to one
  // worker, none to another. So a task that streams nothing is followed by a draw when it begins.
  __device__ bool may_take() const {
    const u32 taken = fetched - freed;
    if (taken >= slots_ahead()) return false;
    if (source.policy != kPolicyClaim || taken == 0) return true;
    const Slot& last = slot_of(fetched - 1);
    return ld_shared_acquire_u32(shared_address(&last.met_turn)) == fetched - 1 ||
           (chosen == fetched && last.record.stream_bytes != 0);
  }

  __device__ u32 slots_ahead() const {
    if (source.policy == kPolicyStatic) return kSlotCount;
    return source.policy == kPolicyDynamic ? kDynamicAhead : kQueueAhead;
  }

  // ---- the end ----------------------------------------------------------------------------------
  // The team drains its slots, then finds the last one; so does the streamer.
  __device__ void leave() {
    set_leaving();
    wait_all_copies();
    give_up_edges();
    while (chosen != fetched) pass_on();
    const u32 empty = shared_address(&shared().slot_empty[fetched % kSlotCount]);
    while (!mbarrier_try_wait(empty, slot_parity(fetched) ^ 1)) {
    }
    slot_of(fetched).kind = kSlotLeave;
    const u32 full = shared_address(&shared().slot_full[fetched % kSlotCount]);
    mbarrier_arrive(full);
    mbarrier_arrive(full);
    pass_on();
  }
};

// Watches the team and the queue: no progress for wait_timeout_ns is a Fault. The clock stands
// while the team waits for a step to open: the time between two steps is the host's.
struct Watch {
  u64 since_ns;
  u32 freed;
  u32 looked_at;  // cycles

  // Whether the launch must end. Called while the loader can do nothing.
  __device__ bool look(const Loader& loader) {
    if (clock_cycles_low() - looked_at < kCyclesPerLook) return false;
    const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
    const u32 abort = load_relaxed(&control->abort), exit = load_relaxed(&control->exit);
    const u64 open = load_relaxed(&control->steps_open);
    looked_at = clock_cycles_low();
    if ((abort | exit) != 0) return true;
    const bool holds_none = loader.freed == loader.fetched;
    const TaskSource& source = loader.source;
    const u64 step = holds_none ? source.step : slot_of(loader.freed).step;
    const u64 now = clock_ns();
    const bool may_wait = holds_none && source.policy < kPolicyReady;
    if (may_wait || loader.freed != freed || since_ns == 0 || open <= step) {
      freed = loader.freed;
      since_ns = now;
      return false;
    }
    if (now - since_ns <= gpurt_program.wait_timeout_ns) return false;
    if (holds_none) {
      report_empty_slot(source, now - since_ns);
    } else {
      report_stuck_task(slot_of(freed), now - since_ns);
    }
    return true;
  }

 private:
  __device__ static Fault fault_of(u32 kind, u32 task, u64 step, u64 waited_ns) {
    Fault fault = {};
    fault.kind = kind;
    fault.worker = blockIdx.x;
    fault.task = task;
    fault.step = step;
    fault.waited_ns = waited_ns;
    return fault;
  }

  // Whether the task lacks a counter edge; then the fault names it.
  __device__ static bool find_edge(const TaskRecord& record, u64 round, Fault& fault) {
    for (u32 i = 0; i < record.wait_count; ++i) {
      fault.needed = counter_target(record.wait[i], round);
      const Seen seen = seen_of(gpurt_program, record.wait[i].counter, fault.needed);
      fault.seen = seen.value;
      fault.detail[0] = seen.rank;
      fault.counter = record.wait[i].counter;
      if (fault.seen < fault.needed) return true;
    }
    fault.seen = fault.needed = fault.counter = 0;
    return false;
  }

  // The task in the team's hands: what it waits for follows from its record.
  __device__ static __noinline__ void report_stuck_task(const Slot& slot, u64 waited_ns) {
    const TaskRecord& record = slot.record;
    const u32 kind = record.payload_mask != 0 ? kFaultPayloadTimeout : kFaultStreamTimeout;
    Fault fault = fault_of(kind, record.task_index, slot.step, waited_ns);
    if (find_edge(record, slot.round, fault)) fault.kind = kFaultEdgeTimeout;
    raise_fault(gpurt_program, fault);
  }

  // A `ready` slot that nobody fills, or a dynamic segment that nobody opens, belongs to no task
  // yet: names the first one that lacks an edge.
  __device__ static __noinline__ void report_empty_slot(const TaskSource& source, u64 waited_ns) {
    Fault fault = fault_of(kFaultQueueTimeout, source.begin, source.step, waited_ns);
    for (u32 task = source.begin; task < source.end; ++task) {
      fault.task = task;
      const TaskRecord& record = at<const TaskRecord>(gpurt_program.records)[task];
      if (find_edge(record, source.round, fault)) break;
    }
    raise_fault(gpurt_program, fault);
  }
};

__device__ __noinline__ void run_loader() {
  if (threadIdx.x % 32 != 0) return;
  add_acq_rel(&at<DeviceControl>(gpurt_program.device_control)->workers_in, 1);
  Loader loader;
  loader.start();
  Watch watch = {0, 0, clock_cycles_low()};
  while (!is_leaving()) {
    const bool fetched = loader.fetch();
    // The team may stand still for a look: it comes before an expert that is needed later.
    if (loader.look() || fetched || loader.choose()) continue;
    if (!loader.must_look()) loader.rest();
    if (watch.look(loader)) break;
  }
  loader.leave();
}

__device__ __noinline__ void run_streamer() {
  if (threadIdx.x % 32 != 0) return;
  Streamer streamer;
  for (u32 turn = 0;; ++turn) {
    const u32 known = shared_address(&shared().slot_known[turn % kSlotCount]);
    while (!mbarrier_try_wait(known, slot_parity(turn))) {
    }
    if (slot_of(turn).kind == kSlotLeave) break;
    streamer.stream(slot_of(turn));
    mbarrier_arrive(shared_address(&shared().slot_empty[turn % kSlotCount]));
  }
  streamer.drain();
}

}  // namespace gpurt
