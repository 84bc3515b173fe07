// The table of cases; cases.hpp says what a case is.
#include "cases.hpp"

#include <cstring>

namespace gpurt::sim {
namespace {

const std::vector<u32> kFew = {1, 2, 3, 7, 11};
const std::vector<u32> kSeveral = {2, 3, 7};

std::vector<NamedCase> make_policy_cases() {
  return {
      {{.name = "static", .policies = "s", .workers = kFew}},
      {{.name = "claim", .policies = "c", .workers = kFew}},
      {{.name = "ready", .policies = "r", .workers = kFew}},
      {{.name = "mixed", .policies = "scr", .workers = kFew}},
  };
}

// How requests and kernels end, and what only some plans have.
std::vector<NamedCase> make_special_cases() {
  return {
      {{.name = "cancel",
        .policies = "scr",
        .workers = kFew,
        .requests_max = 6,
        .steps_max = 8,
        .cancel_percent = 60}},
      {{.name = "abort",
        .policies = "scr",
        .workers = kFew,
        .cancel_percent = 20,
        .abort_percent = 100}},
      {{.name = "fault", .policies = "scr", .workers = kFew, .fault_percent = 100}},
      {{.name = "linger",
        .policies = "scr",
        .workers = {1, 2, 3},
        .operators_max = 3,
        .requests_max = 6,
        .steps_max = 2,
        .linger_ns = 4000}},
      {{.name = "residency",
        .policies = "scr",
        .workers = {1, 2, 3},
        .operators_max = 3,
        .requests_max = 6,
        .steps_max = 3,
        .cancel_percent = 10,
        .linger_ns = 20000,
        .residency_ns = 40000}},
      {{.name = "payload", .policies = "sc", .workers = kFew, .steps_max = 6, .payload = true}},
      {{.name = "counters",
        .policies = "scr",
        .workers = kFew,
        .steps_max = 6,
        .bulk_signals = true}},
      {{.name = "draft",
        .policies = "scr",
        .workers = kFew,
        .requests_max = 6,
        .steps_max = 20,
        .cancel_percent = 15,
        .drafts = true}},
      {{.name = "wide",
        .policies = "scr",
        .workers = {132},
        .operators_max = 4,
        .tiles_max = 60,
        .segments_max = 3,
        .requests_max = 2,
        .steps_max = 2}},
  };
}

// Families of experts, of which a step has as many as their decider says.
std::vector<NamedCase> make_dynamic_cases() {
  const Case base = {.name = "dynamic",
                     .policies = "scr",
                     .workers = kFew,
                     .operators_max = 5,
                     .steps_max = 6,
                     .cancel_percent = 15,
                     .experts_percent = 50};
  Case ends = base;
  ends.name = "dynamic_ends";
  ends.workers = {1, 2, 3};
  ends.requests_max = 6;
  ends.abort_percent = 40;
  ends.linger_ns = 6000;
  Case fault = base;
  fault.name = "dynamic_fault";
  fault.cancel_percent = 0;
  fault.fault_percent = 100;
  Case bulk = base;
  bulk.name = "dynamic_counters";
  bulk.bulk_signals = true;
  Case piped = base;
  piped.name = "dynamic_pipeline";
  piped.workers = {1, 2, 3, 7};
  piped.pipeline = true;
  return {{base}, {ends}, {fault}, {bulk}, {piped}};
}

// Plans of two or three step sizes, whose steps follow each other as prompts come and go.
std::vector<NamedCase> make_variant_cases() {
  const Case base = {.name = "variants",
                     .policies = "scr",
                     .workers = kFew,
                     .operators_max = 4,
                     .requests_max = 6,
                     .steps_max = 6,
                     .cancel_percent = 15,
                     .variants_max = 3};
  Case claim = base;
  claim.name = "variants_claim";
  claim.policies = "c";
  Case draft = base;
  draft.name = "variants_draft";
  draft.drafts = true;
  Case ends = base;
  ends.name = "variants_ends";
  ends.workers = {1, 2, 3};
  ends.abort_percent = 40;
  ends.linger_ns = 6000;
  Case dynamic = base;
  dynamic.name = "variants_dynamic";
  dynamic.experts_percent = 50;
  Case piped = base;
  piped.name = "variants_pipeline";
  piped.workers = {1, 2, 3, 7};
  piped.pipeline = true;
  Case payload = piped;
  payload.name = "variants_payload";
  payload.policies = "sc";
  payload.payload = true;
  Case experts = piped;
  experts.name = "variants_experts";
  experts.experts_percent = 50;
  return {{base}, {claim}, {draft}, {ends}, {dynamic}, {piped}, {payload}, {experts}};
}

// Workers in the shape of the GPU's.
std::vector<NamedCase> make_pipeline_cases() {
  return {
      {{.name = "pipeline",
        .policies = "scr",
        .workers = {1, 2, 3, 7},
        .steps_max = 6,
        .cancel_percent = 15,
        .pipeline = true}},
      {{.name = "pipeline_payload",
        .policies = "sc",
        .workers = {1, 2, 3, 7},
        .steps_max = 6,
        .payload = true,
        .pipeline = true}},
      {{.name = "pipeline_draft",
        .policies = "scr",
        .workers = {1, 2, 3},
        .operators_max = 4,
        .steps_max = 20,
        .pipeline = true,
        .drafts = true}},
      {{.name = "pipeline_ends",
        .policies = "scr",
        .workers = {1, 2, 3},
        .operators_max = 4,
        .requests_max = 6,
        .steps_max = 3,
        .abort_percent = 40,
        .linger_ns = 6000,
        .pipeline = true}},
      {{.name = "pipeline_fault",
        .policies = "sc",
        .workers = {1, 2, 3},
        .fault_percent = 100,
        .pipeline = true}},
  };
}

// Each planted bug runs in a case that has what it breaks. Without the race check, a missing
// release has to show as a wrong value or a hang; with it, it also shows where plain data is read.
std::vector<NamedCase> make_planted_cases() {
  const Case mixed = {.name = "", .policies = "scr", .workers = kSeveral, .requests_max = 6};
  Case by_value = mixed;
  by_value.races = false;
  Case payload = {
      .name = "", .policies = "sc", .workers = kSeveral, .steps_max = 6, .payload = true};
  payload.races = false;
  Case drain = {
      .name = "", .policies = "sc", .workers = {1, 2, 3}, .segments_max = 6, .past_drain = true};
  const Case ahead = {
      .name = "", .policies = "sc", .workers = {1, 2, 3}, .segments_max = 6, .pipeline = true};
  const Case ends = {.name = "",
                     .policies = "scr",
                     .workers = {1, 2},
                     .operators_max = 4,
                     .requests_max = 3,
                     .steps_max = 3,
                     .linger_ns = 6000,
                     .pipeline = true};
  Case counters = mixed;
  counters.steps_max = 6;
  counters.bulk_signals = true;
  Case abort = mixed;
  abort.abort_percent = 100;
  Case linger = {.name = "",
                 .policies = "scr",
                 .workers = {1, 2},
                 .operators_max = 2,
                 .requests_max = 6,
                 .steps_max = 2,
                 .linger_ns = 3000};
  Case dynamic = mixed;
  dynamic.steps_max = 6;
  dynamic.experts_percent = 60;
  Case forgets = dynamic;
  forgets.forgets_absent = true;
  Case early = dynamic;
  early.compensates_early = true;
  Case piped = dynamic;
  piped.races = false;
  piped.pipeline = true;
  const auto named = [](Case kind, const char* name, Planted planted) {
    kind.name = name;
    return NamedCase{std::move(kind), planted};
  };
  return {
      named(by_value, "signal_before_data", Planted::kSignalBeforeData),
      named(payload, "rearm_without_release", Planted::kRearmWithoutRelease),
      named(drain, "list_past_drain", Planted::kListPastDrain),
      named(ahead, "claim_past_drain", Planted::kClaimPastDrain),
      named(ends, "gate_reopens", Planted::kGateReopens),
      named(counters, "counter_wraps", Planted::kCounterWraps),
      named(abort, "lost_abort_exit", Planted::kLostAbortExit),
      named(linger, "no_fence", Planted::kNoFence),
      named(mixed, "weak_steps_open", Planted::kWeakStepsOpen),
      named(mixed, "weak_arrivals", Planted::kWeakArrivals),
      named(mixed, "weak_slots", Planted::kWeakSlots),
      named(mixed, "weak_idle", Planted::kWeakIdle),
      named(mixed, "weak_mirror_tail", Planted::kWeakMirrorTail),
      named(mixed, "weak_submit_tail", Planted::kWeakSubmitTail),
      named(mixed, "weak_token_count", Planted::kWeakTokenCount),
      named(mixed, "weak_finish", Planted::kWeakFinish),
      named(piped, "weak_tickets", Planted::kWeakTickets),
      named(piped, "publish_before_data", Planted::kPublishBeforeData),
      named(piped, "round_before_count", Planted::kRoundBeforeCount),
      named(forgets, "absent_forgotten", Planted::kAbsentForgotten),
      named(early, "early_compensation", Planted::kEarlyCompensation),
  };
}

std::vector<NamedCase> make_planted_variant_cases() {
  const Case base = {.name = "round_of_steps",
                     .policies = "scr",
                     .workers = kSeveral,
                     .requests_max = 6,
                     .steps_max = 6,
                     .variants_max = 3};
  Case ahead = base;
  ahead.name = "turn_changes";
  ahead.pipeline = true;
  Case behind = base;  // workers that often find their step over
  behind.name = "weak_turns";
  behind.policies = "sc";
  behind.workers = {2, 3};
  behind.operators_max = 1;
  behind.tiles_max = 2;
  behind.segments_max = 2;
  behind.linger_ns = 3000;
  return {{base, Planted::kRoundOfSteps},
          {ahead, Planted::kTurnChanges},
          {behind, Planted::kWeakTurns}};
}

}  // namespace

const std::vector<NamedCase>& all_cases() {
  static const std::vector<NamedCase> cases = [] {
    std::vector<NamedCase> all = make_policy_cases();
    for (NamedCase& special : make_special_cases()) all.push_back(std::move(special));
    for (NamedCase& dynamic : make_dynamic_cases()) all.push_back(std::move(dynamic));
    for (NamedCase& variants : make_variant_cases()) all.push_back(std::move(variants));
    for (NamedCase& piped : make_pipeline_cases()) all.push_back(std::move(piped));
    for (NamedCase& planted : make_planted_cases()) all.push_back(std::move(planted));
    for (NamedCase& planted : make_planted_variant_cases()) all.push_back(std::move(planted));
    return all;
  }();
  return cases;
}

const NamedCase* find_case(const char* name) {
  for (const NamedCase& known : all_cases()) {
    if (std::strcmp(known.kind.name, name) == 0) return &known;
  }
  return nullptr;
}

}  // namespace gpurt::sim
