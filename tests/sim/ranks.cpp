// Several ranks in the simulation: each has a Program of its own, run by the product's worker.hpp.
//
// Every rank's collectives are drawn alike: tiles that publish a word to all ranks, and tiles that
// read all ranks' words; or, in two shots, tiles that scatter a word to each rank, tiles that read
// the own ones and publish a word of the second shot, and tiles that read these. What they exchange
// is data behind a rank counter, or payload: readers poll it, a task of each rank re-arms the next
// round's set, and advance waits until all ranks' have. Checked: each word
// is of this round, no store overtakes a read, all ranks see the same rows, every request ends with
// its tokens, whoever aborts takes all along. Ranks are launched at random moments. `--plant NAME`
// puts one bug in, which must then be found.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch.hpp"
#include "machine.hpp"
#include "payload.hpp"
#include "rank_tasks.hpp"
#include "words.hpp"
#include "worker.hpp"

namespace gpurt::sim {
namespace {

constexpr u32 kVocab = 97;
constexpr u64 kArenaBytes = u64{2} << 20;
constexpr u32 kLaunches = 3;
constexpr u32 kData = 0x7FFFFFFF;  // bits that data may have: never the sentinel

class World;

struct Platform {
  World& world;
  u32 rank;

  static u64 ticks() { return clock_ns(); }
  u32 run_body(const TaskRecord& record, u64 step) const;
  static const u32* fault_detail() {
    static constexpr u32 kDetail[4] = {7, 0, 0, 0};
    return kDetail;
  }
  static u32 chosen() { return 0; }
  static u32 nap_polls() { return 256; }
  static void edge_pause(u32) { pause(); }
  static void step_pause(u64, u32, bool) { pause(); }
  static void step_opened() {}
};

class World {
 public:
  World(u64 seed, const char* planted) : random_(seed), planted_(planted) {
    draw();
    MachineOptions options;
    options.seed = seed;
    options.fibres = shape_.ranks * shape_.workers + 1;
    options.arena_bytes = kArenaBytes;
    options.step_limit = 2000000;
    machine_ = std::make_unique<Machine>(options);
    for (u32 rank = 0; rank < shape_.ranks; ++rank) programs_.push_back(lay_out());
    for (u32 rank = 0; rank < shape_.ranks; ++rank) connect(rank);
    launches_ = array<Launch>("launches", shape_.ranks);
    plant();
  }

  std::string run() {
    for (u32 rank = 0; rank < shape_.ranks; ++rank) {
      for (u32 worker = 0; worker < shape_.workers; ++worker)
        machine_->spawn([this, rank, worker] { work(rank, worker); });
    }
    machine_->spawn([this] { host(); });
    machine_->run();
    return machine_->failure();
  }

  u32 run_body(u32 rank, const TaskRecord& record) {
    const Task& task = shape_.tasks[record.task_index];
    const Program& p = *programs_[rank];
    const u64 round = step_state(p)->round;
    if (rank == failing_rank_ && round == failing_round_ && record.task_index == 0)
      return kFaultNonFinite;
    if (task.kind == Kind::kPublish) publish(rank, task, round);
    if (task.kind == Kind::kReduce) reduce(rank, task, round);
    if (task.kind == Kind::kCollect) collect(rank, task, round);
    if (task.kind == Kind::kRearm) rearm(rank, round);
    if (task.kind == Kind::kSample) sample(rank);
    return kFaultNone;
  }

 private:
  struct Launch {
    u64 started;
    u8 pad0[56];
    u64 ended;
    u8 pad1[56];
  };

  bool plants(const char* name) const { return std::strcmp(planted_, name) == 0; }

  template <class T>
  T* array(const char* name, u64 count) {
    return static_cast<T*>(machine_->memory().allocate((count + 1) * sizeof(T), 64, name));
  }
  template <class T>
  u64 place(const char* name, u64 count) {
    return reinterpret_cast<u64>(array<T>(name, count));
  }

