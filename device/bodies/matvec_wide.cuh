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
//   warp (tile, quarter) = 16 rows of W by 32 step rows
//   stage of 64 columns  = 4 units of W of 2 KB, 16 of x of 1 KB
//
// Floor of a chunk and SM: 256 mma; 96 KB from shared memory (770 cycles); 24 KB from L2.
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
  static constexpr u32 kStage = kTiles * kUnitW + kStepTiles * kUnitX;
  // A number for each output: of chains that are done. There are two such places, in the scratch
  // and behind the stages.
  static constexpr u32 kParked = kTiles * 16 * kStepTiles * 8 * 4;
  static constexpr u32 kDepth = (kRingBytes - kParked) / kStage;
  static_assert(kDepth >= 2 && kParked <= kScratchBytes);

  // What all lanes share.
  struct Job {
    u32 chunks, groups;    // of K
    u32 tiles, rows;       // of W, and of the step, that are there
    u32 first, size_log2;  // row tile in its packed tile, and how many that one has
    u64 w, x;
  };

  // Chunks as they are taken: group by group, chain by chain.
  struct Order {
    u32 at, chunk;  // number of the group in this order

    GPURT_FN static u32 group(const Job& job, u32 at) {
      const u32 of_chain = job.groups / 4;
      return job.groups < 4 ? at : at % of_chain * 4 + at / of_chain;
    }
    GPURT_FN void advance(const Job& job) {
      chunk += job.groups;
      while (chunk >= job.chunks && ++at < job.groups) chunk = group(job, at);
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
    u32 size = task.param[matvec_input::kRowTiles], begin = tile / size * size;
    // Those at W's end are smaller: graphs/ops/packing.py.
    while (begin + size > all || tile >= begin + size) {
      if (begin + size <= all) begin += size;
      size /= 2;
    }
    job.chunks = (task.param[T::kK] + 63) / 64;
    job.groups = 16 / size;
    job.tiles = (task.tile[1] - task.tile[0] + 15) / 16;
    job.rows = min(task.tile[3], all_rows(task)) - task.tile[2];
    job.first = tile - begin;
    job.size_log2 = 31 - __clz(static_cast<i32>(size));
    job.w = task.addr[T::kArgW] + u64{begin} * job.chunks * kUnitW;
    job.x = task.addr[T::kArgX] + u64{task.tile[2] / 8} * job.chunks * kUnitX;
    return job;
  }

  // A chunk on its way into a stage: 16 bytes a thread and copy.
  GPURT_FN static void fetch(const Job& job, u32 chunk, u32 stage) {
    constexpr u32 kOfW = kUnitW / 16, kOfX = kUnitX / 16;
#pragma unroll 2
    for (u32 n = 0; n < kTiles * kOfW / kTeamThreads; ++n) {
      const u32 i = threadIdx.x + n * kTeamThreads, tile = job.first + i / kOfW;
      if (i / kOfW >= job.tiles) continue;
      // Packed tiles lie one after another; in each, chunks, and of each its row tiles.
      const u32 inside = tile & ((1u << job.size_log2) - 1);
      const u32 unit = ((tile >> job.size_log2) * job.chunks + chunk) << job.size_log2 | inside;
      copy16_to_shared(stage + i * 16, job.w + u64{unit} * kUnitW + i % kOfW * 16);
    }
#pragma unroll 2
    for (u32 n = 0; n < kStepTiles * kOfX / kTeamThreads; ++n) {
      const u32 i = threadIdx.x + n * kTeamThreads;
      if (i / kOfX * 8 >= job.rows) continue;
      const u64 from = job.x + u64{i / kOfX * job.chunks + chunk} * kUnitX + i % kOfX * 16;
      copy16_to_shared(stage + kTiles * kUnitW + i * 16, from);
    }
  }

  GPURT_FN static void fetch_next(const Job& job, Order& next, u32 stage) {
    if (next.at < job.groups) {
      fetch(job, next.chunk, stage);
      next.advance(job);
    }
    copies_commit();  // also of none: they are counted
  }

  using Sums = f32[kOwn][4];

  __device__ __noinline__ static void multiply(const TaskRecord& task, u32 warp) {
    const Job job = job_of(task);
    const u32 ring = shared_address(shared().ring);
    const bool works = warp % kTiles < job.tiles && warp / kTiles * kOwn * 8 < job.rows;
    Sums sum[2] = {}, chain = {};
    team_sync();  // a team of one warp: it has read what the last turn left in the stages
    Order next{0, 0};
#pragma unroll 1
    for (u32 i = 0; i + 1 < kDepth; ++i) fetch_next(job, next, ring + i * kStage);
    u32 taken = 0, filled = kDepth - 1;
#pragma unroll 1
    for (u32 at = 0; at < job.groups; ++at) {
#pragma unroll 1
      for (u32 chunk = Order::group(job, at); chunk < job.chunks; chunk += job.groups) {
        copies_wait<kDepth - 2>();
        team_sync();  // everybody's copies are there, and the stage before was read by all
        fetch_next(job, next, ring + filled * kStage);
        if (works) add_chunk(ring + taken * kStage, warp, sum);
        taken = taken + 1 == kDepth ? 0 : taken + 1;
        filled = filled + 1 == kDepth ? 0 : filled + 1;
      }
      if (works) close_group(job, at, warp, sum, chain);
    }
    if (works) finish(task, job, warp, chain);
  }

  // Two mma of each half of a chunk, one a chain: in the order of MatvecActivations' pairs.
  GPURT_FN static void add_chunk(u32 stage, u32 warp, Sums (&sum)[2]) {
    const u32 lane = threadIdx.x % 32 * 16;
    const u32 w = stage + warp % kTiles * kUnitW + lane;
    const u32 x = stage + kTiles * kUnitW + warp / kTiles * kOwn * kUnitX + lane;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const uint4 first = ld_shared_b128(w + h * 1024), second = ld_shared_b128(w + h * 1024 + 512);
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
        const uint4 v = ld_shared_b128(x + n * kUnitX + h * 512);
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

  // As MatvecTask::sum_groups adds them. After the last group `chain` is the sum of all.
  GPURT_FN static void close_group(const Job& job, u32 at, u32 warp, Sums (&sum)[2], Sums& chain) {
    const u32 of_chain = job.groups < 4 ? 1 : job.groups / 4;
    const bool begins = at % of_chain == 0;
#pragma unroll
    for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const f32 part = sum[0][n][i] + sum[1][n][i];
        sum[0][n][i] = sum[1][n][i] = 0;
        chain[n][i] = job.groups < 4 ? part : (begins ? 0.0f : chain[n][i]) + part;
      }
    }
    if ((at + 1) % of_chain != 0) return;
    const u32 number = at / of_chain, place = number / 2;
    if (number % 2 == 1) add_parked(place, warp, chain);
    if (number == 3) add_parked(0, warp, chain);
    if (at + 1 != job.groups) put(place, warp, chain);
  }

  // Where this thread's outputs lie: rows g and g + 8 of W of step rows 2c and 2c + 1 of each tile.
  struct Place {
    u32 row, of_w, rows, all_of_w;  // its first ones in the task, and how many are there
    u32 width, paired;
    u64 first;

    GPURT_FN static Place of(const TaskRecord& task, const Job& job, u32 warp) {
      const u32 paired = task.param[T::kEpilogue] == T::kSwiglu ? 1 : 0;
      const u32 row = warp / kTiles * kOwn * 8 + threadIdx.x % 4 * 2;
      const u32 of_w = warp % kTiles * 16 + threadIdx.x % 32 / 4,
                width = task.param[T::kN] >> paired;
      const u64 first = u64{task.tile[2] + row} * width + ((task.tile[0] + of_w) >> paired);
      return {row, of_w, job.rows, task.tile[1] - task.tile[0], width, paired, first};
    }
    GPURT_FN bool has(u32 n, u32 i) const {
      return row + n * 8 + i % 2 < rows && of_w + i / 2 * 8 < all_of_w;
    }
    GPURT_FN u64 at(u32 n, u32 i) const {
      return first + (n * 8 + i % 2) * width + (i / 2 * 8 >> paired);
    }
  };

  // Rolled but for the loads, which are under way at once: straight code would be fetched anew by
  // every task.
  GPURT_FN static void finish(const TaskRecord& task, const Job& job, u32 warp, Sums& value) {
    const Place place = Place::of(task, job, warp);
    const f32* residual = arg<const f32>(task, T::kArgResidual);
    Sums held = {};
    if (residual != nullptr) {
#pragma unroll
      for (u32 n = 0; n < kOwn; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) held[n][i] = place.has(n, i) ? residual[place.at(n, i)] : 0.0f;
      }
    }
    if (task.addr[T::kArgNorm] != 0) scale_rows(task, job, place, value);
    put(0, warp, value);
    put(1, warp, held);
#pragma unroll 1
    for (u32 n = 0; n < kOwn; ++n) {
      const float4 sums = *parked(0, warp, n), others = *parked(1, warp, n);
      const f32 sum[4] = {sums.x, sums.y, sums.z, sums.w};
      const f32 other[4] = {others.x, others.y, others.z, others.w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        f32 v = scaled(task, sum[i]);
        if (place.paired != 0) v = T::swiglu(v, __shfl_down_sync(~0u, v, 4));
        if (residual != nullptr) v = __fadd_rn(v, other[i]);
        if (!place.has(n, i) || (place.paired & place.of_w) != 0) continue;
        store(task, place.at(n, i), v);
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

  GPURT_FN static void store(const TaskRecord& task, u64 at, f32 v) {
    if (task.param[T::kYDtype] == kBf16) {
      arg<u16>(task, T::kArgY)[at] = static_cast<u16>(pack_bf16x2(v, 0.0f));
    } else {
      arg<f32>(task, T::kArgY)[at] = v;
    }
  }
};

}  // namespace gpurt
