// expert_matvec's loop for up to six users of an nvfp4 expert, four row tiles a virtual warp.
//
// At 16 rows and top 8 of 256 97 % of the experts have no more than two, and go by a way of their
// own in it; the others by run_wide(). A chunk of 64 columns is then a stage: one wait, four units,
// one release, two chunks without a branch.
//   x         each half warp loads one row, a lane one granule, two chunks ahead: a trip to L2 is
//             a microsecond while weights stream, as long as a chunk. The last two chunks of a task
//             ask for the first two of the next one (Carry), if it comes here too and its edges
//             are met: one warp looks for all (is_followed), and nobody asks again
//   outputs   of a task are made by the storer, while the team goes on: a warp that makes outputs
//             is late with its next task, then all wait for the stages that it has not released. Of
//             a task that none follows the team makes them, in a fifth of the time
#pragma once
#include "expert_task.cuh"
#include "published.cuh"

namespace gpurt {

struct ExpertFew : ExpertTask {
  // What a lane multiplies of a chunk, under way: four columns of x, and the norm's weights.
  struct Granule {
    uint4 x, weights;
  };

  // What a task leaves to the next one of its loop.
  struct Carry {
    // Flags, and the next task's pass: each register more would be one in local memory, a trip to
    // L2 a task.
    u32 bits = 0;
    Granule ahead[2];       // chunk q in q % 2
    u64 x_from, norm_from;  // this lane's granules of the chunk to ask for next, a step apart
    u32 step;

    GPURT_FN void load(Granule& to) {
      to.x = ld_relaxed_b128(x_from), to.weights = ld_relaxed_b128(norm_from);
      x_from += step, norm_from += step;
    }

    static constexpr u32 kBegun = 1, kParked = 2, kPass = 4, kAfterWide = 16;
    // Whether the next task comes here too, its first two chunks are under way.
    GPURT_FN bool is_begun() const { return (bits & kBegun) != 0; }
    // Whether the storer may still read the last task's sums.
    GPURT_FN bool has_parked() const { return (bits & kParked) != 0; }
    GPURT_FN u32 pass() const { return bits / kPass % 4; }
    // So many turns ago sums went there: passes take turns, but a task of many users has them all.
    GPURT_FN u32 back() const { return (bits & kAfterWide) != 0 ? pass() + 1 : kPasses; }
    // The next task's pass.
    GPURT_FN void turn_pass() {
      const bool is_last = pass() + 1 == kPasses;
      bits = is_last ? bits % kPass : bits + kPass;
    }
  };

  // Until the storer has ended the slot `back` turns ago, so has read the sums of that task.
  GPURT_FN static void wait_ended(u32 turn, u32 back) {
    if (turn < back) return;
    const u32 empty = shared_address(&shared().slot_empty[(turn - back) % kSlotCount]);
    while (!mbarrier_try_wait(empty, slot_parity(turn - back))) {
    }
  }

  GPURT_FN static void leave(const Carry& carry, u32, u32 turn) {
    if (carry.has_parked()) wait_ended(turn, 1);
  }

  static constexpr u32 kFewUsers = kPasses * kPassPairs;
  static constexpr u32 kFewBytes = kTilesMax * kVirtual * Nvfp4Unit::kBytes;

  // A plan without nvfp4 may have a smaller ring.
  GPURT_FN static bool is_few(const Slot& slot) {
    const TaskRecord& task = slot.record;
    const bool is_whole = (task.param[kK] & ((128u << groups_log2(task)) - 1)) == 0;
    return kTeamWarps != 1 && kFewBytes <= kStageRoom && warp_tiles(task) == kTilesMax &&
           is_whole && slot.chosen[RoutesLayout::kCount] - 1 < kFewUsers;
  }

