// The arithmetic of attention at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kTile = 4;  // positions (scores) or vectors (sums) whose chains run side by side
constexpr u32 kPair = 2;  // query heads that share one load of keys or values

/// What one row keeps while it walks its pages. Strides are multiples of kPadLanes.
struct AttentionRow {
  f32* q;        // [G, d_stride], zero past D
  f32* out;      // [G, d_stride]: sum of weight * v so far
  f32* scores;   // [G, page_stride]: then the weights of the page at hand
  f32* maximum;  // [G]
  f32* total;    // [G]: sum of weights so far
  u64 d_stride;
  u64 page_stride;
  u8* keys;    // a page, [page, D] as stored, for a row on a branch; null: none is
  u8* values;  // the same
};

/// Rotates the pairs (i, i + D/2) in place.
GPURT_SIMD_FN void rotate(f32* x, const f32* rope, u32 head_dim) {
  const u32 half = head_dim / 2;
  for (u32 i = 0; i < half; ++i) {
    const f32 low = x[i];
    const f32 high = x[i + half];
    x[i] = low * rope[i] - high * rope[i + half];
    x[i + half] = high * rope[i] + low * rope[i + half];
  }
}

/// One head's query or key: norm if there is one, then rotation. which: 0 query, 1 key.
GPURT_SIMD_FN void prepare_head(const AttentionTask& task, const f32* from, u32 which, u32 position,
                                f32* to, u64 stride) {
  copy_row(from, to, task.head_dim, stride);
  if (task.norm_kind != 0) {
    const f32* const weights = task.norm_kind == 1 ? task.qk_norm + which * task.head_dim : nullptr;
    normalise_row(to, weights, task.head_dim, task.eps);
  }
  if (task.rope) rotate(to, task.rope + u64{position} * task.head_dim, task.head_dim);
}

template <class C>
GPURT_SIMD_FN void write_cache(const AttentionTask& task, const BodyContext& context, f32* head,
                               u64 stride) {
  const u32 d = task.head_dim;
  const u64 width = u64{2} * task.kv_heads * d;
  for (u32 row = 0; row < context.step->rows; ++row) {
    const RowState& state = context.rows[row];
    if (!task.owns(state.position)) continue;
    const f32* const k = task.kv + row * width + u64{task.kv_head} * d;
    const f32* const v = k + u64{task.kv_heads} * d;
    const u64 at = task.cache_at(state.slot, place_of_row(state.position, row_ancestors(state)));
    C* const k_to = static_cast<C*>(task.k_cache) + at;
    C* const v_to = static_cast<C*>(task.v_cache) + at;
    prepare_head(task, k, 1, state.position, head, stride);
    for (u32 i = 0; i < d; ++i) from_f32(head[i], k_to + i);
    for (u32 i = 0; i < d; ++i) from_f32(v[i], v_to + i);
  }
}

/// scores[g, j] = q[g] . k[j] for HG heads from g and the positions [begin, end) of a page.
template <u32 HG, class C>
GPURT_SIMD_FN void score_heads(const AttentionTask& task, const AttentionRow& row, const C* k,
                               u32 g, u32 begin, u32 end) {
  const u32 d = task.head_dim;
  const u32 whole = d / kLanes * kLanes;
  const f32* const q = row.q + g * row.d_stride;
  f32* const scores = row.scores + g * row.page_stride;
  for (u32 j = begin; j < end; j += kTile) {
    const C* keys[kTile];
    // Past the end the last key is read again: what lies beyond it may be anything.
    for (u32 t = 0; t < kTile; ++t) keys[t] = k + u64{j + t < end ? j + t : end - 1} * d;
    Vf sum[HG][kTile];
    for (u32 h = 0; h < HG; ++h) {
      for (u32 t = 0; t < kTile; ++t) sum[h][t] = splat(0.0F);
    }
    for (u32 i = 0; i < d; i += kLanes) {
      Vf key[kTile];
      for (u32 t = 0; t < kTile; ++t) {
        key[t] = i < whole ? load(keys[t] + i) : load_part(keys[t] + i, d - i);
      }
      for (u32 h = 0; h < HG; ++h) {
        const Vf v = load(q + h * row.d_stride + i);
        for (u32 t = 0; t < kTile; ++t) sum[h][t] = fma(key[t], v, sum[h][t]);
      }
    }
    for (u32 h = 0; h < HG; ++h) store_quad(scores + h * row.page_stride + j, sums_of(sum[h]));
  }
}

