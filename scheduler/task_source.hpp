// TaskSource: which task a worker takes next. One per worker, used by one thread, never blocks.
//
// Owns: the walk through a plan's segments, step after step, under the three policies.
// Does not know: edges (the worker waits for them) and whether a step is open.
//
//   segment:   static          claim                      ready
//   next:      own list        ticket = head + 1          ticket = head + 1, then its slot
//   leave:     list ends       ticket of a later step     ticket of a later step
//
// A dynamic segment is a claim segment whose number of tasks its decider publishes in every step
// (dynamic.hpp), so the queue's head names the step itself:
//
//   head:      round << 32 | place      places count up to kPlaceEnd, where the step's tasks end
//   next:      round not there: kNotYet;  of a later step: leave;  else ticket = head + 1
//   leave:     place kPlaceEnd or more (nothing to keep), or ticket of a later step
//
// Tickets of other segments are numbered through all rounds: with n tasks, ticket t is of round
// 1 + t / n. A worker that draws one of a later round keeps it, leaves the segment, and finds it
// first when it comes there in that round. So nothing is reset between steps, and no ticket is ever
// lost or drawn twice.
//
// With several variants the step's turn says whose segments to walk, and its round. Turns are known
// one step ahead, so a walk goes up to the end of the step after the open one. A worker that finds
// its step over (it had nothing left to do in it) goes on with the open one.
// On the GPU the loader thread runs a TaskSource ahead of the worker:
// look-ahead stays in topological order, so the task that all wait for is always first in some
// worker's hands, and in `ready` segments a task comes out only after its edges are met.
#pragma once
#include "counter.hpp"

namespace gpurt {

// DeviceControl::turns.
GPURT_FN u64 make_turn(u64 round, u32 variant) {
  return round << 8U | variant;
}
GPURT_FN u64 turn_round(u64 turn) {
  return turn >> 8U;
}
GPURT_FN u32 turn_variant(u64 turn) {
  return static_cast<u32>(turn & 0xFFU);
}

enum class Next : u32 {
  kTask,    // task and step were set
  kNotYet,  // a ready slot is empty, a dynamic segment is not yet decided, or the walk stands
            // before a step: look again
};

constexpr u32 kSlotTaken = 0xFFFFFFFFu;  // low word of a slot whose task the pusher kept

struct TaskSource {
  const Program* program;
  u64 step;         // where the walk stands
  u64 round;        // of that step's variant
  u64 step_limit;   // the walk hands out nothing of a step >= this; the owner raises it
  u64 ticket_base;  // number of this segment's first ticket of this round
  u64 ticket;       // drawn and not yet used, + 1 (dynamic: the head as drawn); 0: none
  u64 queue;        // address of the segment's Cursor, if it has one
  u32 worker;
  u32 segment;
  u32 segment_end;  // of the step's variant
  u32 policy;
  u32 begin;  // static: position in lists; else first task of the segment
  u32 end;
  u32 live;  // dynamic: tasks of this step, once published; before: kUnpublished
  bool is_entered;

  static constexpr u32 kUnpublished = 0xFFFFFFFFu;

  GPURT_FN void start(const Program& of_program, u32 of_worker) {
    program = &of_program;
    worker = of_worker;
    step = of_program.first_step;
    step_limit = ~u64{0};
    policy = kPolicyStatic;
    is_entered = enter_step();
  }

  // Crossing into another step always returns kNotYet once, so a worker without tasks never
  // loops in here. `polls`: how often it looks at an empty `ready` slot; more than once if the
  // caller has nothing else to do.
  GPURT_FN Next next(u32& task, u64& task_step, u32 polls = 1) {
    if (!is_entered) is_entered = enter_step();
    for (;;) {
      if (step >= step_limit || !is_entered) return Next::kNotYet;
      if (policy == kPolicyStatic) {
        if (begin < end) {
          task = at<const u32>(program->lists)[begin++];
          task_step = step;
          return Next::kTask;
        }
      } else {
        const Drawn drawn = policy == kPolicyDynamic ? draw_dynamic(task) : draw(task, polls);
        task_step = step;
        if (drawn == Drawn::kTask) return Next::kTask;
        if (drawn == Drawn::kEmpty) return Next::kNotYet;
        at<u64>(program->held_tickets)[place()] = ticket;
      }
      if (segment + 1 < segment_end) {
        enter(segment + 1);
      } else {
        ++step;
        is_entered = enter_step();
        return Next::kNotYet;
      }
    }
  }

  // Of an empty `ready` slot: the task that comes to lie there if all are pushed in plan order.
  // That is a guess. False: no ticket for such a slot is in hand.
  GPURT_FN bool expects(u32& task) const {
    if (policy != kPolicyReady || ticket == 0 || ticket - 1 - ticket_base >= end - begin)
      return false;
    task = begin + static_cast<u32>(ticket - 1 - ticket_base);
    return true;
  }

