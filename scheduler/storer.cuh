// Storer: the warp that ends tasks. It signals their counters, pushes what became ready, writes
// their spans and gives their slots back to the loader.
//
// A team that finished a task goes on at once; the release of a signal, which waits for the task's
// stores to reach L2, is this warp's. slot_done (acquire) then a signal (release) pass the stores
// of the whole team on to whoever waits for the counter. Spans are in nanoseconds of the device's
// global clock: an SM's cycle counter, anchored once a step. The global clock is coarse, so single
// spans are measured in cycles and then scaled.
#pragma once
#include "bodies.gen.cuh"
#include "controller.hpp"
#include "dynamic.hpp"
#include "queue.hpp"
#include "stream.cuh"
#include "trace.hpp"

namespace gpurt {

// A cycle counter's place in global time. One lane's.
struct SpanClock {
  u64 cycles;
  u64 ns;
  u64 step;
  f32 ns_per_cycle;

  // Until the first scale() a guess: 1.8 GHz, near what the chips of sm_90 and sm_100 sustain.
  __device__ void start() {
    step = ~u64{0};
    ns_per_cycle = 1.0f / 1.8f;
    anchor();
  }
  __device__ void anchor() {
    ns = clock_ns();
    cycles = clock_cycles();
  }
  __device__ void scale() {
    const u64 ns_now = clock_ns(), cycles_now = clock_cycles();
    if (cycles_now != cycles)
      ns_per_cycle = static_cast<f32>(ns_now - ns) / static_cast<f32>(cycles_now - cycles);
  }
  __device__ void enter(u64 of_step) {
    if (of_step == step) return;
    step = of_step;
    if (clock_cycles() - cycles < 200000) return;
    scale();
    anchor();
  }
  __device__ u64 at_ns(u64 at_cycles) const {
    const f32 since = static_cast<f32>(static_cast<i64>(at_cycles - cycles));
    return ns + static_cast<u64>(static_cast<i64>(since * ns_per_cycle));
  }
};

// One ring of spans (trace.hpp). A count is published when the storer had nothing to do for a
// while, or after kSpansUnpublished spans.
struct SpanRing {
  u64 spans;
  u64* published;
  u64 count;
  u64 last;

  __device__ void start(u64 ring, u64 counts) {
    spans = ring + u64{blockIdx.x} * gpurt_program.span_capacity * sizeof(Span);
    published = at<u64>(counts + u64{blockIdx.x} * kSpanCountStride);
    count = last = load_relaxed(published);
  }
  __device__ void add(const Span& span) {
    at<Span>(spans)[count & (gpurt_program.span_capacity - 1)] = span;
    if (++count - last >= kSpansUnpublished) publish();
  }
  __device__ void publish() {
    if (count != last) store_release(published, last = count);
  }
};

// How long the storer waits for a task's end before it publishes: that is two fences, 2 us, and the
// task might end meanwhile.
constexpr u32 kIdleCycles = 4000;

struct SpanWriter {
  // What a span is made of, in cycles.
  struct Run {
    u64 begin, step;
    u32 task, wait, stall, run, chosen;
  };

  SpanClock clock;
  SpanRing all;
  SpanRing sampled;
  bool is_sampled;  // the step of the last span: a remainder of 64 bits is 150 instructions

