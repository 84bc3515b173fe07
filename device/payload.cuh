// Payload edges on the device: how bodies poll, read and write granules.
//
// A granule is 16 aligned bytes, read and written by one ld/st.relaxed.gpu.b128 each, which is
// single-copy atomic: if its first word is not the sentinel, all of it has arrived. Polls are
// converged: a whole warp looks, and goes on together. The rules of payload.hpp hold: writers
// canonicalise, the test is for the exact bits, and only these bytes are ordered.
#pragma once
#include "payload.hpp"
#include "spin.cuh"

namespace gpurt {

GPURT_FN bool is_sentinel(const uint4& granule) {
  return granule.x == kPayloadSentinel;
}

// Whether a converged poll goes on: some lane's data is missing and the block does not leave.
GPURT_FN bool payload_missing(bool missing, u32& polls) {
  if (!__any_sync(~0u, missing)) return false;
  return !is_look(++polls) || !__any_sync(~0u, is_leaving());
}

// A granule at `address`, polled if `payload`. All lanes of a warp, converged; a lane that needs
// nothing passes any address that never holds the sentinel, or `payload` false.
GPURT_FN uint4 load_granule(u64 address, bool payload, const BodyContext& context) {
  (void)context;
  uint4 v = ld_relaxed_gpu_b128(address);
  for (u32 polls = 0; payload_missing(payload && is_sentinel(v), polls);)
    v = ld_relaxed_gpu_b128(address);
  return v;
}

// Two neighbours at once: their round trips overlap.
GPURT_FN void load_granules(u64 address, bool payload, const BodyContext& context, uint4& first,
                            uint4& second) {
  (void)context;
  first = ld_relaxed_gpu_b128(address);
  second = ld_relaxed_gpu_b128(address + 16);
  for (u32 polls = 0;
       payload_missing(payload && (is_sentinel(first) || is_sentinel(second)), polls);) {
    first = ld_relaxed_gpu_b128(address);
    second = ld_relaxed_gpu_b128(address + 16);
  }
}

// Four floats, canonical, in one store. Any lanes; right for payload and for ordinary arguments.
GPURT_FN void store_granule(u64 address, f32 a, f32 b, f32 c, f32 d) {
  st_relaxed_gpu_b128(
      address, make_uint4(canonical_f32(__float_as_uint(a)), canonical_f32(__float_as_uint(b)),
                          canonical_f32(__float_as_uint(c)), canonical_f32(__float_as_uint(d))));
}

}  // namespace gpurt
