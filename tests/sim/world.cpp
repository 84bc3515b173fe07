// The workers of a World and the bodies of its tasks; host.cpp has the other side.
#include "world.hpp"

#include <algorithm>

#include "payload.hpp"
#include "words.hpp"

namespace gpurt::sim {
namespace {

constexpr u64 kArenaBytes = u64{4} << 20;

// Host threads spin, yield and sleep; fibres only let others run.
struct Platform {
  World& world;
  u32 worker;

  static u64 ticks() { return gpurt::clock_ns(); }
  u32 run_body(const TaskRecord& record, u64 step) { return world.run_body(worker, record, step); }
  static const u32* fault_detail() {
    static constexpr u32 kDetail[4] = {7, 0, 0, 0};
    return kDetail;
  }
  static u32 chosen() { return 0; }
  static u32 nap_polls() { return 256; }
  static void edge_pause(u32) { gpurt::pause(); }
  static void step_pause(u64, u32, bool) { gpurt::pause(); }
  static void step_opened() {}
};

}  // namespace

World::World(const Case& kind, u64 seed, Planted planted)
    : kind_(kind), seed_(seed), planted_(planted), random_(seed ^ 0x5DEECE66DULL) {}

Outcome World::run() {
  const u32 most = *std::max_element(kind_.workers.begin(), kind_.workers.end());
  MachineOptions options;
  options.seed = seed_;
  options.fibres = kind_.pipeline ? most * kPipelineFibres + 2 : most + 1;
  options.arena_bytes = kArenaBytes;
  options.step_limit = 300000 + u64{options.fibres} * 30000;
  machine_.emplace(options);
  model_.emplace(kind_, random_, machine_->memory());
  machine_->memory().check_races(kind_.races);
  launches_ = static_cast<Launches*>(machine_->memory().allocate(sizeof(Launches), 64, "launches"));
  run_counts_.assign(model_->tasks.size(), 0);
  sequences_.assign(model_->program->slot_count, Sequence{});
  write_scripts();
  plant();
  machine_->describe_with([this] { return describe(); });
  spawn_workers();
  machine_->spawn([this] { host(); });
  machine_->run();
  Outcome outcome;
  outcome.failure = machine_->failure();
  outcome.shape = model_->shape;
  outcome.points = machine_->steps();
  outcome.bites = machine_->memory().bite_count();
  if (planted_ == Planted::kListPastDrain && model_->moved_task != kNobody) outcome.bites = 1;
  if (model_->misled != 0) outcome.bites = model_->misled;
  const std::size_t shown = std::min<std::size_t>(log_.size(), 20);
  for (auto run = log_.end() - static_cast<std::ptrdiff_t>(shown); run != log_.end(); ++run) {
    outcome.last_tasks.push_back("worker " + std::to_string(run->worker) + " ran task " +
                                 std::to_string(run->task) + " of step " +
                                 std::to_string(run->step));
  }
  return outcome;
}

void World::fail(const std::string& what) {
  machine_->fail(what);
}

std::string World::describe() const {
  const Program& p = *model_->program;
  const DeviceControl& control = *device_control(p);
  std::string text = "steps_open " + std::to_string(control.steps_open - p.first_step) + ", idle " +
                     std::to_string(control.idle) + ", abort " + std::to_string(control.abort) +
                     ", exit " + std::to_string(control.exit) + ", published " +
                     std::to_string(published_) + ", consumed " + std::to_string(consumed_) +
                     ", tasks behind:";
  const StepState& state = *step_state(p);
  for (u32 task = 0; task < run_counts_.size(); ++task) {
    if (model_->tasks[task].variant == state.variant && run_counts_[task] < state.round)
      text += " " + std::to_string(task);
  }
  return text;
}

// ---- workers ---------------------------------------------------------------------------------

// A fibre that runs its part of every launch.
void World::spawn_role(std::function<void()> run_one_launch) {
  role_count_ += 1;
  machine_->spawn([this, run = std::move(run_one_launch)] {
    for (u64 launch = 1;; ++launch) {
      u64 started = 0;
      while ((started = load_acquire(&launches_->started)) < launch) gpurt::pause();
      if (started == kNoMoreLaunches) return;
      run();
      add_acq_rel(&launches_->ended, 1);
    }
  });
}

void World::spawn_workers() {
  const Program& program = *model_->program;
  if (!kind_.pipeline) {
    for (u32 i = 0; i < program.worker_count; ++i) {
      spawn_role([this, i, &program] {
        Platform platform{*this, i};
        Worker<Platform>(program, i, platform).run();
      });
    }
    return;
  }
  const u64 bytes = sizeof(PipelineShared) * program.worker_count;
  pipelines_ = static_cast<PipelineShared*>(machine_->memory().allocate(bytes, 64, "pipelines"));
  for (u32 i = 0; i < program.worker_count; ++i) {
    pipeline_workers_.push_back(
        std::make_unique<Pipeline>(*this, program, i, pipelines_ + i, planted_));
    Pipeline* const pipeline = pipeline_workers_.back().get();
    spawn_role([pipeline] { pipeline->run_loader(); });
    spawn_role([pipeline] { pipeline->run_team(); });
    spawn_role([pipeline] { pipeline->run_storer(); });
  }
  spawn_role([&program] { run_pipeline_controller(program); });
}

u32 World::run_body(u32 worker, const TaskRecord& record, u64 step) {
  const Program& p = *model_->program;
  const u32 task = record.task_index;
  const TaskFacts& facts = model_->tasks[task];
  log_.push_back(TaskRun{worker, task, step});
  if (log_.size() > 4096) log_.erase(log_.begin(), log_.begin() + 2048);
  check_step(facts.variant, step);
  const u64 round = step_state(p)->round;
  check_run(task, round);
  run_counts_[task] = round;
  if (task == model_->fault_task && round >= model_->fault_round) return kFaultNonFinite;
  switch (facts.body) {
    case Body::kNoop:
      break;
    case Body::kData:
      return data_body(record, round, facts);
    case Body::kSample:
      sample_body();
      break;
    case Body::kDraft:
      draft_body();
      break;
    case Body::kRearm:
      rearm_body(facts.variant, round);
      break;
    case Body::kDecide:
      return decide_body(record, round, facts);
  }
  return kFaultNone;
}

void World::check_step(u32 variant, u64 step) {
  const Program& p = *model_->program;
  const StepState& state = *step_state(p);
  if (state.step != step) fail("a task sees another step's StepState");
  if (state.variant != variant) fail("a task runs in a step of another variant");
  if (state.rows_capacity != p.variants[variant].rows) fail("a step has another variant's rows");
}

u32 World::data_body(const TaskRecord& record, u64 round, const TaskFacts& facts) {
  const u32 task = record.task_index;
  if (model_->is_absent(task, launch_count_, round)) return kFaultNone;
  if (facts.slot != kNobody) check_expert(task, round);
  u32* set = model_->payload + (round & 1) * model_->payload_count;
  for (const u32 producer : facts.polled) {
    const u32 seen = poll(set + model_->tasks[producer].payload);
    if (seen == kPayloadSentinel) return kFaultPayloadTimeout;  // aborted meanwhile
    if (seen != payload_word(launch_count_, producer, round)) {
      fail("task " + std::to_string(task) + " polled wrong data of task " +
           std::to_string(producer));
    }
  }
  for (const u32 producer : facts.producers) {
    if (model_->is_absent(producer, launch_count_, round)) continue;
    if (run_counts_[producer] != round) {
      fail("task " + std::to_string(task) + " runs before its producer " +
           std::to_string(producer));
    }
    if (data_load(model_->data + producer) != data_word(launch_count_, producer, round)) {
      fail("task " + std::to_string(task) + " read stale data of task " + std::to_string(producer));
    }
  }
  data_store(model_->data + task, data_word(launch_count_, task, round));
  if (facts.payload != kNobody) {
    payload_store(set + facts.payload, payload_word(launch_count_, task, round));
  }
  for (const u32 counter : facts.bulk) add_release(model_->counter(counter), kBulkSignals);
  return kFaultNone;
}

// Until the word is data, or the sentinel if the run was aborted meanwhile.
u32 World::poll(const u32* word) {
  for (u32 polls = 1;; ++polls) {
    const u32 seen = load_relaxed(word);
    if (seen != kPayloadSentinel) return seen;
    if (polls % 64 == 0 && load_relaxed(&device_control(*model_->program)->abort) != 0) {
      return kPayloadSentinel;
    }
    gpurt::pause();
  }
}

// Fills the set that the next round writes; everybody read it a round ago.
void World::rearm_body(u32 variant, u64 round) {
  u32* set = model_->payload + ((round + 1) & 1) * model_->payload_count;
  const VariantFacts& facts = model_->variants[variant];
  for (u32 i = facts.payload_begin; i < facts.payload_end; ++i)
    payload_rearm(set + i, kPayloadSentinel);
}

// Plays the model: the token after a row depends on all tokens of its sequence so far.
void World::sample_body() {
  const Program& p = *model_->program;
  const StepState& state = *step_state(p);
  if (state.rows == 0 || state.rows > state.rows_capacity)
    fail("a step with a wrong number of rows");
  u32 samples = 0;
  for (u32 r = 0; r < state.rows; ++r) {
    const RowState& row = step_rows(p)[r];
    const u32 token = feed_row(row, samples == 0 ? 0 : step_sampled(p)[samples - 1]);
    if ((row.flags & kRowSample) == 0) continue;
    if (samples >= state.sample_count || step_sample_rows(p)[samples] != r) {
      fail("a sampled row is not listed");
    }
    step_sampled(p)[samples++] = token;
  }
  turn_wrongly();
  if (samples != state.sample_count) fail("more sample rows are listed than rows ask for");
}

// The token after a row. before: what the sampled row before it gave. A sequence goes on only over
// rows that it really has: those of a block behind a wrong proposal give tokens of no consequence.
u32 World::feed_row(const RowState& row, u32 before) {
  const Program& p = *model_->program;
  if (row.slot >= p.slot_count) fail("a row of no slot");
  if (row.token >= p.vocab_size) fail("a row of a token that does not exist");
  if (row.position >= p.context_capacity) fail("a row past the context");
  Sequence& sequence = sequences_[row.slot];
  if ((row.flags & kRowProposal) == 0) {
    if (row.position == 0) sequence = Sequence{};
    sequence.is_off = false;
  } else if (sequence.is_off || row.token != before) {
    sequence.is_off = true;
    return static_cast<u32>(mix(row.token, row.position) % p.vocab_size);
  }
  if (row.position != sequence.fed) fail("a row is fed out of order");
  sequence.fed += 1;
  sequence.chain = mix(sequence.chain, row.token);
  return static_cast<u32>(sequence.chain % p.vocab_size);
}

// Plays every kind of drafter: right up to some proposal, wrong from there on, or nonsense.
void World::draft_body() {
  const Program& p = *model_->program;
  for (u32 slot = 0; slot < p.slot_count; ++slot) {
    Proposals& to = model_->proposals[slot];
    u64 chain = sequences_[slot].chain;
    chain = mix(chain, static_cast<u32>(chain % p.vocab_size));
    const u32 right = random_.below(kProposalsPerSlot + 1);
    to.count = random_.chance(10) ? ~0u : random_.below(kProposalsPerSlot + 1);
    for (u32 i = 0; i < kProposalsPerSlot; ++i) {
      const u32 token = static_cast<u32>(chain % p.vocab_size);
      const u32 wrong = random_.chance(20) ? ~0u : (token + 1) % p.vocab_size;
      to.tokens[i] = i < right ? token : wrong;
      chain = mix(chain, token);
    }
  }
}

}  // namespace gpurt::sim
