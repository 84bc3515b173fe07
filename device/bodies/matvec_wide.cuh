// matvec on the GPU for steps of many rows: units of 64 rows of W by 128 step rows.
//
// The contract is in graphs/ops/matvec_wide_cuda.py: x comes from matvec_input, in the order of the
// tensor cores, and with a norm a factor for each row. W lies as smaller steps have it, and every
// output is the sum that they make, bit by bit (matvec.cuh): K group by K group, each in two chains
// of mma, then the groups in four chains, (0 + 1) + (2 + 3). So chunks are taken in the order of
// their groups, and of those the ones of a chain follow each other:
//
//   chain 0: groups 0, 4, 8, 12    chain 1: groups 1, 5, 9, 13    ...    (G groups; here 16)
//
// A thread then holds of each of its 16 outputs two mma chains and one chain of groups; what waits
// for the chains behind lies in shared memory. A task has the whole weight ring as its room
// (kTaskRing): the team copies chunks of W and of x there itself, kDepth of them at a time, since
// copies of 2 KB are too many for the loader's one lane.
//
//   warp (tile, quarter)  = 16 rows of W by 32 step rows
//   stage of 64 columns   = 4 units of W of 2 KB, 16 of x of 1 KB
//
// By wgmma, both operands are cores in shared memory. Four warps of a quarter make one of the two
// mma chains, of both quarters of their half: a product of 64 x 64 asks less of shared memory than
// two of 64 x 32. At a group's end the two quarters swap what is the other's. Its sums have the
// bits of mma.sync (tools/LOG.md), which other architectures and teams of one warp use. Floor of a
// chunk and SM: 256 cycles of wgmma; 56 KB through shared memory's port (448 cycles: W twice, x
// once, and both on their way in); 24 KB from L2 (350).
#pragma once
#include "matvec_wide_outputs.cuh"
#include "ring_body.cuh"

namespace gpurt {

struct matvec_wide : RingBody<matvec_wide>, MatvecWide {
  static constexpr u32 kUnitsMax = 16;
  static constexpr u32 kUnitW = 2048, kUnitX = 1024;
  static constexpr u32 kCoreX = 128;  // 8 step rows x 8 columns
  static constexpr bool kByFour = GPURT_WGMMA != 0 && kTeamWarps >= kTiles;  // warps, by wgmma
  static constexpr bool kInKernel = kByFour;                                 // scheduler/team.cuh
  static constexpr u32 kStage = kTiles * kUnitW + kStepTiles * kUnitX;
  // A number for each output: of chains that are done. There are two such places, in the scratch
  // and behind the stages, and by wgmma one more, for what quarters swap.
  static constexpr u32 kParked = kTiles * 16 * kStepTiles * 8 * 4;
  static constexpr u32 kPlaces = kByFour ? 3 : 2;
  static constexpr u32 kBehind = (kPlaces - 1) * kParked;  // the stages
  static constexpr u32 kDepth = (kRingBytes - kBehind) / kStage;
  static_assert(kDepth >= 3 && kParked <= kScratchBytes);

  // Chunks as they are taken: group by group, chain by chain.
  struct Order {
    // The group that is number `at` of this order, and how many chunks it has.
    GPURT_FN static u32 group(const Cut& cut, u32 at) {
      if (cut.groups < 4) return at;
      return (at & ((1u << cut.chain_log2) - 1)) * 4 + (at >> cut.chain_log2);
    }
    GPURT_FN static u32 chunks(const Cut& cut, u32 at) {
      return (cut.chunks - group(cut, at) + cut.groups - 1) >> cut.groups_log2;
    }
  };

  __device__ static void run(const TaskRecord& task, const BodyContext&) {
    const Job job = job_of(task);
    if (job.units == 0) return;  // all threads
#pragma unroll 1
    for (u32 warp = threadIdx.x / 32; warp < kWarps; warp += kTeamWarps) multiply(task, job, warp);
  }

 private:
  GPURT_FN static u32 all_rows(const TaskRecord& task) {
    return task.param[T::kSampled] != 0 ? shared().sample_count : shared().rows;
  }