  __device__ void start() {
    clock.start();
    is_sampled = false;
    all.start(gpurt_program.spans, gpurt_program.span_counts);
    sampled.start(gpurt_program.sampled_spans, gpurt_program.sampled_counts);
  }
  // Of a slot that is still this task's.
  // done_at: when all of its warps had ended, of which those of a cold body know no clock.
  __device__ Run run_of(const Slot& slot, u32 turn, u32 done_at) const {
    const bool is_expert = streams_expert(slot.record);
    const u32 end = !is_expert && slot.met_turn == turn ? done_at : slot.end;
    return {slot.begin,
            slot.step,
            slot.record.task_index,
            slot.met - static_cast<u32>(slot.begin),
            slot.stall,
            end - slot.met,
            is_expert ? chosen_word(slot.chosen[0], slot.chosen[1]) : 0};
  }
  __device__ void add(const Run& run) {
    if (run.step != clock.step) is_sampled = run.step % gpurt_program.sample_period == 0;
    clock.enter(run.step);
    const f32 scale = clock.ns_per_cycle;
    Span span;
    span.begin = clock.at_ns(run.begin);
    span.task = run.task;
    span.step = static_cast<u32>(run.step);
    span.wait = static_cast<u32>(static_cast<f32>(run.wait) * scale);
    span.stall = static_cast<u32>(static_cast<f32>(run.stall) * scale);
    span.run = static_cast<u32>(static_cast<f32>(run.run) * scale);
    span.chosen = run.chosen;
    all.add(span);
    if (is_sampled) sampled.add(span);
  }
  __device__ void publish() {
    all.publish();
    sampled.publish();
  }
  // All lanes: until a barrier of the turn's slot completes.
  __device__ void publish_until(const u64& barrier, u32 turn, bool traces) {
    const u32 address = shared_address(&barrier);
    if (mbarrier_test_wait(address, slot_parity(turn))) return;
    const u32 since = clock_cycles_low();
    while (!mbarrier_try_wait(address, slot_parity(turn))) {
      if (traces && clock_cycles_low() - since > kIdleCycles) publish();
    }
  }
};

// ---- signals, a lane each ---------------------------------------------------------------------
// What a signal needs beside its counter, if that has successors. Read before the task ends: each
// of these words is a trip to L2.
struct Successors {
  CounterInfo info;
  Segment queue;  // of info.queue

