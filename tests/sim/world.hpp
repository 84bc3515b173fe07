// World: one random Program run by simulated workers and a simulated host, with all that is
// checked.
//
// Owns: the host's side of the protocol (submit, cancel, abort, launch again), the task bodies, and
//   the expectations: each task once a step, after its producers and with their data; every request
//   ends with exactly its tokens; every worker leaves.
// Does not know: how tasks are chosen and ordered. That is the product's worker.hpp, run unchanged.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "machine.hpp"
#include "model.hpp"
#include "pipeline.hpp"
#include "worker.hpp"

namespace gpurt::sim {

// Bugs put into the simulated protocol on purpose, to show that the checks find them.
enum class Planted : u32 {
  kNothing,
  kSignalBeforeData,     // signals of data counters release nothing
  kRearmWithoutRelease,  // the re-arm's signal releases nothing
  kListPastDrain,        // a list holds a task of a later segment, past a drain
  kClaimPastDrain,       // look-ahead hands on a claimed task before an earlier static one
  kGateReopens,          // a task after one whose gate was given up runs without the gate
  kCounterWraps,         // counters keep 32 bits
  kLostAbortExit,        // one worker never sees the abort flag
  kNoFence,              // the fences of the end protocol do nothing
  kWeakStepsOpen,        // the accesses to this word release and acquire nothing; so below
  kWeakArrivals,
  kWeakSlots,
  kWeakIdle,
  kWeakMirrorTail,
  kWeakSubmitTail,
  kWeakTokenCount,
  kWeakFinish,
  kWeakTickets,        // the head of a dynamic segment
  kPublishBeforeData,  // a decider opens its segments before it has written what they read
  kRoundBeforeCount,   // the head names a round whose number of tasks is not yet there
  kAbsentForgotten,    // a counter does not get the signals of absent tasks
  kEarlyCompensation,  // they are given before what the absent tasks would have waited for
  kTurnChanges,        // the variant of the next step changes after it was fixed
  kRoundOfSteps,       // rounds are counted in steps of any variant
  kWeakTurns,          // and these words release and acquire nothing
};

struct Outcome {
  std::string failure;  // empty: the world held
  std::string shape;
  std::vector<std::string> last_tasks;
  u64 points = 0;
  u64 bites = 0;  // how often the planted bug changed something
};

class World {
 public:
  World(const Case& kind, u64 seed, Planted planted);
  Outcome run();

  // For the Platform of worker.hpp.
  u32 run_body(u32 worker, const TaskRecord& record, u64 step);
  // For a loader: which expert's weights it would fetch, known once the task's ticket was drawn.
  void look_ahead(u32 task, u64 round);

 private:
  struct Script {
    std::vector<u32> prompt;
    std::vector<u32> expected;  // tokens, if nobody cancels
    u32 reason = 0;             // and why it ends
    u32 steps = 0;              // plain: steps to run
    RequestRecord record{};
    u32 seen = 0;
    bool cancelled = false;
    bool done = false;
    u32 cancel_at = kNobody;  // host turn
  };
  struct Sequence {
    u64 chain = 0;
    u32 fed = 0;
    bool is_off = false;  // in this step: a proposal was wrong
  };
  struct TaskRun {
    u32 worker;
    u32 task;
    u64 step;
  };
  struct Launches {
    u64 started;
    u8 pad0[56];
    u64 ended;  // roles that left, over all launches
    u8 pad1[56];
  };

  // planted.cpp
  void plant();
  void plant_in_counters();
  void plant_in_control();
  void plant_in_decisions();

  void write_scripts();
  void write_generate(Script& script);

  void spawn_workers();
  void spawn_role(std::function<void()> run_one_launch);
  u32 data_body(const TaskRecord& record, u64 round, const TaskFacts& facts);
  u32 decide_body(const TaskRecord& record, u64 round, const TaskFacts& facts);
  void decide_wrongly(const TaskRecord& record, u64 round);
  void check_expert(u32 task, u64 round);
  void check_run(u32 task, u64 round);
  u64 last_live_round(u32 task, u64 round) const;
  void sample_body();
  u32 feed_row(const RowState& row, u32 before);
  void draft_body();
  void rearm_body(u32 variant, u64 round);
  void check_step(u32 variant, u64 step);
  void turn_wrongly();
  u32 poll(const u32* word);

  // host.cpp
  void host();
  void host_turn(u32 turn);
  void launch();
  void reset_program();
  bool has_ended();
  void publish(u32 index);
  void cancel(u32 index);
  void look_at_outputs();
  void check_output(Script& script, u32 index);
  void check_end(const Script& script, const RequestOutput& output, u32 reason);
  void check_acceptance(const Script& script, const RequestOutput& output);
  void run_into_fault();
  void abort_and_launch();
  void end();
  u64 rounds_of(u32 variant) const;
  void check_launch();
  [[noreturn]] void fail(const std::string& what);
  std::string describe() const;

  const Case& kind_;
  u64 seed_;
  Planted planted_;
  Random random_;  // draws the world; the machine has its own for the schedule
  std::optional<Machine> machine_;
  std::optional<Model> model_;
  Launches* launches_ = nullptr;
  PipelineShared* pipelines_ = nullptr;  // by worker
  std::vector<std::unique_ptr<Pipeline>> pipeline_workers_;
  u32 role_count_ = 0;  // fibres that a launch starts
  std::vector<Script> scripts_;
  std::vector<Sequence> sequences_;  // by slot
  std::vector<u64> run_counts_;      // by task, since launch
  std::vector<TaskRun> log_;
  u32 published_ = 0;
  u32 consumed_ = 0;
  u64 launch_count_ = 0;
  u32 abort_at_ = kNobody;
  bool aborted_ = false;
};

}  // namespace gpurt::sim
