// Wire structs: what Python packs, and what host and device workers read. One file for all sides.
//
// Owns: the byte layout of records, step state, requests, spans and faults.
// Does not know: who schedules (scheduler/) and what a body computes (device/bodies/).
// gpurt/wire.py states the same layouts as numpy dtypes; tests/unit/test_wire.py compares the two.
// Every field is a sized type; every struct states its size; addresses are u64.
#pragma once
#include "types.hpp"

namespace gpurt {

// ---- limits that the layouts fix; the planner keeps every plan within them -------------------
constexpr u32 kWaitsPerTask = 4;    // more producers: the planner adds `noop` join tasks
constexpr u32 kSignalsPerTask = 4;  // more counters: the planner coarsens edges to whole operators
constexpr u32 kAddrsPerTask = 10;
constexpr u32 kParamsPerTask = 20;
constexpr u32 kStopIdsPerRequest = 16;
constexpr u32 kProposalsPerSlot = 15;  // a block of 16 rows: the last token, and proposals
constexpr u32 kCounterStride = 64;     // bytes between counters: no two share a cache line on a CPU
constexpr u32 kRanksMax = 8;           // of one group
// Set in the index of a counter that all ranks signal: counter.hpp.
constexpr u32 kRankCounter = 0x80000000u;

// Element types as bodies see them in their parameters; gpurt/wire.py has the same numbers.
enum DTypeCode : u32 {
  kF32 = 0,
  kF16 = 1,
  kBf16 = 2,
  kI32 = 3,
  kU32 = 4,
  kU8 = 5,
  kQ41 = 6,
  kQ80 = 7,
  kNvfp4 = 8,  // the second-level scale is an argument of its own
  kE4m3 = 9,   // a cache's keys and values
};

// ---- plan ------------------------------------------------------------------------------------
struct Wait {
  u32 counter;           // index into Program::counters, or kRankCounter and its number
  u32 signals_per_step;  // the wait of round r is for signals_per_step * r; see Variant
};
static_assert(sizeof(Wait) == 8);

enum TaskFlags : u16 {
  kTaskAdvance = 1,        // runs advance(): writes the next StepState and opens the next step
  kTaskPayloadIn = 2,      // the body polls its inputs: data is its own flag
  kTaskPayloadOut = 4,     // the body stores granules that readers poll
  kTaskRearm = 8,          // refills payload buffers with the sentinel
  kTaskDecides = 16,       // after its body: scheduler/dynamic.hpp, by the Decision it names
  kTaskExpertStream = 32,  // streams an expert's weights, which one is known at run time
  kTaskWakes = 64,         // a counter that it signals has successors, or is all ranks'
  kTaskOwnRows = 128,      // its rows are not the step's, but of a table that this step makes
  kTaskRing = 256,         // has the whole weight ring as its room; streams nothing
};

// Where such tasks keep what no body reads: the last parameters and addresses of the record.
// kTaskDecides:
constexpr u32 kParamDecision = kParamsPerTask - 1;  // index into Program::decisions
// kTaskExpertStream: weights of expert e begin at stream_base + e * 16 * stride. The task's slot is
// tile[0]; a slot that is not live streams nothing. The loader reads the words once the counter
// has reached its target, which says that the decider has run.
constexpr u32 kParamExpertStage = kParamsPerTask - 4;  // of the ring, in units of 16 bytes
constexpr u32 kParamExpertSignals = kParamsPerTask - 3;
constexpr u32 kParamExpertCounter = kParamsPerTask - 2;
constexpr u32 kParamExpertStride = kParamsPerTask - 1;  // in units of 16 bytes
constexpr u32 kAddrLiveSlots = kAddrsPerTask - 2;       // u32: how many slots are live
constexpr u32 kAddrExpertId = kAddrsPerTask - 1;        // u32: the expert of this task's slot;
constexpr u32 kExpertWords = 6;  // it and the words behind it are brought along with the weights
// kTaskOwnRows, which no task of experts has:
constexpr u32 kAddrSampleRows = kAddrsPerTask - 2;  // u32[]: as behind a step's rows
constexpr u32 kAddrRows = kAddrsPerTask - 1;        // StepState, whose RowStates follow

// One task, complete in itself, so that one asynchronous copy brings all a worker needs.
struct alignas(16) TaskRecord {
  u64 stream_base;   // first byte of this task's packed weights, 0 if it streams none
  u32 stream_bytes;  // multiple of 16
  u16 body;          // index into the executor's body table
  u16 flags;         // TaskFlags
  u32 task_index;    // == index of this record: records lie in topological order
  u32 op_index;      // operator of the Graph that this tile belongs to
  u16 wait_count;
  u16 signal_count;
  u16 layer;         // for traces only
  u16 payload_mask;  // bit i: addr[i] has two sets; add (round & 1) * payload_set_bytes
  Wait wait[kWaitsPerTask];
  u32 signal[kSignalsPerTask];
  u32 tile[4];                // coordinates, meaning fixed by the body
  u64 addr[kAddrsPerTask];    // buffers, in the order of the body's `args`
  u32 param[kParamsPerTask];  // scalars, in the order of the body's `params`; floats by bit pattern
};
static_assert(sizeof(TaskRecord) == 256 && alignof(TaskRecord) == 16);

// Dynamic: claim, but how many of the segment's tasks a step has is decided in that step.
enum Policy : u32 { kPolicyStatic = 0, kPolicyClaim = 1, kPolicyReady = 2, kPolicyDynamic = 3 };

// A run of operators under one policy. Every worker walks the segments in this order.
struct Segment {
  u32 policy;  // Policy
  u32 begin;   // tasks [begin, end) of the plan
  u32 end;
  u32 cursor;  // claim, ready, dynamic: index into Program::cursors
};
static_assert(sizeof(Segment) == 16);

// One of the step sizes of a plan: a range of its tasks, run in whole steps. Steps of different
// variants follow each other in any order. Round r of a variant is its r-th step since launch, and
// all that a step counts (waits, tickets, slots, payload sets) is counted in rounds of its own.
struct Variant {
  u32 rows;           // the most that one of its steps carries
  u32 segment_begin;  // into Program::segments
  u32 segment_end;
  u32 root_begin;  // into successors: `ready` tasks without waits, pushed by who opens a step
  u32 root_count;
  u32 reserved[3];
};
static_assert(sizeof(Variant) == 32);

constexpr u32 kVariantsPerPlan = 4;  // rows ascend

// What a signal on a counter does besides counting: dependents under the `ready` policy.
struct CounterInfo {
  u32 signals_per_step;
  u32 successor_begin;  // into Program::successors (task indices, maybe with kOnlyWait)
  u32 successor_count;
  u32 queue;  // 1 + the segment of all successors, if each has kOnlyWait; else 0
};
static_assert(sizeof(CounterInfo) == 16);

// On a successor: the counter is all that it waits for, so nobody counts its arrivals.
constexpr u32 kOnlyWait = 0x80000000u;

// Head and tail of one segment's queue, each alone in its line.
struct alignas(64) Cursor {
  u64 head;  // next ticket to take: only grows; of round 1 + t / tasks, task t % tasks
             // dynamic: round << 32 | place; the last live task has place kPlaceEnd - 1
  u8 pad0[56];
  u64 tail;  // `ready`: next slot to fill: only grows. Dynamic: live tasks of head's round
  u8 pad1[56];
};
static_assert(sizeof(Cursor) == 128);

constexpr u32 kPlaceEnd = 0x80000000u;
constexpr u32 kPublishedPerDecision = 4;  // more dynamic operators of one decider stay under claim

// A dynamic segment that a decider opens: slot by slot, `tiles_per_slot` tasks each.
struct Published {
  u32 cursor;  // index into Program::cursors
  u32 tiles_per_slot;
};
static_assert(sizeof(Published) == 8);

// Signals that do not come from tasks of slots that are not live: `signals_per_slot` for each slot
// of [slot_begin, slot_end) from the first that is not.
struct Absent {
  u32 counter;
  u32 slot_begin;
  u32 slot_end;
  u32 signals_per_slot;
};
static_assert(sizeof(Absent) == 16);

// What a task with kTaskDecides does after its body.
struct Decision {
  u64 live;          // u32: how many slots are live in this step, written by the decider's body
  u32 slots;         // the most there can be
  u32 absent_begin;  // into Program::absents
  u32 absent_count;
  u32 published_count;
  u32 reserved[2];
  Published published[kPublishedPerDecision];
};
static_assert(sizeof(Decision) == 64);

// ---- step ------------------------------------------------------------------------------------
enum RowFlags : u32 {
  kRowSample = 1,    // this row's logits are wanted
  kRowProposal = 2,  // its token is a drafter's proposal: what its parent's row may sample
};
constexpr u32 kRowAncestorsShift = 16;  // the upper half of the flags: device/row_path.hpp

struct RowState {
  u32 token;
  u32 slot;
  u32 position;
  u32 flags;  // RowFlags; in a tree of proposals its ancestors too
};
static_assert(sizeof(RowState) == 16);

enum Phase : u32 { kPhasePlain = 0, kPhasePrefill = 1, kPhaseDecode = 2 };

// Written by the advance task of the step before (or by admission when idle); read by every task.
// `rows` RowStates follow in memory, up to Program::rows_capacity; then as many u32 sample rows
// (the row index of each sampled row, ascending); then as many u32 sampled tokens (out).
struct StepState {
  u64 step;           // this step's number since launch, from Program::first_step
  u32 rows;           // active rows
  u32 sample_count;   // how many rows want logits
  u32 phase;          // Phase of the first row: for traces
  u32 variant;        // whose tasks the step runs
  u64 round;          // of that variant
  u32 rows_capacity;  // Variant::rows
  u32 reserved[7];
};
static_assert(sizeof(StepState) == 64);

// ---- requests --------------------------------------------------------------------------------
enum RequestKind : u32 { kRequestSteps = 0, kRequestGenerate = 1 };
enum FinishReason : u32 {
  kFinishNone = 0,
  kFinishStop = 1,       // a stop id was produced (it is the last token of the output)
  kFinishLength = 2,     // max_tokens or the context bound
  kFinishCancelled = 3,  // RequestRecord::cancel was seen
  kFinishFault = 4,      // the run was aborted; see Fault
  kFinishSteps = 5,      // kRequestSteps: all steps done
};
enum RequestFlags : u32 { kRequestIgnoreStop = 1 };

// Host-mapped; entry = sequence % Program::queue_capacity. The host fills it, then publishes
// HostControl::submit_tail with a release. Only `cancel` changes after that.
struct RequestRecord {
  u64 sequence;  // from 0, in submission order
  u32 kind;      // RequestKind
  u32 flags;     // RequestFlags
  u32 prompt_tokens;
  u32 max_tokens;   // kRequestGenerate: 1 or more; kRequestSteps: number of steps
  f32 temperature;  // 0: greedy
  u32 top_k;        // 0: off
  f32 top_p;        // 1: off
  u32 stop_count;
  u64 seed;
  u32 cancel;  // the host sets 1
  // Its first `kept_tokens` are those of an earlier request; their K/V are used if a slot still has
  // them. follows: 1 + that request's sequence, 0 if there is none. kept_tokens < prompt_tokens.
  u32 kept_tokens;
  u64 follows;
  u32 stop_ids[kStopIdsPerRequest];
};
static_assert(sizeof(RequestRecord) == 128);

// Host-mapped; same index. The device publishes token_count, then finish_reason, with releases.
struct RequestOutput {
  u64 token_count;    // tokens readable in Program::output_tokens[entry]
  u32 finish_reason;  // FinishReason, stored last
  u32 steps;          // steps this request took part in
  u64 begin_ns;       // admission, first token, end: device clock, nanoseconds
  u64 first_token_ns;
  u64 end_ns;
  u64 first_step;  // number of its first and last step, for traces
  u64 last_step;
  u64 kept_tokens;                  // prompt tokens whose K/V were there already
  u32 verify_steps;                 // decode steps with a drafter; stored when the request ends:
  u32 accepted[kProposalsPerSlot];  // [i]: how many of them committed their proposal i
};
static_assert(sizeof(RequestOutput) == 128);

constexpr u32 kNoSample = 0xFFFFFFFFu;

// What a drafter proposes to follow one sequence's last token. A drafter is an operator that writes
// one for every sequence that sampled in the step, after `sample`; advance makes rows of them in
// the next step. Whatever they hold is safe: a proposal only saves time when the target agrees.
struct Proposals {
  u32 count;
  u32 tokens[kProposalsPerSlot];
};
static_assert(sizeof(Proposals) == 64);

// State of one sequence on the device; only advance and admission touch it.
struct SlotState {
  u32 active;    // 0: free; else 1 + the steps this request took part in
  u32 entry;     // index into requests and outputs
  u32 position;  // next position to feed
  u32 prompt_tokens;
  u32 produced;
  u32 max_tokens;
  u32 last_token;
  u32 kind;
  u32 flags;
  u32 stop_count;
  f32 temperature;
  u32 top_k;
  f32 top_p;
  u32 sample_index;  // where in `sampled` this step's token will be; kNoSample: nowhere
  u64 seed;
  u32 stop_ids[kStopIdsPerRequest];
  u32 verify_steps;  // as in RequestOutput; touched only where there is a drafter
  u32 accepted[kProposalsPerSlot];
};
static_assert(sizeof(SlotState) == 192);

// ---- control ---------------------------------------------------------------------------------
enum KernelState : u32 {
  kKernelAbsent = 0,   // set by the host before a launch
  kKernelRunning = 1,  // set by the controller once every worker checked in
  kKernelEnding = 2,   // set by the controller: takes no further request
};

enum FaultKind : u32 {
  kFaultNone = 0,
  kFaultEdgeTimeout = 1,     // a counter did not reach its target
  kFaultPayloadTimeout = 2,  // a sentinel never went away
  kFaultStreamTimeout = 3,   // a weight copy never landed
  kFaultQueueTimeout = 4,    // a ready slot was never filled, or a dynamic segment never opened
  kFaultNonFinite = 5,       // a body met NaN or infinity where the model needs a number
  kFaultHostBody = 6,        // a Python body raised
  kFaultCheckIn = 7,         // not every worker arrived
  kFaultCapacity = 8,        // a decider named more live slots (seen) than the plan has (needed)
  kFaultPeer = 9,            // another rank, detail[0], gave up
  kFaultRanksDiffer = 10,    // this rank sampled (seen) other tokens than rank 0 (needed)
  kFaultRankLost = 11,       // by the host: the process of rank detail[0] is gone
};

struct Fault {
  u32 kind;  // FaultKind, stored last with a release
  u32 worker;
  u32 task;
  u32 counter;
  u64 step;
  u64 seen;
  u64 needed;
  u64 waited_ns;
  u32 detail[4];  // kFaultNonFinite: row, column, buffer argument index. A rank counter's: the rank
};
static_assert(sizeof(Fault) == 64);

// Host-mapped. The host writes the first line, the device the rest; before a launch, and after a
// fault, the host sets those words too: then no kernel is there.
struct alignas(64) HostControl {
  u64 submit_tail;    // requests published
  u32 exit_request;   // 1: end at the next request boundary
  u32 abort_request;  // 1: end now
  u32 cancel_count;   // the host adds 1 after it set a RequestRecord::cancel
  u8 pad0[44];
  u64 submit_head;    // requests admitted
  u32 kernel_state;   // KernelState
  u32 workers_in;     // workers that checked in since launch
  u64 heartbeat;      // steps finished since launch: the host's Session watches it
  u64 idle_since_ns;  // device clock when the last request ended, 0 while busy
  u32 launch;         // which launch this is, from 1: the host sets it before
  u32 ranks_in;       // ranks that this one knows to be in
  u8 pad1[24];
  Fault fault;
};
static_assert(sizeof(HostControl) == 192);

constexpr u32 kTurnCount = 4;

// Device memory. `mirror_*` is what the controller last saw in HostControl.
struct alignas(64) DeviceControl {
  u64 steps_open;         // step s may run once steps_open >= s + 1: the word every worker waits on
  u64 turns[kTurnCount];  // several variants: step s's round << 8 | variant at s % kTurnCount, from
                          // before step s - 1 opens until step s + 3 opens
  u8 pad0[24];
  u64 mirror_submit_tail;
  u32 mirror_exit;
  u32 mirror_cancel;  // cancel_count as last seen; advance re-reads all cancel flags on a change
  u32 abort;          // any worker raises it; all drain
  u32 exit;           // set by the controller when idle: workers leave
  u32 idle;           // advance set it: no step is open; the controller owns admission
  u32 workers_in;
  u64 submit_head;  // requests admitted; HostControl has a copy
  u32 cancel_seen;  // mirror_cancel when advance last read the flags
  u32 launch;       // HostControl::launch
  u64 order_count;  // StepOrders that rank 0 gave, or that this rank took
  u8 pad1[8];
  u64 rounds[kVariantsPerPlan];  // several variants: steps of each so far, with those in `turns`
  u64 slow_step;                 // s + 1: step s was slow (scheduler/slow_steps.hpp)
  u64 slow_bound_ns[2];          // longer is slow: prefill steps, all others
  u8 pad2[8];
};
static_assert(sizeof(DeviceControl) == 192);

// ---- ranks -----------------------------------------------------------------------------------
// Symmetric memory: the same layout on every rank, and every rank knows all of its addresses:
//   RankControl | two StepOrders | rank counters | two sets of symmetric buffers
// All its words only grow, also over launches, but for the counters: those return to zero before
// their rank says that it is in, and nobody signals before all are in.
struct alignas(64) RankControl {
  u64 in[kRanksMax];  // by rank: the launch that it is in; written by that rank
  u64 abort;          // launch << 8 | rank + 1 of one that gave up
  u8 pad[56];
};
static_assert(sizeof(RankControl) == 128);

enum OrderKind : u32 {
  kOrderStep = 0,  // run this step
  kOrderIdle = 1,  // there is none
  kOrderExit = 2,  // leave
};

// What rank 0 decided, in every other rank's memory. A StepState and its rows as of step_state(),
// without sampled tokens, and all SlotStates follow.
struct alignas(64) StepOrder {
  u64 stamp;   // launch << 40 | number from 1; stored last, with a release
  u32 kind;    // OrderKind
  u32 checks;  // 1: `check` is of the tokens that the step before this order sampled
  u64 check;
  u32 next_variant;  // of the step after
  u8 pad[36];
};
static_assert(sizeof(StepOrder) == 64);

// ---- trace -----------------------------------------------------------------------------------
// One task on one worker. Times are ticks of Program::tick_ns_x1024 / 1024 nanoseconds.
struct Span {
  u64 begin;  // claimed: the wait starts here
  u32 task;
  u32 step;
  u32 wait;   // ticks until all edges were met
  u32 stall;  // ticks of the run spent waiting for streamed weights
  u32 run;    // ticks from edges met to signalled; on the GPU to the last store, before the signals
  u32 chosen;  // a task that ran an expert: rows that chose it << 16 | expert; else 0
};
static_assert(sizeof(Span) == 32);

struct StepSummary {
  u64 step;
  u64 begin_ns;
  u64 end_ns;
  u32 rows;
  u16 phase;
  u16 variant;
};
static_assert(sizeof(StepSummary) == 32);

// ---- program ---------------------------------------------------------------------------------
// All a worker needs to run a loaded plan. Addresses are valid where the worker runs.
struct alignas(64) Program {
  u64 records;          // TaskRecord[task_count]
  u64 segments;         // Segment[segment_count]
  u64 lists;            // u32 task indices, static segments, worker-major
  u64 list_offsets;     // u32[worker_count * segment_count + 1] into lists
  u64 counters;         // u64 every kCounterStride bytes, [counter_count]
  u64 counter_infos;    // CounterInfo[counter_count]
  u64 successors;       // u32 task indices
  u64 arrived;          // u64[task_count]: waits met so far, only grows (`ready`)
  u64 ready_slots;      // u64[task_count]: slot of ticket t of a segment: begin + t % (end - begin)
  u64 cursors;          // Cursor[]
  u64 step_state;       // StepState and its rows
  u64 slots;            // SlotState[slot_count]
  u64 device_control;   // DeviceControl
  u64 host_control;     // HostControl
  u64 requests;         // RequestRecord[queue_capacity]
  u64 outputs;          // RequestOutput[queue_capacity]
  u64 prompt_tokens;    // u32[queue_capacity][context_capacity]
  u64 output_tokens;    // u32[queue_capacity][context_capacity]
  u64 spans;            // Span[worker_count][span_capacity]; span_capacity is a power of two
  u64 span_counts;      // u64[worker_count], every 64 bytes
  u64 sampled_spans;    // Span[worker_count][span_capacity]: steps with step % sample_period == 0
  u64 sampled_counts;   // u64[worker_count], every 64 bytes
  u64 summaries;        // StepSummary[summary_capacity], by step % summary_capacity
  u64 wait_timeout_ns;  // no progress for this long is a Fault
  u64 linger_ns;        // idle this long: the kernel ends; 0: it stays
  u64 residency_ns;     // resident this long: the kernel ends at the next request boundary; 0: no
                        // limit
  u64 tick_ns_x1024;    // nanoseconds per Span tick, times 1024
  u64 first_step;       // 0, or just below 2^32 in tests
  u64 payload_set_bytes;  // distance between the two sets of payload buffers
  u64 held_tickets;       // u64[worker_count * segment_count]: ticket + 1 taken for a later round
                          // (dynamic: the head that was drawn); 0: none
  u32 task_count;
  u32 segment_count;
  u32 worker_count;
  u32 counter_count;
  u32 rows_capacity;     // rows of one step of the largest variant
  u32 slot_count;        // sequences of one step
  u32 queue_capacity;    // requests in flight
  u32 context_capacity;  // positions of one sequence
  u32 span_capacity;     // 0: tracing off
  u32 summary_capacity;
  u32 sample_period;
  u32 vocab_size;    // 0 for a plain graph
  u32 prefill_rows;  // at most this many rows of one sequence in a prefill step, <= rows_capacity
  u32 team_warps;    // cuda: 16 or 1
  u32 variant_count;
  u32 reserved;
  u64 decisions;      // Decision[]
  u64 absents;        // Absent[]
  u64 symmetric;      // this rank's symmetric memory
  u64 peers;          // u64[rank_count]: that of every rank, as this one reaches it
  u64 rank_counters;  // byte in symmetric memory: u64 every kCounterStride bytes,
                      // [rank_counter_count][rank_count]
  u32 rank;
  u32 rank_count;  // 1: alone, or one of several in loop-back
  u32 rank_counter_count;
  u32 reserved1;
  // u64[slot_count]: 1 + the sequence of the request whose K/V a slot holds; no launch resets it.
  u64 slot_owners;
  Variant variants[kVariantsPerPlan];
};
static_assert(sizeof(Program) == 512);

}  // namespace gpurt