  // Dynamic: the next ticket, if none is in hand: its trip is over when next() needs it.
  GPURT_FN void draw_ahead() {
    if (policy != kPolicyDynamic || live == kUnpublished || ticket != 0) return;
    ticket = add_relaxed(&at<Cursor>(queue)->head, 1);
  }

 private:
  enum class Drawn : u32 { kTask, kEmpty, kLater };

  // Finds out what the step is made of. False: that is not decided yet.
  GPURT_FN bool enter_step() {
    u32 variant = 0;
    if (program->variant_count == 1) {
      round = step_count(*program, step);
    } else {
      u64 turn = 0;
      if (!find_turn(turn)) return false;
      round = turn_round(turn);
      variant = turn_variant(turn);
    }
    segment_end = program->variants[variant].segment_end;
    enter(program->variants[variant].segment_begin);
    return true;
  }

  // A turn is overwritten after its step has ended. So it was right if the step has not ended after
  // the load; who loads a later one acquires what the opener of the steps between released.
  GPURT_FN bool find_turn(u64& turn) {
    const DeviceControl* control = at<const DeviceControl>(program->device_control);
    u64 open = load_acquire(&control->steps_open);
    if (open < step) return false;
    do {
      if (open > step + 1) step = open - 1;
      turn = load_acquire(&control->turns[step % kTurnCount]);
      open = load_acquire(&control->steps_open);
    } while (open > step + 1);
    return true;
  }

  // Of this worker and segment, in lists and held tickets alike.
  GPURT_FN u64 place() const { return u64{worker} * program->segment_count + segment; }

  GPURT_FN void enter(u32 to_segment) {
    segment = to_segment;
    const Segment& s = at<const Segment>(program->segments)[segment];
    policy = s.policy;
    if (policy == kPolicyStatic) {
      const u32* offsets = at<const u32>(program->list_offsets) + place();
      begin = offsets[0];
      end = offsets[1];
      return;
    }
    begin = s.begin;
    end = s.end;
    ticket_base = (round - 1) * (end - begin);
    live = kUnpublished;
    queue = program->cursors + u64{s.cursor} * sizeof(Cursor);
    ticket = at<const u64>(program->held_tickets)[place()];
  }

  // How many rounds later, modulo 2^32.
  GPURT_FN i32 rounds_ahead(u64 head) const {
    return static_cast<i32>(static_cast<u32>(head >> 32U) - static_cast<u32>(round));
  }

  // A round is published after the one before it has ended. So while this round has a task that
  // nobody took, head stays of this round and tail the number of its tasks; if head is of a later
  // one, all of this step is done, and a ticket in hand is of a later step.
  GPURT_FN Drawn draw_dynamic(u32& task) {
    Cursor& cursor = *at<Cursor>(queue);
    if (live == kUnpublished) {
      // The acquire pairs with publish_live(): also what the decider wrote is visible after it.
      const i32 ahead = rounds_ahead(load_acquire(&cursor.head));
      if (ahead != 0) return ahead < 0 ? Drawn::kEmpty : Drawn::kLater;
      live = static_cast<u32>(load_relaxed(&cursor.tail));
    }
    if (ticket == 0) ticket = add_relaxed(&cursor.head, 1);
    const u32 place = static_cast<u32>(ticket);
    const bool is_task = place < kPlaceEnd;
    if (is_task && rounds_ahead(ticket) > 0) return Drawn::kLater;
    ticket = 0;
    if (!is_task) return Drawn::kLater;
    task = begin + live - (kPlaceEnd - place);
    return Drawn::kTask;
  }

  // A ticket's round never lies behind the walk: a worker leaves a step only with a later ticket in
  // its hand, or finds the step over, hence all its tickets drawn; and the head only grows.
  GPURT_FN Drawn draw(u32& task, u32 polls) {
    for (;;) {
      // Relaxed: a ticket carries no data; edges or the slot order what the task reads.
      if (ticket == 0) ticket = add_relaxed(&at<Cursor>(queue)->head, 1) + 1;
      const u64 offset = ticket - 1 - ticket_base;
      if (offset >= end - begin) return Drawn::kLater;
      const u32 at_task = begin + static_cast<u32>(offset);
      if (policy == kPolicyClaim) {
        task = at_task;
        ticket = 0;
        return Drawn::kTask;
      }
      // The acquire pairs with the push: everything the task waited for is visible after it.
      const u64* place = &at<const u64>(program->ready_slots)[at_task];
      u64 slot = load_acquire(place);
      while (rounds_ahead(slot) < 0 && --polls != 0) slot = load_acquire(place);
      // Rounds are compared by difference in 32 bits, so they may wrap. A later round lies in a
      // slot only if this round's task was kept by its pusher: else this worker had to run it.
      const i32 ahead = rounds_ahead(slot);
      if (ahead < 0) return Drawn::kEmpty;
      ticket = 0;
      const u32 word = static_cast<u32>(slot);
      if (ahead > 0 || word == kSlotTaken) continue;
      task = word - 1;
      return Drawn::kTask;
    }
  }
};

}  // namespace gpurt
