// How a random Program is drawn and laid out.
#include "model.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "payload.hpp"

namespace gpurt::sim {
namespace {

constexpr u64 kStepNearWrap = 0xFFFFFFFFull;  // steps cross 2^32 within a few

u64 address_of(const void* p) {
  return reinterpret_cast<u64>(p);
}

}  // namespace

Model::Model(const Case& kind, Random& random, Memory& memory)
    : kind_(kind), random_(random), memory_(memory) {
  program = array<Program>("program", 1);
  draw_sizes();
  draw_variant_rows();
  for (u32 i = 0; i < program->variant_count; ++i) draw_variant();
  if (kind_.bulk_signals) draw_bulk_signals();
  draw_segments();
  draw_lists();
  lay_out_queues();
  lay_out_decisions();
  lay_out_state();
  fill_records();
  shape = std::to_string(program->worker_count) + " workers, " +
          std::to_string(program->task_count) + " tasks, " +
          std::to_string(program->counter_count) + " counters, segments ";
  for (const Segment& segment : segments_) {
    shape += "scrd"[segment.policy];
    shape += std::to_string(segment.end - segment.begin) + " ";
  }
  if (program->variant_count != 1) {
    shape += std::to_string(program->variant_count) + " variants of ";
    for (u32 i = 0; i < program->variant_count; ++i)
      shape += std::to_string(program->variants[i].rows) + " ";
  }
  shape += program->vocab_size == 0 ? "plain" : "generate";
}

void Model::draw_sizes() {
  Program& p = *program;
  p.rank_count = 1;
  p.worker_count = kind_.workers[random_.below(static_cast<u32>(kind_.workers.size()))];
  p.vocab_size = random_.chance(60) ? 97 : 0;
  p.rows_capacity = random_.between(1, 6);
  p.prefill_rows = random_.between(1, p.rows_capacity);
  p.slot_count = p.vocab_size == 0 ? 1 : random_.between(1, 3);
  p.queue_capacity = random_.between(2, 4);
  p.context_capacity = 24;
  p.span_capacity = random_.chance(30) ? 4 : 0;
  p.sample_period = 2;
  p.summary_capacity = random_.chance(50) ? 2 : 0;
  p.tick_ns_x1024 = 1024;
  p.team_warps = 1;
  p.wait_timeout_ns = 1ull << 50;  // never: a hang is what the step limit finds
  p.linger_ns = kind_.linger_ns == 0 ? 0 : 1 + random_.below(kind_.linger_ns);
  // Longer than it takes to check in and admit: else the kernel yields before it serves anybody.
  p.residency_ns = kind_.residency_ns == 0 ? 0 : 8000 + random_.below(kind_.residency_ns);
  if (kind_.may_wrap && random_.chance(25)) p.first_step = kStepNearWrap - random_.below(4);
}

// Ascending; the last one's are the capacity.
void Model::draw_variant_rows() {
  Program& p = *program;
  const u32 most = p.vocab_size == 0 ? 1 : kind_.variants_max;
  p.variant_count = most == 1 ? 1 : random_.between(2, most);
  if (p.variant_count != 1) {
    p.rows_capacity += p.variant_count;
    p.prefill_rows = random_.chance(50) ? p.rows_capacity : random_.between(1, p.rows_capacity);
  }
  u32 rows = p.rows_capacity;
  for (u32 i = p.variant_count; i-- > 0;) {
    p.variants[i].rows = rows;
    rows = i == 0 ? 0 : random_.between(i, rows - 1);
  }
}

// All tasks of one variant; its counters are its own.
void Model::draw_variant() {
  operators_.clear();
  counter_begin_ = static_cast<u32>(counters_.size());
  VariantFacts facts{};
  facts.payload_begin = payload_count;
  const u32 operator_count = random_.below(kind_.operators_max + 1);
  for (u32 i = 0; i < operator_count; ++i) {
    if (kind_.experts_percent != 0 && random_.chance(kind_.experts_percent)) {
      draw_family();
    } else {
      draw_operator();
    }
  }
  if (kind_.payload) draw_rearm();
  if (program->vocab_size != 0) draw_tail();
  join_sinks();
  facts.payload_end = payload_count;
  facts.task_end = static_cast<u32>(tasks.size());
  variants.push_back(facts);
}

void Model::draw_rearm() {
  draw_payload_edges();
  const u32 rearm = new_task(Body::kRearm);
  rearm_counter = new_counter();
  signal_from(rearm, rearm_counter);
}

void Model::draw_tail() {
  const u32 sample = new_task(Body::kSample);
  const std::vector<u32> open = unwaited();
  for (u32 i = 0; i < open.size() && i < 3; ++i) wait_on(sample, open[i]);
  const u32 sampled = new_counter();
  signal_from(sample, sampled);
  if (!kind_.drafts) return;
  if (proposals == nullptr) proposals = array<Proposals>("proposals", program->slot_count);
  const u32 draft = new_task(Body::kDraft);
  wait_on(draft, sampled);
  signal_from(draft, new_counter());
}

u32 Model::new_task(Body body) {
  const u32 task = static_cast<u32>(tasks.size());
  tasks.emplace_back();
  tasks.back().body = body;
  tasks.back().variant = static_cast<u32>(variants.size());
  records_.emplace_back();
  TaskRecord& record = records_.back();
  std::memset(static_cast<void*>(&record), 0, sizeof(record));
  record.body = static_cast<u16>(body);
  record.task_index = task;
  return task;
}

u32 Model::new_counter() {
  counters_.emplace_back();
  return static_cast<u32>(counters_.size() - 1);
}

void Model::signal_from(u32 task, u32 counter) {
  TaskRecord& record = records_[task];
  record.signal[record.signal_count++] = counter;
  counters_[counter].producers.push_back(task);
  tasks[task].counters.push_back(counter);
}

// Only once all producers of the counter are known: the target is their number.
void Model::wait_on(u32 task, u32 counter) {
  TaskRecord& record = records_[task];
  Wait& wait = record.wait[record.wait_count++];
  wait.counter = counter;
  wait.signals_per_step = static_cast<u32>(counters_[counter].producers.size());
  counters_[counter].waited = true;
  for (const u32 producer : counters_[counter].producers) {
    const Body body = tasks[producer].body;
    if (body == Body::kData || body == Body::kDecide) tasks[task].producers.push_back(producer);
  }
}

void Model::draw_operator() {
  Operator op;
  std::set<u32> inputs;
  const u32 earlier = static_cast<u32>(operators_.size());
  const u32 input_count = random_.chance(15) ? 0 : random_.between(1, 3);
  for (u32 i = 0; i < input_count && earlier != 0; ++i) {
    // Mostly the newest operators, so that long chains form.
    inputs.insert(random_.chance(60) ? earlier - 1 : random_.below(earlier));
  }
  const u32 tile_count = random_.between(1, kind_.tiles_max);
  const bool counter_per_tile = random_.chance(30) && tile_count <= 6;
  if (!counter_per_tile) op.counters.push_back(new_counter());
  for (u32 tile = 0; tile < tile_count; ++tile) {
    const u32 task = new_task(Body::kData);
    for (const u32 input : inputs) {
      const std::vector<u32>& choices = operators_[input].counters;
      wait_on(task, choices[random_.below(static_cast<u32>(choices.size()))]);
      const std::vector<u32>& implied = operators_[input].implied;
      std::vector<u32>& producers = tasks[task].producers;
      producers.insert(producers.end(), implied.begin(), implied.end());
    }
    op.tiles.push_back(task);
    if (counter_per_tile) op.counters.push_back(new_counter());
    signal_from(task, op.counters.back());
  }
  operators_.push_back(op);
}

// Some tiles read tiles of earlier operators by polling, beside what they wait for.
void Model::draw_payload_edges() {
  for (std::size_t k = 1; k < operators_.size(); ++k) {
    if (!random_.chance(70)) continue;
    const std::vector<u32>& sources = operators_[random_.below(static_cast<u32>(k))].tiles;
    for (const u32 tile : operators_[k].tiles) {
      const u32 source = sources[random_.below(static_cast<u32>(sources.size()))];
      if (tasks[source].payload == kNobody) tasks[source].payload = payload_count++;
      tasks[tile].polled.push_back(source);
      records_[source].flags |= kTaskPayloadOut;
      records_[tile].flags |= kTaskPayloadIn;
    }
  }
}

std::vector<u32> Model::unwaited() const {
  std::vector<u32> open;
  for (u32 i = counter_begin_; i < counters_.size(); ++i) {
    if (!counters_[i].waited) open.push_back(i);
  }
  return open;
}

void Model::join_sinks() {
  std::vector<u32> open = unwaited();
  while (open.size() > kWaitsPerTask) {
    const u32 join = new_task(Body::kNoop);
    for (u32 i = 0; i < kWaitsPerTask; ++i) wait_on(join, open[i]);
    open.erase(open.begin(), open.begin() + kWaitsPerTask);
    open.push_back(new_counter());
    signal_from(join, open.back());
  }
  const u32 advance = new_task(Body::kNoop);
  records_[advance].flags |= kTaskAdvance;
  for (const u32 counter : open) wait_on(advance, counter);
  if (proposals == nullptr) return;
  records_[advance].addr[1] = address_of(proposals);
  records_[advance].param[0] = random_.between(1, kProposalsPerSlot);
}

void Model::draw_segments() {
  const u32 task_count = static_cast<u32>(tasks.size());
  std::set<u32> cuts = {task_count};
  for (u32 i = random_.below(kind_.segments_max); i > 0 && task_count > 1; --i) {
    cuts.insert(random_.between(1, task_count - 1));
  }
  keep_families_whole(cuts);
  for (const VariantFacts& variant : variants) cuts.insert(variant.task_end);
  u32 begin = 0;
  for (const u32 end : cuts) {
    Segment segment{};
    const char policy =
        kind_.policies[random_.below(static_cast<u32>(std::strlen(kind_.policies)))];
    segment.policy = policy == 's' ? kPolicyStatic : policy == 'c' ? kPolicyClaim : kPolicyReady;
    segment.begin = begin;
    segment.end = end;
    segment.cursor = static_cast<u32>(segments_.size());
    draw_family_segment(segment);
    segments_.push_back(segment);
    begin = end;
  }
}

void Model::draw_lists() {
  Program& p = *program;
  std::vector<std::vector<u32>> lists(p.worker_count * segments_.size());
  for (u32 s = 0; s < segments_.size(); ++s) {
    if (segments_[s].policy != kPolicyStatic) continue;
    const bool round_robin = random_.chance(50);
    for (u32 task = segments_[s].begin; task < segments_[s].end; ++task) {
      const u32 worker = round_robin ? task % p.worker_count : random_.below(p.worker_count);
      lists[worker * segments_.size() + s].push_back(task);
    }
  }
  if (kind_.past_drain) move_past_drain(lists);
  u32* flat = array<u32>("lists", tasks.size());
  u32* offsets = array<u32>("list_offsets", lists.size() + 1);
  u32 used = 0;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    offsets[i] = used;
    for (const u32 task : lists[i]) flat[used++] = task;
  }
  offsets[lists.size()] = used;
  p.lists = address_of(flat);
  p.list_offsets = address_of(offsets);
}

