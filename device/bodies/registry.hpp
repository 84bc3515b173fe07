// The host's bodies by name. A TaskRecord holds an index into a table that the executor fills at
// load from the plan's body names, so adding a body here changes no plan.
#pragma once
#include "context.hpp"
#include "noop.hpp"
#if __has_include("embed.hpp")
#include "embed.hpp"
#endif
#if __has_include("matvec.hpp")
#include "matvec.hpp"
#endif
#if __has_include("attention.hpp")
#include "attention.hpp"
#endif
#if __has_include("sample.hpp")
#include "sample.hpp"
#endif
#if __has_include("gated_residual.hpp")
#include "gated_residual.hpp"
#endif
#if __has_include("route.hpp")
#include "route.hpp"
#endif
#if __has_include("expert_matvec.hpp")
#include "expert_matvec.hpp"
#endif
#if __has_include("combine.hpp")
#include "combine.hpp"
#endif
#include "attention_commit.hpp"
#include "attention_merge.hpp"
#include "block_conv.hpp"
#include "candidates.hpp"
#include "collect.hpp"
#include "combine_columns.hpp"
#include "draft_ngram.hpp"
#include "draft_rows.hpp"
#include "draft_walk.hpp"
#include "publish.hpp"
#include "reduce.hpp"
#include "reduce_squares.hpp"

namespace gpurt {

struct HostBodyEntry {
  const char* name;
  HostBody run;
};

inline constexpr HostBodyEntry kHostBodies[] = {
    {"noop", &noop::run},
#if __has_include("embed.hpp")
    {"embed", &embed::run},
#endif
#if __has_include("matvec.hpp")
    {"matvec", &matvec::run},
#endif
#if __has_include("attention.hpp")
    {"attention", &attention::run},
#endif
#if __has_include("sample.hpp")
    {"sample", &sample::run},
#endif
#if __has_include("gated_residual.hpp")
    {"gated_residual", &gated_residual::run},
#endif
#if __has_include("route.hpp")
    {"route", &route::run},
#endif
#if __has_include("expert_matvec.hpp")
    {"expert_matvec", &expert_matvec::run},
#endif
#if __has_include("combine.hpp")
    {"combine", &combine::run},
#endif
    {"attention_merge", &attention_merge::run},
    {"attention_commit", &attention_commit::run},
    {"publish", &publish::run},
    {"collect", &collect::run},
    {"reduce", &reduce::run},
    {"reduce_squares", &reduce_squares::run},
    {"combine_columns", &combine_columns::run},
    {"draft_ngram", &draft_ngram::run},
    {"draft_rows", &draft_rows::run},
    {"block_conv", &block_conv::run},
    {"candidates", &candidates::run},
    {"draft_walk", &draft_walk::run},
};

// Null if there is no such body.
inline HostBody find_host_body(const char* name) {
  for (const HostBodyEntry& entry : kHostBodies) {
    const char* a = entry.name;
    const char* b = name;
    while (*a != 0 && *a == *b) ++a, ++b;
    if (*a == *b) return entry.run;
  }
  return nullptr;
}

}  // namespace gpurt
