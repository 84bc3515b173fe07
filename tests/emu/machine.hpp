// A GPU for g++: fibres as threads, blocks that are resident together, in one thread of the host.
//
// Owns: who runs next (seeded, in passes over all fibres), a warp's collectives, named barriers,
// mbarriers, and asynchronous copies that land some passes later, in any order.
// Does not know: speed and the memory model. What a fence orders is ordered here anyway.
#pragma once

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx;  // of the fibre that runs

namespace emu {

extern unsigned char* shared;  // shared memory of the block that runs

// What a whole warp does together. Lanes that meet in different ones are an error.
enum class Collective : unsigned char { kShuffle, kVote, kMma };

constexpr unsigned kLaneBytes = 32;
using Lanes = unsigned char[32][kLaneBytes];

// Each lane gives up to kLaneBytes. What all lanes gave, until this lane's next exchange.
const Lanes& exchange(Collective kind, const void* in, unsigned bytes);
void barrier(unsigned id, unsigned threads);
// Counts there without waiting.
void arrive(unsigned id, unsigned threads);
unsigned block_threads();
// Lets every other fibre run: polls of memory call it, so that no spin starves what it waits for.
void yield();

// mbarriers by their address in shared memory.
void mbarrier_init(unsigned at, unsigned arrivals);
void mbarrier_inval(unsigned at);  // until then nothing else may be put there
void mbarrier_arrive(unsigned at, unsigned expected_bytes);
bool mbarrier_test(unsigned at, unsigned parity);
bool mbarrier_wait(unsigned at, unsigned parity);  // gives up after some passes

// Global to shared memory. Lands later; a bulk copy then completes its bytes on `mbarrier`.
void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned mbarrier);
void copy16(unsigned to, const void* from);
void commit_copies();                         // this fibre's copy16 since the last one are a group
void wait_copies(unsigned newest);            // until all groups but so many have landed
void arrive_after_copies(unsigned mbarrier);  // after this fibre's copy16 so far
void wait_all_copies();                       // the same, but waits

void fail(const char* what);  // prints where, and ends the process

}  // namespace emu