// A consumer goes into its worker's list of an earlier segment, in front of the drain that holds
// its producers: a plan that the checker must refuse.
void Model::move_past_drain(std::vector<std::vector<u32>>& lists) {
  const std::size_t n = segments_.size();
  for (u32 first = 0; first + 2 < n; ++first) {
    if (segments_[first].policy != kPolicyStatic) continue;
    for (u32 last = first + 2; last < n; ++last) {
      if (segments_[last].policy != kPolicyStatic) continue;
      for (u32 worker = 0; worker < program->worker_count; ++worker) {
        std::vector<u32>& from = lists[worker * n + last];
        if (from.empty() || tasks[from[0]].producers.empty()) continue;
        const u32 producer = tasks[from[0]].producers[0];
        if (producer < segments_[first].end || producer >= segments_[last].begin) continue;
        moved_task = from[0];
        lists[worker * n + first].push_back(moved_task);
        from.erase(from.begin());
        return;
      }
    }
  }
}

// Not of experts: those may be absent.
void Model::draw_bulk_signals() {
  const auto may_give = [this](u32 task) {
    return tasks[task].body == Body::kData && tasks[task].family == kNobody;
  };
  for (u32 i = 0; i < counters_.size(); ++i) {
    const u32 producer = counters_[i].producers[0];
    if (may_give(producer)) tasks[producer].bulk.push_back(i);
  }
  for (TaskRecord& record : records_) {
    for (u32 w = 0; w < record.wait_count; ++w) {
      const u32 producer = counters_[record.wait[w].counter].producers[0];
      if (may_give(producer)) record.wait[w].signals_per_step += kBulkSignals;
    }
  }
}

