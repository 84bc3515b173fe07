// Prompt look-up: what followed the last time a text ended as it ends now.
//
//   tokens  ... a b c x y ... q b c      the last `longest` tokens or fewer, as they stood before
//               ^match_end    ^length
//   proposals: x y ..., and past the end of the tokens the proposals themselves, so that a text
//   that repeats a short period is proposed as far as there is room
//
// Source: prompt look-up decoding (A. Saxena, 2023); here the latest of the longest matches, and
// one pass over the tokens, which a team of threads can share.
#pragma once
#include "task_record.hpp"

namespace gpurt {

// How many tokens, at most `longest`, are equal that end at tokens[end] and at the last one.
GPURT_FN u32 match_length(const u32* tokens, u32 length, u32 end, u32 longest) {
  u32 n = 0;
  while (n < longest && n <= end && tokens[end - n] == tokens[length - 1 - n]) ++n;
  return n;
}

// Orders matches: the longest first, of equals the latest. 0: no match.
GPURT_FN u64 match_rank(const u32* tokens, u32 length, u32 end, u32 longest) {
  const u64 n = match_length(tokens, length, end, longest);
  return n == 0 ? 0 : n << 32 | end;
}

// What followed the match of `rank`, if there is one. A match shorter than `longest` is weak
// evidence, and rows cost time: it gives as many proposals as it has tokens.
GPURT_FN void propose_after(const u32* tokens, u32 length, u64 rank, u32 longest, u32 limit,
                            Proposals& to) {
  const u32 match = static_cast<u32>(rank >> 32);
  const u32 end = static_cast<u32>(rank);
  if (match < longest && match < limit) limit = match;
  for (u32 i = 0; i < limit; ++i) {
    const u32 next = end + 1 + i;
    to.tokens[i] = next < length ? tokens[next] : to.tokens[next - length];
  }
  to.count = limit;
}

}  // namespace gpurt
