#include "cases.hpp"

#include <cstring>

namespace gpurt::sim {
namespace {

const std::vector<u32> kFew = {1, 2, 3, 7, 11};
const std::vector<u32> kSeveral = {2, 3, 7};

std::vector<NamedCase> make_cases() {
  std::vector<NamedCase> cases = {
      {{.name = "static", .policies = "s", .workers = kFew}},
      {{.name = "claim", .policies = "c", .workers = kFew}},
      {{.name = "ready", .policies = "r", .workers = kFew}},
      {{.name = "mixed", .policies = "scr", .workers = kFew}},
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
      {{.name = "wide",
        .policies = "scr",
        .workers = {132},
        .operators_max = 4,
        .tiles_max = 60,
        .segments_max = 3,
        .requests_max = 2,
        .steps_max = 2}},
      // Planted bugs. Each belongs to the case above that has what it breaks.
      {{.name = "signal_before_data", .policies = "scr", .workers = kSeveral},
       Planted::kSignalBeforeData},
      {{.name = "rearm_without_release",
        .policies = "sc",
        .workers = kSeveral,
        .steps_max = 6,
        .payload = true},
       Planted::kRearmWithoutRelease},
      {{.name = "claim_past_drain",
        .policies = "sc",
        .workers = {1, 2, 3},
        .segments_max = 6,
        .past_drain = true},
       Planted::kClaimPastDrain},
      {{.name = "counter_wraps",
        .policies = "scr",
        .workers = kSeveral,
        .steps_max = 6,
        .bulk_signals = true},
       Planted::kCounterWraps},
      {{.name = "lost_abort_exit", .policies = "scr", .workers = kSeveral, .abort_percent = 100},
       Planted::kLostAbortExit},
      {{.name = "step_without_release", .policies = "scr", .workers = kSeveral},
       Planted::kStepWithoutRelease},
  };
  return cases;
}

}  // namespace

const std::vector<NamedCase>& all_cases() {
  static const std::vector<NamedCase> cases = make_cases();
  return cases;
}

const NamedCase* find_case(const char* name) {
  for (const NamedCase& known : all_cases()) {
    if (std::strcmp(known.kind.name, name) == 0) return &known;
  }
  return nullptr;
}

}  // namespace gpurt::sim
