// matvec on the GPU for steps of many rows: up to 64 rows of W by up to 128 step rows a task.
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
//   warp (tile, quarter) = 16 rows of W by 32 step rows; four warps of a quarter, a wgmma of 64 x
//   32 stage of 64 columns  = 4 units of W of 2 KB, 16 of x of 1 KB
//
// W's units are wgmma's A in registers, x's cores its B in shared memory, and its sums have the
// bits of mma.sync (tools/LOG.md), which other architectures and teams of one warp use.
// Floor of a chunk and SM: 256 cycles of wgmma; 72 KB through shared memory's port (576 cycles: W
// once for each quarter, x once, and both on their way in); 24 KB from L2 (350).
#pragma once
#include "matvec_input.cuh"
#include "ring_body.cuh"

namespace gpurt {

struct matvec_wide : RingBody<matvec_wide> {
  using T = MatvecTask;
  static constexpr u32 kWarps = 16;      // at work on a task, whatever the team
  static constexpr u32 kTiles = 4;       // of 16 rows of W
  static constexpr u32 kStepTiles = 16;  // of 8 step rows
  static constexpr u32 kOwn = 4;         // of them, a warp's
  static constexpr u32 kUnitW = 2048, kUnitX = 1024;
  static constexpr u32 kCoreX = 128;  // 8 step rows x 8 columns
  static constexpr bool kByFour = GPURT_WGMMA != 0 && kTeamWarps >= kTiles;  // warps, by wgmma
  static constexpr bool kInKernel = kByFour;                                 // scheduler/team.cuh
  static constexpr u32 kStage = kTiles * kUnitW + kStepTiles * kUnitX;
  // A number for each output: of chains that are done. There are two such places, in the scratch
  // and behind the stages.
  static constexpr u32 kParked = kTiles * 16 * kStepTiles * 8 * 4;
  static constexpr u32 kDepth = (kRingBytes - kParked) / kStage;
  static_assert(kDepth >= 3 && kParked <= kScratchBytes);

  // How K is cut: its groups are added in chains of 2^chain_log2.
  struct Cut {
    u32 chunks, groups, groups_log2, chain_log2;
  };

  // What all lanes share.
  struct Job {
    Cut cut;
    u32 tiles, rows;       // of W, and of the step, that are there
    u32 first, size_log2;  // row tile in its packed tile, and how many that one has
    u64 w, x;
  };

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
    if (task.tile[2] >= all_rows(task)) return;  // all threads
#pragma unroll 1
    for (u32 warp = threadIdx.x / 32; warp < kWarps; warp += kTeamWarps) multiply(task, warp);
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
    job.rows = min(task.tile[3], all_rows(task)) - task.tile[2];
    job.first = tile - begin;
    job.size_log2 = 31 - __clz(static_cast<i32>(size));
    job.cut.chain_log2 = job.size_log2 < 2 ? 2 - job.size_log2 : 0;
    job.w = task.addr[T::kArgW] + u64{begin} * job.cut.chunks * kUnitW;
    job.x = task.addr[T::kArgX] + u64{task.tile[2] / 8} * job.cut.chunks * kUnitX;  // whole blocks
    return job;
  }

  // One of the four that bring a chunk: a row tile of W, and a quarter of x.
  struct Copies {
    u64 w, x;  // of chunk 0
    u32 bytes_w, bytes_x, apart;

    GPURT_FN static Copies of(const Job& job, u32 part) {
      // Packed tiles lie one after another; in each, chunks, and of each its row tiles.
      const u32 tile = job.first + part, inside = tile & ((1u << job.size_log2) - 1);
      const u32 unit = (tile >> job.size_log2) * job.cut.chunks << job.size_log2 | inside;
      const u32 tiles = (job.rows + 7) / 8, before = part * kOwn;
      Copies c;
      c.w = job.w + u64{unit} * kUnitW, c.x = job.x + before * kUnitX;
      c.bytes_w = part < job.tiles ? kUnitW : 0;
      c.bytes_x = before < tiles ? min(tiles - before, kOwn) * kUnitX : 0;
      c.apart = kUnitW << job.size_log2;  // from one chunk of W to the next
      return c;
    }
    GPURT_FN void send(u32 part, u32 chunk, u32 stage, u32 full) const {
      mbarrier_arrive_expect(full, bytes_w + bytes_x);
      if (bytes_w != 0)
        bulk_copy_to_shared(stage + part * kUnitW, w + u64{chunk} * apart, bytes_w, full);
      if (bytes_x != 0)
        bulk_copy_to_shared(stage + kTiles * kUnitW + part * kOwn * kUnitX,
                            x + u64{chunk} * kStepTiles * kUnitX, bytes_x, full);
    }
  };

