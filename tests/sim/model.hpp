// Model: a small random Program, as a planner could have made it, in simulated memory.
//
// Owns: the shape of the graph (tasks, counters, segments, lists) and every array a Program points
//   to. Only the seed and the case decide; the planner's own code is not involved.
// Does not know: fibres and requests (world.cpp) and what happens when it runs.
//
// Tasks come in operators of several tiles. A tile waits for the counters of up to three earlier
// operators; what nobody waits for is joined by `noop` tasks in front of the last task, `advance`.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "memory.hpp"
#include "task_record.hpp"

namespace gpurt::sim {

enum class Body : u16 { kNoop, kData, kSample, kRearm, kDecide, kDraft };
constexpr u32 kBodyCount = 6;

// Given to a counter by one producer's body each step, beside its signal: so targets, which only a
// run of weeks would bring past 32 bits, pass them in the third step.
constexpr u32 kBulkSignals = 0x70000000u;

// What the checks know of a task beside its record.
struct TaskFacts {
  Body body = Body::kNoop;
  std::vector<u32> producers;  // tasks whose data it reads, ordered by counters
  std::vector<u32> polled;     // tasks whose data it reads by polling: payload edges
  std::vector<u32> counters;   // counters it signals
  std::vector<u32> bulk;       // of these, the ones it also gives kBulkSignals to
  u32 payload = kNobody;       // index of its payload word, or kNobody
  u32 variant = 0;
  u32 family = kNobody;  // of experts that it belongs to, or decides about
  u32 slot = kNobody;    // of that family; a decider has none
};

// What the checks know of a variant beside program->variants.
struct VariantFacts {
  u32 task_end = 0;
  u32 payload_begin = 0;  // its words in each set
  u32 payload_end = 0;
};

// Experts: slot by slot in each of a few levels, of which a step has the slots that are live.
struct Family {
  struct Level {
    u32 begin;
    u32 tiles;  // a slot
    u32 segment;
  };
  u32 decider = kNobody;
  u32 compensator = kNobody;
  u32 slots = 0;
  bool is_dynamic = false;  // else under an ordinary policy: absent tasks return at once
  std::vector<Level> levels;
  u32* live = nullptr;     // what the decider leaves
  u64* experts = nullptr;  // one word a slot
};

// One named kind of random world: what is drawn, and between which bounds.
struct Case {
  const char* name;
  const char* policies;      // one letter a policy that segments may have: s, c, r
  std::vector<u32> workers;  // one of these
  u32 operators_max = 7;
  u32 tiles_max = 5;
  u32 segments_max = 4;
  u32 requests_max = 4;
  u32 steps_max = 4;          // of a plain request; tokens of a generated one
  bool may_wrap = true;       // first_step just below 2^32 in one of four worlds
  bool payload = false;       // payload edges between static operators, with re-arming
  u32 cancel_percent = 0;     // a request is cancelled at some moment
  u32 abort_percent = 0;      // the host aborts at some moment
  u32 fault_percent = 0;      // a counter lacks a signal for ever, or a body gives a fault
  bool bulk_signals = false;  // counters pass 2^32 within a few steps
  bool races = true;          // plain accesses are checked for races
  bool past_drain = false;    // planted: a list holds a task of a later segment
  u32 linger_ns = 0;          // the kernel ends when idle and is launched again
  u32 residency_ns = 0;
  bool pipeline = false;           // workers as the GPU has them: pipeline.hpp
  bool drafts = false;             // generating graphs have a drafter
  u32 variants_max = 1;            // of a generating graph
  u32 experts_percent = 0;         // of operators that are families of experts
  bool forgets_absent = false;     // planted: of the counters of absent tasks one is left out
  bool compensates_early = false;  // planted: the decider compensates where it does not suffice
};

class Model {
 public:
  Model(const Case& kind, Random& random, Memory& memory);

  Program* program = nullptr;
  std::vector<TaskFacts> tasks;
  std::vector<VariantFacts> variants;
  u64* data = nullptr;     // one word a task
  u32* payload = nullptr;  // two sets of payload words, one each per producer
  u32 payload_count = 0;
  Proposals* proposals = nullptr;  // by slot, if there is a drafter
  u32 rearm_counter = kNobody;
  u32 lost_counter = kNobody;  // its target is never reached
  u32 fault_task = kNobody;    // its body gives a fault in the step of round `fault_round`
  u64 fault_round = 0;
  u32 moved_task = kNobody;  // planted in a list before a drain that it needs
  std::vector<Family> families;
  u64 misled = 0;     // planted: how many decisions are wrong
  std::string shape;  // one line for a person

  TaskRecord& record(u32 task) const;
  u64* counter(u32 index) const;
  bool is_data_counter(u32 index) const;
  // Rounds are of the task's variant.
  u32 live_slots(u32 family, u64 launch, u64 round) const;
  bool is_absent(u32 task, u64 launch, u64 round) const;
  // Whether steps lack the task when its slot is not live; else it runs and does nothing.
  bool is_dynamic(u32 task) const;

 private:
  struct Counter {
    std::vector<u32> producers;
    bool waited = false;
  };
  struct Operator {
    std::vector<u32> tiles;
    std::vector<u32> counters;  // one for all tiles, or one a tile
    std::vector<u32> implied;   // tasks that have ended when all tiles have, seen or absent
  };

  void draw_sizes();
  void draw_variant_rows();
  void draw_variant();
  void draw_rearm();
  void draw_tail();
  void draw_operator();
  void draw_family();
  u32 draw_decider(Family& family, u32 index);
  void draw_level(Family& family, u32 index, const std::vector<u32>& inputs,
                  std::vector<u32>& slot_counters, Operator& op);
  void keep_families_whole(std::set<u32>& cuts) const;
  void draw_family_segment(Segment& segment);
  void lay_out_decisions();
  void add_absents(const Family& family, std::vector<Absent>& absents) const;
  void draw_payload_edges();
  u32 new_task(Body body);
  u32 new_counter();
  void wait_on(u32 task, u32 counter);
  void signal_from(u32 task, u32 counter);
  std::vector<u32> unwaited() const;
  void join_sinks();
  void draw_bulk_signals();
  bool has_lasting_waiter(u32 counter) const;
  void draw_fault();
  void move_past_drain(std::vector<std::vector<u32>>& lists);
  void draw_segments();
  void draw_lists();
  void lay_out_queues();
  void lay_out_variants(std::vector<u32>& successors, const std::vector<bool>& is_ready);
  void lay_out_state();
  void fill_records();
  template <class T>
  T* array(const char* name, u64 count) {
    return static_cast<T*>(memory_.allocate((count == 0 ? 1 : count) * sizeof(T), 64, name));
  }

  const Case& kind_;
  Random& random_;
  Memory& memory_;
  std::vector<TaskRecord> records_;
  std::vector<Counter> counters_;
  std::vector<Operator> operators_;  // of the variant at hand
  u32 counter_begin_ = 0;            // its first
  std::vector<Segment> segments_;
};

}  // namespace gpurt::sim
