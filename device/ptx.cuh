// PTX by order and scope: the inline assembly of the device code, and nothing else.
//
// A name says what the instruction guarantees: ld_relaxed_b128, mbarrier_arrive (release at CTA
// scope), fence_proxy_async. Shared addresses are the 32-bit addresses of the shared window.
// Counters and flags go through atomics.hpp.
#pragma once
#include "types.hpp"

// Whether the architecture has the products of four warps, wgmma: only sm_90a.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GPURT_WGMMA 1
#else
#define GPURT_WGMMA 0
#endif

// 1 if ranks of the plan exchange payload: the generated bodies.gen.cuh says so. A granule's other
// side may then be another GPU.
#ifndef GPURT_RANKS
#define GPURT_RANKS 0
#endif
#if GPURT_RANKS
#define GPURT_GRANULE_SCOPE "sys"
#else
#define GPURT_GRANULE_SCOPE "gpu"
#endif

namespace gpurt {

GPURT_FN u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// The value is in a register from here on. Without it the compiler computes late what was meant to
// be ready before a wait ends.
GPURT_FN void pin(u32& value) {
  asm volatile("" : "+r"(value));
}
GPURT_FN void pin(u64& value) {
  asm volatile("" : "+l"(value));
}

// ---- mbarriers -------------------------------------------------------------------------------
GPURT_FN void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Before its memory is anything else: the hardware keeps state of an mbarrier beside the memory.
GPURT_FN void mbarrier_inval(u32 barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// After the inits, before the team barrier: the async proxy may complete a barrier only once it
// sees it initialised.
GPURT_FN void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
GPURT_FN void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same by who has read: `read` is made of all that was. One arrival, whatever it is, but the
// instruction waits for it, so nothing that follows the arrival can overtake the reads.
GPURT_FN void mbarrier_arrive_behind(u32 barrier, u32 read) {
  asm volatile(
      "{\n.reg .u32 n;\nor.b32 n, %1, 1;\nmin.u32 n, n, 1;\n"
      "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], n;\n}" ::"r"(barrier),
      "r"(read)
      : "memory");
}
// One arrival that also announces `bytes` of bulk copies to come in this phase.
GPURT_FN void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Whether the phase of this parity is complete. May suspend the thread for a short while.
GPURT_FN bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// The same, suspended for about `limit_ns` at most.
GPURT_FN bool mbarrier_try_wait_for(u32 barrier, u32 parity, u32 limit_ns) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(limit_ns)
      : "memory");
  return done != 0;
}
// The same, and never suspends.
GPURT_FN bool mbarrier_test_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- asynchronous copies ---------------------------------------------------------------------
// Async proxy. Source and destination aligned to 16, bytes a multiple of 16.
GPURT_FN void bulk_copy_to_shared(u32 to, u64 from, u32 bytes, u32 barrier) {
  u64 once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(once)
      : "memory");
}
// Both by the lanes that say so, of a warp whose lanes all come here: what a branch would take
// apart while products of four warps are under way.
GPURT_FN void mbarrier_arrive_expect_if(bool arrives, u32 barrier, u32 bytes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes), "r"(u32{arrives})
      : "memory");
}
GPURT_FN void bulk_copy_to_shared_if(bool copies, u32 to, u64 from, u32 bytes, u32 barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "r"(u32{copies})
      : "memory");
}
// Into L2, for loads that come later. Aligned to 16, bytes a multiple of 16; nothing waits for it.
GPURT_FN void prefetch_to_l2(u64 from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The 128 bytes that hold `from`, as above; by many lanes at once.
GPURT_FN void prefetch_line_to_l2(u64 from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Generic proxy, 16 bytes: what it overwrites needs no proxy fence.
GPURT_FN void copy16_to_shared(u32 to, u64 from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// One arrival on `barrier` when all earlier copy16_to_shared of this thread have landed.
GPURT_FN void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// This thread's copies of 16 bytes since the last one are a group; until all but the newest N
// groups have landed.
GPURT_FN void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <u32 N>
GPURT_FN void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Until all of them have.
GPURT_FN void wait_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// By every lane that read a stage, before the stage is released to the next bulk copy. Without it
// the copy overwrote a stage that was still being read, once in some hundred launches.
GPURT_FN void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// By who copies what other blocks stored in this launch, between the wait for them and the copy.
GPURT_FN void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Between two accesses of one thread: together with relaxed accesses a release or an acquire.
GPURT_FN void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// A lane gets what the lane has whose number is its own under SEGMENTS, and FROM beside these bits.
template <u32 SEGMENTS, u32 FROM>
GPURT_FN u32 shuffle_in_segments(u32 v) {
  u32 got;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, -1;"
               : "=r"(got)
               : "r"(v), "n"(FROM), "n"(SEGMENTS << 8 | 31));
  return got;
}

// Kept in a register: what hangs on the thread's number alone the compiler makes anew where it is
// needed, a special register's 20 cycles each time.
GPURT_FN u32 in_register(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// ---- global memory ---------------------------------------------------------------------------
// One granule of a payload edge: 16 bytes, single-copy atomic, so one word tells for all.
GPURT_FN uint4 ld_relaxed_b128(u64 from) {
  uint4 v;
  asm volatile(
      "{\n.reg .b128 q;\n.reg .b64 a, b;\n"
      "ld.relaxed." GPURT_GRANULE_SCOPE
      ".global.b128 q, [%4];\n"
      "mov.b128 {a, b}, q;\nmov.b64 {%0, %1}, a;\nmov.b64 {%2, %3}, b;\n}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from)
      : "memory");
  return v;
}
GPURT_FN void st_relaxed_b128(u64 to, uint4 v) {
  asm volatile(
      "{\n.reg .b128 q;\n.reg .b64 a, b;\n"
      "mov.b64 a, {%1, %2};\nmov.b64 b, {%3, %4};\nmov.b128 q, {a, b};\n"
      "st.relaxed." GPURT_GRANULE_SCOPE ".global.b128 [%0], q;\n}" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
// Half of a granule that another thread stores at once: single-copy atomic, too.
GPURT_FN uint2 ld_relaxed_b64(u64 from) {
  uint2 v;
  asm volatile("{\n.reg .b64 a;\nld.relaxed." GPURT_GRANULE_SCOPE
               ".global.b64 a, [%2];\n"
               "mov.b64 {%0, %1}, a;\n}"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from)
               : "memory");
  return v;
}
GPURT_FN u32 ld_relaxed_u32(u64 from) {
  u32 v;
  asm volatile("ld.relaxed." GPURT_GRANULE_SCOPE ".global.u32 %0, [%1];"
               : "=r"(v)
               : "l"(from)
               : "memory");
  return v;
}

GPURT_FN void st_relaxed_u32(u64 to, u32 v) {
  asm volatile("st.relaxed." GPURT_GRANULE_SCOPE ".global.u32 [%0], %1;" ::"l"(to), "r"(v)
               : "memory");
}

// Weights: nobody writes them while the kernel is resident, and nobody on this SM reads them again.
GPURT_FN uint4 ld_weight_b128(u64 from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
GPURT_FN u32 ld_weight_u16(u64 from) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}

// ---- shared memory ---------------------------------------------------------------------------
GPURT_FN uint4 ld_shared_b128(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// Four matrices of 8 x 8 elements of 16 bits; lane i names row i % 8 of matrix i / 8. Lane (g, c)
// gets elements 2c and 2c + 1 of row g of each.
GPURT_FN uint4 ld_shared_matrices(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row)
               : "memory");
  return v;
}

// Of all who offer words, not 0, for a word that is 0: the first one's. Acquires and releases.
GPURT_FN u32 decide_shared_u32(u32 at, u32 word) {
  u32 old;
  asm volatile("atom.acq_rel.cta.shared.cas.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "r"(at), "r"(word)
               : "memory");
  return old != 0 ? old : word;
}

GPURT_FN void st_shared_b128(u32 to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

GPURT_FN f32 ld_shared_f32(u32 from) {
  f32 v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}

GPURT_FN u32 ld_shared_u8(u32 from) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// Between warps of one block, where an mbarrier would be one more object a slot.
GPURT_FN u32 ld_shared_acquire_u32(u32 from) {
  u32 v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
GPURT_FN void st_shared_release_u32(u32 to, u32 v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

GPURT_FN void st_shared_f32(u32 to, f32 v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

GPURT_FN uint2 ld_shared_b64(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// ---- barriers and clocks ---------------------------------------------------------------------
// Among the `threads` of a team; the loader and other service warps never take part.
GPURT_FN void bar_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts among `threads` without waiting: whoever syncs on the barrier sees what was written
// before.
GPURT_FN void bar_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The low word: for differences of less than two seconds.
GPURT_FN u32 clock_cycles_low() {
  u32 cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}
GPURT_FN u64 clock_cycles() {
  u64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

// ---- arithmetic ------------------------------------------------------------------------------
// d += a b: 16 x 8, k = 16, bf16 in, f32 sums. a: weight rows, b: step rows.
GPURT_FN void mma_m16n8k16_bf16(f32 (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// The same in products of four warps, 64 x 64 and k = 16, of operands in shared memory: a warp has
// 16 rows of a, and sums, as above. Bits are those of mma.sync (tools/LOG.md). Asynchronous:
// registers of d belong to it from warps_mma_begin() to warps_mma_wait(), and what is done with d
// stays outside by naming it there.
GPURT_FN void pin(f32 (&d)[8][4]) {
#pragma unroll
  for (u32 n = 0; n < 8; ++n)
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
GPURT_FN void warps_mma_begin(f32 (&d)[8][4]) {
  pin(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
GPURT_FN void warps_mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
GPURT_FN void warps_mma_wait(f32 (&d)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(d);
}
// An operand: cores of 8 rows x 8 columns, 128 bytes; how far the next 8 columns lie, and rows.
GPURT_FN u64 warps_mma_operand(u32 at, u32 columns_apart, u32 rows_apart) {
  const u32 low = (at & 0x3FFFF) >> 4 | (columns_apart >> 4) << 16;
  return u64{rows_apart >> 4} << 32 | low;
}
GPURT_FN void warps_mma_m64n64k16_bf16(f32 (&d)[8][4], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b)
      : "memory");
}
// Transposes an 8 x 8 matrix of 16-bit elements; lane (g, c) holds 2c and 2c + 1 of row g.
GPURT_FN u32 movmatrix_trans(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}
// 2^x to 2 ulp; one instruction, where exp2f takes care of denormals by several.
GPURT_FN f32 ex2_approx_ftz(f32 x) {
  f32 v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
// 1 / x to 1 ulp; 0 of infinity.
GPURT_FN f32 rcp_approx_ftz(f32 x) {
  f32 v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
// Two floats to a pair of bf16, round to nearest even; NaN becomes 0x7FFF, never the sentinel.
GPURT_FN u32 pack_bf16x2(f32 low, f32 high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// Rounded once, denormals kept.
GPURT_FN u32 mul_bf16x2(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
GPURT_FN u32 pack_f16x2(f32 low, f32 high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
GPURT_FN f32 f32_from_f16(u16 bits) {
  f32 v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
// Two floats to a pair of e4m3, round to nearest even; beyond 448 it is 448, NaN stays NaN.
GPURT_FN u16 pack_e4m3x2(f32 low, f32 high) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}
// Exact: every e4m3 is a half.
GPURT_FN u32 f16x2_from_e4m3x2(u16 bits) {
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(bits));
  return v;
}

}  // namespace gpurt