  GPURT_FN static Job job_of(const TaskRecord& task) {
    Job job;
    const u32 all = (task.param[T::kN] + 15) / 16, tile = task.tile[0] / 16;
    u32 size = task.param[matvec_input::kRowTiles], begin = tile & ~(size - 1);
    // Those at W's end are smaller: graphs/ops/packing.py.
    while (begin + size > all || tile >= begin + size) {
      if (begin + size <= all) begin += size;
      size /= 2;
    }
    job.cut.chunks = (task.param[T::kK] + 63) / 64;
    job.cut.groups = 16 / size;
    job.cut.groups_log2 = 31 - __clz(static_cast<i32>(job.cut.groups));
    job.tiles = (task.tile[1] - task.tile[0] + 15) / 16;
    job.rows = all_rows(task);
    job.blocks = (job.rows + kBlock - 1) / kBlock;
    job.before = min(task.tile[2] / kBlock, job.blocks);
    const u32 behind = job.blocks - min((task.tile[3] + kBlock - 1) / kBlock, job.blocks);
    job.units = (job.tiles + kTiles - 1) / kTiles * job.blocks - job.before - behind;
    job.first = tile - begin;
    job.size_log2 = 31 - __clz(static_cast<i32>(size));
    job.cut.chain_log2 = job.size_log2 < 2 ? 2 - job.size_log2 : 0;
    job.w = task.addr[T::kArgW] + u64{begin} * job.cut.chunks * kUnitW;
    job.x = task.addr[T::kArgX];
    return job;
  }

  // One of the four that bring a chunk of a unit: a row tile of W, and a quarter of x.
  struct alignas(16) Copies {
    u64 w, x;  // of chunk 0
    u32 bytes_w, bytes_x, bytes;
    u32 apart;  // from one chunk of W to the next

    GPURT_FN static Copies of(const Job& job, u32 unit, u32 part) {
      // Packed tiles lie one after another; in each, chunks, and of each its row tiles.
      const u32 number = job.before + unit, block = number % job.blocks;
      const u32 of_w = number / job.blocks * kTiles + part;
      const u32 tile = job.first + of_w, inside = tile & ((1u << job.size_log2) - 1);
      const u32 place = (tile >> job.size_log2) * job.cut.chunks << job.size_log2 | inside;
      const u32 tiles = (min(job.rows - block * kBlock, kBlock) + 7) / 8, before = part * kOwn;
      Copies c;
      c.w = job.w + u64{place} * kUnitW;
      c.x = job.x + (u64{block} * job.cut.chunks * kStepTiles + before) * kUnitX;
      c.bytes_w = of_w < job.tiles ? kUnitW : 0;
      c.bytes_x = before < tiles ? min(tiles - before, kOwn) * kUnitX : 0;
      c.bytes = c.bytes_w + c.bytes_x;
      c.apart = kUnitW << job.size_log2;
      return c;
    }
    // By the lane that says so. at: a shared address of one.
    GPURT_FN static void send(bool sends, u32 at, u32 part, u32 chunk, u32 stage, u32 full) {
      const uint4 from = ld_shared_b128(at), how = ld_shared_b128(at + 16);
      const u64 w = (u64{from.y} << 32 | from.x) + u64{chunk} * how.w;
      const u64 x = (u64{from.w} << 32 | from.z) + u64{chunk} * kStepTiles * kUnitX;
      mbarrier_arrive_expect_if(sends, full, how.z);
      bulk_copy_to_shared_if(sends && how.x != 0, stage + part * kUnitW, w, how.x, full);
      bulk_copy_to_shared_if(sends && how.y != 0, stage + kTiles * kUnitW + part * kOwn * kUnitX, x,
                             how.y, full);
    }
  };

  // Behind the stages and what is parked there.
  struct Room {
    u64 full[kDepth], empty[kDepth];  // mbarriers of stages
    Job job;
    Copies copies[kUnitsMax][kTiles];
    u32 order[1];  // chunk and unit << 16 behind which i are left
  };
  static constexpr u32 kOrderMax = (kRingBytes - kDepth * kStage - kBehind - sizeof(Room)) / 4;
  static_assert(kOrderMax >= 1024);  // as graphs/ops/matvec_wide_cuda.py cuts tasks
  GPURT_FN static Room& room() {
    return *reinterpret_cast<Room*>(shared().ring[0] + kDepth * kStage + kBehind);
  }
  // Anew for each task: the ring is not ours between two.
  GPURT_FN static void open_room(const Job& job) {
    const Cut& cut = job.cut;
    for (u32 i = threadIdx.x; i < job.units * cut.groups; i += kTeamThreads) {
      const u32 unit = i >> cut.groups_log2, at = i & (cut.groups - 1);
      u32* order = room().order + (job.units - unit) * cut.chunks - 1;
      for (u32 j = 0; j < at; ++j) order -= Order::chunks(cut, j);
      for (u32 chunk = Order::group(cut, at); chunk < cut.chunks; chunk += cut.groups)
        *order-- = chunk | unit << 16;
    }
    for (u32 i = threadIdx.x; i < job.units * kTiles; i += kTeamThreads)
      room().copies[i / kTiles][i % kTiles] = Copies::of(job, i / kTiles, i % kTiles);
    if (threadIdx.x == 0) {
      room().job = job;
      for (u32 i = 0; i < kDepth; ++i) {
        mbarrier_init(shared_address(room().full + i), kTiles);
        mbarrier_init(shared_address(room().empty + i), kTeamWarps);
      }
      fence_mbarrier_init();
    }
    fence_proxy_async_global();  // x
    team_sync();
  }
  GPURT_FN static void close_room() {
    team_sync();  // nobody waits any more
    if (threadIdx.x != 0) return;
    for (u32 i = 0; i < kDepth; ++i) {
      mbarrier_inval(shared_address(room().full + i));
      mbarrier_inval(shared_address(room().empty + i));
    }
  }

