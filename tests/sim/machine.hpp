// Machine: workers as fibres of one thread, in an order that only the seed decides.
//
// Owns: fibres, who runs next, the virtual clock, the step limit, and the hooks that atomics.hpp
//   (GPURT_SIM) and the compiler's race instrumentation call.
// Does not know: the protocol under test (world.cpp) and what a load may return (memory.hpp).
//
// Every atomic access is a scheduling point: before it happens, any other fibre may run for a while
// and any buffered store may become visible. Per seed the order of fibres has one of four tempers,
// since uniform chance alone never lets one fibre fall far behind.
#pragma once
#include <ucontext.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace gpurt::sim {

struct MachineOptions {
  u64 seed = 1;
  u32 fibres = 2;
  u64 arena_bytes = 1 << 20;
  u64 step_limit = 1000000;  // scheduling points; more is a hang
};

class Machine {
 public:
  explicit Machine(const MachineOptions& options);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  void spawn(std::function<void()> body);
  // Runs until every fibre ended or one failed. Returns whether all ended; else failure() says why.
  bool run();

  // Only from a fibre.
  void point();
  void pause();
  // Whoever has just drawn a ticket or signalled is the one whose absence tells most.
  void may_fall_behind();
  [[noreturn]] void fail(const std::string& what);

  u32 current() const { return current_; }
  bool in_fibre() const { return current_ != kNobody; }
  u64 now_ns() const { return now_ns_; }
  u64 steps() const { return steps_; }
  const std::string& failure() const { return failure_; }
  Random& random() { return random_; }
  Memory& memory() { return memory_; }
  // Called on a hang, to say where everybody is.
  void describe_with(std::function<std::string()> describe) { describe_ = std::move(describe); }

 private:
  struct Fibre {
    ucontext_t context;
    std::unique_ptr<u8[]> stack;
    std::function<void()> body;
    bool ended = false;
    u64 paused_at_write = ~0ULL;  // write_count when it last paused: polling the same words again
  };
  enum class Temper : u32 { kUniform, kBursts, kStarveOne, kFewAtATime };

  static void entry();
  u32 choose();
  u32 choose_by_temper();
  void switch_to(u32 next);
  void leave();

  Random random_;
  Memory memory_;
  u64 step_limit_;
  Temper temper_;
  u32 victim_ = 0;
  u64 starved_until_ = 0;  // the victim hardly runs before this many steps
  u32 alive_ = 0;
  u32 current_ = kNobody;
  u64 steps_ = 0;
  u64 now_ns_ = 1000;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  ucontext_t main_;
  std::string failure_;
  std::function<std::string()> describe_;
};

// The machine whose run() is active; there is one at a time.
Machine& machine();
// Null outside of a fibre.
Machine* machine_of_this_fibre();

// What simulated tasks do to their data, each a scheduling point. A load is as weak as a plain one,
// and a missing order shows as an old value. A store checks first that it may overwrite.
u64 data_load(const u64* p);
void data_store(u64* p, u64 value);
// Payload words are polled: what overwrites the sentinel comes after the re-arm but not after the
// polls; what re-arms comes after the reads, and by them after the store (coherence).
void payload_store(u32* p, u32 value);
void payload_rearm(u32* p, u32 sentinel);

}  // namespace gpurt::sim