  GPURT_FN static Successors of(u32 counter) {
    const Program& program = gpurt_program;
    Successors s{};
    if (is_rank_counter(counter)) return s;
    s.info = at<const CounterInfo>(program.counter_infos)[counter];
    if (s.info.queue != 0) s.queue = at<const Segment>(program.segments)[s.info.queue - 1];
    return s;
  }
  // Those of one lane, for all.
  GPURT_FN Successors from_lane(u32 lane) const {
    const auto one = [lane](u32 word) { return __shfl_sync(~0u, word, lane); };
    return {{one(info.signals_per_step), one(info.successor_begin), one(info.successor_count),
             one(info.queue)},
            {one(queue.policy), one(queue.begin), one(queue.end), one(queue.cursor)}};
  }
};

GPURT_FN u64* ready_slot(const Segment& queue, u64 tail, u64 round) {
  const u64 base = (round - 1) * (queue.end - queue.begin);
  return at<u64>(gpurt_program.ready_slots) + queue.begin + (tail - base);
}
GPURT_FN u64 ready_word(u32 task, u64 round) {
  return (round & 0xFFFFFFFFu) << 32 | (task + 1);
}

constexpr u32 kPushesPerLane = 5;  // a stage of 132 tasks at once

// All successors become ready now, and all in one queue: their places are known before they are.
// One trip brings places and tasks, beside the fence that releases to them what lane 0 acquired.
__device__ __forceinline__ void push_all(const Successors& of, u64 round) {
  const u32 lane = threadIdx.x % 32, count = of.info.successor_count;
  const u32* successors = at<const u32>(gpurt_program.successors) + of.info.successor_begin;
  // By all lanes: behind a branch the warp would wait for the result.
  Cursor& cursor = at<Cursor>(gpurt_program.cursors)[of.queue.cursor];
  u64 tail = add_relaxed(&cursor.tail, lane == 0 ? count : 0);
  for (u32 begin = 0; begin < count; begin += 32 * kPushesPerLane) {
    u32 successor[kPushesPerLane];
#pragma unroll
    for (u32 i = 0; i < kPushesPerLane; ++i) {
      const u32 at_successor = begin + 32 * i + lane;
      successor[i] = successors[at_successor < count ? at_successor : 0];
    }
    if (begin == 0) {
      fence_acq_rel_gpu();
      tail = __shfl_sync(~0u, tail, 0);
    }
#pragma unroll
    for (u32 i = 0; i < kPushesPerLane; ++i) {
      const u32 at_successor = begin + 32 * i + lane;
      if (at_successor >= count) break;
      store_relaxed(ready_slot(of.queue, tail + at_successor, round),
                    ready_word(successor[i] & ~kOnlyWait, round));
    }
  }
}

// Any successors, a lane each. queue.hpp has the same steps one by one; here one fence serves all
// adds of 32:
//   fence -> arrivals -> fence -> places in the queues -> slots
// The first fence releases what the counter's signals passed on, with every arrival; the second one
// acquires what earlier arrivals released, and releases all of it with the slots.
__device__ __noinline__ void push_arrived(u32 begin, u32 count, u64 round) {
  const Program& program = gpurt_program;
  const u32* successors = at<const u32>(program.successors) + begin;
  for (u32 i = threadIdx.x % 32; i - threadIdx.x % 32 < count; i += 32) {
    const u32 successor = i < count ? successors[i] : 0, task = successor & ~kOnlyWait;
    bool is_last = (successor & kOnlyWait) != 0;
    fence_acq_rel_gpu();
    if (i < count && !is_last) {
      const u64 before = add_relaxed(&at<u64>(program.arrived)[task], 1);
      const u64 waits = at<const TaskRecord>(program.records)[task].wait_count;
      is_last = before + 1 == waits * round;
    }
    fence_acq_rel_gpu();
    if (!is_last) continue;
    const Segment& queue = segment_of(program, task);
    const u64 tail = add_relaxed(&at<Cursor>(program.cursors)[queue.cursor].tail, 1);
    store_relaxed(ready_slot(queue, tail, round), ready_word(task, round));
  }
}

// All lanes, converged: `amount` signals of a lane's counter, which has successors or is all
// ranks'; 0: it has none.
__device__ __forceinline__ void signal_and_push(u32 counter, const Successors& of, u32 amount,
                                                u64 round) {
  const Program& program = gpurt_program;
  const bool is_all_ranks = amount != 0 && is_rank_counter(counter);
  bool is_last = false;
  if (amount != 0 && !is_all_ranks) {
    const u64 target = u64{of.info.signals_per_step} * round;
    is_last = add_acq_rel(counter_address(program, counter), amount) + amount == target;
  }
  for (u32 rest = __ballot_sync(~0u, is_last); rest != 0; rest &= rest - 1) {
    const Successors one = of.from_lane(__ffs(static_cast<int>(rest)) - 1);
    if (one.info.queue != 0) {
      push_all(one, round);
    } else {
      push_arrived(one.info.successor_begin, one.info.successor_count, round);
    }
  }
  for (u32 rest = __ballot_sync(~0u, is_all_ranks); rest != 0; rest &= rest - 1) {
    const u32 from = __ffs(static_cast<int>(rest)) - 1, rank = threadIdx.x % 32;
    const u32 one = __shfl_sync(~0u, counter, from), by = __shfl_sync(~0u, amount, from);
    if (rank < program.rank_count)  // their round trips overlap
      add_release_system(rank_counter_address(program, one, rank, program.rank), by);
  }
  __syncwarp();
}

// A lane's signal of a task, known before the task ends.
struct Signal {
  u32 counter;
  u32 amount;  // 0: this lane has none
  bool wakes;  // of all lanes alike: the task may wake others, or ranks
  u64* word;   // if not
  Successors successors;

  GPURT_FN static Signal of(const TaskRecord& record) {
    const u32 lane = threadIdx.x % 32;
    Signal s{0, lane < record.signal_count, (record.flags & kTaskWakes) != 0, nullptr, {}};
    if (s.amount == 0) return s;
    s.counter = record.signal[lane];
    s.word = counter_address(gpurt_program, s.counter);
    if (s.wakes) s.successors = Successors::of(s.counter);
    return s;
  }