/// Turns a page's scores of one head into weights and folds the new maximum into what was summed.
/// Positions outside [begin, end) weigh exactly 0.
GPURT_SIMD_FN void weigh_page(const AttentionRow& row, u32 g, u32 begin, u32 end) {
  f32* const scores = row.scores + g * row.page_stride;
  const u64 padded = padded_lanes(end);
  const f32 none = -__builtin_inff();
  for (u32 j = 0; j < begin; ++j) scores[j] = none;
  for (u64 j = end; j < padded; ++j) scores[j] = none;
  const f32 before = row.maximum[g];
  Vf largest = splat(before);
  for (u64 j = 0; j < padded; j += kLanes) largest = max(load(scores + j), largest);
  const f32 maximum = max_of(largest);
  Vf sum = splat(0.0F);
  for (u64 j = 0; j < padded; j += kLanes) {
    const Vf weight = exp_of(sub(load(scores + j), splat(maximum)));
    store(scores + j, weight);
    sum = add(sum, weight);
  }
  f32 total = row.total[g];
  if (maximum != before) {
    f32 shrink[kLanes];
    store(shrink, exp_of(splat(before - maximum)));
    total *= shrink[0];
    f32* const out = row.out + g * row.d_stride;
    for (u64 i = 0; i < row.d_stride; i += kLanes) {
      store(out + i, mul(load(out + i), splat(shrink[0])));
    }
  }
  row.total[g] = total + sum_of(sum);
  row.maximum[g] = maximum;
}

/// out[g] += weight[g, j] * v[j] for HG heads from g, position after position, over T vectors of
/// columns from i (one of them may be cut short by D).
template <u32 HG, u32 T, class C>
GPURT_SIMD_FN void gather_columns(const AttentionTask& task, const AttentionRow& row, const C* v,
                                  u32 g, u32 i, u32 begin, u32 end) {
  const u32 d = task.head_dim;
  const bool whole = T == kTile || i + kLanes <= d;
  const f32* const weights = row.scores + g * row.page_stride;
  f32* const out = row.out + g * row.d_stride + i;
  Vf sum[HG][T];
  for (u32 h = 0; h < HG; ++h) {
    for (u32 t = 0; t < T; ++t) sum[h][t] = load(out + h * row.d_stride + t * kLanes);
  }
  for (u32 j = begin; j < end; ++j) {
    const C* const from = v + u64{j} * d + i;
    Vf value[T];
    for (u32 t = 0; t < T; ++t) {
      value[t] = whole ? load(from + t * kLanes) : load_part(from, d - i);
    }
    for (u32 h = 0; h < HG; ++h) {
      const Vf weight = splat(weights[h * row.page_stride + j]);
      for (u32 t = 0; t < T; ++t) sum[h][t] = fma(weight, value[t], sum[h][t]);
    }
  }
  for (u32 h = 0; h < HG; ++h) {
    for (u32 t = 0; t < T; ++t) store(out + h * row.d_stride + t * kLanes, sum[h][t]);
  }
}

template <u32 HG, class C>
GPURT_SIMD_FN void gather_heads(const AttentionTask& task, const AttentionRow& row, const C* v,
                                u32 g, u32 begin, u32 end) {
  const u32 d = task.head_dim;
  u32 i = 0;
  for (; i + kTile * kLanes <= d; i += kTile * kLanes) {
    gather_columns<HG, kTile>(task, row, v, g, i, begin, end);
  }
  for (; i < d; i += kLanes) gather_columns<HG, 1>(task, row, v, g, i, begin, end);
}

/// All heads over the positions [begin, end) of one page, given where the page's positions start.
template <class C>
GPURT_SIMD_FN void attend_page(const AttentionTask& task, const AttentionRow& row, const C* k,
                               const C* v, u32 begin, u32 end) {
  u32 g = 0;
  for (; g + kPair <= task.group; g += kPair) score_heads<kPair>(task, row, k, g, begin, end);
  if (g < task.group) score_heads<1>(task, row, k, g, begin, end);
  for (g = 0; g < task.group; ++g) weigh_page(row, g, begin, end);
  for (g = 0; g + kPair <= task.group; g += kPair) gather_heads<kPair>(task, row, v, g, begin, end);
  if (g < task.group) gather_heads<1>(task, row, v, g, begin, end);
}

/// One head's result: divided, normed, gated. gate: null without gates.
GPURT_SIMD_FN void finish_head(const AttentionTask& task, const AttentionRow& row, u32 g,
                               const f32* gate, f32* out) {
  const u32 d = task.head_dim;
  f32* const sums = row.out + g * row.d_stride;
  const Vf total = splat(row.total[g]);
  for (u64 i = 0; i < row.d_stride; i += kLanes) store(sums + i, div(load(sums + i), total));
  if (task.out_eps > 0.0F) normalise_row(sums, nullptr, d, task.out_eps);
  for (u32 i = 0; i < d; i += kLanes) {
    const u32 width = d - i < kLanes ? d - i : kLanes;
    Vf v = load(sums + i);
    if (gate) {
      const Vf g_part = load_part(gate + i, width);
      v = div(v, add(splat(1.0F), exp_of(sub(splat(0.0F), g_part))));
    }
    store_part(out + i, v, width);
  }
}

