// The host's side of a World: what runtime.py and the executors do, on one fibre.
#include <algorithm>

#include "launch.hpp"
#include "words.hpp"
#include "world.hpp"

namespace gpurt::sim {

void World::write_generate(Script& script) {
  const Program& p = *model_->program;
  RequestRecord& record = script.record;
  record.kind = kRequestGenerate;
  record.max_tokens = random_.between(1, kind_.steps_max);
  record.prompt_tokens = random_.between(1, random_.chance(20) ? p.context_capacity : 9);
  u64 chain = 0;
  for (u32 i = 0; i < record.prompt_tokens; ++i) {
    script.prompt.push_back(random_.below(p.vocab_size));
    chain = mix(chain, script.prompt.back());
  }
  // The context has room for each token that is fed again; the last one is not.
  const u32 room = p.context_capacity - record.prompt_tokens + 1;
  const u32 most = std::min(record.max_tokens, room);
  for (u32 i = 0; i < most; ++i) {
    script.expected.push_back(static_cast<u32>(chain % p.vocab_size));
    chain = mix(chain, script.expected.back());
  }
  script.reason = kFinishLength;
  if (!random_.chance(40)) return;
  const u32 stop = script.expected[random_.below(most)];
  record.stop_count = random_.between(1, 3);
  for (u32 i = 0; i < record.stop_count; ++i) record.stop_ids[i] = stop;
  if (random_.chance(25)) {
    record.flags = kRequestIgnoreStop;
    return;
  }
  const auto first = std::find(script.expected.begin(), script.expected.end(), stop);
  script.expected.erase(first + 1, script.expected.end());
  script.reason = kFinishStop;
}

void World::write_scripts() {
  const u32 count = random_.between(1, kind_.requests_max);
  for (u32 i = 0; i < count; ++i) {
    Script script;
    if (model_->program->vocab_size != 0) {
      write_generate(script);
    } else {
      script.record.kind = kRequestSteps;
      script.record.max_tokens = random_.between(1, kind_.steps_max);
      script.steps = script.record.max_tokens;
      script.reason = kFinishSteps;
    }
    script.record.sequence = i;
    if (random_.chance(kind_.cancel_percent)) script.cancel_at = random_.below(400);
    scripts_.push_back(std::move(script));
  }
  if (random_.chance(kind_.abort_percent)) abort_at_ = random_.below(400);
}

// ---- launches --------------------------------------------------------------------------------

bool World::has_ended() {
  return load_acquire(&launches_->ended) == launch_count_ * role_count_;
}

void World::reset_program() {
  const Program& p = *model_->program;
  if (kind_.pipeline) {
    zero_words(reinterpret_cast<u64>(pipelines_), u64{p.worker_count} * sizeof(PipelineShared));
  }
  reset_for_launch(p);
}

void World::launch() {
  reset_program();
  for (u32 i = 0; i < model_->payload_count * 2; ++i) {
    payload_rearm(model_->payload + i, kPayloadSentinel);
  }
  std::fill(run_counts_.begin(), run_counts_.end(), 0);
  launch_count_ += 1;
  store_release(&launches_->started, launch_count_);
}

// How many steps of a variant the launch that ended had: one more has its turn, and never opened.
u64 World::rounds_of(u32 variant) const {
  const Program& p = *model_->program;
  const u64 steps = host_control(p)->heartbeat;
  if (p.variant_count == 1) return steps;
  const DeviceControl& control = *device_control(p);
  const u64 next = control.turns[(p.first_step + steps) % kTurnCount];
  return control.rounds[variant] - (turn_variant(next) == variant ? 1 : 0);
}

// A launch that ended in peace ran every task once in each step of its variant.
void World::check_launch() {
  u64 steps = 0;
  for (u32 i = 0; i < model_->program->variant_count; ++i) steps += rounds_of(i);
  if (steps != host_control(*model_->program)->heartbeat) fail("rounds do not add up to steps");
  for (u32 task = 0; task < run_counts_.size(); ++task) {
    if ((model_->record(task).flags & kTaskAdvance) != 0) continue;
    const u64 rounds = rounds_of(model_->tasks[task].variant);
    if (run_counts_[task] == last_live_round(task, rounds)) continue;
    fail("task " + std::to_string(task) + " ran " + std::to_string(run_counts_[task]) +
         " times in " + std::to_string(rounds) + " rounds");
  }
}

// ---- requests --------------------------------------------------------------------------------

void World::publish(u32 index) {
  const Program& p = *model_->program;
  const Script& script = scripts_[index];
  const u32 entry = index % p.queue_capacity;
  u32* prompt = at<u32>(p.prompt_tokens) + u64{entry} * p.context_capacity;
  for (u32 i = 0; i < script.prompt.size(); ++i) prompt[i] = script.prompt[i];
  *request_record(p, entry) = script.record;
  *request_output(p, entry) = RequestOutput{};
  published_ = index + 1;
  HostControl* host = host_control(p);
  store_release_system(&host->submit_tail, published_);
  fence_seq_cst_system();
  while (load_acquire_system(&host->kernel_state) != kKernelRunning) {
    if (has_ended()) {
      if (launch_count_ != 0) check_launch();
      launch();
      return;
    }
    gpurt::pause();
  }
}

void World::cancel(u32 index) {
  const Program& p = *model_->program;
  scripts_[index].cancelled = true;
  store_release_system(&request_record(p, index % p.queue_capacity)->cancel, 1);
  add_release_system(&host_control(p)->cancel_count, 1);
}

void World::check_end(const Script& script, const RequestOutput& output, u32 reason) {
  const bool is_whole = script.seen == script.expected.size();
  if (reason == kFinishCancelled) {
    if (!script.cancelled) fail("a request that nobody cancelled ends as cancelled");
    return;
  }
  if (reason != script.reason) fail("a request ends for a wrong reason");
  if (!is_whole) fail("a request ends without all of its tokens");
  if (script.steps != 0 && output.steps != script.steps) fail("a wrong number of steps");
  if (output.last_step < output.first_step) fail("a request ends before it begins");
  if (model_->proposals != nullptr) check_acceptance(script, output);
}

// Every token but the first came from a step that verified, or was one of its proposals.
void World::check_acceptance(const Script& script, const RequestOutput& output) {
  u32 tokens = 1 + output.verify_steps;
  for (u32 i = 0; i < kProposalsPerSlot; ++i) {
    if (i > 0 && output.accepted[i] > output.accepted[i - 1]) fail("accepted out of order");
    tokens += output.accepted[i];
  }
  if (tokens != script.seen) fail("a request's accepted proposals do not add up to its tokens");
}

void World::check_output(Script& script, u32 index) {
  const Program& p = *model_->program;
  const u32 entry = index % p.queue_capacity;
  RequestOutput* output = request_output(p, entry);
  const u32* tokens = at<const u32>(p.output_tokens) + u64{entry} * p.context_capacity;
  // The reason first: once it is there, so are all tokens.
  const u32 reason = load_acquire_system(&output->finish_reason);
  const u64 count = load_acquire_system(&output->token_count);
  if (count < script.seen || count > script.expected.size()) fail("a wrong number of tokens");
  for (; script.seen < count; ++script.seen) {
    if (tokens[script.seen] != script.expected[script.seen]) {
      fail("request " + std::to_string(index) + ": token " + std::to_string(script.seen) +
           " is wrong");
    }
  }
  if (reason == kFinishNone) return;
  check_end(script, *output, reason);
  script.done = true;
}

void World::look_at_outputs() {
  for (u32 i = consumed_; i < published_; ++i) {
    if (!scripts_[i].done) check_output(scripts_[i], i);
  }
  while (consumed_ < published_ && scripts_[consumed_].done) ++consumed_;
}

// ---- the host's life -------------------------------------------------------------------------

void World::host() {
  if (model_->lost_counter != kNobody || model_->fault_task != kNobody) {
    run_into_fault();
  } else {
    for (u32 turn = 0; consumed_ < scripts_.size(); ++turn) {
      host_turn(turn);
      gpurt::pause();
    }
    end();
  }
  store_release(&launches_->started, kNoMoreLaunches);
}

void World::host_turn(u32 turn) {
  const Program& p = *model_->program;
  if (turn >= abort_at_ && !aborted_ && launch_count_ != 0) {
    abort_and_launch();
    return;
  }
  // Its residency over, the kernel leaves queued requests to the next launch.
  if (p.residency_ns != 0 && consumed_ < published_ && has_ended()) {
    look_at_outputs();
    check_launch();
    if (consumed_ < published_) launch();
  }
  for (u32 i = consumed_; i < published_; ++i) {
    if (turn >= scripts_[i].cancel_at && !scripts_[i].cancelled && !scripts_[i].done) cancel(i);
  }
  if (published_ < scripts_.size() && published_ - consumed_ < p.queue_capacity &&
      random_.chance(30)) {
    publish(published_);
  }
  look_at_outputs();
}

// What was admitted is lost; what was only queued is served by the next launch.
void World::abort_and_launch() {
  aborted_ = true;
  HostControl* host = host_control(*model_->program);
  store_release_system(&host->abort_request, 1);
  while (!has_ended()) gpurt::pause();
  look_at_outputs();
  const u64 head = load_acquire_system(&host->submit_head);
  for (u32 i = consumed_; i < published_ && i < head; ++i) scripts_[i].done = true;
  look_at_outputs();
  launch();
}

void World::run_into_fault() {
  publish(0);
  while (!has_ended()) {
    if (load_acquire_system(&request_output(*model_->program, 0)->finish_reason) != 0) {
      // A single step may end before the round in which the body fails.
      store_release_system(&host_control(*model_->program)->exit_request, 1);
    }
    gpurt::pause();
  }
  const Fault& fault = host_control(*model_->program)->fault;
  const u32 kind = load_acquire_system(&fault.kind);
  if (model_->fault_task != kNobody) {
    if (kind == kFaultNone && run_counts_[model_->fault_task] < model_->fault_round) return;
    if (kind != kFaultNonFinite || fault.task != model_->fault_task || fault.detail[0] != 7) {
      fail("the fault of a body is lost");
    }
    return;
  }
  if (kind != kFaultEdgeTimeout && kind != kFaultQueueTimeout) fail("no fault names the wait");
  if (fault.seen >= fault.needed) fail("the fault names a wait that was met");
  if (fault.waited_ns < model_->program->wait_timeout_ns) fail("the fault came too early");
}

void World::end() {
  const Program& p = *model_->program;
  if ((p.linger_ns == 0 && p.residency_ns == 0) || random_.chance(30)) {
    store_release_system(&host_control(p)->exit_request, 1);
  }
  while (!has_ended()) gpurt::pause();
  check_launch();
}

}  // namespace gpurt::sim