  // Behind the stages and what is parked there.
  struct Room {
    u64 full[kDepth], empty[kDepth];  // mbarriers of stages
    Job job;
    Copies copies[kTiles];
    u16 order[1];  // the chunk that is taken as number i
  };
  static constexpr u32 kChunksMax = (kRingBytes - kDepth * kStage - kParked - sizeof(Room)) / 2;
  static_assert(kChunksMax >= 1024);  // graphs/ops/matvec_wide_cuda.py refuses more columns
  GPURT_FN static Room& room() {
    return *reinterpret_cast<Room*>(shared().ring[0] + kDepth * kStage + kParked);
  }
  // Anew for each task: the ring is not ours between two.
  GPURT_FN static void open_room(const Job& job) {
    const Cut& cut = job.cut;
    u16* order = room().order;
    for (u32 at = threadIdx.x; at < cut.groups; at += kTeamThreads) {
      u32 first = 0;
      for (u32 i = 0; i < at; ++i) first += Order::chunks(cut, i);
      const u32 group = Order::group(cut, at);
      for (u32 chunk = group; chunk < cut.chunks; chunk += cut.groups)
        order[first++] = static_cast<u16>(chunk);
    }
    if (threadIdx.x < kTiles) room().copies[threadIdx.x] = Copies::of(job, threadIdx.x);
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
    // Chunk `number` of the order: four warps by turns, a lane each.
    GPURT_FN void send(u32 number) const {
      const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const u32 part = kTeamWarps == 1 ? lane : warp % kTiles;
      if (kTeamWarps == 1 ? lane >= kTiles
                          : lane != 0 || warp / kTiles != number % (kTeamWarps / kTiles))
        return;
      const u32 chunk = room().order[number];
      wait(empty());  // of a fresh stage: the phase before the first, which is over
      room().copies[part].send(part, chunk, at(), full());
    }
  };

  using Sums = f32[kOwn][4];

  GPURT_FN static void multiply(const TaskRecord& task, u32 warp) {
    const Job job = job_of(task);
    const Cut cut = job.cut;
    // Four warps stay together, also where W ends.
    const bool works =
        (kByFour || warp % kTiles < job.tiles) && warp / kTiles * kOwn * 8 < job.rows;
    Sums sum[2] = {}, chain;
    restart(cut, chain);
    open_room(job);
    Turn turn{0, 1};
    u32 sent = 0;
#pragma unroll 1
    for (; sent != min(kDepth - 1, cut.chunks); ++sent, turn = turn.next()) turn.send(sent);
    turn = {0, 0};
#pragma unroll 1
    for (u32 at = 0; at < cut.groups; ++at) {
#pragma unroll 1
      for (u32 left = Order::chunks(cut, at); left != 0; --left) {
        turn.wait(turn.full());
        if (kByFour || works) add_chunk(turn.at(), warp, sum);
        turn.leave();
        if (sent < cut.chunks) turn.last().send(sent++);
        turn = turn.next();
      }
      if (works) close_group(cut, at, warp, sum, chain);
    }
    if (works) finish(task, room().job, warp, chain);
    close_room();
  }

