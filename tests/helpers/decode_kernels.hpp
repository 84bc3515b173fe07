// nvfp4's decoding alone, as Nvfp4Kernel does it, for tests. Included by simd_each.hpp.
namespace gpurt::host::GPURT_SIMD_LEVEL {

/// The 16 floats of one block.
GPURT_SIMD_FN void decode_block(const u8* block, f32* to) {
  for (u32 i = 0; i < kNvfp4Block; i += kLanes) {
    store(to + i, mul(load_e2m1(block + i / 2), splat(kE4m3Values[block[kNvfp4Codes]])));
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
