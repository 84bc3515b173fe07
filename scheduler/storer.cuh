// Storer: the warp that ends tasks. It signals their counters, pushes what became ready, writes
// their spans and gives their slots back to the loader.
//
// A team that finished a task goes on at once; the release of a signal, which waits for the task's
// stores to reach L2, is this warp's. slot_done (acquire) then a signal (release) pass the stores of
// the whole team on to whoever waits for the counter.
// Spans are in nanoseconds of the device's global clock: an SM's cycle counter, anchored once a
// step. The global clock is coarse, so single spans are measured in cycles and then scaled.
#pragma once
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

__device__ __forceinline__ void write_span(const Slot& slot, SpanClock& clock) {
  clock.enter(slot.step);
  const u64 begin = clock.at_ns(slot.begin);
  const f32 scale = clock.ns_per_cycle;
  const u64 met = begin + static_cast<u64>(static_cast<f32>(slot.met) * scale);
  const u64 end = met + static_cast<u64>(static_cast<f32>(slot.run) * scale);
  const u32 stall = static_cast<u32>(static_cast<f32>(slot.stall) * scale);
  span_record(gpurt_program, blockIdx.x, slot.record.task_index, slot.step, begin, met, end, stall);
}

__device__ __noinline__ void run_storer() {
  if (threadIdx.x % 32 != 0) return;
  SpanClock clock;
  const bool traces = gpurt_program.span_capacity != 0;
  if (traces) clock.start();
  for (u32 turn = 0;; ++turn) {
    const u32 done = shared_address(&shared().slot_done[turn % kSlotCount]);
    while (!mbarrier_try_wait(done, slot_parity(turn))) {
    }
    const Slot& slot = slot_of(turn);
    if (slot.kind == kSlotLeave) return;
    // After a fault a signal would vouch for data that is not there.
    if (slot.kind == kSlotTask && !is_leaving()) {
      for (u32 i = 0; i < slot.record.signal_count; ++i)
        signal_and_push(gpurt_program, slot.record.signal[i], slot.step, nullptr);
      if (traces) write_span(slot, clock);
    }
    mbarrier_arrive(shared_address(&shared().slot_empty[turn % kSlotCount]));
  }
}

}  // namespace gpurt