  GPURT_FN static void run_few(u32 turn, StageCursor& cursor, Carry& carry) {
    if (slot_of(turn).chosen[RoutesLayout::kCount] > kPassPairs) {
      cursor = run_wide(turn, cursor);
      carry = Carry{Carry::kAfterWide | Carry::kParked};
      return;
    }
    f32 sum[kTilesMax][4] = {};
    const f32 squares = multiply_narrow(turn, cursor, carry, sum);
    turn = in_register(turn);
    Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    Pass& pass = reinterpret_cast<Pass*>(shared().scratch)[carry.pass()];
    wait_ended(turn, carry.back());
    park_narrow(task, pass, sum);
    if (task.addr[kArgNorm] != 0) park_squares(task, pass, squares);
    if (carry.is_begun()) {
      leave_outputs(slot, carry.pass());
      carry.bits |= Carry::kParked;
    } else {
      leave(carry, 0, turn);  // what follows may want the scratch
      team_sync();
      make_outputs(slot, pass, {threadIdx.x / 128, kTeamThreads / 128, threadIdx.x % 128, 128});
      carry = Carry{carry.bits & ~Carry::kParked};  // no register of it is kept over the call
    }
    carry.turn_pass();
  }

  // Of more users than a pass holds. Out of line: its registers are not those of the loop.
  __device__ __noinline__ static StageCursor run_wide(u32 turn, StageCursor cursor) {
    Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const u32 count = slot.chosen[RoutesLayout::kCount];
    f32 sum[kTilesMax][4] = {}, squares[4] = {};
    multiply_wide(turn, cursor, sum, squares);
    Pass* passes = reinterpret_cast<Pass*>(shared().scratch);
    wait_ended(turn, 1);  // all passes are its own
    park(task, passes, count, sum);
    if (task.addr[kArgNorm] != 0) park_squares(task, passes, count, squares);
    leave_outputs(slot, 0);
    return cursor;
  }

  // Whose share of a task's outputs: every `users`-th user, thread `thread` of so many.
  struct Share {
    u32 user, users, thread, threads;
  };

  // By the storer's warp: outputs of the sums that the team parked.
  GPURT_FN static void make_outputs(const Slot& slot) {
    const Pass* passes = reinterpret_cast<Pass*>(shared().scratch);
    make_outputs(slot, passes[slot.parked - 1], {0, 1, threadIdx.x % 32, 32});
  }

  // Whole warps. Out of line: its registers are not those of the loop.
  __device__ __noinline__ static void make_outputs(const Slot& slot, const Pass& first,
                                                   Share share) {
    const TaskRecord& task = slot.record;
    const bool paired = task.param[kEpilogue] == MatvecTask::kSwiglu;
    const u32 count = slot.chosen[RoutesLayout::kCount];
    const u32 pairs = word_of(slot, threadIdx.x % 32, count, 1);
    const Scales scales = scales_of(task, slot.chosen[RoutesLayout::kExpert], Nvfp4Unit::kFactor);
#pragma unroll 1
    for (u32 j = share.user; j < count; j += share.users) {
      const u32 pair = __shfl_sync(~0u, pairs, j);
      const Pass& pass = (&first)[j / kPassPairs];
      Outputs to = outputs_of(slot, pass, j % kPassPairs, pair, paired ? 1 : 0);
      to.even = scales.even, to.odd = scales.odd;
      const u32 log2 = groups_log2(task);
      if (log2 == 0) make_user<1>(task, to, paired, share);
      if (log2 == 1) make_user<2>(task, to, paired, share);
      if (log2 == 2) make_user<4>(task, to, paired, share);
      if (log2 == 3) make_user<8>(task, to, paired, share);
      if (log2 == 4) make_user<16>(task, to, paired, share);
    }
  }

 private:
  // ---- x ----------------------------------------------------------------------------------------
  // Of user lane / 16, of user 0 if there is no other.
  GPURT_FN static u64 row_of(const Slot& slot) {
    const TaskRecord& task = slot.record;
    const u32 lane_user = threadIdx.x % 32 / 16;
    const u32 user = lane_user < slot.chosen[RoutesLayout::kCount] ? lane_user : 0;
    const u32 word = RoutesLayout::kUsers + 2 * user + (task.param[kXPerPair] != 0 ? 1 : 0);
    return task.addr[kArgX] + u64{slot.chosen[word]} * (task.param[kK] * 4);
  }

