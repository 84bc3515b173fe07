// Payload edges on the device: how bodies poll, read and write granules.
//
// A granule is 16 aligned bytes, read and written by one ld/st.relaxed.b128 each, which is
// single-copy atomic: if its first word is not the sentinel, all of it has arrived. From another
// rank it may come over a link that promises no more than whole words, so there all four are asked.
// Polls are converged: a whole warp looks, and goes on together; or a lane looks for itself where
// lanes have no like share. The rules of payload.hpp hold: writers canonicalise, the test is for
// the exact bits, and only these bytes are ordered.
#pragma once
#include "payload.hpp"
#include "spin.cuh"

namespace gpurt {

GPURT_FN bool is_sentinel(const uint4& granule) {
  // The largest word there is, so one compare for all four.
  if constexpr (GPURT_RANKS != 0)
    return max(max(granule.x, granule.y), max(granule.z, granule.w)) == kPayloadSentinel;
  return granule.x == kPayloadSentinel;
}

// Whether a converged poll goes on: some lane's data is missing and the block does not leave.
GPURT_FN bool payload_missing(bool missing, u32& polls) {
  if (!__any_sync(~0u, missing)) return false;
  return !is_look(++polls) || !__any_sync(~0u, is_leaving());
}

// Two neighbouring granules at once, polled if `payload`: their round trips overlap. All lanes of a
// warp, converged; a lane that needs nothing passes any address that never holds the sentinel.
GPURT_FN void load_granules(u64 address, bool payload, uint4& first, uint4& second) {
  first = ld_relaxed_b128(address);
  second = ld_relaxed_b128(address + 16);
  for (u32 polls = 0;
       payload_missing(payload && (is_sentinel(first) || is_sentinel(second)), polls);) {
    first = ld_relaxed_b128(address);
    second = ld_relaxed_b128(address + 16);
  }
}

// A granule that was not there yet, polled until it is. Any lanes. Out of line: a body that looks
// at several at once would hold this loop as often.
__device__ __noinline__ uint4 wait_granule(u64 address) {
  uint4 granule;
  u32 polls = 0;
  do {
    pause();
    granule = ld_relaxed_b128(address);
  } while (is_sentinel(granule) && !must_end(polls));
  return granule;
}

// A float of an argument that may be payload. Any lanes.
GPURT_FN f32 load_word(const f32* from) {
  return __uint_as_float(ld_relaxed_u32(reinterpret_cast<u64>(from)));
}
__device__ __noinline__ f32 wait_word(const f32* from) {
  f32 word;
  u32 polls = 0;
  do {
    pause();
    word = load_word(from);
  } while (__float_as_uint(word) == kPayloadSentinel && !must_end(polls));
  return word;
}
GPURT_FN f32 whole_word(f32 word, const f32* from, bool payload) {
  return payload && __float_as_uint(word) == kPayloadSentinel ? wait_word(from) : word;
}

GPURT_FN float4 float4_of(const uint4& v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

// Pieces of arguments that may be payload, in bodies that move four floats a thread, or one where
// rows are not made of fours: then each word is a flag of its own. Any lanes.
GPURT_FN float4 load_piece(const float4* from) {
  return float4_of(ld_relaxed_b128(reinterpret_cast<u64>(from)));
}
GPURT_FN f32 load_piece(const f32* from) {
  return load_word(from);
}
GPURT_FN bool is_missing(const float4& v) {
  return is_sentinel(make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                __float_as_uint(v.w)));
}
GPURT_FN bool is_missing(f32 v) {
  return __float_as_uint(v) == kPayloadSentinel;
}
// What load_piece() gave, once it is there. payload: whether it had to be waited for.
GPURT_FN float4 whole_piece(const float4& piece, const float4* from, bool payload) {
  if (!payload || !is_missing(piece)) return piece;
  return float4_of(wait_granule(reinterpret_cast<u64>(from)));
}
GPURT_FN f32 whole_piece(f32 piece, const f32* from, bool payload) {
  return whole_word(piece, from, payload);
}

// The same of several pieces, of which load(j) looks at piece j. Who waits for one after another
// makes a trip to L2 for each that was not there at first; here each look is at all that are
// missing.
template <u32 N, class Piece, class Load>
GPURT_FN void load_missing(Piece (&pieces)[N], bool payload, Load load) {
  if (!payload) return;
  for (u32 polls = 0;;) {
    u32 missing = 0;
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
      if (!is_missing(pieces[j])) continue;
      pieces[j] = load(j);
      missing = 1;
    }
    if (missing == 0 || must_end(polls)) return;
    pause();
  }
}
// Piece j at from(j).
template <u32 N, class Piece, class From>
GPURT_FN void whole_pieces(Piece (&pieces)[N], bool payload, From from) {
  load_missing(pieces, payload, [&](u32 j) { return load_piece(from(j)); });
}

// Four floats, canonical, in one store. Any lanes; right for payload and for ordinary arguments.
GPURT_FN void store_granule(u64 address, f32 a, f32 b, f32 c, f32 d) {
  st_relaxed_b128(address,
                  make_uint4(canonical_f32(__float_as_uint(a)), canonical_f32(__float_as_uint(b)),
                             canonical_f32(__float_as_uint(c)), canonical_f32(__float_as_uint(d))));
}

// Payload or not: bits that are no floats stay what they are where it is not.
GPURT_FN void store_piece(float4* to, const float4& v, bool payload) {
  if (payload) {
    store_granule(reinterpret_cast<u64>(to), v.x, v.y, v.z, v.w);
  } else {
    *to = v;
  }
}
GPURT_FN void store_piece(f32* to, f32 v, bool payload) {
  if (payload) {
    st_relaxed_u32(reinterpret_cast<u64>(to), canonical_f32(__float_as_uint(v)));
  } else {
    *to = v;
  }
}
// Whether input, or output, `i` of a task is payload: what has two sets and is none is a symmetric
// buffer behind a rank counter, and a task has no inputs, nor outputs, of both kinds.
GPURT_FN bool polls_input(const TaskRecord& task, u32 i) {
  return (task.flags & kTaskPayloadIn) != 0 && (task.payload_mask >> i & 1) != 0;
}
GPURT_FN bool arms_output(const TaskRecord& task, u32 i) {
  return (task.flags & kTaskPayloadOut) != 0 && (task.payload_mask >> i & 1) != 0;
}

}  // namespace gpurt
