// The shared memory of one block: one team, its weight ring, its task slots. Size and byte map.
//
//   0                      ring      kStageCount stages of kStageRoom bytes, filled by bulk copies
//   + all of that          scratch   32 KB for bodies: partial sums, attention's pages (64 KB for
//                                    a team of 1)
//   + 32 KB                slots     8 task records and the times of their runs, 336 bytes each
//   + 2.6 KB               barriers  stage full/empty, slot full/done/empty, 8 bytes each
//   ...                    words     leaving, and what the step's gate brought
//
// kTeamWarps, kStageRoom and kStageCount come from the generated bodies.gen.cuh: the host derives
// the room from the plan's streams, and the count from the device's limit of shared memory.
#pragma once
#include "ptx.cuh"
#include "task_record.hpp"

namespace gpurt {

constexpr u32 kStageBytes = 32768;  // 16 units of 16 rows x 64 columns of bf16: a unit a warp
constexpr u32 kScratchBytes = kTeamWarps == 1 ? 65536 : 32768;
constexpr u32 kSlotCount = 8;  // the loader runs at most this many tasks ahead
constexpr u32 kTeamThreads = kTeamWarps * 32;
constexpr u32 kTeamBarrier = 1;
constexpr u32 kBodyBarrier =
    2;  // this one and those behind it are for bodies, which leave them empty

// Service warps follow the team's warps.
constexpr u32 kLoaderWarp = kTeamWarps;          // takes tasks, fetches records, finds experts
constexpr u32 kStorerWarp = kTeamWarps + 1;      // signals, pushes, writes spans
constexpr u32 kControllerWarp = kTeamWarps + 2;  // block 0 only: mirrors the host's words
constexpr u32 kStreamerWarp = kTeamWarps + 3;    // streams weights
constexpr u32 kBlockThreads = (kTeamWarps + 4) * 32;

static_assert(kTeamWarps == 16 || kTeamWarps == 1, "the virtual split of K is over 16 warps");
static_assert(kStageRoom >= kStageBytes);
static_assert(kStageCount >= 2, "one stage is read while another is filled");
static_assert((kSlotCount & (kSlotCount - 1)) == 0, "slots are found by masking");

// kSlotSkip: its wait was given up; the body must not run.
enum SlotKind : u32 { kSlotTask = 0, kSlotSkip = 1, kSlotLeave = 2 };

// Of a task from a `ready` queue, which the loader acquired, and of experts' tasks, for which the
// loader looks; the others' edges are the team's to wait for. kNeverMet: its wait was given up.
enum SlotEdges : u32 { kNotMet = 0, kMet = 1, kNeverMet = 2 };

struct alignas(16) Slot {
  TaskRecord record;
  u64 step;
  u64 round;     // of the step's variant
  u64 begin;     // cycles of this SM: the team turned to this task
  u32 met;       // low word of the same clock: its edges were met
  u32 end;       // the same: after its last store
  u32 stall;     // cycles spent waiting for the weight stream
  u32 kind;      // SlotKind
  u32 is_met;    // SlotEdges
  u32 met_turn;  // kTaskExpertStream: the turn for which the loader found the edges met; of a cold
                 // body: the turn that has begun
  u32 parked;    // 1 + the pass where the team left its sums: the storer makes its outputs; 0: none
  u32 followed;  // by a task of the same loop: 0, then 1 or 2 as the first warp to ask finds it
  // kTaskExpertStream: the words at kAddrExpertId, as the loader found them: expert id, its number
  // of users, row and pair of the first two. [1] comes last; kNotChosen until then, 0: not live.
  u32 chosen[kExpertWords];
};
static_assert(sizeof(Slot) == 336);
constexpr u32 kNotChosen = 0xFFFFFFFFu;
constexpr u32 kNoTurn = 0xFFFFFFFFu;

#ifndef GPURT_EXPERTS  // whether tasks of a plan stream experts: kernels of others know none
#define GPURT_EXPERTS 0
#endif
#ifndef GPURT_RING  // the same for tasks that have the whole ring as their room
#define GPURT_RING 0
#endif
GPURT_FN bool streams_expert(const TaskRecord& task) {
  return GPURT_EXPERTS != 0 && (task.flags & kTaskExpertStream) != 0;
}

struct SharedMemory {
  u8 ring[kStageCount][kStageRoom];
  u8 scratch[kScratchBytes];
  Slot slots[kSlotCount];
  u64 stage_full[kStageCount];   // 1 arrival (the loader) and the stage's bytes
  u64 stage_empty[kStageCount];  // kTeamWarps arrivals
  u64 slot_full[kSlotCount];     // 2 arrivals: the loader, and its copies when they land
  u64 slot_known[kSlotCount];    // 1 arrival (the loader): whose weights, and from where
  u64 slot_done[kSlotCount];     // kTeamWarps arrivals
  u64 slot_empty[kSlotCount];    // 2 arrivals: the storer, the streamer
  u32 leaving;                   // 1: every wait in this block ends; set once
  u32 rows;                      // StepState::rows of the step whose gate the team passed
  u32 sample_count;
  u32 gave_up;  // 1: a body's own wait for its edges was; no body runs any more
};
static_assert(sizeof(SharedMemory) <= 232448,
              "227 KB is the most a block of sm_90 and sm_100 gets");

extern __shared__ __align__(128) u8 gpurt_shared[];

GPURT_FN SharedMemory& shared() {
  return *reinterpret_cast<SharedMemory*>(gpurt_shared);
}

GPURT_FN void team_sync() {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    bar_sync(kTeamBarrier, kTeamThreads);
  }
}

// The flag is an ordinary word of shared memory that any thread of the block may set at any time.
GPURT_FN bool is_leaving() {
  return *const_cast<volatile u32*>(&shared().leaving) != 0;
}
GPURT_FN void set_leaving() {
  *const_cast<volatile u32*>(&shared().leaving) = 1;
}

}  // namespace gpurt