/// A row's queries, ready for scores.
GPURT_SIMD_FN void prepare_queries(const AttentionTask& task, u32 position, const AttentionRow& row,
                                   const f32* q) {
  const u32 d = task.head_dim;
  for (u32 g = 0; g < task.group; ++g) {
    f32* const head = row.q + g * row.d_stride;
    prepare_head(task, q + u64{g} * d, 0, position, head, row.d_stride);
    for (u64 i = 0; i < row.d_stride; i += kLanes) {
      store(head + i, mul(load(head + i), splat(task.scale)));
    }
  }
}

/// Copies, from where a row on a branch finds them, the positions [begin, end) of a page.
template <class C>
GPURT_SIMD_FN void gather_page(const AttentionTask& task, const RowState& state, u32 begin, u32 end,
                               const AttentionRow& row) {
  const u32 ancestors = row_ancestors(state), d = task.head_dim;
  const u32 block = block_begin(state.position, ancestors);
  for (u32 position = begin; position < end; ++position) {
    const u64 from = task.cache_at(state.slot, place_seen(position, block, ancestors));
    const u64 to = u64{position % task.page} * d;
    __builtin_memcpy(reinterpret_cast<C*>(row.keys) + to,
                     static_cast<const C*>(task.k_cache) + from, d * sizeof(C));
    __builtin_memcpy(reinterpret_cast<C*>(row.values) + to,
                     static_cast<const C*>(task.v_cache) + from, d * sizeof(C));
  }
}

/// Sums over the positions [first, end) that a row sees.
template <class C>
GPURT_SIMD_FN void attend(const AttentionTask& task, const RowState& state, u32 first, u32 end,
                          const AttentionRow& row) {
  for (u32 g = 0; g < task.group; ++g) {
    for (u64 i = 0; i < row.d_stride; i += kLanes) {
      store(row.out + g * row.d_stride + i, splat(0.0F));
    }
    row.maximum[g] = -__builtin_inff();
    row.total[g] = 0.0F;
  }
  for (u32 page = first / task.page * task.page; page < end; page += task.page) {
    const u32 left = end - page;
    const u32 begin = first > page ? first - page : 0, count = left < task.page ? left : task.page;
    if (is_on_branch(row_ancestors(state)) &&
        page + count > block_begin(state.position, row_ancestors(state)) + 1) {
      gather_page<C>(task, state, page + begin, page + count, row);
      attend_page(task, row, reinterpret_cast<const C*>(row.keys),
                  reinterpret_cast<const C*>(row.values), begin, count);
      continue;
    }
    const u64 at = task.cache_at(state.slot, page);
    attend_page(task, row, static_cast<const C*>(task.k_cache) + at,
                static_cast<const C*>(task.v_cache) + at, begin, count);
  }
}

/// All heads' results of a row. gates: null without.
GPURT_SIMD_FN void finish_row(const AttentionTask& task, const AttentionRow& row, const f32* gates,
                              f32* out) {
  for (u32 g = 0; g < task.group; ++g) {
    const u64 at = u64{g} * task.head_dim;
    finish_head(task, row, g, gates ? gates + at : nullptr, out + at);
  }
}

/// The sums of the task's spans, one after another.
template <class C>
GPURT_SIMD_FN void attend_spans(const AttentionTask& task, u32 r, const RowState& state,
                                const AttentionRow& row) {
  const AttentionSpans spans{task.kv_heads, task.spans, task.group, task.head_dim};
  const u32 seen = task.first_seen(state.position), d = task.head_dim;
  for (u32 span = task.split; span * kAttentionSpan <= state.position; span += task.splits) {
    const u32 begin = span * kAttentionSpan, end = begin + kAttentionSpan;
    if (end <= seen) continue;
    attend<C>(task, state, begin < seen ? seen : begin,
              state.position < end ? state.position + 1 : end, row);
    for (u32 g = 0; g < task.group; ++g) {
      f32* const to = task.partials + spans.word(r, task.kv_head, span, g);
      const f32* const sums = row.out + g * row.d_stride;
      for (u32 i = 0; i < d; ++i) to[i] = sums[i];
      to[d] = row.maximum[g];
      to[d + 1] = row.total[g];
    }
  }
}

template <class C>
GPURT_SIMD_FN void attend_rows(const AttentionTask& task, const BodyContext& context,
                               const AttentionRow& row, f32* head) {
  write_cache<C>(task, context, head, row.d_stride);
  const u64 width = u64{task.heads} * task.head_dim;
  const u64 first = u64{task.kv_head} * task.group * task.head_dim;
  if (!task.q) return;
  for (u32 r = 0; r < context.step->rows; ++r) {
    const RowState& state = context.rows[r];
    const f32* const q = task.q + r * width * (task.gated ? 2 : 1) + first;
    prepare_queries(task, state.position, row, q);
    if (task.spans != 0) {
      attend_spans<C>(task, r, state, row);
      continue;
    }
    attend<C>(task, state, task.first_seen(state.position),
              task.end_seen(context.rows, context.step->rows, r), row);
    finish_row(task, row, task.gated ? q + width : nullptr, task.out + r * width + first);
  }
}