void Model::lay_out_queues() {
  Program& p = *program;
  p.task_count = static_cast<u32>(tasks.size());
  p.segment_count = static_cast<u32>(segments_.size());
  p.counter_count = static_cast<u32>(counters_.size());
  std::vector<bool> is_ready(p.task_count, false);
  for (const Segment& segment : segments_) {
    for (u32 task = segment.begin; task < segment.end; ++task) {
      is_ready[task] = segment.policy == kPolicyReady;
    }
  }
  std::vector<u32> successors;
  CounterInfo* infos = array<CounterInfo>("counter_infos", p.counter_count);
  for (u32 i = 0; i < p.counter_count; ++i) {
    infos[i].signals_per_step = static_cast<u32>(counters_[i].producers.size());
    if (!tasks[counters_[i].producers[0]].bulk.empty()) {
      infos[i].signals_per_step += kBulkSignals;
    }
    infos[i].successor_begin = static_cast<u32>(successors.size());
    for (const TaskRecord& record : records_) {
      if (!is_ready[record.task_index]) continue;
      for (u32 w = 0; w < record.wait_count; ++w) {
        if (record.wait[w].counter != i) continue;
        successors.push_back(record.task_index | (record.wait_count == 1 ? kOnlyWait : 0));
      }
    }
    infos[i].successor_count = static_cast<u32>(successors.size()) - infos[i].successor_begin;
  }
  lay_out_variants(successors, is_ready);
  u32* flat = array<u32>("successors", successors.size());
  std::copy(successors.begin(), successors.end(), flat);
  Segment* segments = array<Segment>("segments", segments_.size());
  std::copy(segments_.begin(), segments_.end(), segments);
  p.segments = address_of(segments);
  p.counter_infos = address_of(infos);
  p.successors = address_of(flat);
  p.counters = address_of(array<u8>("counters", u64{p.counter_count} * kCounterStride));
  p.arrived = address_of(array<u64>("arrived", p.task_count));
  p.ready_slots = address_of(array<u64>("ready_slots", p.task_count));
  p.cursors = address_of(array<Cursor>("cursors", p.segment_count));
  p.held_tickets = address_of(array<u64>("held_tickets", u64{p.worker_count} * p.segment_count));
}

