// The machine that runs a kernel: passes over all fibres in a seeded order.
//
// A fibre stops only where it waits or polls, so everything between two such places is atomic.
#include "machine.hpp"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

Index threadIdx{0, 0, 0};
Index blockIdx{0, 0, 0};

namespace emu {

unsigned char* shared = nullptr;

namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned kSharedBytes = 256 << 10;
constexpr unsigned kWaitPasses = 24;     // of one mbarrier_wait
constexpr unsigned kCopyPassesMax = 12;  // until a copy has landed

// An mbarrier as this machine keeps it in its 64 bits.
struct Mbarrier {
  short pending;
  short arrivals;
  int bytes : 31;  // announced and not yet landed
  unsigned phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

struct Warp {
  Lanes lanes[2];  // two sets: a fast lane may begin the next exchange
  Collective kind;
  unsigned bytes;
  unsigned come = 0;
  unsigned round = 0;
};

struct Barrier {
  unsigned come = 0;
  unsigned round = 0;
};

struct Block;
using Jump = void* [5];  // of __builtin_setjmp, which calls nothing

struct Fibre {
  enum State { kReady, kBlocked, kPhase, kEnded };
  Block* block;
  unsigned thread;
  State state = kReady;
  bool started = false;
  unsigned barrier, parity;           // kPhase: what for
  unsigned long until;                // kPhase: gives up in that pass
  unsigned long copied_until;         // when its copy16 so far have landed
  std::vector<unsigned long> groups;  // and those of each group
  Jump at;
  ucontext_t start;
};

struct Block {
  Index index;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* shared;
  unsigned char* stacks;
  std::vector<Fibre> fibres;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::set<unsigned> mbarriers;  // those that are alive, by their address
  unsigned left;
};

struct Copy {
  Block* block;
  unsigned long due;
  unsigned to, bytes;
  const void* from;
  unsigned mbarrier;
  enum Kind { kBulk, kPlain, kArrival } kind;
};

void (*kernel)() = nullptr;
Fibre* running = nullptr;
Jump machine;
unsigned long pass = 0;
std::vector<Copy> copies;
std::mt19937 chance;

Mbarrier& mbarrier_at(unsigned at) {
  if (at % 8 != 0 || at >= kSharedBytes) fail("an mbarrier is not aligned to 8 bytes");
  return *reinterpret_cast<Mbarrier*>(shared + at);
}

void complete(Mbarrier& barrier) {
  if (barrier.pending < 0) fail("more arrivals than an mbarrier counts");
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.arrivals;
}

void select(Fibre& fibre) {
  running = &fibre;
  threadIdx = {fibre.thread, 0, 0};
  blockIdx = fibre.block->index;
  shared = fibre.block->shared;
}

// Back to the machine; returns when this fibre is chosen again.
__attribute__((noinline)) void jump(Jump& to) {
  __builtin_longjmp(to, 1);
}

__attribute__((noinline)) void leave() {
  if (__builtin_setjmp(running->at) == 0) jump(machine);
}

void enter_fibre() {
  kernel();
  running->state = Fibre::kEnded;
  --running->block->left;
  leave();
}

__attribute__((noinline)) void resume(Fibre& fibre) {
  select(fibre);
  if (__builtin_setjmp(machine) != 0) return;
  if (fibre.started) jump(fibre.at);
  fibre.started = true;
  setcontext(&fibre.start);
}

void land(const Copy& copy) {
  shared = copy.block->shared;
  if (copy.kind != Copy::kArrival) std::memcpy(shared + copy.to, copy.from, copy.bytes);
  if (copy.kind == Copy::kPlain) return;
  Mbarrier& barrier = mbarrier_at(copy.mbarrier);
  if (copy.kind == Copy::kBulk) barrier.bytes -= static_cast<int>(copy.bytes);
  if (copy.kind == Copy::kArrival) --barrier.pending;
  complete(barrier);
}

void land_copies() {
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].due > pass) {
      ++i;
      continue;
    }
    const Copy copy = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    land(copy);
  }
}