/// Folds one more span's sums of head g into the row's.
GPURT_SIMD_FN void fold_span(const AttentionTask& task, const AttentionRow& row, u32 g,
                             const f32* from) {
  const u32 d = task.head_dim;
  const f32 before = row.maximum[g], maximum = before < from[d] ? from[d] : before;
  const Vf mine = exp_of(splat(before - maximum)), theirs = exp_of(splat(from[d] - maximum));
  f32 factor[2][kLanes];
  store(factor[0], mine);
  store(factor[1], theirs);
  f32* const sums = row.out + g * row.d_stride;
  for (u32 i = 0; i < d; i += kLanes) {
    const Vf part = i + kLanes <= d ? load(from + i) : load_part(from + i, d - i);
    store(sums + i, fma(part, theirs, mul(load(sums + i), mine)));
  }
  row.total[g] = row.total[g] * factor[0][0] + from[d + 1] * factor[1][0];
  row.maximum[g] = maximum;
}

/// attention_merge: all rows of one kv head.
GPURT_SIMD_FN void attention_merge_run(const AttentionTask& task, const BodyContext& context) {
  using W = Workspace;
  AttentionRow row{};
  row.d_stride = padded_lanes(task.head_dim);
  const u64 g = task.group;
  Workspace workspace(context, W::padded<f32>(g * row.d_stride) + 2 * W::padded<f32>(g));
  row.out = workspace.take<f32>(g * row.d_stride);
  row.maximum = workspace.take<f32>(g);
  row.total = workspace.take<f32>(g);
  const AttentionSpans spans{task.kv_heads, task.spans, task.group, task.head_dim};
  const u64 width = u64{task.heads} * task.head_dim, d = task.head_dim;
  const u64 first = u64{task.kv_head} * task.group * d;
  for (u32 r = 0; r < context.step->rows; ++r) {
    const u32 position = context.rows[r].position;
    const u32 begin = task.first_seen(position) / kAttentionSpan;
    for (u32 h = 0; h < task.group; ++h) {
      const f32* const from = task.partials + spans.word(r, task.kv_head, begin, h);
      copy_row(from, row.out + h * row.d_stride, task.head_dim, row.d_stride);
      row.maximum[h] = from[d];
      row.total[h] = from[d + 1];
      for (u32 span = begin + 1; span <= position / kAttentionSpan; ++span) {
        fold_span(task, row, h, task.partials + spans.word(r, task.kv_head, span, h));
      }
    }
    const f32* const gates = task.q ? task.q + (u64{2} * r + 1) * width + first : nullptr;
    finish_row(task, row, gates, task.out + r * width + first);
  }
}

GPURT_SIMD_FN bool is_tree(const BodyContext& context) {
  for (u32 row = 0; row < context.step->rows; ++row)
    if (is_on_branch(row_ancestors(context.rows[row]))) return true;
  return false;
}

GPURT_SIMD_FN void attention_run(const AttentionTask& task, const BodyContext& context) {
  using W = Workspace;
  AttentionRow row{};
  row.d_stride = padded_lanes(task.head_dim);
  row.page_stride = padded_lanes(task.page + kTile);  // a tile of scores may begin anywhere
  const u64 g = task.group;
  const u64 page = is_tree(context) ? u64{4} * task.page * task.head_dim : 0;
  Workspace workspace(context, 2 * W::padded<f32>(g * row.d_stride) +
                                   W::padded<f32>(g * row.page_stride) + 2 * W::padded<f32>(g) +
                                   W::padded<f32>(row.d_stride) + 2 * W::padded<u8>(page));
  row.q = workspace.take<f32>(g * row.d_stride);
  row.out = workspace.take<f32>(g * row.d_stride);
  row.scores = workspace.take<f32>(g * row.page_stride);
  row.maximum = workspace.take<f32>(g);
  row.total = workspace.take<f32>(g);
  f32* const head = workspace.take<f32>(row.d_stride);
  row.keys = workspace.take<u8>(page);
  row.values = workspace.take<u8>(page);
  switch (task.cache_dtype) {
    case kF32:
      attend_rows<f32>(task, context, row, head);
      break;
    case kF16:
      attend_rows<F16>(task, context, row, head);
      break;
    case kE4m3:
      attend_rows<E4m3>(task, context, row, head);
      break;
    default:
      attend_rows<Bf16>(task, context, row, head);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