// Roots go behind all successors.
void Model::lay_out_variants(std::vector<u32>& successors, const std::vector<bool>& is_ready) {
  u32 task = 0;
  u32 segment = 0;
  for (u32 i = 0; i < program->variant_count; ++i) {
    Variant& variant = program->variants[i];
    variant.segment_begin = segment;
    while (segment < segments_.size() && segments_[segment].end <= variants[i].task_end) ++segment;
    variant.segment_end = segment;
    variant.root_begin = static_cast<u32>(successors.size());
    for (; task < variants[i].task_end; ++task) {
      if (is_ready[task] && records_[task].wait_count == 0) successors.push_back(task);
    }
    variant.root_count = static_cast<u32>(successors.size()) - variant.root_begin;
  }
}

void Model::lay_out_state() {
  Program& p = *program;
  const u64 row_bytes = sizeof(RowState) + 2 * sizeof(u32);
  p.step_state =
      address_of(array<u8>("step_state", sizeof(StepState) + p.rows_capacity * row_bytes));
  p.slots = address_of(array<SlotState>("slots", p.slot_count));
  p.slot_owners = address_of(array<u64>("slot_owners", p.slot_count));
  p.device_control = address_of(array<DeviceControl>("device_control", 1));
  p.host_control = address_of(array<HostControl>("host_control", 1));
  p.requests = address_of(array<RequestRecord>("requests", p.queue_capacity));
  p.outputs = address_of(array<RequestOutput>("outputs", p.queue_capacity));
  const u64 ring = u64{p.queue_capacity} * p.context_capacity;
  p.prompt_tokens = address_of(array<u32>("prompt_tokens", ring));
  p.output_tokens = address_of(array<u32>("output_tokens", ring));
  const u64 spans = u64{p.worker_count} * p.span_capacity;
  p.spans = address_of(array<Span>("spans", spans));
  p.span_counts = address_of(array<u8>("span_counts", u64{p.worker_count} * 64));
  p.sampled_spans = address_of(array<Span>("sampled_spans", spans));
  p.sampled_counts = address_of(array<u8>("sampled_counts", u64{p.worker_count} * 64));
  p.summaries = address_of(array<StepSummary>("summaries", p.summary_capacity));
  data = array<u64>("data", p.task_count);
  p.payload_set_bytes = u64{payload_count} * sizeof(u32);
  payload = array<u32>("payload", u64{payload_count} * 2);
  std::fill(payload, payload + u64{payload_count} * 2, kPayloadSentinel);
}

