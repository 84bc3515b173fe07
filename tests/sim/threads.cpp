// The host executor on real threads, for ThreadSanitizer: random plans, requests and relaunches.
//
// The same random Programs as the simulation, run by scheduler/host_executor.cpp itself. Task data
// are plain words, so a missing release or acquire is a data race that the sanitizer reports.
// `--race` plants one: no data task waits for its producers.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "host_executor.hpp"
#include "model.hpp"
#include "words.hpp"

namespace gpurt::sim {
namespace {

class Run {
 public:
  Run(const Case& kind, u64 seed)
      : random_(seed),
        memory_(u64{4} << 20, 1, random_),
        model_(kind, random_, memory_),
        executor_(
            *model_.program, std::vector<HostBody>(kBodyCount, nullptr),
            [this](u32 task, u32 worker) { return body(task, worker); }, 64,
            std::make_shared<Parking>()) {
    // Thousands of spins at 64 polls a look are slow under the sanitizer; the clock is not.
    model_.program->wait_timeout_ns = 60'000'000'000;
  }

  // Wrong data are let through, or the run could end before the race that gave them.
  void plant_race() {
    has_race_ = true;
    for (u32 task = 0; task + 1 < model_.program->task_count; ++task) {
      if (model_.tasks[task].body == Body::kData) model_.record(task).wait_count = 0;
    }
  }

  // False: something was wrong, and has been printed.
  bool serve(u32 request_count) {
    for (u32 i = 0; i < request_count; ++i) {
      if (!serve_one(i)) return false;
      if (random_.chance(20)) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    store_release_system(&host_control(*model_.program)->exit_request, 1);
    executor_.wake();
    return executor_.join(60'000'000'000) && !wrong_;
  }

  const std::string& shape() const { return model_.shape; }

 private:
  u32 body(u32 task, u32) {
    const Program& p = *model_.program;
    const TaskFacts& facts = model_.tasks[task];
    const u64 round = step_state(p)->round;
    if (facts.body == Body::kSample) {
      for (u32 i = 0; i < step_state(p)->sample_count; ++i) {
        step_sampled(p)[i] = step_rows(p)[step_sample_rows(p)[i]].position % p.vocab_size;
      }
    }
    const bool decides = facts.body == Body::kDecide;
    if ((facts.body != Body::kData && !decides) || model_.is_absent(task, 0, round))
      return kFaultNone;
    u64 sum = 0;
    u64 expected = 0;
    for (const u32 producer : facts.producers) {
      if (model_.is_absent(producer, 0, round)) continue;
      sum += model_.data[producer];
      expected += data_word(0, producer, round);
    }
    if (facts.family != kNobody && !decides) {
      const Family& family = model_.families[facts.family];
      if (family.experts[facts.slot] != round || facts.slot >= *family.live) return kFaultHostBody;
    }
    if (sum != expected && !has_race_) return kFaultHostBody;
    model_.data[task] = data_word(0, task, round);
    if (decides) decide(model_.families[facts.family], facts.family, round);
    return kFaultNone;
  }

  void decide(const Family& family, u32 index, u64 round) {
    *family.live = model_.live_slots(index, 0, round);
    for (u32 slot = 0; slot < *family.live; ++slot) family.experts[slot] = round;
  }

  RequestRecord draw_request(u32 index) {
    const Program& p = *model_.program;
    RequestRecord record{};
    record.sequence = index;
    record.kind = p.vocab_size == 0 ? kRequestSteps : kRequestGenerate;
    const u32 longest = p.variant_count == 1 ? 6 : 16;
    record.prompt_tokens = p.vocab_size == 0 ? 0 : random_.between(1, longest);
    record.max_tokens = random_.between(1, 6);
    return record;
  }

  void ensure_running() {
    HostControl* host = host_control(*model_.program);
    fence_seq_cst_system();
    while (load_acquire_system(&host->kernel_state) != kKernelRunning) {
      if (!executor_.running()) {
        executor_.launch();
        return;
      }
      std::this_thread::yield();
    }
  }

  bool serve_one(u32 index) {
    const Program& p = *model_.program;
    const u32 entry = index % p.queue_capacity;
    *request_record(p, entry) = draw_request(index);
    RequestOutput* output = request_output(p, entry);
    *output = RequestOutput{};
    store_release_system(&host_control(p)->submit_tail, index + 1);
    ensure_running();
    executor_.wake();
    if (random_.chance(15)) {
      store_release_system(&request_record(p, entry)->cancel, 1);
      add_release_system(&host_control(p)->cancel_count, 1);
    }
    while (load_acquire_system(&output->finish_reason) == kFinishNone) {
      if (!executor_.running()) {
        std::printf("the run ended with fault %u, task %u\n", host_control(p)->fault.kind,
                    host_control(p)->fault.task);
        wrong_ = true;
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    // Tokens were stored as position % vocab_size, and are plain for who saw the reason.
    const u32* tokens = at<const u32>(p.output_tokens) + u64{entry} * p.context_capacity;
    for (u32 i = 0; i < output->token_count; ++i) {
      const u32 position = request_record(p, entry)->prompt_tokens - 1 + i;
      if (tokens[i] != position % p.vocab_size) {
        std::printf("token %u of request %u is wrong\n", i, index);
        wrong_ = true;
      }
    }
    return !wrong_;
  }

  Random random_;
  Memory memory_;
  Model model_;
  HostExecutor executor_;
  bool wrong_ = false;
  bool has_race_ = false;
};

}  // namespace
}  // namespace gpurt::sim

int main(int argc, char** argv) {
  using namespace gpurt::sim;
  Case kind = {.name = "threads", .policies = "scr", .workers = {1}, .operators_max = 6};
  unsigned seeds = 1;
  bool has_race = false;
  bool has_experts = false;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--workers") == 0 && has_value) {
      kind.workers = {static_cast<gpurt::u32>(std::strtoul(argv[++i], nullptr, 10))};
    } else if (std::strcmp(argv[i], "--seeds") == 0 && has_value) {
      seeds = static_cast<unsigned>(std::strtoul(argv[++i], nullptr, 10));
    } else if (std::strcmp(argv[i], "--experts") == 0) {
      has_experts = true;
    } else if (std::strcmp(argv[i], "--variants") == 0) {
      kind.variants_max = 3;
    } else if (std::strcmp(argv[i], "--race") == 0) {
      has_race = true;
      kind.policies = "sc";
    }
  }
  kind.linger_ns = 400'000;
  kind.experts_percent = has_experts ? 60 : 0;
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    Run run(kind, seed);
    if (has_race) run.plant_race();
    if (!run.serve(12)) {
      std::printf("seed %u failed: %s\n", seed, run.shape().c_str());
      return 1;
    }
  }
  std::printf("ok: %u plans on %u workers\n", seeds, kind.workers[0]);
  return 0;
}
