// How families of experts are drawn and laid out; model.hpp says what a family is.
#include <algorithm>

#include "model.hpp"
#include "words.hpp"

namespace gpurt::sim {

u32 Model::live_slots(u32 family, u64 launch, u64 round) const {
  const u32 slots = families[family].slots;
  const u64 draw = mix(mix(launch, family + 1000), round);
  if (draw % 5 == 0) return 0;
  return draw % 5 == 1 ? slots : static_cast<u32>((draw >> 8U) % (slots + 1));
}

bool Model::is_absent(u32 task, u64 launch, u64 round) const {
  const TaskFacts& facts = tasks[task];
  return facts.slot != kNobody && facts.slot >= live_slots(facts.family, launch, round);
}

bool Model::is_dynamic(u32 task) const {
  return tasks[task].slot != kNobody && families[tasks[task].family].is_dynamic;
}

// Returns the counter that says that it has run.
u32 Model::draw_decider(Family& family, u32 index) {
  family.decider = new_task(Body::kDecide);
  tasks[family.decider].family = index;
  if (!operators_.empty() && random_.chance(80)) {
    const Operator& input = operators_[random_.below(static_cast<u32>(operators_.size()))];
    wait_on(family.decider, input.counters[0]);
  }
  const u32 decided = new_counter();
  signal_from(family.decider, decided);
  return decided;
}

// `slot_counters`: of the level before, then of this one.
void Model::draw_level(Family& family, u32 index, const std::vector<u32>& inputs,
                       std::vector<u32>& slot_counters, Operator& op) {
  const u32 tiles = random_.between(1, 3);
  const bool is_first = slot_counters.empty();
  family.levels.push_back({static_cast<u32>(tasks.size()), tiles, 0});
  std::vector<u32> mine;
  for (u32 slot = 0; slot < family.slots; ++slot) {
    mine.push_back(new_counter());
    for (u32 tile = 0; tile < tiles; ++tile) {
      const u32 task = new_task(Body::kData);
      tasks[task].family = index;
      tasks[task].slot = slot;
      if (is_first || random_.chance(30))
        for (const u32 input : inputs) wait_on(task, input);
      if (!is_first) wait_on(task, slot_counters[slot]);
      signal_from(task, mine.back());
      signal_from(task, op.counters[0]);
      op.tiles.push_back(task);
    }
  }
  slot_counters = mine;
}

// decider -> [compensator] -> levels of experts; whoever waits for the operator waits for all of
// its last level, or for the compensator in the absent ones' place.
void Model::draw_family() {
  const u32 index = static_cast<u32>(families.size());
  Family family;
  family.slots = random_.between(1, 4);
  family.is_dynamic = random_.chance(85);
  std::vector<u32> inputs = {draw_decider(family, index)};
  family.compensator = family.decider;
  Operator op;
  op.implied.push_back(family.decider);
  if (!operators_.empty() && random_.chance(70)) {
    // Something that experts need and their decider does not.
    const Operator other = operators_[random_.below(static_cast<u32>(operators_.size()))];
    inputs.push_back(other.counters.back());
    const std::vector<u32>& ended = counters_[other.counters.back()].producers;
    if (family.is_dynamic) {
      op.implied.insert(op.implied.end(), ended.begin(), ended.end());
      op.implied.insert(op.implied.end(), other.implied.begin(), other.implied.end());
      family.compensator = new_task(Body::kNoop);
      for (const u32 input : inputs) wait_on(family.compensator, input);
      signal_from(family.compensator, new_counter());
    }
  }
  if (!family.is_dynamic) op.implied.clear();
  std::vector<u32> slot_counters;
  for (u32 level = random_.between(1, 3); level > 0; --level) {
    op.tiles.clear();
    op.counters = {new_counter()};
    draw_level(family, index, inputs, slot_counters, op);
  }
  families.push_back(family);
  operators_.push_back(op);
}

// A level is a segment of its own.
void Model::keep_families_whole(std::set<u32>& cuts) const {
  for (const Family& family : families) {
    for (const Family::Level& level : family.levels) {
      const u32 end = level.begin + family.slots * level.tiles;
      cuts.erase(cuts.lower_bound(level.begin), cuts.lower_bound(end));
      if (level.begin != 0) cuts.insert(level.begin);
      cuts.insert(end);
    }
  }
}

void Model::draw_family_segment(Segment& segment) {
  for (Family& family : families) {
    for (Family::Level& level : family.levels) {
      if (level.begin != segment.begin) continue;
      level.segment = segment.cursor;
      if (family.is_dynamic) segment.policy = kPolicyDynamic;
    }
  }
}

void Model::add_absents(const Family& family, std::vector<Absent>& absents) const {
  for (const Family::Level& level : family.levels) {
    for (u32 slot = 0; slot < family.slots; ++slot) {
      const TaskRecord& first = records_[level.begin + slot * level.tiles];
      for (u32 s = 0; s < first.signal_count; ++s)
        absents.push_back({first.signal[s], slot, slot + 1, level.tiles});
    }
  }
}

void Model::lay_out_decisions() {
  std::vector<Decision> decisions;
  std::vector<Absent> absents;
  for (Family& family : families) {
    family.live = array<u32>("live", 1);
    family.experts = array<u64>("experts", family.slots);
    if (!family.is_dynamic) continue;
    const bool is_early = kind_.compensates_early && family.compensator != family.decider;
    misled += is_early || kind_.forgets_absent ? 1 : 0;
    const u32 compensator = is_early ? family.decider : family.compensator;
    for (const u32 task : std::set<u32>{family.decider, compensator}) {
      Decision decision{};
      decision.live = reinterpret_cast<u64>(family.live);
      decision.slots = family.slots;
      if (task == family.decider) {
        for (const Family::Level& level : family.levels)
          decision.published[decision.published_count++] = {level.segment, level.tiles};
      }
      decision.absent_begin = static_cast<u32>(absents.size());
      if (task == compensator) add_absents(family, absents);
      if (task == compensator && kind_.forgets_absent) absents.pop_back();
      decision.absent_count = static_cast<u32>(absents.size()) - decision.absent_begin;
      records_[task].flags |= kTaskDecides;
      records_[task].param[kParamDecision] = static_cast<u32>(decisions.size());
      decisions.push_back(decision);
    }
  }
  Decision* const to = array<Decision>("decisions", decisions.size());
  std::copy(decisions.begin(), decisions.end(), to);
  Absent* const rows = array<Absent>("absents", absents.size());
  std::copy(absents.begin(), absents.end(), rows);
  program->decisions = reinterpret_cast<u64>(to);
  program->absents = reinterpret_cast<u64>(rows);
}

}  // namespace gpurt::sim