void Model::fill_records() {
  if (random_.chance(kind_.fault_percent)) draw_fault();
  TaskRecord* records = array<TaskRecord>("records", records_.size());
  std::copy(records_.begin(), records_.end(), records);
  program->records = address_of(records);
}

bool Model::has_lasting_waiter(u32 counter) const {
  for (const TaskRecord& record : records_) {
    if (is_dynamic(record.task_index)) continue;
    for (u32 w = 0; w < record.wait_count; ++w) {
      if (record.wait[w].counter == counter) return true;
    }
  }
  return false;
}

void Model::draw_fault() {
  const u32 task = random_.below(static_cast<u32>(tasks.size()));
  if (random_.chance(30) && (records_[task].flags & kTaskAdvance) == 0) {
    fault_task = task;
    fault_round = random_.between(1, 2);
    return;
  }
  if (counters_.empty()) return;
  // All who wait for this counter expect one signal more a step than anybody gives.
  program->wait_timeout_ns = 400000;
  lost_counter = random_.below(static_cast<u32>(counters_.size()));
  // Experts alone may be absent until the end: then nobody would miss the signal.
  while (!families.empty() && !has_lasting_waiter(lost_counter))
    lost_counter = random_.below(static_cast<u32>(counters_.size()));
  reinterpret_cast<CounterInfo*>(program->counter_infos)[lost_counter].signals_per_step += 1;
  for (TaskRecord& record : records_) {
    for (u32 w = 0; w < record.wait_count; ++w) {
      if (record.wait[w].counter == lost_counter) record.wait[w].signals_per_step += 1;
    }
  }
}

TaskRecord& Model::record(u32 task) const {
  return reinterpret_cast<TaskRecord*>(program->records)[task];
}

u64* Model::counter(u32 index) const {
  return reinterpret_cast<u64*>(program->counters + u64{index} * kCounterStride);
}

bool Model::is_data_counter(u32 index) const {
  return tasks[counters_[index].producers[0]].body == Body::kData && counters_[index].waited;
}

}  // namespace gpurt::sim