std::unique_ptr<Block> start_block(unsigned index, unsigned threads) {
  auto block = std::make_unique<Block>();
  block->index = {index, 0, 0};
  block->memory = std::make_unique<unsigned char[]>(kSharedBytes + 128);
  const auto at = reinterpret_cast<size_t>(block->memory.get());
  block->shared = block->memory.get() + (128 - at % 128) % 128;
  std::memset(block->shared, 0xA5, kSharedBytes);
  block->stacks =
      static_cast<unsigned char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (block->stacks == MAP_FAILED) fail("no memory for stacks");
  block->fibres = std::vector<Fibre>(threads);
  block->warps = std::vector<Warp>((threads + 31) / 32);
  block->left = threads;
  for (unsigned i = 0; i < threads; ++i) {
    Fibre& fibre = block->fibres[i];
    fibre.block = block.get();
    fibre.thread = i;
    fibre.copied_until = 0;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = block->stacks + i * kStackBytes;
    fibre.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fibre.start, enter_fibre, 0);
  }
  return block;
}

void end_block(const Block& block) {
  select(const_cast<Fibre&>(block.fibres[0]));
  for (const Warp& warp : block.warps)
    if (warp.come != 0) fail("a thread ended where its warp is in a collective");
  for (const Barrier& barrier : block.barriers)
    if (barrier.come != 0) fail("a thread ended where others are at a barrier");
  for (const Copy& copy : copies)
    if (copy.block == &block) fail("the block ended while a copy was under way");
  munmap(block.stacks, block.fibres.size() * kStackBytes);
}

bool is_ready(Fibre& fibre) {
  if (fibre.state == Fibre::kReady) return true;
  if (fibre.state != Fibre::kPhase) return false;
  shared = fibre.block->shared;
  if (mbarrier_at(fibre.barrier).phase == fibre.parity && pass < fibre.until) return false;
  fibre.state = Fibre::kReady;
  return true;
}

void run_block(Block& block) {
  const size_t count = block.fibres.size();
  const bool backwards = chance() % 2 != 0;
  const size_t from = chance() % count;
  for (size_t k = 0; k < count; ++k) {
    const size_t place = (from + k) % count;
    Fibre& fibre = block.fibres[backwards ? count - 1 - place : place];
    if (is_ready(fibre)) resume(fibre);
  }
}

void wake(Fibre& fibre) {
  if (fibre.state == Fibre::kBlocked) fibre.state = Fibre::kReady;
}

void block_here() {
  running->state = Fibre::kBlocked;
  leave();
}

