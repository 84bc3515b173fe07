// Team: the warps that compute. Takes tasks from the slots, waits for their edges, runs bodies.
//
//   slot -> [gate of a new step, counter edges: one thread, then team barrier] -> body -> done
//
// The hot loop is a function of its own (one with wgmma a part of the kernel, see InKernel) that
// keeps four words and nothing else over a task. For a body that is not hot it returns, and
// run_cold is called from the kernel: nothing of the loop is live over a cold body, so no cold
// body's registers make the loop spill.
// All warps take the same way through all barriers. So what decides about a barrier is never a word
// that another thread may change meanwhile: whether a task is skipped is written into its slot by
// the one thread that waited, before the barrier after that wait.
#pragma once
#include "advance.hpp"
#include "bodies.gen.cuh"
#include "stream.cuh"

namespace gpurt {

// A warp's place, the same in all warps of a team. 16 bytes: travels in registers.
struct alignas(16) TeamState {
  u32 turn;    // slots finished
  u32 step;    // low word of the step whose gate was passed
  u32 cursor;  // stage | parity << 8 | half << 9 | kSkips
  u32 route;   // what the slot of `turn` asks for: a way of a hot body, or one of these
};

constexpr u32 kRouteSkip = 17;
constexpr u32 kRouteLeave = 18;

// A wait was given up: no body runs any more, the slots up to kSlotLeave are passed by. A task that
// ran all the same would find its weights misplaced in the ring, and data of the step before.
constexpr u32 kSkips = 1 << 16;

GPURT_FN u32 pack_cursor(const StageCursor& cursor, u32 half) {
  return cursor.stage | cursor.parity << 8 | half << 9;
}

// One thread. The step's own tasks may run once it is open; no time-out, the time between two steps
// is the host's. False: the kernel ends.
GPURT_FN bool pass_gate(u64 step) {
  const DeviceControl* control = at<const DeviceControl>(gpurt_program.device_control);
  for (u32 polls = 0; load_acquire(&control->steps_open) <= step;) {
    if (must_end(polls)) return false;
  }
  const StepState* state = step_state(gpurt_program);
  shared().rows = state->rows;
  shared().sample_count = state->sample_count;
  return true;
}

// By the first warp of the team: the gate, then all edges at once, a lane each, so that their round
// trips overlap. What a `ready` queue gave is met: the loader acquired its push, and the slot's
// barrier passes that on; for experts' tasks the loader looks.
GPURT_FN void pass_edges(Slot& slot, bool new_step, bool streams) {
  const u32 lane = threadIdx.x;
  bool passed = true;
  if (new_step) {
    if (lane == 0) passed = pass_gate(slot.step);
    passed = __shfl_sync(~0u, passed ? 1u : 0u, 0) != 0;
  }
  if (passed && streams) {
    passed = wait_met(slot);
  } else if (passed && slot.is_met == kNotMet && lane < slot.record.wait_count) {
    passed = wait_counter(slot.record.wait[lane], slot.round);
  }
  if (__any_sync(~0u, !passed) && lane == 0) slot.kind = kSlotSkip;
}

// Takes the next slot up to where its body may run. False: the body must not run.
// is_early: the body waits for its edges itself.
GPURT_FN bool enter_slot(u32 turn, bool new_step, bool syncs, bool is_early = false) {
  Slot& slot = slot_of(turn);
  trace_begin(turn);
  const bool streams = streams_expert(slot.record);
  const bool waits = streams || (has_edges(slot) && !is_early);
  if (!new_step && !waits && !syncs) return true;
  if ((new_step || waits) && threadIdx.x < 32) pass_edges(slot, new_step, streams);
  team_sync();
  // The hardware lets instructions past bar.sync until one needs what the barrier guards: a clock
  // read right behind it tells when the trace lane arrived. So the word comes first.
  const bool runs = slot.kind == kSlotTask;
  if (runs) trace_met(turn);
  return runs;
}

// The next slot of an experts' loop: each warp for itself, none waits for another.
GPURT_FN bool enter_alone(u32 turn) {
  trace_begin(turn);
  if (!wait_met(slot_of(turn))) return false;
  trace_met(turn);
  return true;
}

// Any slot. A cold body, and the first task of a step, follow a team barrier.
__device__ __noinline__ TeamState open_slot(TeamState state) {
  wait_slot(state.turn);
  const Slot& slot = slot_of(state.turn);
  if (slot.kind == kSlotLeave) return {state.turn, state.step, state.cursor, kRouteLeave};
  if ((state.cursor & kSkips) != 0 || shared().gave_up != 0)
    return {state.turn, state.step, state.cursor, kRouteSkip};
  const u32 step = static_cast<u32>(slot.step);
  const bool syncs = state.route == kRouteCold || Bodies::needs_barrier(slot.record);
  if (!enter_slot(state.turn, step != state.step, syncs, Bodies::enters_early(slot.record)))
    return {state.turn, step, state.cursor | kSkips, kRouteSkip};
  return {state.turn, step, state.cursor, Bodies::route_of(slot)};
}

// The slot that was opened, then all that follow the same way in the same step.
template <class Body, u32 WAY>
GPURT_FN TeamState run_hot_tasks(TeamState state) {
  StageCursor cursor{state.cursor & 0xFF, state.cursor >> 8 & 1};
  u32 half = state.cursor >> 9 & 1, turn = state.turn, step;
  // Which way a task goes may hang on the expert's users: known only once its edges are met.
  constexpr bool is_way_late = Body::kWayIsChosen && kTeamWarps != 1;
  typename Body::Carry carry{};  // undefined words would lie in local memory
  for (;;) {
    bool ran = true;
    if constexpr (EntersEarly<Body>) {
      ran = Body::template run_hot<WAY>(turn, cursor, half, carry);
    } else {
      Body::template run_hot<WAY>(turn, cursor, half, carry);
    }
    turn = in_register(turn);  // what was made of it is made anew, not kept and so spilled
    // Kept over no task, where it would be spilled; and of the slot, which is this warp's until it
    // ends it: a warp that is ahead passes the next step's gate.
    step = static_cast<u32>(slot_of(turn).step);
    if (!ran) break;  // open_slot() sees why
    if constexpr (is_way_late) {
      if (carry.is_begun()) {  // all that is asked for below is known of it
        trace_follow(turn);
        finish_slot(turn++);
        continue;
      }
    }
    trace_end(turn);
    finish_slot(turn);
    ++turn;
    wait_slot(turn);
    // Sums instead of && : the loads go out together, not one after another.
    const Slot& slot = slot_of(turn);
    const u32 way = is_way_late ? WAY : Body::way_of(slot);
    const bool syncs = Body::needs_barrier(slot.record);
    const u32 differs = (slot.kind ^ kSlotTask) | (static_cast<u32>(slot.step) ^ step) |
                        (slot.record.body ^ Bodies::index_of<Body>()) | (way ^ WAY);
    if (differs != 0) break;
    if constexpr (is_way_late) {
      if (!enter_alone(turn) || Body::way_of(slot) != WAY) break;
    } else if (!enter_slot(turn, false, syncs, EntersEarly<Body>)) {
      break;
    }
  }
  // Its last outputs are still being summed there, and another body's sums may come next.
  if constexpr (Body::kLeavesScratch) {
    Body::leave(carry, half, turn);
    team_sync();
  }
  return {turn, step, pack_cursor(cursor, half), 0};
}

template <class Body, u32 WAY>
__device__ __noinline__ TeamState hot_loop(TeamState state) {
  return run_hot_tasks<Body, WAY>(state);
}

// Where a line of memory begins that advance reads, one for each lane: nobody writes them meanwhile
// but for words that it asks L2 for.
GPURT_FN u64 line_of_advance(u64 step, u32 lane) {
  const Program& program = gpurt_program;
  if (lane < 2) return program.device_control + lane * 128;
  if (lane < 4) return program.step_state + (lane - 2) * 64;
  if (lane == 4) return reinterpret_cast<u64>(step_sampled(program));
  if (lane == 5 && program.summary_capacity != 0)
    return reinterpret_cast<u64>(step_summary(program, step));
  const u32 behind = (lane - min(lane, 6u)) * 128;
  return program.slots + (behind < program.slot_count * sizeof(SlotState) ? behind : 0);
}

// Out of line: its registers are not those of the loop over all tasks.
__device__ __noinline__ void run_advance(u32 turn) {
  if (threadIdx.x >= 32) return;
  const Slot& slot = slot_of(turn);
  // One thread would wait for each line in turn, 600 cycles each: the warp brings them into L1.
  const u32 word = *at<const u32>(line_of_advance(slot.step, threadIdx.x));
  // A step that failed is never harvested: its tokens are not what the model said.
  if (threadIdx.x == 0 && !is_leaving()) advance(gpurt_program, slot.record, slot.step);
  const u32 words = __reduce_max_sync(~0u, word);  // or the loads would be none
  if (threadIdx.x == 0) *reinterpret_cast<volatile u32*>(shared().scratch) = words;
}

// A task whose body is not hot; its edges are met, and the team has passed a barrier since its last
// use of the scratch: each warp ends it for itself, and all meet when they open the next one. One
// call deep: each further one is code to fetch, and registers to bring back from local memory,
// between a task's edges and its signals.
GPURT_FN void run_cold(u32 turn) {
  if (threadIdx.x == 0) st_shared_release_u32(shared_address(&slot_of(turn).met_turn), turn);
  if ((slot_of(turn).record.flags & kTaskAdvance) != 0) {
    run_advance(turn);
  } else {
    Bodies::run_cold(turn);
  }
  finish_slot(turn);
}

// Whether a body's loop must be part of the kernel: ptxas waits for each single wgmma of a function
// that is called.
template <class Body>
concept InKernel = requires { requires Body::kInKernel; };

struct HotLoops {
  TeamState state;
  template <class Body, u32 WAY>
  GPURT_FN void run() {
    if constexpr (InKernel<Body>) {
      state = run_hot_tasks<Body, WAY>(state);
    } else {
      state = hot_loop<Body, WAY>(state);
    }
  }
};

GPURT_FN void run_team() {
  TeamState state{0, static_cast<u32>(gpurt_program.first_step) - 1, 0, 0};
  for (;;) {
    state = open_slot(state);
    if (state.route == kRouteLeave) break;
    if (state.route < kRouteCold) {
      HotLoops loops{state};
      Bodies::dispatch(state.route, loops);
      state = loops.state;
      continue;
    }
    if (state.route == kRouteCold) {
      run_cold(state.turn);
    } else {
      finish_slot(state.turn);
    }
    ++state.turn;
  }
  finish_slot(state.turn);
}

}  // namespace gpurt