  // ---- the programs ----------------------------------------------------------------------------
  void draw() {
    shape_.ranks = random_.between(2, 4);
    shape_.workers = random_.between(1, 2);
    shape_.collectives = plants("one_set") ? 1 : random_.between(1, 2);
    shape_.tiles = random_.between(1, 2);
    shape_.claims = random_.chance(50);
    shape_.two_shots = random_.chance(50);
    shape_.payload = plants("unordered_armed") || plants("weak_armed");
    if (*planted_ == 0) shape_.payload = random_.chance(50);
    if (plants("one_set")) shape_.two_shots = false;  // two shots would need no more
    if (plants("own_rank_alone") || plants("rearm_of_shares") || plants("rearm_of_sums"))
      shape_.two_shots = true;
    if (rearms()) shape_.tasks.push_back({Kind::kRearm, 0, 0});
    for (u32 c = 0; c < shape_.collectives; ++c) {
      for (u32 t = 0; t < shape_.tiles; ++t) shape_.tasks.push_back({Kind::kPublish, c, t});
      for (u32 t = 0; t < shape_.tiles && shape_.two_shots; ++t)
        shape_.tasks.push_back({Kind::kReduce, c, t});
      for (u32 t = 0; t < shape_.tiles; ++t) shape_.tasks.push_back({Kind::kCollect, c, t});
    }
    shape_.tasks.push_back({Kind::kSample, 0, 0});
    shape_.tasks.push_back({Kind::kAdvance, 0, 0});
    if (*planted_ == 0 && random_.chance(25)) {
      failing_rank_ = random_.below(shape_.ranks);
      failing_round_ = random_.between(1, 3);
    }
  }

  // Counter c is of the collects of collective c, then one of what advance waits for; the last one
  // is for a planted bug. Rank counter 2 c is of publishes, the next one of reduces; the last one
  // of re-arms of payload.
  u32 last_counter() const { return shape_.collectives; }
  u32 armed() const { return kRankCounter | (2 * shape_.collectives); }
  // Whom nobody else waits for where data tells by itself.
  u32 senders() const { return shape_.collectives * shape_.tiles * (shape_.two_shots ? 2 : 1); }
  u32 rank_counters() const { return 2 * shape_.collectives + 1; }
  bool rearms() const {
    return shape_.payload || plants("unordered_rearm") || plants("rearm_of_shares") ||
           plants("rearm_of_sums");
  }

  void fill_record(TaskRecord& record, u32 index) const {
    const Task& task = shape_.tasks[index];
    record.task_index = index;
    const auto wait = [&record](u32 counter, u32 signals) {
      record.wait[record.wait_count++] = {counter, signals};
    };
    const auto signal = [&record](u32 counter) { record.signal[record.signal_count++] = counter; };
    const u32 c = task.collective;
    if (task.kind == Kind::kPublish) {
      if (c > 0) wait(c - 1, shape_.tiles);
      signal(shape_.payload ? last_counter() : kRankCounter | 2 * c);
      if (plants("own_rank_alone")) signal(last_counter() + 1);
    } else if (task.kind == Kind::kReduce) {
      if (plants("own_rank_alone")) {
        wait(last_counter() + 1, shape_.tiles * shape_.collectives);
      } else if (!shape_.payload) {
        wait(kRankCounter | 2 * c, shape_.tiles);
      }
      signal(shape_.payload ? last_counter() : kRankCounter | (2 * c + 1));
    } else if (task.kind == Kind::kCollect) {
      if (!shape_.payload) wait(kRankCounter | (2 * c + (shape_.two_shots ? 1 : 0)), shape_.tiles);
      signal(c);
    } else if (task.kind == Kind::kSample) {
      wait(last_counter() - 1, shape_.tiles);
      signal(last_counter());
    } else if (task.kind == Kind::kRearm) {
      signal(last_counter());
      if (shape_.payload) signal(armed());
    } else {
      record.flags = kTaskAdvance;
      wait(last_counter(), 1 + (rearms() ? 1 : 0) + (shape_.payload ? senders() : 0));
      if (shape_.payload && !plants("unordered_armed")) wait(armed(), 1);
    }
  }