  // Two mma of each half of a chunk, one a chain: in the order of MatvecActivations' pairs.
  GPURT_FN static void add_chunk(u32 stage, u32 warp, Sums (&sum)[2]) {
    const u32 lane = threadIdx.x % 32 * 16;
    const u32 w = stage + warp % kTiles * kUnitW + lane;
    const u32 x = stage + kTiles * kUnitW + warp / kTiles * kOwn * kUnitX;
    if constexpr (kByFour) {
      uint4 rows[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) rows[i] = ld_shared_b128(w + i * 512);
      const u64 columns = warps_mma_operand(x, kCoreX, kUnitX);
      warps_mma_begin(sum[0], sum[1]);
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        warps_mma_m64n32k16_bf16(sum[i % 2], rows[i], columns + i * (2 * kCoreX / 16));
      warps_mma_wait(sum[0], sum[1]);
      return;
    }
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const uint4 first = ld_shared_b128(w + h * 1024), second = ld_shared_b128(w + h * 1024 + 512);
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
        const uint4 v = ld_shared_matrices(x + n * kUnitX + h * 512 + lane);
        mma_m16n8k16_bf16(sum[0][n], first, v.x, v.y);
        mma_m16n8k16_bf16(sum[1][n], second, v.z, v.w);
      }
    }
  }

  // What this thread keeps of its outputs in one of two places.
  GPURT_FN static float4* parked(u32 place, u32 warp, u32 n) {
    u8* base = place == 0 ? shared().scratch : shared().ring[0] + kDepth * kStage;
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

  // A chain of one group is that, whatever the sign of its zero: -0 + v = v for every v.
  GPURT_FN static void restart(const Cut& cut, Sums& chain) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) chain[n][i] = cut.groups < 4 ? -0.0f : 0.0f;
    }
  }

  // As MatvecTask::sum_groups adds them. After the last group `chain` is the sum of all.
  GPURT_FN static void close_group(const Cut& cut, u32 at, u32 warp, Sums (&sum)[2], Sums& chain) {
    const u32 number = at >> cut.chain_log2;  // of its chain
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        chain[n][i] += sum[0][n][i] + sum[1][n][i];
        sum[0][n][i] = sum[1][n][i] = 0;
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

  // Where this thread's outputs lie: rows g and g + 8 of W of step rows 2c and 2c + 1 of each tile.
  // Of pairs it has one: that of row g, or the one eight rows on where g is odd.
  struct Place {
    u32 row, of_w, rows, all_of_w;  // its first ones in the task, and how many are there
    u32 width, paired;
    u64 first;

    GPURT_FN static Place of(const TaskRecord& task, const Job& job, u32 warp) {
      const u32 paired = task.param[T::kEpilogue] == T::kSwiglu ? 1 : 0;
      const u32 row = warp / kTiles * kOwn * 8 + threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
      const u32 of_w = warp % kTiles * 16 + g + (paired & g) * 7,
                width = task.param[T::kN] >> paired;
      const u64 first = u64{task.tile[2] + row} * width + ((task.tile[0] + of_w) >> paired);
      return {row, of_w, job.rows, task.tile[1] - task.tile[0], width, paired, first};
    }
    GPURT_FN bool has(u32 n, u32 i) const {
      return row + n * 8 + i % 2 < rows && of_w + i / 2 * 8 < all_of_w;
    }
    GPURT_FN u64 at(u32 n, u32 i) const { return first + (n * 8 + i % 2) * width + i / 2 * 8; }
  };

  GPURT_FN static void finish(const TaskRecord& task, const Job& job, u32 warp, Sums& value) {
    const Place place = Place::of(task, job, warp);
    if (task.addr[T::kArgNorm] != 0) scale_rows(task, job, place, value);
    if constexpr (kMatvecScaled) {
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) value[n][i] = scaled(task, value[n][i]);
      }
    }
    if (place.paired != 0) {
      join_pairs(value);
      add_and_store<2>(task, place, value);
    } else {
      add_and_store<4>(task, place, value);
    }
  }

  // Lanes of a gate and of its up part share the pairs of both their rows: [n][0] and [n][1].
  GPURT_FN static void join_pairs(Sums& value) {
    const bool has_up = (threadIdx.x / 4 & 1) != 0;
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const f32 low = value[n][i], high = value[n][2 + i], own = has_up ? high : low;
        const f32 other = __shfl_xor_sync(~0u, has_up ? low : high, 4);
        value[n][i] = T::swiglu(has_up ? other : own, has_up ? own : other);
      }
    }
  }

  // COUNT: of a thread's outputs in each tile. Loads go out before the first store.
  template <u32 COUNT>
  GPURT_FN static void add_and_store(const TaskRecord& task, const Place& place, Sums& value) {
    if (task.addr[T::kArgResidual] != 0) {
      const f32* residual = arg<const f32>(task, T::kArgResidual);
      f32 held[kOwn][COUNT];
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i)
          held[n][i] = place.has(n, i) ? residual[place.at(n, i)] : 0.0f;
      }
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) value[n][i] = __fadd_rn(value[n][i], held[n][i]);
      }
    }
    if (task.param[T::kYDtype] == kBf16) {
      store<COUNT>(arg<u16>(task, T::kArgY), place, value);
    } else {
      store<COUNT>(arg<f32>(task, T::kArgY), place, value);
    }
  }

  GPURT_FN static void convert(f32 v, f32& to) { to = v; }
  GPURT_FN static void convert(f32 v, u16& to) { to = static_cast<u16>(pack_bf16x2(v, 0.0f)); }

  template <u32 COUNT, class Y>
  GPURT_FN static void store(Y* y, const Place& place, const Sums& value) {
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i) {
        if (place.has(n, i)) convert(value[n][i], y[place.at(n, i)]);
      }
    }
  }

  // By the factor of each step row, for packed tiles of this task's size. A row that is not there
  // takes the last one's, and is not stored.
  GPURT_FN static void scale_rows(const TaskRecord& task, const Job& job, const Place& place,
                                  Sums& value) {
    const f32* factors = arg<const f32>(task, T::kArgNorm) + job.size_log2 * 8;
    f32 factor[kOwn][2];
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = task.tile[2] + min(place.row + n * 8 + i, job.rows - 1);
        factor[n][i] = factors[row / 8 * matvec_input::kSizes * 8 + row % 8];
      }
    }
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) value[n][i] = __fmul_rn(value[n][i], factor[n][i % 2]);
    }
  }

  GPURT_FN static f32 scaled(const TaskRecord& task, f32 v) {
    if constexpr (kMatvecScaled) {
      if (param_f32(task, kMatvecScale) != 1 || param_f32(task, kMatvecSoftcap) > 0)
        v = scale_and_cap(v, param_f32(task, kMatvecScale), param_f32(task, kMatvecSoftcap));
    }
    return v;
  }
};

}  // namespace gpurt
