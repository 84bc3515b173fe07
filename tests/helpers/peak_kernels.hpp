// What bounds the host bodies, at one SIMD level: reading, and multiplying codes. Included by
// simd_each.hpp.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// The sum of `count` floats, a multiple of four vectors: as fast as memory can be read.
GPURT_SIMD_FN f32 peak_read(const f32* from, u64 count) {
  Vf sum[4] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
  for (u64 i = 0; i < count; i += 4 * kLanes) {
    for (u32 t = 0; t < 4; ++t) {
      __builtin_prefetch(from + i + t * kLanes + 1024);
      sum[t] = add(sum[t], load(from + i + t * kLanes));
    }
  }
  return sum_of(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

/// `count` times one block of codes in registers with eight rows of activations in L1.
GPURT_SIMD_FN f32 peak_codes(const u8* block, const i16* codes, const f32* scale, u64 count) {
  const Qblock q = unpack_q8_0(block);
  Qacc acc[2][4];
  for (auto& row : acc) {
    for (auto& one : row) one = zero_acc();
  }
  for (u64 i = 0; i < count; ++i) {
    for (u32 j = 0; j < 2; ++j) {
      for (u32 r = 0; r < 4; ++r) {
        const Qsum sum = GPURT_SIMD_LEVEL::dot_block(q, codes + (r + i % 8) * 32);
        acc[j][r] = add_scaled(acc[j][r], sum, broadcast(scale + j));
      }
    }
  }
  const Quad sums = acc_sums_of(acc[0]) + acc_sums_of(acc[1]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