  Program* lay_out() {
    Program* p = array<Program>("program", 1);
    p->worker_count = shape_.workers;
    p->vocab_size = kVocab;
    p->rows_capacity = p->prefill_rows = 3;
    p->slot_count = 2;
    p->queue_capacity = 4;
    p->context_capacity = 24;
    p->sample_period = 2;
    p->wait_timeout_ns = u64{1} << 50;
    p->linger_ns = 4000;
    p->task_count = static_cast<u32>(shape_.tasks.size());
    p->segment_count = 1;
    p->counter_count = last_counter() + 2;
    p->rank_count = shape_.ranks;
    p->rank_counter_count = rank_counters();
    p->variant_count = 1;
    p->variants[0] = {p->rows_capacity, 0, 1, 0, 0, {}};
    TaskRecord* records = array<TaskRecord>("records", p->task_count);
    for (u32 i = 0; i < p->task_count; ++i) fill_record(records[i], i);
    p->records = reinterpret_cast<u64>(records);
    Segment* segment = array<Segment>("segments", 1);
    *segment = {shape_.claims ? kPolicyClaim : kPolicyStatic, 0, p->task_count, 0};
    p->segments = reinterpret_cast<u64>(segment);
    lay_out_lists(*p);
    p->counters = place<u8>("counters", u64{p->counter_count} * kCounterStride);
    p->counter_infos = place<CounterInfo>("counter_infos", p->counter_count);
    p->successors = place<u32>("successors", 1);
    p->arrived = place<u64>("arrived", p->task_count);
    p->ready_slots = place<u64>("ready_slots", p->task_count);
    p->cursors = place<Cursor>("cursors", 1);
    p->held_tickets = place<u64>("held_tickets", p->worker_count);
    p->step_state = place<u8>("step_state", sizeof(StepState) + p->rows_capacity * 24);
    p->slots = place<SlotState>("slots", p->slot_count);
    p->slot_owners = place<u64>("slot_owners", p->slot_count);
    p->device_control = place<DeviceControl>("device_control", 1);
    p->host_control = place<HostControl>("host_control", 1);
    p->requests = place<RequestRecord>("requests", p->queue_capacity);
    p->outputs = place<RequestOutput>("outputs", p->queue_capacity);
    p->prompt_tokens = place<u32>("prompt_tokens", p->queue_capacity * p->context_capacity);
    p->output_tokens = place<u32>("output_tokens", p->queue_capacity * p->context_capacity);
    p->rank_counters = sizeof(RankControl) + 2 * order_bytes(*p);
    data_begin_ = p->rank_counters + u64{rank_counters()} * shape_.ranks * kCounterStride;
    p->symmetric = place<u8>("symmetric", data_begin_ + 4 * set_words() * sizeof(u64));
    return p;
  }

  void lay_out_lists(Program& p) {
    u32* lists = array<u32>("lists", p.task_count);
    u32* offsets = array<u32>("list_offsets", p.worker_count + 1);
    u32 used = 0;
    for (u32 worker = 0; worker < p.worker_count && !shape_.claims; ++worker) {
      for (u32 task = worker; task < p.task_count; task += p.worker_count) lists[used++] = task;
      offsets[worker + 1] = used;
    }
    p.lists = reinterpret_cast<u64>(lists);
    p.list_offsets = reinterpret_cast<u64>(offsets);
  }

  void connect(u32 rank) {
    u64* peers = array<u64>("peers", shape_.ranks);
    for (u32 i = 0; i < shape_.ranks; ++i) peers[i] = programs_[i]->symmetric;
    programs_[rank]->peers = reinterpret_cast<u64>(peers);
    programs_[rank]->rank = rank;
  }

  void plant() {
    for (const Program* p : programs_) {
      RankControl* control = at<RankControl>(p->symmetric);
      const auto relax = [this](const void* begin, u64 bytes) {
        machine_->memory().plant(
            {begin, static_cast<const u8*>(begin) + bytes, Broken::How::kRelaxed});
      };
      if (plants("weak_counters") || plants("weak_armed"))
        relax(at<u8>(p->symmetric + p->rank_counters), data_begin_ - p->rank_counters);
      if (plants("weak_in")) relax(control->in, sizeof(control->in));
      if (plants("weak_order")) relax(control + 1, 2 * order_bytes(*p));
    }
  }

  // ---- bodies ----------------------------------------------------------------------------------
  // A set has the words of first shots, then those of second ones.
  u64 shot_words() const { return u64{shape_.collectives} * shape_.tiles * shape_.ranks; }
  u64 set_words() const { return 2 * shot_words(); }

  u64* word_at(u32 rank, const Task& task, u32 source, u64 round, u32 shot = 0) const {
    const u64 set = plants("one_set") ? 0 : round & 1;
    const u64 tile = u64{task.collective} * shape_.tiles + task.tile;
    return at<u64>(programs_[rank]->symmetric + data_begin_) + set * set_words() +
           shot * shot_words() + tile * shape_.ranks + source;
  }

  // target: whose share it is; without shares the first one's.
  u64 value_of(const Task& task, u32 source, u64 round, u32 shot, u32 target) const {
    const u32 tile = (task.collective * shape_.tiles + task.tile) * shape_.ranks + source;
    return data_word(launch_, (tile * 2 + shot) * shape_.ranks + target, round);
  }
  u32 target_of(u32 rank) const { return shape_.two_shots ? rank : 0; }

