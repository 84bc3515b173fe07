// Litmus tests: small programs whose possible outcomes are known. They show that the simulation is
// weak enough to find errors, and not weaker than the language allows.
//
// Prints one line per program: its name, then every outcome that some seed reached.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "machine.hpp"

namespace gpurt::sim {
namespace {

struct Words {
  u32* x;
  u32* y;
  u32* z;
  std::vector<u32> seen;
};
using Body = void (*)(Words&);
struct Litmus {
  const char* name;
  std::vector<Body> fibres;
};

const Litmus kMessagePassingRelaxed = {"message_passing_relaxed",
                                       {[](Words& w) {
                                          store_relaxed(w.x, 1);
                                          store_relaxed(w.y, 1);
                                        },
                                        [](Words& w) {
                                          w.seen[0] = load_acquire(w.y);
                                          w.seen[1] = load_relaxed(w.x);
                                        }}};

const Litmus kMessagePassingNoAcquire = {"message_passing_no_acquire",
                                         {[](Words& w) {
                                            store_relaxed(w.x, 1);
                                            store_release(w.y, 1);
                                          },
                                          [](Words& w) {
                                            w.seen[0] = load_relaxed(w.y);
                                            w.seen[1] = load_relaxed(w.x);
                                          }}};

const Litmus kMessagePassingReleaseAcquire = {"message_passing_release_acquire",
                                              {[](Words& w) {
                                                 store_relaxed(w.x, 1);
                                                 store_release(w.y, 1);
                                               },
                                               [](Words& w) {
                                                 w.seen[0] = load_acquire(w.y);
                                                 w.seen[1] = load_relaxed(w.x);
                                               }}};

const Litmus kStoreBuffering = {"store_buffering",
                                {[](Words& w) {
                                   store_release(w.x, 1);
                                   w.seen[0] = load_acquire(w.y);
                                 },
                                 [](Words& w) {
                                   store_release(w.y, 1);
                                   w.seen[1] = load_acquire(w.x);
                                 }}};

const Litmus kStoreBufferingFenced = {"store_buffering_fenced",
                                      {[](Words& w) {
                                         store_relaxed(w.x, 1);
                                         fence_seq_cst();
                                         w.seen[0] = load_relaxed(w.y);
                                       },
                                       [](Words& w) {
                                         store_relaxed(w.y, 1);
                                         fence_seq_cst();
                                         w.seen[1] = load_relaxed(w.x);
                                       }}};

const Litmus kLoadBufferingAcquire = {"load_buffering_acquire",
                                      {[](Words& w) {
                                         w.seen[0] = load_acquire(w.y);
                                         store_release(w.x, 1);
                                       },
                                       [](Words& w) {
                                         w.seen[1] = load_acquire(w.x);
                                         store_release(w.y, 1);
                                       }}};

const Litmus kCoherenceOfReads = {"coherence_of_reads",
                                  {[](Words& w) { store_relaxed(w.x, 1); },
                                   [](Words& w) {
                                     w.seen[0] = load_relaxed(w.x);
                                     w.seen[1] = load_relaxed(w.x);
                                   }}};

// A read and an add pass on what they saw: no thread may read an older value after them.
const Litmus kCoherenceThroughAThird = {"coherence_through_a_third",
                                        {[](Words& w) { store_relaxed(w.x, 1); },
                                         [](Words& w) {
                                           if (load_relaxed(w.x) == 1) store_release(w.y, 1);
                                         },
                                         [](Words& w) {
                                           w.seen[0] = load_acquire(w.y);
                                           w.seen[1] = load_relaxed(w.x);
                                         }}};

const Litmus kIndependentReads = {
    "independent_reads",
    {[](Words& w) { store_release(w.x, 1); }, [](Words& w) { store_release(w.y, 1); },
     [](Words& w) {
       w.seen[0] = load_acquire(w.x);
       w.seen[1] = load_acquire(w.y);
     },
     [](Words& w) {
       w.seen[2] = load_acquire(w.y);
       w.seen[3] = load_acquire(w.x);
     }}};

// Two producers signal one counter: the add of the second carries the release of the first.
const Litmus kReleaseSequence = {"release_sequence",
                                 {[](Words& w) {
                                    store_relaxed(w.x, 1);
                                    add_release(w.y, 1);
                                  },
                                  [](Words& w) {
                                    store_relaxed(w.z, 1);
                                    add_release(w.y, 1);
                                  },
                                  [](Words& w) {
                                    w.seen[0] = load_acquire(w.y);
                                    w.seen[1] = load_relaxed(w.x);
                                    w.seen[2] = load_relaxed(w.z);
                                  }}};

const Litmus kAddsAreExact = {"adds_are_exact",
                              {[](Words& w) { w.seen[0] = add_relaxed(w.x, 1); },
                               [](Words& w) { w.seen[1] = add_relaxed(w.x, 1); }}};

const Litmus kWriteWriteReordering = {"write_write_reordering",
                                      {[](Words& w) {
                                         store_relaxed(w.x, 1);
                                         store_relaxed(w.y, 2);
                                       },
                                       [](Words& w) {
                                         store_relaxed(w.y, 1);
                                         store_relaxed(w.x, 2);
                                       }}};

const Litmus* const kLitmus[] = {&kMessagePassingRelaxed,
                                 &kMessagePassingNoAcquire,
                                 &kMessagePassingReleaseAcquire,
                                 &kStoreBuffering,
                                 &kStoreBufferingFenced,
                                 &kLoadBufferingAcquire,
                                 &kCoherenceOfReads,
                                 &kCoherenceThroughAThird,
                                 &kIndependentReads,
                                 &kReleaseSequence,
                                 &kAddsAreExact,
                                 &kWriteWriteReordering};

std::string outcome(const Litmus& litmus, u64 seed) {
  MachineOptions options;
  options.seed = seed;
  options.fibres = static_cast<u32>(litmus.fibres.size());
  options.arena_bytes = 4096;
  Machine machine(options);
  Words words;
  words.x = static_cast<u32*>(machine.memory().allocate(4, 64, "word"));
  words.y = static_cast<u32*>(machine.memory().allocate(4, 64, "word"));
  words.z = static_cast<u32*>(machine.memory().allocate(4, 64, "word"));
  words.seen.resize(4);
  for (const Body body : litmus.fibres) {
    machine.spawn([body, &words] { body(words); });
  }
  if (!machine.run()) return "failure: " + machine.failure();
  std::string text;
  for (const u32 value : words.seen) text += std::to_string(value);
  return text + "/" + std::to_string(*words.x) + std::to_string(*words.y);
}

}  // namespace
}  // namespace gpurt::sim

int main(int argc, char** argv) {
  const unsigned long long seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  for (const auto* litmus : gpurt::sim::kLitmus) {
    std::set<std::string> outcomes;
    for (unsigned long long seed = 1; seed <= seeds; ++seed) {
      outcomes.insert(gpurt::sim::outcome(*litmus, seed));
    }
    std::printf("%s", litmus->name);
    for (const std::string& outcome : outcomes) std::printf(" %s", outcome.c_str());
    std::printf("\n");
  }
  return 0;
}