  // Where a warp stands in the stages. Two mbarriers each: `full`, the copies are there, and
  // `empty`, all warps have multiplied. So no warp waits for the slowest one of a chunk, and of the
  // one before only who copies.
  struct Turn {
    u32 stage, parity;

    GPURT_FN Turn next() const {
      return stage + 1 == kDepth ? Turn{0, parity ^ 1} : Turn{stage + 1, parity};
    }
    GPURT_FN Turn last() const {
      return stage == 0 ? Turn{kDepth - 1, parity ^ 1} : Turn{stage - 1, parity};
    }
    GPURT_FN u32 at() const { return shared_address(shared().ring) + stage * kStage; }
    GPURT_FN u32 full() const { return shared_address(room().full) + stage * 8; }
    GPURT_FN u32 empty() const { return shared_address(room().empty) + stage * 8; }
    GPURT_FN void wait(u32 barrier) const {
      while (!mbarrier_try_wait(barrier, parity)) {
      }
    }
    // Behind this warp's last look at the stage. Without a proxy fence: its loads have come, since
    // the products of what they brought are made.
    GPURT_FN void leave() const {
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
    }
    // The chunk behind which `left` are: four warps by turns, a lane each.
    GPURT_FN void send(u32 left) const {
      const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (kTeamWarps != 1 && warp / kTiles != left % (kTeamWarps / kTiles)) return;  // whole warps
      const u32 part = kTeamWarps == 1 ? lane % kTiles : warp % kTiles;
      const u32 next = room().order[left];
      wait(empty());  // of a fresh stage: the phase before the first, which is over
      Copies::send(kTeamWarps == 1 ? lane < kTiles : lane == 0,
                   shared_address(room().copies) + ((next >> 16) * kTiles + part) * sizeof(Copies),
                   part, next & 0xFFFF, at(), full());
    }
  };

  // Two mma chains of these; by wgmma, inside a group, one chain of two quarters.
  using Chains = f32[2 * kOwn][4];

  GPURT_FN static void multiply(const TaskRecord& task, const Job& job, u32 warp) {
    open_room(job);
    // What the loop over chunks does not need lies in shared memory: registers are few.
    const Job& own = room().job;
    const Cut& cut = own.cut;
    Turn turn{0, 1};
    u32 left = own.units * cut.chunks;  // to multiply
#pragma unroll 1
    for (u32 i = 1; i <= min(kDepth - 1, left); ++i, turn = turn.next()) turn.send(left - i);
    turn = {0, 0};
    turn.wait(turn.full());
#pragma unroll 1
    for (u32 unit = 0; unit < own.units; ++unit) {
      Chains sum = {};
      Sums chain;
      restart(cut, chain);
#pragma unroll 1
      for (u32 at = 0; at < cut.groups; ++at) {
#pragma unroll 1
        for (u32 of_group = Order::chunks(cut, at); of_group != 0; --of_group) {
          // Four warps stay together, also where W ends.
          if (kByFour || Place::works(own, unit, warp)) begin_chunk(turn.at(), warp, sum);
          // Meanwhile the next one comes, and copies go out into the stage that was left before.
          const Turn next = turn.next();
          if (left > 1) next.wait(next.full());
          if (left >= kDepth) turn.last().send(left - kDepth);
          if constexpr (kByFour) warps_mma_wait(sum);
          turn.leave();
          turn = next;
          --left;
        }
        if constexpr (kByFour) swap(warp, sum);
        close_group(cut, at, warp, sum, chain);
      }
      finish(task, own, unit, warp, chain);
    }
    close_room();
  }

