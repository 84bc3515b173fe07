// The scans of sample over a row of logits, at one SIMD level. Included by simd_each.hpp.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kScan = 1024;  // logits between two looks at the largest so far

/// The largest of `count` logits; NaN if one is NaN or infinite (then nobody uses it).
GPURT_SIMD_FN f32 largest_of(const f32* logits, u32 count) {
  const u32 whole = count / kLanes * kLanes;
  Vf largest = splat(-__builtin_inff());
  Vf poison = splat(0.0F);
  for (u32 i = 0; i < whole; i += kLanes) {
    const Vf v = load(logits + i);
    largest = max(v, largest);
    poison = fma(v, splat(0.0F), poison);
  }
  f32 tail = -__builtin_inff();
  f32 bad = sum_of(poison);
  for (u32 i = whole; i < count; ++i) {
    tail = logits[i] > tail ? logits[i] : tail;
    bad += logits[i] * 0.0F;
  }
  const f32 most = max_of(largest);
  return (most > tail ? most : tail) + bad;
}

/// The careful scan, one by one, for rows that hold NaN or an infinity.
GPURT_SIMD_FN LogitScan scan_slowly(const f32* logits, u32 count) {
  const f32 infinity = __builtin_inff();
  LogitScan scan{-infinity, 0, kNoColumn};
  for (u32 i = 0; i < count; ++i) {
    if (!(logits[i] < infinity)) {
      scan.bad_column = i;
      return scan;
    }
    if (logits[i] > scan.largest) {
      scan.largest = logits[i];
      scan.index = i;
    }
  }
  if (scan.largest == -infinity) scan.bad_column = 0;  // no token is possible
  return scan;
}

GPURT_SIMD_FN LogitScan scan_logits(const f32* logits, u32 count) {
  LogitScan scan{-__builtin_inff(), 0, kNoColumn};
  u32 where = 0;  // the first stretch that holds the largest
  for (u32 i = 0; i < count; i += kScan) {
    const f32 most = largest_of(logits + i, count - i < kScan ? count - i : kScan);
    if (most != most) return scan_slowly(logits, count);
    if (most > scan.largest) {
      scan.largest = most;
      where = i;
    }
  }
  scan.index = where;
  while (logits[scan.index] != scan.largest) ++scan.index;
  return scan;
}

/// weights = exp((logits - largest) / temperature).
GPURT_SIMD_FN void weigh_logits(const f32* logits, u32 count, f32 largest, f32 temperature,
                                f32* weights) {
  const u32 whole = count / kLanes * kLanes;
  const Vf most = splat(largest);
  const Vf divisor = splat(temperature);
  for (u32 i = 0; i < whole; i += kLanes) {
    store(weights + i, exp_of(div(sub(load(logits + i), most), divisor)));
  }
  if (whole < count) {
    const Vf tail = sub(load_part(logits + whole, count - whole), most);
    store_part(weights + whole, exp_of(div(tail, divisor)), count - whole);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
