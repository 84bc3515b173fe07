// Payload edges: the data is its own flag. The part of the rules that host and device share.
//
// A reader polls a granule until it differs from the sentinel, so no value that a body stores may
// equal it: the sentinel is one exact NaN that arithmetic never makes, and bodies store through
// canonical_*(), which turns every NaN into another one. A row of NaN is then a Fault of the body
// that meets it, never a reader that waits for ever.
//   set of round r:  address + (r & 1) * Program::payload_set_bytes, refilled in round r + 1 of the
//                    same variant; no two variants share payload buffers
// The polling itself is the device's (payload.cuh): a host plan has no payload edges.
#pragma once
#include "task_record.hpp"

namespace gpurt {

constexpr u32 kPayloadSentinel = 0xFFFFFFFFu;  // all bits set: a NaN in f32, two of them in bf16
constexpr u32 kCanonicalNanF32 = 0x7FC00000u;
constexpr u16 kCanonicalNanBf16 = 0x7FC0u;

GPURT_FN u32 canonical_f32(u32 bits) {
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? kCanonicalNanF32 : bits;
}
GPURT_FN u16 canonical_bf16(u16 bits) {
  return (bits & 0x7FFFu) > 0x7F80u ? kCanonicalNanBf16 : bits;
}

// Where argument `i` of a task lies in this round.
GPURT_FN u64 arg_address(const TaskRecord& task, u32 i, u64 round, u64 payload_set_bytes) {
  const u64 in_set = (u64{task.payload_mask} >> i) & round & 1U;
  return task.addr[i] + in_set * payload_set_bytes;
}

}  // namespace gpurt
