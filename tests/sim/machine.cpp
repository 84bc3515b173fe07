// Fibres by ucontext, and who runs next.
#include "machine.hpp"

#include <cstdlib>

namespace gpurt::sim {
namespace {

constexpr std::size_t kStackBytes = 128 * 1024;
constexpr u32 kDrainPercent = 12;       // chance that a point lets one buffered store out
constexpr u32 kSkipPausedPercent = 85;  // chance to pass over a fibre that polls unchanged memory

Machine* active = nullptr;
std::vector<std::unique_ptr<u8[]>> free_stacks;  // reused: thousands of machines run in a process

}  // namespace

Machine& machine() {
  return *active;
}

Machine* machine_of_this_fibre() {
  return active != nullptr && active->in_fibre() ? active : nullptr;
}

Machine::Machine(const MachineOptions& options)
    : random_(options.seed),
      memory_(options.arena_bytes, options.fibres, random_),
      step_limit_(options.step_limit),
      temper_(static_cast<Temper>(random_.below(4))) {}

Machine::~Machine() {
  for (const auto& fibre : fibres_) free_stacks.push_back(std::move(fibre->stack));
}

void Machine::spawn(std::function<void()> body) {
  auto fibre = std::make_unique<Fibre>();
  if (free_stacks.empty()) {
    fibre->stack = std::unique_ptr<u8[]>(new u8[kStackBytes]);
  } else {
    fibre->stack = std::move(free_stacks.back());
    free_stacks.pop_back();
  }
  fibre->body = std::move(body);
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = kStackBytes;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, &Machine::entry, 0);
  fibres_.push_back(std::move(fibre));
  ++alive_;
}

void Machine::entry() {
  Fibre& fibre = *active->fibres_[active->current_];
  fibre.body();
  fibre.ended = true;
  --active->alive_;
  active->leave();
}

void Machine::leave() {
  if (alive_ == 0) {
    current_ = kNobody;
    setcontext(&main_);
  }
  current_ = choose();
  setcontext(&fibres_[current_]->context);
  std::abort();
}

bool Machine::run() {
  active = this;
  current_ = choose();
  swapcontext(&main_, &fibres_[current_]->context);
  current_ = kNobody;
  if (failure_.empty()) failure_ = memory_.complaint();
  for (u32 fibre = 0; fibre < fibres_.size(); ++fibre) memory_.drain_all(fibre);
  active = nullptr;
  return failure_.empty();
}

void Machine::fail(const std::string& what) {
  failure_ = what;
  current_ = kNobody;
  setcontext(&main_);
  std::abort();
}

u32 Machine::choose_by_temper() {
  const u32 count = static_cast<u32>(fibres_.size());
  switch (temper_) {
    case Temper::kUniform:
      break;
    case Temper::kBursts:
      if (current_ != kNobody && random_.chance(85)) return current_;
      break;
    case Temper::kStarveOne: {
      if (steps_ >= starved_until_ || count == 1 || random_.below(600) == 0) break;
      const u32 other = random_.below(count - 1);
      return other < victim_ ? other : other + 1;
    }
    case Temper::kFewAtATime: {
      if (random_.below(60) == 0) victim_ = random_.below(count);
      if (random_.chance(80)) return (victim_ + random_.below(3)) % count;
      break;
    }
  }
  return random_.below(count);
}

u32 Machine::choose() {
  const u32 count = static_cast<u32>(fibres_.size());
  for (u32 attempt = 0; attempt < 8; ++attempt) {
    const u32 next = choose_by_temper();
    const Fibre& fibre = *fibres_[next];
    if (fibre.ended) continue;
    if (fibre.paused_at_write == memory_.write_count() && random_.chance(kSkipPausedPercent)) {
      continue;
    }
    return next;
  }
  u32 next = random_.below(count);
  while (fibres_[next]->ended) next = (next + 1) % count;
  return next;
}

void Machine::switch_to(u32 next) {
  if (next == current_) return;
  Fibre& from = *fibres_[current_];
  current_ = next;
  swapcontext(&from.context, &fibres_[next]->context);
}

void Machine::point() {
  steps_ += 1;
  now_ns_ += 1 + random_.below(16);
  if (!memory_.complaint().empty()) fail(memory_.complaint());
  if (steps_ > step_limit_) {
    fail("no end after " + std::to_string(step_limit_) + " scheduling points" +
         (describe_ ? ": " + describe_() : std::string()));
  }
  if (random_.chance(kDrainPercent)) {
    memory_.drain_some();
  }
  switch_to(choose());
}

void Machine::may_fall_behind() {
  if (temper_ != Temper::kStarveOne || steps_ < starved_until_ || !random_.chance(6)) return;
  victim_ = current_;
  starved_until_ = steps_ + random_.between(20, 2000);
}

void Machine::pause() {
  now_ns_ += random_.below(64);
  fibres_[current_]->paused_at_write = memory_.write_count();
  point();
}

// ---- what atomics.hpp calls ------------------------------------------------------------------
// Outside of run(), the test itself prepares or inspects memory: nobody else is there.

u64 load(const void* p, u32 size_bytes, Order order) {
  active->point();
  return active->memory().load(active->current(), p, size_bytes, order);
}

void store(void* p, u32 size_bytes, u64 value, Order order) {
  active->point();
  active->memory().store(active->current(), p, size_bytes, value, order);
}

u64 add(void* p, u32 size_bytes, u64 value, Order order) {
  active->point();
  active->may_fall_behind();
  return active->memory().add(active->current(), p, size_bytes, value, order);
}

u64 exchange(void* p, u32 size_bytes, u64 value, Order order) {
  active->point();
  return active->memory().exchange(active->current(), p, size_bytes, value, order);
}

void fence_seq_cst() {
  active->point();
  active->memory().fence_seq_cst(active->current());
}

void pause() {
  active->pause();
}

u64 clock_ns() {
  return active->now_ns();
}

u64 data_load(const u64* p) {
  return load(p, sizeof(*p), Order::kRelaxed);
}

void data_store(u64* p, u64 value) {
  active->point();
  active->memory().expect_overwritable(active->current(), p, sizeof(*p), true, true);
  active->memory().store(active->current(), p, sizeof(*p), value, Order::kRelaxed);
}

void payload_store(u32* p, u32 value) {
  active->point();
  active->memory().expect_overwritable(active->current(), p, sizeof(*p), true, false);
  active->memory().store(active->current(), p, sizeof(*p), value, Order::kRelaxed);
}

void payload_rearm(u32* p, u32 sentinel) {
  active->point();
  active->memory().expect_overwritable(active->current(), p, sizeof(*p), false, true);
  active->memory().store(active->current(), p, sizeof(*p), sentinel, Order::kRelaxed);
}

}  // namespace gpurt::sim
