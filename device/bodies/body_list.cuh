// BodyList: the bodies of one compiled kernel by index, as TaskRecord::body counts them.
//
// The generated bodies.gen.cuh names the list; scheduler/persistent.cu documents that file. A body
// with `kWays` streams weights through the ring, in hot loops of its own, one a way:
//   u32 way_of(slot)                        below kWays
//   kWayIsChosen                            it hangs on the slot's expert, known once it is entered
//   bool needs_barrier(task)                whether it must follow a team barrier in any case
//   void run_hot<WAY>(turn, cursor, half, carry)   that task; moves the cursor past it
//   Carry                                   what a task may leave to the next one of its loop
//   kLeavesScratch                          whether the scratch is still read when that returns;
//   void leave(carry, half, turn)           then, at the loop's end, before a team barrier
//   void make_outputs(slot)                 of sums that it parked (Slot::parked): by the storer
// All others are called from outside the hot loops, each a function of its own, so that its
// registers and spills stay its own. One of these may have
//   void prefetch(task)                     weights that it reads itself, into L2: by the loader,
//                                           long before the task's edges are met
// or
//   kEntersEarly                            it waits for its edges itself: context.cuh
#pragma once
#include "../stream.cuh"

namespace gpurt {

template <class Body>
concept HotBody = requires { Body::kWays; };

constexpr u32 kRouteCold = 16;  // a route below it: a way of a hot body, counted through the list

template <class Body>
__device__ __noinline__ void call_body(u32 turn) {
  Body::run(slot_of(turn).record, context_of(slot_of(turn), shared().scratch));
}

template <class Body>
concept Prefetches = requires(const TaskRecord& task) { Body::prefetch(task); };

template <class Body>
concept EntersEarly = requires { Body::kEntersEarly; };

template <class Body>
concept ParksSums = requires(const Slot& slot) { Body::make_outputs(slot); };

template <class One, class Other>
constexpr bool kIsSame = false;
template <class One>
constexpr bool kIsSame<One, One> = true;

template <class... Bodies>
struct BodyList {
  template <class Body>
  GPURT_FN static constexpr u32 index_of() {
    u32 index = 0;
    bool found = false;
    ((found = found || kIsSame<Body, Bodies>, index += found ? 0 : 1), ...);
    return index;
  }

  // Of an entered slot.
  GPURT_FN static u32 route_of(const Slot& slot) {
    u32 route = kRouteCold;
    (add_route<Bodies>(slot, route), ...);
    return route;
  }

  // Cold bodies do: they read what others of the team wrote.
  GPURT_FN static bool needs_barrier(const TaskRecord& task) {
    bool needs = true;
    (add_need<Bodies>(task, needs), ...);
    return needs;
  }

  // Whether the task's body waits for its edges itself.
  GPURT_FN static bool enters_early(const TaskRecord& task) {
    bool early = false;
    ((early = early || (EntersEarly<Bodies> && task.body == index_of<Bodies>())), ...);
    return early;
  }

  // Calls run.run<Body, WAY>() of a route below kRouteCold.
  template <class Run>
  GPURT_FN static void dispatch(u32 route, Run& run) {
    (dispatch_way<Bodies, 0>(route, run), ...);
  }

  GPURT_FN static void run_cold(u32 turn) {
    const u32 body = slot_of(turn).record.body;
    u32 index = 0;
    (run_if<Bodies>(body == index++, turn), ...);
  }

  // One thread. Out of line: the loader's loop keeps its registers.
  __device__ __noinline__ static void prefetch(const TaskRecord& task) {
    u32 index = 0;
    (prefetch_if<Bodies>(task.body == index++, task), ...);
  }

  // The storer's warp.
  GPURT_FN static void make_outputs(const Slot& slot) { (make_if<Bodies>(slot), ...); }

 private:
  // One body does.
  template <class Body>
  GPURT_FN static void make_if(const Slot& slot) {
    if constexpr (ParksSums<Body>) Body::make_outputs(slot);
  }
  template <class Body>
  GPURT_FN static void prefetch_if(bool chosen, const TaskRecord& task) {
    if constexpr (Prefetches<Body>) {
      if (chosen) Body::prefetch(task);
    }
  }
  template <class Body>
  GPURT_FN static constexpr u32 ways() {
    if constexpr (HotBody<Body>) return Body::kWays;
    return 0;
  }
  template <class Body>
  GPURT_FN static constexpr u32 first_route() {
    u32 route = 0;
    bool found = false;
    ((found = found || kIsSame<Body, Bodies>, route += found ? 0 : ways<Bodies>()), ...);
    return route;
  }
  static_assert((ways<Bodies>() + ... + 0) <= kRouteCold);

  template <class Body>
  GPURT_FN static void add_route(const Slot& slot, u32& route) {
    if constexpr (HotBody<Body>) {
      if (slot.record.body == index_of<Body>()) route = first_route<Body>() + Body::way_of(slot);
    }
  }
  template <class Body>
  GPURT_FN static void add_need(const TaskRecord& task, bool& needs) {
    if constexpr (HotBody<Body>) {
      if (task.body == index_of<Body>()) needs = Body::needs_barrier(task);
    }
  }
  template <class Body, u32 WAY, class Run>
  GPURT_FN static void dispatch_way(u32 route, Run& run) {
    if constexpr (WAY < ways<Body>()) {
      if (route == first_route<Body>() + WAY) run.template run<Body, WAY>();
      dispatch_way<Body, WAY + 1>(route, run);
    }
  }
  template <class Body>
  GPURT_FN static void run_if(bool chosen, u32 turn) {
    if constexpr (!HotBody<Body>) {
      if (chosen) call_body<Body>(turn);
    }
  }
};

}  // namespace gpurt