  // Payload lies behind the data: the same word, half as long.
  u32* payload_at(u32 rank, const Task& task, u32 source, u64 round, u32 shot) const {
    return reinterpret_cast<u32*>(word_at(rank, task, source, round, shot) + 2 * set_words());
  }

  void store(u32 to, const Task& task, u32 source, u64 round, u32 shot, u32 target) {
    const u64 value = value_of(task, source, round, shot, target);
    if (shape_.payload) {
      payload_store(payload_at(to, task, source, round, shot), static_cast<u32>(value) & kData);
    } else {
      data_store(word_at(to, task, source, round, shot), value);
    }
  }

  void publish(u32 rank, const Task& task, u64 round) {
    if (plants("skipped_round") && rank == 1 && round == 2) return;
    for (u32 peer = 0; peer < shape_.ranks; ++peer)
      store(peer, task, rank, round, 0, target_of(peer));
  }

  // Its own share of all ranks, then a word to all.
  void reduce(u32 rank, const Task& task, u64 round) {
    for (u32 source = 0; source < shape_.ranks; ++source)
      check_word(rank, task, source, round, 0, target_of(rank));
    for (u32 peer = 0; peer < shape_.ranks; ++peer) store(peer, task, rank, round, 1, 0);
  }

  void collect(u32 rank, const Task& task, u64 round) {
    for (u32 source = 0; source < shape_.ranks; ++source) {
      for (u32 tile = 0; tile < shape_.tiles; ++tile)
        check_word(rank, {Kind::kPublish, task.collective, tile}, source, round,
                   shape_.two_shots ? 1 : 0, 0);
    }
  }

  void check_word(u32 rank, const Task& from, u32 source, u64 round, u32 shot, u32 target) {
    const u64 value = value_of(from, source, round, shot, target);
    bool is_right = true;
    if (shape_.payload) {
      const u32 seen = poll(*programs_[rank], payload_at(rank, from, source, round, shot));
      is_right = seen == kPayloadSentinel || seen == (static_cast<u32>(value) & kData);
    } else {
      is_right = data_load(word_at(rank, from, source, round, shot)) == value;
    }
    if (!is_right)
      machine_->fail("rank " + std::to_string(rank) + " read stale data of rank " +
                     std::to_string(source));
  }

  // Until the word is data, or the sentinel if the launch was given up.
  static u32 poll(const Program& p, const u32* word) {
    for (;;) {
      const u32 seen = load_relaxed_system(word);
      if (seen != kPayloadSentinel) return seen;
      controller_mirror(p);
      if (load_relaxed(&device_control(p)->abort) != 0) return seen;
      pause();
    }
  }

  // Of the set that the next round writes; planted, also of data that is no payload.
  void rearm(u32 rank, u64 round) {
    if (shape_.payload) return arm(rank, round + 1);
    const u64 begin = plants("rearm_of_sums") ? shot_words() : 0;
    const u64 end = plants("rearm_of_shares") ? shot_words() : set_words();
    for (u64 i = begin; i < end; ++i)
      data_store(word_at(rank, {Kind::kPublish, 0, 0}, 0, round + 1) + i, 0);
  }

  void arm(u32 rank, u64 round) {
    u32* first = payload_at(rank, {Kind::kPublish, 0, 0}, 0, round, 0);
    for (u64 i = 0; i < set_words(); ++i) payload_rearm(first + 2 * i, kPayloadSentinel);
  }

  // All ranks see the rows that the first one saw.
  void sample(u32 rank) {
    const Program& p = *programs_[rank];
    const StepState& state = *step_state(p);
    std::vector<u32> seen;
    for (u32 i = 0; i < state.rows; ++i) {
      const RowState& row = step_rows(p)[i];
      seen.insert(seen.end(), {row.token, row.slot, row.position, row.flags});
    }
    const auto [known, is_first] = steps_.emplace(std::make_pair(launch_, state.step), seen);
    if (!is_first && known->second != seen) machine_->fail("ranks run different rows in a step");
    for (u32 i = 0; i < state.sample_count; ++i) {
      const RowState& row = step_rows(p)[step_sample_rows(p)[i]];
      step_sampled(p)[i] = static_cast<u32>(mix(row.token, row.position) % kVocab);
    }
  }