  // Where a lane's granule of its virtual warp's first chunk lies in a row: of lane (g, c) granule
  // g % 4 of block c.
  GPURT_FN static u32 first_offset(const TaskRecord& task) {
    const u32 granule = threadIdx.x % 4 * 4 + threadIdx.x / 4 % 4;
    return (threadIdx.x / 32 >> (4 - groups_log2(task))) * 256 + granule * 16;
  }

  // Row (0) or pair (1) of user j. The first two are in the slot.
  GPURT_FN static u32 word_of(const Slot& slot, u32 j, u32 count, u32 which) {
    const u32 word = RoutesLayout::kUsers + 2 * j + which;
    if (j < kPassPairs) return slot.chosen[word];
    return j < count ? ld_relaxed_u32(slot.record.addr[kAddrExpertId] + word * 4) : 0;
  }

  // To a task's first chunk. Without a norm some floats that nobody needs: no branch in the loop.
  GPURT_FN static void point_to(Carry& carry, const Slot& slot) {
    const TaskRecord& task = slot.record;
    const u32 first = first_offset(task);
    carry.x_from = row_of(slot) + first;
    carry.norm_from = task.addr[task.addr[kArgNorm] != 0 ? kArgNorm : kArgX] + first;
    carry.step = 256u << groups_log2(task);
  }

  // Whether the task behind `turn` comes here too, and its edges are met.
  GPURT_FN static bool is_next(u32 turn) {
    const Slot& slot = slot_of(turn + 1);
    if (ld_shared_acquire_u32(shared_address(&slot.met_turn)) != turn + 1) return false;
    const TaskRecord& task = slot.record;
    const u32 differs = (slot.kind ^ kSlotTask) | static_cast<u32>(slot.step ^ slot_of(turn).step) |
                        (task.body ^ slot_of(turn).record.body);
    return differs == 0 && task.param[kWDtype] == kNvfp4 && is_few(slot) &&
           slot.chosen[RoutesLayout::kCount] <= kPassPairs;
  }

  // The same for all warps, as who asks first finds it: what follows has a team barrier.
  GPURT_FN static bool is_followed(u32 turn) {
    constexpr u32 kYes = 1, kNo = 2;
    const u32 at = shared_address(&slot_of(turn).followed);
    u32 word = 0;
    if (threadIdx.x % 32 == 0) {
      word = ld_shared_acquire_u32(at);
      if (word == 0) word = decide_shared_u32(at, is_next(turn) ? kYes : kNo);
    }
    return __shfl_sync(~0u, word, 0) == kYes;
  }

  // Lanes (g, c) get user g / 4: four columns of the product are the same. Granule i of their block
  // is lane (g / 4 * 4 + i, c)'s: lanes in segments, so that no lane's number is in a register.
  GPURT_FN static void convert(const Granule& granule, bool norms, f32& squares,
                               ExpertPairs& pairs) {
    float4 v = float4_of(granule.x);
    if (norms) {
      squares = add_squares(v, squares);
      scale_granule(v, float4_of(granule.weights));
    }
    const u32 low = pack_bf16x2(v.x, v.y), high = pack_bf16x2(v.z, v.w);
    pairs[0] = of_lane<0>(low), pairs[1] = of_lane<0>(high);
    pairs[2] = of_lane<1>(low), pairs[3] = of_lane<1>(high);
    pairs[4] = of_lane<2>(low), pairs[5] = of_lane<2>(high);
    pairs[6] = of_lane<3>(low), pairs[7] = of_lane<3>(high);
  }
  template <u32 I>
  GPURT_FN static u32 of_lane(u32 v) {
    return shuffle_in_segments<0b10011, I * 4>(v);
  }