void copy_later(Copy copy) {
  copy.block = running->block;
  copy.due = pass + 1 + chance() % kCopyPassesMax;
  copies.push_back(copy);
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emu: %s - at block %u, thread %u\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

void yield() {
  leave();
}

const Lanes& exchange(Collective kind, const void* in, unsigned bytes) {
  Block& block = *running->block;
  const unsigned me = running->thread;
  Warp& warp = block.warps[me / 32];
  if (warp.come != 0 && (warp.kind != kind || warp.bytes != bytes))
    fail("lanes of one warp meet in different collectives");
  warp.kind = kind;
  warp.bytes = bytes;
  const unsigned round = warp.round;
  std::memcpy(warp.lanes[round & 1][me % 32], in, bytes);
  if (++warp.come == 32) {
    warp.come = 0;
    ++warp.round;
    for (unsigned i = 0; i < 32; ++i) wake(block.fibres[me / 32 * 32 + i]);
  }
  while (warp.round == round) block_here();
  return warp.lanes[round & 1];
}

void arrive(unsigned id, unsigned threads) {
  Block& block = *running->block;
  Barrier& barrier = block.barriers[id];
  if (++barrier.come == threads) {
    barrier.come = 0;
    ++barrier.round;
    for (Fibre& fibre : block.fibres) wake(fibre);
  }
}

void barrier(unsigned id, unsigned threads) {
  const Barrier& barrier = running->block->barriers[id];
  const unsigned round = barrier.round;
  arrive(id, threads);
  while (barrier.round == round) block_here();
}

unsigned block_threads() {
  return static_cast<unsigned>(running->block->fibres.size());
}

void mbarrier_init(unsigned at, unsigned arrivals) {
  if (!running->block->mbarriers.insert(at).second) fail("an mbarrier is alive there already");
  const short count = static_cast<short>(arrivals);
  mbarrier_at(at) = {count, count, 0, 0};
}

void mbarrier_inval(unsigned at) {
  if (running->block->mbarriers.erase(at) == 0) fail("no mbarrier is there");
}

void mbarrier_arrive(unsigned at, unsigned expected_bytes) {
  Mbarrier& barrier = mbarrier_at(at);
  barrier.bytes += static_cast<int>(expected_bytes);
  --barrier.pending;
  complete(barrier);
}

bool mbarrier_test(unsigned at, unsigned parity) {
  leave();
  return mbarrier_at(at).phase != parity;
}

bool mbarrier_wait(unsigned at, unsigned parity) {
  if (mbarrier_at(at).phase != parity) return true;
  running->state = Fibre::kPhase;
  running->barrier = at;
  running->parity = parity;
  running->until = pass + kWaitPasses;
  leave();
  return mbarrier_at(at).phase != parity;
}

void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned mbarrier) {
  const auto source = reinterpret_cast<size_t>(from);
  if (to % 16 != 0 || source % 16 != 0 || bytes % 16 != 0 || to + bytes > kSharedBytes)
    fail("a bulk copy is not aligned to 16 bytes");
  const auto barrier = running->block->mbarriers.lower_bound(to);
  if (barrier != running->block->mbarriers.end() && *barrier < to + bytes)
    fail("a bulk copy over an mbarrier that is alive");
  std::memset(shared + to, 0xA5, bytes);  // whoever still reads there sees it
  copy_later({nullptr, 0, to, bytes, from, mbarrier, Copy::kBulk});
}

void copy16(unsigned to, const void* from) {
  if (to % 16 != 0 || reinterpret_cast<size_t>(from) % 16 != 0)
    fail("a copy of 16 bytes is not aligned");
  std::memset(shared + to, 0xA5, 16);
  copy_later({nullptr, 0, to, 16, from, 0, Copy::kPlain});
  running->copied_until = std::max(running->copied_until, copies.back().due);
}

void commit_copies() {
  running->groups.push_back(running->copied_until);
}

void wait_copies(unsigned newest) {
  const size_t count = running->groups.size();
  const unsigned long until = count > newest ? running->groups[count - 1 - newest] : 0;
  while (until > pass) leave();
}

void arrive_after_copies(unsigned mbarrier) {
  copy_later({nullptr, 0, 0, 0, nullptr, mbarrier, Copy::kArrival});
  // Later than the copies: those of one pass land in any order.
  copies.back().due = std::max(copies.back().due, running->copied_until + 1);
}

void wait_all_copies() {
  while (pass <= running->copied_until) yield();
}

}  // namespace emu

// Runs `entry` in `blocks` blocks, `resident` of them at a time. 0, or 1 if it took too long.
extern "C" int emu_launch(void (*entry)(), unsigned blocks, unsigned threads, unsigned resident,
                          unsigned seed, double limit_s) {
  using namespace emu;
  using Clock = std::chrono::steady_clock;
  kernel = entry;
  chance.seed(seed);
  copies.clear();
  const auto end = Clock::now() + std::chrono::duration<double>(limit_s);
  std::vector<std::unique_ptr<Block>> here;
  unsigned next = 0;
  for (pass = 1; next < blocks || !here.empty(); ++pass) {
    while (next < blocks && here.size() < resident) here.push_back(start_block(next++, threads));
    land_copies();
    const size_t from = chance() % here.size();
    for (size_t k = 0; k < here.size(); ++k) run_block(*here[(from + k) % here.size()]);
    for (size_t i = 0; i < here.size();) {
      if (here[i]->left != 0) {
        ++i;
        continue;
      }
      end_block(*here[i]);
      here.erase(here.begin() + static_cast<long>(i));
    }
    if (pass % 1024 == 0 && Clock::now() > end) return 1;
  }
  return 0;
}