  // Two mma of each half of a chunk, one a chain, in the order of MatvecActivations' pairs. By four
  // warps they are under way then, those of one chain.
  GPURT_FN static void begin_chunk(u32 stage, u32 warp, Chains& sum) {
    const u32 of_x = stage + kTiles * kUnitW;
    if constexpr (kByFour) {
      const u32 half = warp / (2 * kTiles), first = warp / kTiles % 2 * T::kMmaBytes;
      const u64 rows = warps_mma_operand(stage + first, T::kCoreBytes, T::kHighBytes);
      const u64 columns =
          warps_mma_operand(of_x + half * 2 * kOwn * kUnitX + first, kCoreX, kUnitX);
      warps_mma_begin(sum);
#pragma unroll
      for (u32 i = 0; i < 2; ++i)
        warps_mma_m64n64k16_bf16(sum, rows + i * (2 * T::kMmaBytes / 16),
                                 columns + i * (4 * kCoreX / 16));
      warps_mma_commit();
      return;
    }
    const u32 w = stage + warp % kTiles * kUnitW + T::place_in_unit();
    const u32 x = of_x + warp / kTiles * kOwn * kUnitX + threadIdx.x % 32 * 16;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const uint4 first = ld_shared_matrices(w + 2 * h * T::kMmaBytes),
                  second = ld_shared_matrices(w + (2 * h + 1) * T::kMmaBytes);
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
        const uint4 v = ld_shared_matrices(x + n * kUnitX + h * 512);
        mma_m16n8k16_bf16(sum[n], first, v.x, v.y);
        mma_m16n8k16_bf16(sum[kOwn + n], second, v.z, v.w);
      }
    }
  }

  // What this thread keeps of its outputs in one of the places.
  GPURT_FN static float4* parked(u32 place, u32 warp, u32 n) {
    u8* base =
        place == 0 ? shared().scratch : shared().ring[0] + kDepth * kStage + (place - 1) * kParked;
    return reinterpret_cast<float4*>(base) + n * kWarps * 32 + warp * 32 + threadIdx.x % 32;
  }
  GPURT_FN static void put(u32 place, u32 warp, const Sums& from) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n)
      *parked(place, warp, n) = make_float4(from[n][0], from[n][1], from[n][2], from[n][3]);
  }
  GPURT_FN static void add_parked(u32 place, u32 warp, Sums& to) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
      const float4 v = *parked(place, warp, n);
      to[n][0] = v.x + to[n][0], to[n][1] = v.y + to[n][1];
      to[n][2] = v.z + to[n][2], to[n][3] = v.w + to[n][3];
    }
  }

  // What the other quarter's warp has of this one's outputs for what this one has of the other's.
  GPURT_FN static void swap(u32 warp, Chains& sum) {
    if (warp / kTiles % 2 == 0) {
      swap_own(warp, *reinterpret_cast<Sums*>(sum + kOwn));
    } else {
      swap_own(warp, *reinterpret_cast<Sums*>(sum));
    }
  }
  GPURT_FN static void swap_own(u32 warp, Sums& sum) {
    const u32 pair = kBodyBarrier + warp / (2 * kTiles) * kTiles + warp % kTiles;
    bar_sync(pair, 64);  // the other has taken what was put before
    put(2, warp, sum);
    bar_sync(pair, 64);
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
      const float4 v = *parked(2, warp ^ kTiles, n);
      sum[n][0] = v.x, sum[n][1] = v.y, sum[n][2] = v.z, sum[n][3] = v.w;
    }
  }

  // A chain of one group is that, whatever the sign of its zero: -0 + v = v for every v.
  GPURT_FN static void restart(const Cut& cut, Sums& chain) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) chain[n][i] = cut.groups < 4 ? -0.0f : 0.0f;
    }
  }

  // As MatvecTask::sum_groups adds them. After the last group `chain` is the sum of all.
  GPURT_FN static void close_group(const Cut& cut, u32 at, u32 warp, Chains& sum, Sums& chain) {
    const u32 number = at >> cut.chain_log2;  // of its chain
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        chain[n][i] += sum[n][i] + sum[kOwn + n][i];
        sum[n][i] = sum[kOwn + n][i] = 0;
      }
    }
    if ((at + 1) >> cut.chain_log2 == number) return;
    const u32 place = number / 2;
    if (number % 2 == 1) add_parked(place, warp, chain);
    if (number == 3) add_parked(0, warp, chain);
    if (at + 1 == cut.groups) return;
    put(place, warp, chain);
    restart(cut, chain);
  }
};

}  // namespace gpurt