  // ---- chunks -----------------------------------------------------------------------------------
  // Up to two users. Returns their squares, of the granules of this lane's place. What the last two
  // chunks ask for is the next task's, or else their own again.
  GPURT_FN static f32 multiply_narrow(u32 turn, StageCursor& cursor, Carry& carry,
                                      f32 (&sum)[kTilesMax][4]) {
    const Slot& slot = slot_of(turn);
    if (!carry.is_begun()) {
      point_to(carry, slot);
      carry.load(carry.ahead[0]);
      carry.load(carry.ahead[1]);
    }
    carry.bits &= ~Carry::kBegun;
    const Nvfp4Unit::Place place = first_place();
    const bool norms = in_register(slot.record.addr[kArgNorm] != 0 ? 1 : 0) != 0;
    f32 squares = 0;
    u32 left = rounds_of(slot.record);
#pragma unroll 1
    do {
      if (left == 2) turn_to_next(in_register(turn), carry);
#pragma unroll
      for (u32 q = 0; q < 2; ++q) {
        open_stage(turn, cursor);  // first: the compiler waits for no x before its turn
        ExpertPairs pairs;
        convert(carry.ahead[q], norms, squares, pairs);
        multiply_stage(cursor, place, pairs, sum, [&] { carry.load(carry.ahead[q]); });
      }
    } while ((left -= 2) != 0);
    return squares;
  }

  GPURT_FN static void turn_to_next(u32 turn, Carry& carry) {
    if (is_followed(turn)) {
      point_to(carry, slot_of(turn + 1));
      carry.bits |= Carry::kBegun;
    } else {
      carry.x_from -= 2 * carry.step, carry.norm_from -= 2 * carry.step;
    }
  }

  // More users: a lane loads what it needs of one, a chunk ahead, and the norm's weights when it
  // needs them: registers do not hold more.
  GPURT_FN static void multiply_wide(u32 turn, StageCursor& cursor, f32 (&sum)[kTilesMax][4],
                                     f32 (&squares)[4]) {
    const Slot& slot = slot_of(turn);
    const TaskRecord& task = slot.record;
    const u32 user = threadIdx.x % 32 / 4, count = slot.chosen[RoutesLayout::kCount];
    const u32 row = word_of(slot, user, count, task.param[kXPerPair] != 0 ? 1 : 0);
    const u64 x_row = task.addr[kArgX] + u64{row} * (task.param[kK] * 4);
    const u64 norm = task.addr[kArgNorm];
    const Nvfp4Unit::Place place = first_place();
    u32 offset = (threadIdx.x / 32 >> (4 - groups_log2(task))) * 256 + threadIdx.x % 4 * 64;
    uint4 x[4];
    load_granules(x_row, offset, user < count, x);
#pragma unroll 1
    for (u32 left = rounds_of(task); left != 0; --left) {
      uint4 weights[4];
      load_granules(norm, offset, norm != 0, weights);
      offset += 256u << groups_log2(task);
      ExpertPairs pairs;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        float4 v = float4_of(x[i]);
        if (norm != 0) {
          squares[i] = add_squares(v, squares[i]);
          scale_granule(v, float4_of(weights[i]));
        }
        pairs[2 * i] = pack_bf16x2(v.x, v.y), pairs[2 * i + 1] = pack_bf16x2(v.z, v.w);
      }
      open_stage(turn, cursor);
      multiply_stage(cursor, place, pairs, sum,
                     [&] { load_granules(x_row, offset, user < count && left != 1, x); });
    }
  }

