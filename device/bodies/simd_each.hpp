// Includes GPURT_EACH_LEVEL, a body's kernels, once per SIMD level. No include guard, on purpose:
//   #define GPURT_EACH_LEVEL "matvec_kernels.hpp"
//   #include "simd_each.hpp"
// Inside, GPURT_SIMD_LEVEL names the namespace and GPURT_SIMD_FN marks every function: a target
// attribute must stand on each, since the translation unit is compiled for baseline x86-64.
#define GPURT_SIMD_LEVEL portable
#define GPURT_SIMD_FN inline
#include GPURT_EACH_LEVEL
#undef GPURT_SIMD_LEVEL
#undef GPURT_SIMD_FN

#if GPURT_SIMD_X86
#define GPURT_SIMD_LEVEL avx2
#define GPURT_SIMD_FN inline __attribute__((target(GPURT_TARGET_AVX2)))
#include GPURT_EACH_LEVEL
#undef GPURT_SIMD_LEVEL
#undef GPURT_SIMD_FN

#define GPURT_SIMD_LEVEL avx512
#define GPURT_SIMD_FN inline __attribute__((target(GPURT_TARGET_AVX512)))
#include GPURT_EACH_LEVEL
#undef GPURT_SIMD_LEVEL
#undef GPURT_SIMD_FN
#endif

#undef GPURT_EACH_LEVEL
