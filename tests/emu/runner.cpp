// Runs task records of one cold body of the GPU on a CPU: a fibre a thread, one block at a time.
//
// The emulator builds this with the real device/ folder, but for ptx.cuh and atomics.hpp. Shared
// memory starts as garbage; a thread that leaves a collective or a barrier unfinished is an error.
#define __CUDACC__ 1
#include "cuda.hpp"
//
#include <ucontext.h>

#include <vector>

#include "bodies.gen.cuh"
#include "stream.cuh"

Index threadIdx{0, 0, 0};
Index blockIdx{0, 0, 0};
extern "C" {
gpurt::Program gpurt_program;
}

namespace gpurt {

alignas(128) u8 gpurt_shared[300000];
u8* emulated_shared = gpurt_shared;
Fault first_fault;
bool has_fault = false;

void raise_fault(const Program&, const Fault& fault) {
  if (!has_fault) first_fault = fault;
  has_fault = true;
}

}  // namespace gpurt

namespace {

constexpr gpurt::u32 kThreads = gpurt::kTeamThreads;
constexpr size_t kStackBytes = 256 << 10;
constexpr int kRoundsMax = 20'000'000;

struct Warp {
  unsigned char lanes[2][32][64];  // two sets: a fast lane may begin the next exchange
  unsigned come = 0;
  unsigned round = 0;
};

Warp warps[gpurt::kTeamWarps];
unsigned at_barrier = 0;
unsigned barrier_round = 0;
ucontext_t scheduler;
ucontext_t fibres[kThreads];
bool ended[kThreads];
unsigned current = 0;
const gpurt::TaskRecord* task = nullptr;

void yield() {
  swapcontext(&fibres[current], &scheduler);
}

void run_body() {
  using namespace gpurt;
  const Program& program = gpurt_program;
  const BodyContext context{&program,
                            step_state(program),
                            step_rows(program),
                            step_sample_rows(program),
                            step_sampled(program),
                            at<const SlotState>(program.slots),
                            shared().scratch,
                            blockIdx.x,
                            threadIdx.x,
                            step_state(program)->step,
                            step_state(program)->round};
  Bodies::run_cold(*task, context);
  ended[current] = true;
  for (;;) yield();
}

void start_block(std::vector<unsigned char>& stacks) {
  using namespace gpurt;
  std::memset(gpurt_shared, 0xA5, sizeof gpurt_shared);
  shared().leaving = 0;
  shared().rows = step_state(gpurt_program)->rows;
  shared().sample_count = step_state(gpurt_program)->sample_count;
  shared().slots[0].record = *task;
  for (Warp& warp : warps) warp.come = 0;
  at_barrier = 0;
  for (unsigned i = 0; i < kThreads; ++i) {
    ended[i] = false;
    getcontext(&fibres[i]);
    fibres[i].uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    fibres[i].uc_stack.ss_size = kStackBytes;
    fibres[i].uc_link = &scheduler;
    makecontext(&fibres[i], run_body, 0);
  }
}

// Odd blocks take their threads from the last to the first: an order that a body must not need.
bool run_round(bool backwards) {
  bool any = false;
  for (unsigned k = 0; k < kThreads; ++k) {
    const unsigned i = backwards ? kThreads - 1 - k : k;
    if (ended[i]) continue;
    any = true;
    current = i;
    threadIdx.x = i;
    swapcontext(&scheduler, &fibres[i]);
  }
  return any;
}

}  // namespace

namespace emu {

void exchange(const void* in, void* all, unsigned bytes) {
  const unsigned me = current;
  Warp& warp = warps[me / 32];
  const unsigned round = warp.round;
  std::memcpy(warp.lanes[round & 1][me % 32], in, bytes);
  if (++warp.come == 32) {
    warp.come = 0;
    ++warp.round;
  }
  while (warp.round == round) yield();
  for (unsigned i = 0; i < 32; ++i)
    std::memcpy(static_cast<unsigned char*>(all) + i * bytes, warp.lanes[round & 1][i], bytes);
}

void barrier(unsigned threads) {
  const unsigned round = barrier_round;
  if (++at_barrier == threads) {
    at_barrier = 0;
    ++barrier_round;
  }
  while (barrier_round == round) yield();
}

}  // namespace emu

// Returns 0, or 1 if a block never ended, 2 if a thread left a warp's collective or a barrier open.
extern "C" int run_tasks(const void* records, unsigned count, const void* program, void* fault) {
  using namespace gpurt;
  std::memcpy(&gpurt_program, program, sizeof(Program));
  has_fault = false;
  first_fault = Fault{};
  std::vector<unsigned char> stacks(kThreads * kStackBytes);
  for (unsigned block = 0; block < count; ++block) {
    blockIdx.x = block;
    task = static_cast<const TaskRecord*>(records) + block;
    start_block(stacks);
    int rounds = 0;
    while (run_round(block % 2 == 1))
      if (++rounds > kRoundsMax) return 1;
    for (const Warp& warp : warps)
      if (warp.come != 0) return 2;
    if (at_barrier != 0) return 2;
  }
  std::memcpy(fault, &first_fault, sizeof first_fault);
  return 0;
}