  // Four side by side; zeros if there are none.
  GPURT_FN static void load_granules(u64 row, u32 offset, bool is_there, uint4 (&to)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) to[i] = is_there ? ld_relaxed_b128(row + offset + i * 16) : uint4{};
  }

  // This lane's part of its warp's first unit, in stage 0.
  GPURT_FN static Nvfp4Unit::Place first_place() {
    Nvfp4Unit::Place place;
    place.start(shared_address(shared().ring) + threadIdx.x / 32 * Nvfp4Unit::kBytes,
                threadIdx.x % 32);
    return place;
  }

  GPURT_FN static void open_stage(u32 turn, const StageCursor& cursor) {
    if (!is_stage_there(cursor)) trace_stall(turn, wait_stage(cursor));
  }

  // ask: for what comes from L2, once the stage is given back.
  template <class Ask>
  GPURT_FN static void multiply_stage(StageCursor& cursor, Nvfp4Unit::Place place,
                                      const ExpertPairs& pairs, f32 (&sum)[kTilesMax][4], Ask ask) {
    place.advance(cursor.stage * kStageRoom);
    Nvfp4Unit unit[2];
    unit[0].load(place);
#pragma unroll
    for (u32 i = 0; i < kTilesMax; ++i) {
      if (i + 1 < kTilesMax) {
        place.advance(kFewBytes / kTilesMax);
        unit[(i + 1) % 2].load(place);
      } else {
        release_stage_behind(cursor, unit[i % 2].read());
        cursor.advance();
        ask();
      }
#pragma unroll
      for (u32 j = 0; j < 4; ++j)
        mma_m16n8k16_bf16(sum[i], unit[i % 2].operand(j), pairs[2 * j], pairs[2 * j + 1]);
    }
  }

  // ---- sums -----------------------------------------------------------------------------------
  // From the first sum of a pass, where a lane's of row tile 0 and row g go.
  GPURT_FN static u32 place_of_lane(const TaskRecord& task) {
    const u32 v = threadIdx.x / 32, log2 = groups_log2(task);
    const u32 slot = (v & ((16u >> log2) - 1)) << log2 | v >> (4 - log2);
    return (threadIdx.x % 32 / 4 * kGroupStride + slot) * 4;
  }
  static constexpr u32 kTile = 16 * kGroupStride * 4, kPair = kTilesMax * kTile;

  // Of many users 2c and 2c + 1 are lanes c's, and in pass c of `passes`.
  GPURT_FN static void park(const TaskRecord& task, const Pass* passes, u32 count,
                            const f32 (&sum)[kTilesMax][4]) {
    const u32 c = threadIdx.x % 4;
    if (kPassPairs * c >= count) return;
    const u32 to = shared_address(passes + c) + place_of_lane(task);
#pragma unroll
    for (u32 i = 0; i < kTilesMax; ++i) {
      st_shared_f32(to + i * kTile, sum[i][0]);
      st_shared_f32(to + i * kTile + kPair, sum[i][1]);
      st_shared_f32(to + i * kTile + kTile / 2, sum[i][2]);
      st_shared_f32(to + i * kTile + kTile / 2 + kPair, sum[i][3]);
    }
  }

  // Of up to two: user c / 2 is lanes c's, twice in c and c + 1 each.
  GPURT_FN static void park_narrow(const TaskRecord& task, const Pass& pass,
                                   const f32 (&sum)[kTilesMax][4]) {
    if (threadIdx.x % 2 != 0) return;
    const u32 to = shared_address(&pass) + threadIdx.x % 4 / 2 * kPair + place_of_lane(task);
#pragma unroll
    for (u32 i = 0; i < kTilesMax; ++i) {
      st_shared_f32(to + i * kTile, sum[i][0]);
      st_shared_f32(to + i * kTile + kTile / 2, sum[i][2]);
    }
  }

  // A granule's squares are a lane's; those of the same place in a block are neighbours.
  GPURT_FN static void park_squares(const TaskRecord& task, Pass& pass, f32 squares) {
    f32 s = squares;
#pragma unroll
    for (u32 step = 1; step < 16; step *= 2) s += __shfl_xor_sync(~0u, s, step);
    const u32 v = threadIdx.x / 32, log2 = groups_log2(task);
    if (threadIdx.x % 16 == 0 && (v & ((16u >> log2) - 1)) == 0)
      pass.squares[threadIdx.x % 32 / 16][v >> (4 - log2)] = s;
  }

  // The same where four lanes have a user, each four granules of a chunk.
  GPURT_FN static void park_squares(const TaskRecord& task, Pass* passes, u32 count,
                                    const f32 (&squares)[4]) {
    f32 s[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      s[i] = squares[i] + __shfl_xor_sync(~0u, squares[i], 1);
      s[i] += __shfl_xor_sync(~0u, s[i], 2);
    }
    const u32 v = threadIdx.x / 32, user = threadIdx.x % 32 / 4, log2 = groups_log2(task);
    if (threadIdx.x % 4 == 0 && user < count && (v & ((16u >> log2) - 1)) == 0)
      passes[user / kPassPairs].squares[user % kPassPairs][v >> (4 - log2)] =
          (s[0] + s[1]) + (s[2] + s[3]);
  }

  // To the storer.
  GPURT_FN static void leave_outputs(Slot& slot, u32 pass) {
    if (threadIdx.x == 0) slot.parked = pass + 1;
  }

  // ---- outputs ----------------------------------------------------------------------------------
  // Of one user of a task.
  struct Outputs {
    u32 from;    // shared address of its sums
    u32 count;   // of the task
    u32 copies;  // ranks that get them
    u64 first;   // where the first one goes
    f32 norm, even, odd;
  };

  GPURT_FN static Outputs outputs_of(const Slot& slot, const Pass& pass, u32 j, u32 pair,
                                     u32 paired) {
    const TaskRecord& task = slot.record;
    const u32 column = task.tile[1] >> paired;
    Outputs to;
    to.from = shared_address(&pass.part[j]);
    to.count = (task.tile[2] - task.tile[1]) >> paired;
    to.copies = 1;
    if (kMatvecPublished && task.param[kYRanks] != 0) {
      to.first = Copies::first_of(task.param + kYRanks, task.addr[kArgY], pair, column);
      to.copies = Copies::count_of(task.param + kYRanks);
    } else {
      to.first = task.addr[kArgY] + (u64{pair} * (task.param[kN] >> paired) + column) * 4;
    }
    to.norm = task.addr[kArgNorm] != 0 ? norm_scale(task, pass, j) : 1;
    return to;
  }

  // A thread takes four outputs side by side, of swiglu one: a store is of consecutive ones.
  template <u32 GROUPS>
  GPURT_FN static void make_user(const TaskRecord& task, const Outputs& to, bool paired,
                                 const Share& share) {
    constexpr u32 kRowBytes = kGroupStride * 4;
    if (paired) {
#pragma unroll 1
      for (u32 m = share.thread; m < to.count; m += share.threads) {
        const u32 from = to.from + place_of<GROUPS>(2 * m);
        const f32 gate = MatvecTask::sum_groups<GROUPS>(from) * to.norm * to.even;
        const f32 up = MatvecTask::sum_groups<GROUPS>(from + kRowBytes) * to.norm * to.odd;
        const f32 value = __fdividef(gate, 1.0f + __expf(-gate)) * up;
        store(task, to, 4 * m, canonical_f32(__float_as_uint(value)));
      }
    } else {
#pragma unroll(GROUPS == 2 ? 4 : 1)
      for (u32 m = 4 * share.thread; m < to.count; m += 4 * share.threads) {
        const u32 from = to.from + place_of<GROUPS>(m);
        u32 bits[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          const f32 sum = MatvecTask::sum_groups<GROUPS>(from + i * kRowBytes);
          bits[i] = canonical_f32(__float_as_uint(sum * to.norm * to.even));
        }
        store(task, to, 4 * m, make_uint4(bits[0], bits[1], bits[2], bits[3]));
      }
    }
  }

  // Where the sums of row `row` of a task lie, from those of its first one.
  template <u32 GROUPS>
  GPURT_FN static u32 place_of(u32 row) {
    constexpr u32 kRows = 256 / GROUPS;  // of all row groups: row tile `row / kRows` of each
    const u32 at = row / kRows * 16 + row % 16;
    return (at * kGroupStride + row % kRows / 16 * GROUPS) * 4;
  }

  GPURT_FN static void put(u64 to, u32 bits) { st_relaxed_u32(to, bits); }
  GPURT_FN static void put(u64 to, const uint4& bits) { st_relaxed_b128(to, bits); }

  template <class Bits>
  GPURT_FN static void store(const TaskRecord& task, const Outputs& to, u32 bytes,
                             const Bits& bits) {
    put(to.first + bytes, bits);
    if constexpr (!kMatvecPublished) return;
#pragma unroll 1
    for (u32 copy = 1; copy < to.copies; ++copy)
      put(to.first + bytes + Copies::offset_of(task.param + kYRanks, copy), bits);
  }
};

}  // namespace gpurt
