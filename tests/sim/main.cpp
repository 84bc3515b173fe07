// Runs seeds of one case, or replays one. Exit 0: all held; 1: one failed, with its replay command.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cases.hpp"

namespace gpurt::sim {
namespace {

struct Arguments {
  std::string name = "mixed";
  u64 seed = 1;
  u64 count = 1;
  bool verbose = false;
};

void print_failure(const Arguments& arguments, u64 seed, const Outcome& outcome) {
  std::printf("seed %llu, case %s: %s\n", static_cast<unsigned long long>(seed),
              arguments.name.c_str(), outcome.failure.c_str());
  std::printf("world: %s\n", outcome.shape.c_str());
  for (const std::string& line : outcome.last_tasks) std::printf("  %s\n", line.c_str());
  std::printf("replay: make sim SEED=%llu CASE=%s\n", static_cast<unsigned long long>(seed),
              arguments.name.c_str());
}

int run(const Arguments& arguments) {
  const NamedCase* chosen = find_case(arguments.name.c_str());
  if (chosen == nullptr) {
    std::printf("no case %s; there are:", arguments.name.c_str());
    for (const NamedCase& known : all_cases()) std::printf(" %s", known.kind.name);
    std::printf("\n");
    return 2;
  }
  u64 points = 0;
  u64 bites = 0;
  for (u64 seed = arguments.seed; seed < arguments.seed + arguments.count; ++seed) {
    const Outcome outcome = World(chosen->kind, seed, chosen->planted).run();
    if (!outcome.failure.empty()) {
      print_failure(arguments, seed, outcome);
      return 1;
    }
    points += outcome.points;
    bites += outcome.bites != 0 ? 1 : 0;
    if (arguments.verbose) {
      std::printf("seed %llu: %s, %llu points\n", static_cast<unsigned long long>(seed),
                  outcome.shape.c_str(), static_cast<unsigned long long>(outcome.points));
    }
  }
  std::printf("ok: case %s, %llu seeds, %llu scheduling points, %llu with a planted bug\n",
              arguments.name.c_str(), static_cast<unsigned long long>(arguments.count),
              static_cast<unsigned long long>(points), static_cast<unsigned long long>(bites));
  return 0;
}

}  // namespace
}  // namespace gpurt::sim

int main(int argc, char** argv) {
  gpurt::sim::Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--case") == 0 && has_value) {
      arguments.name = argv[++i];
    } else if (std::strcmp(argv[i], "--seed") == 0 && has_value) {
      arguments.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--count") == 0 && has_value) {
      arguments.count = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--verbose") == 0) {
      arguments.verbose = true;
    } else {
      std::printf("usage: sim [--case NAME] [--seed N] [--count N] [--verbose]\n");
      return 2;
    }
  }
  return gpurt::sim::run(arguments);
}
