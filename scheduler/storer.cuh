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
  __device__ Run run_of(const Slot& slot) const {
    const bool is_expert = streams_expert(slot.record);
    return {slot.begin,
            slot.step,
            slot.record.task_index,
            slot.met - static_cast<u32>(slot.begin),
            slot.stall,
            slot.end - slot.met,
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
};

// ---- `ready` successors, a warp at a time ----------------------------------------------------
constexpr u32 kPushesPerLane = 4;

// Successors [begin, begin + 32 * kPushesPerLane) of a counter whose last signal this warp made,
// and acquired. queue.hpp has the same steps one by one; here one fence serves all adds of a stage:
//   fence -> arrivals -> fence -> places in the queue -> slots
// The first fence releases what the counter's signals passed on, with every arrival; the second one
// acquires what earlier arrivals released, and releases all of it with the slots. Where every
// successor waits for this counter alone, there are no arrivals.
__device__ __forceinline__ void push_successors(const u32* successors, u32 count, u64 round) {
  const Program& program = gpurt_program;
  u32 task[kPushesPerLane];
  bool is_last[kPushesPerLane];
  bool arrives = false;
#pragma unroll
  for (u32 i = 0; i < kPushesPerLane; ++i) {
    const u32 at_successor = threadIdx.x % 32 + 32 * i;
    const u32 successor = at_successor < count ? successors[at_successor] : 0;
    task[i] = successor & ~kOnlyWait;
    is_last[i] = (successor & kOnlyWait) != 0;
    arrives |= at_successor < count && !is_last[i];
  }
  fence_acq_rel_gpu();
  if (__any_sync(~0u, arrives)) {
#pragma unroll
    for (u32 i = 0; i < kPushesPerLane; ++i) {
      if (is_last[i] || threadIdx.x % 32 + 32 * i >= count) continue;
      const u64 before = add_relaxed(&at<u64>(program.arrived)[task[i]], 1);
      const u64 waits = at<const TaskRecord>(program.records)[task[i]].wait_count;
      is_last[i] = before + 1 == waits * round;
    }
    fence_acq_rel_gpu();
  }
#pragma unroll
  for (u32 i = 0; i < kPushesPerLane; ++i) {
    if (!is_last[i]) continue;
    const Segment& segment = segment_of(program, task[i]);
    const u64 tail = add_relaxed(&at<Cursor>(program.cursors)[segment.cursor].tail, 1);
    const u64 base = (round - 1) * (segment.end - segment.begin);
    store_relaxed(at<u64>(program.ready_slots) + segment.begin + (tail - base),
                  (round & 0xFFFFFFFFu) << 32 | (task[i] + 1));
  }
}

// All lanes of the storer, converged.
__device__ __forceinline__ void signal_by_warp(u32 counter, u64 round, u32 amount = 1) {
  const Program& program = gpurt_program;
  if (is_rank_counter(counter)) {  // a lane a rank: their round trips overlap
    const u32 rank = threadIdx.x % 32;
    if (rank < program.rank_count)
      add_release_system(rank_counter_address(program, counter, rank, program.rank), amount);
    __syncwarp();
    return;
  }
  const CounterInfo& info = at<const CounterInfo>(program.counter_infos)[counter];
  u64* word = counter_address(program, counter);
  const u32 count = info.successor_count;
  bool is_last = false;
  if (threadIdx.x % 32 == 0) {
    if (count == 0) {
      add_release(word, amount);
    } else {
      const u64 target = u64{info.signals_per_step} * round;
      is_last = add_acq_rel(word, amount) + amount == target;
    }
  }
  if (!__any_sync(~0u, is_last)) return;
  __syncwarp();
  const u32* successors = at<const u32>(program.successors) + info.successor_begin;
  for (u32 begin = 0; begin < count; begin += 32 * kPushesPerLane)
    push_successors(successors + begin, count - begin, round);
  __syncwarp();
}

// All lanes. Without successors a lane a signal: one release for all, and no counter's info is
// read, which would be a round trip to L2 before the signal.
// is_fenced: all lanes passed a fence since the task's end.
__device__ __forceinline__ void signal_all(const Slot& slot, bool is_fenced = false) {
  const TaskRecord& record = slot.record;
  const u32 lane = threadIdx.x % 32;
  if ((record.flags & kTaskWakes) != 0) {
    for (u32 i = 0; i < record.signal_count; ++i) signal_by_warp(record.signal[i], slot.round);
  } else if (lane < record.signal_count) {
    u64* counter = counter_address(gpurt_program, record.signal[lane]);
    if (is_fenced) {
      add_relaxed(counter, 1);
    } else {
      add_release(counter, 1);
    }
  }
}

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
  signal_all(slot, true);
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
    for (u32 rest = __ballot_sync(~0u, pushes); rest != 0; rest &= rest - 1) {
      const u32 from = __ffs(static_cast<int>(rest)) - 1;
      const u32 one = __shfl_sync(~0u, counter, from), by = __shfl_sync(~0u, amount, from);
      signal_by_warp(one, slot.round, by);
    }
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
    const u32 done = shared_address(&shared().slot_done[turn % kSlotCount]);
    if (!mbarrier_test_wait(done, slot_parity(turn))) {
      const u32 since = clock_cycles_low();
      while (!mbarrier_try_wait(done, slot_parity(turn))) {
        if (traces && clock_cycles_low() - since > kIdleCycles) spans.publish();
      }
    }
    const Slot& slot = slot_of(turn);
    if (slot.kind == kSlotLeave) break;
    // After a fault a signal would vouch for data that is not there.
    const bool leaves = __any_sync(~0u, is_leaving());
    bool signals = slot.kind == kSlotTask && !leaves;
    if (signals) {
      if (GPURT_EXPERTS != 0 && slot.parked != 0) {
        Bodies::make_outputs(slot);
        __syncwarp();
        if (is_first) slot_of(turn).end = clock_cycles_low();
      }
      if ((slot.record.flags & kTaskDecides) == 0) {
        signal_all(slot);
      } else {
        signals = decide_by_warp(slot);
      }
    }
    SpanWriter::Run run;
    if (traces) run = spans.run_of(slot);
    __syncwarp();
    if (is_first) mbarrier_arrive(shared_address(&shared().slot_empty[turn % kSlotCount]));
    if (signals && traces) spans.add(run);
  }
  if (traces) spans.publish();
}

}  // namespace gpurt