  // ---- workers and host ------------------------------------------------------------------------
  void work(u32 rank, u32 worker) {
    Platform platform{*this, rank};
    for (u64 launch = 1;; ++launch) {
      u64 started = 0;
      while ((started = load_acquire(&launches_[rank].started)) < launch) pause();
      if (started == kNoMoreLaunches) return;
      Worker<Platform>(*programs_[rank], worker, platform).run();
      add_acq_rel(&launches_[rank].ended, 1);
    }
  }

  bool has_ended() const {
    for (u32 rank = 0; rank < shape_.ranks; ++rank)
      if (load_acquire(&launches_[rank].ended) != launch_ * shape_.workers) return false;
    return true;
  }

  // Each rank resets when it comes, which others may do much earlier.
  void launch() {
    launch_ += 1;
    for (u32 rank = 0; rank < shape_.ranks; ++rank) {
      for (u32 nap = random_.below(60); nap > 0; --nap) pause();
      host_control(*programs_[rank])->launch = static_cast<u32>(launch_);
      reset_for_launch(*programs_[rank]);
      if (shape_.payload) arm(rank, 0), arm(rank, 1);
      store_release(&launches_[rank].started, launch_);
    }
  }

  // False: the last launch is over.
  bool publish_request(u64 index) {
    const Program& p = *programs_[0];
    const u32 entry = static_cast<u32>(index % p.queue_capacity);
    RequestRecord record{};
    record.sequence = index;
    record.kind = kRequestGenerate;
    record.prompt_tokens = random_.between(1, 6);
    record.max_tokens = random_.between(1, 5);
    *request_record(p, entry) = record;
    *request_output(p, entry) = RequestOutput{};
    HostControl* host = host_control(p);
    store_release_system(&host->submit_tail, index + 1);
    fence_seq_cst_system();
    while (load_acquire_system(&host->kernel_state) != kKernelRunning) {
      if (has_ended()) {
        if (launch_ == kLaunches) return false;
        launch();
        return true;
      }
      pause();
    }
    return true;
  }

  void host() {
    for (u64 index = 0; publish_request(index); ++index) {
      const RequestOutput* output = request_output(*programs_[0], static_cast<u32>(index % 4));
      while (load_acquire_system(&output->finish_reason) == kFinishNone && !has_ended()) pause();
      if (has_ended() && load_acquire_system(&output->finish_reason) == kFinishNone) {
        check_faults();
        host_control(*programs_[0])->submit_head = index + 1;
      }
      for (u32 nap = random_.below(200); nap > 0; --nap) pause();
    }
    store_release_system(&host_control(*programs_[0])->exit_request, 1);
    while (!has_ended()) pause();
    for (u32 rank = 0; rank < shape_.ranks; ++rank)
      store_release(&launches_[rank].started, kNoMoreLaunches);
  }

  // A launch that ended without its request: all ranks say why.
  void check_faults() {
    for (u32 rank = 0; rank < shape_.ranks; ++rank) {
      const Fault& fault = host_control(*programs_[rank])->fault;
      const u32 kind = load_acquire_system(&fault.kind);
      const bool own = rank == failing_rank_;
      if (kind != (own ? kFaultNonFinite : kFaultPeer)) machine_->fail("a rank's fault is lost");
      if (!own && fault.detail[0] != failing_rank_) machine_->fail("a rank names a wrong one");
    }
  }

  Random random_;
  const char* planted_;
  Shape shape_;
  std::unique_ptr<Machine> machine_;
  std::vector<Program*> programs_;
  Launch* launches_ = nullptr;
  u64 data_begin_ = 0;
  u64 launch_ = 0;
  u32 failing_rank_ = kNobody;
  u64 failing_round_ = 0;
  std::map<std::pair<u64, u64>, std::vector<u32>> steps_;
};

u32 Platform::run_body(const TaskRecord& record, u64) const {
  return world.run_body(rank, record);
}

int run(u64 first, u64 count, const char* planted) {
  for (u64 seed = first; seed < first + count; ++seed) {
    const std::string failure = World(seed, planted).run();
    if (failure.empty()) continue;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), failure.c_str());
    return 1;
  }
  std::printf("ok: %llu seeds\n", static_cast<unsigned long long>(count));
  return 0;
}

}  // namespace
}  // namespace gpurt::sim

// ranks SEED COUNT [PLANTED]
int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  if (argc < 3) return 2;
  return gpurt::sim::run(number(1), number(2), argc > 3 ? argv[3] : "");
}