  // All lanes. is_fenced: all passed a fence since the task's end.
  GPURT_FN void send(u64 round, bool is_fenced = false) const {
    if (wakes) {
      signal_and_push(counter, successors, amount, round);
    } else if (amount != 0) {
      if (is_fenced) {
        add_relaxed(word, 1);
      } else {
        add_release(word, 1);
      }
    }
  }
};

// What deciders and compensators do after their body (dynamic.hpp), a warp at a time: absent tasks
// have a counter for each slot, so one fence serves all adds. False: the block leaves.
__device__ __noinline__ bool decide_by_warp(const Slot& slot) {
  const Program& program = gpurt_program;
  const Decision& decision = decision_of(program, slot.record);
  const u32 live = live_slots(decision), lane = threadIdx.x % 32;
  if (live > decision.slots) {
    if (lane == 0) {
      Fault fault = {};
      fault.kind = kFaultCapacity;
      fault.worker = blockIdx.x;
      fault.task = slot.record.task_index;
      fault.step = slot.step;
      fault.seen = live;
      fault.needed = decision.slots;
      raise_fault(program, fault);
      set_leaving();
    }
    __syncwarp();
    return false;
  }
  // publish_live(), a lane a segment: the fence releases each tail with its head, and what the body
  // wrote with both and with all signals below.
  const bool opens = lane < decision.published_count;
  const Published published = decision.published[opens ? lane : 0];
  Cursor& cursor = at<Cursor>(program.cursors)[published.cursor];
  const u32 tasks = live * published.tiles_per_slot;
  if (opens) store_relaxed(&cursor.tail, u64{tasks});
  fence_acq_rel_gpu();
  if (opens) store_relaxed(&cursor.head, dynamic_head(slot.round, tasks));
  // What experts wait for comes before what is absent.
  Signal::of(slot.record).send(slot.round, true);
  if (live == decision.slots) return true;  // none is absent
  const Absent* absents = at<const Absent>(program.absents) + decision.absent_begin;
  const CounterInfo* infos = at<const CounterInfo>(program.counter_infos);
  for (u32 begin = 0; begin < decision.absent_count; begin += 32) {
    const bool is_mine = begin + lane < decision.absent_count;
    const u32 amount = is_mine ? absent_signals(absents[begin + lane], live) : 0;
    const u32 counter = is_mine ? absents[begin + lane].counter : 0;
    const bool pushes =
        amount != 0 && (is_rank_counter(counter) || infos[counter].successor_count != 0);
    if (amount != 0 && !pushes) add_relaxed(counter_address(program, counter), amount);
    if (!__any_sync(~0u, pushes)) continue;
    signal_and_push(counter, pushes ? Successors::of(counter) : Successors{}, pushes ? amount : 0,
                    slot.round);
  }
  __syncwarp();
  return true;
}

__device__ __noinline__ void run_storer() {
  const bool is_first = threadIdx.x % 32 == 0;
  const bool traces = is_first && gpurt_program.span_capacity != 0;
  SpanWriter spans;
  if (traces) spans.start();
  for (u32 turn = 0;; ++turn) {
    // The record is there before the task ends: what its signals need is found beforehand.
    spans.publish_until(shared().slot_full[turn % kSlotCount], turn, traces);
    const Slot& slot = slot_of(turn);
    if (slot.kind == kSlotLeave) break;
    const Signal signal = Signal::of(slot.record);
    const bool decides = (slot.record.flags & kTaskDecides) != 0;
    spans.publish_until(shared().slot_done[turn % kSlotCount], turn, traces);
    const u32 done_at = clock_cycles_low(), kind = slot.kind;
    // After a fault a signal would vouch for data that is not there.
    const bool leaves = __any_sync(~0u, is_leaving());
    bool signals = kind == kSlotTask && !leaves;
    if (signals) {
      if (GPURT_EXPERTS != 0 && slot.parked != 0) {
        Bodies::make_outputs(slot);
        __syncwarp();
        if (is_first) slot_of(turn).end = clock_cycles_low();
      }
      if (!decides) {
        signal.send(slot.round);
      } else {
        signals = decide_by_warp(slot);
      }
    }
    SpanWriter::Run run;
    if (traces) run = spans.run_of(slot, turn, done_at);
    __syncwarp();
    if (is_first) mbarrier_arrive(shared_address(&shared().slot_empty[turn % kSlotCount]));
    if (signals && traces) spans.add(run);
  }
  if (traces) spans.publish();
}

}  // namespace gpurt
