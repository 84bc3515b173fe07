// The arithmetic of attention at one SIMD level. Included by simd_each.hpp, so without a guard.
namespace gpurt::host::GPURT_SIMD_LEVEL {

constexpr u32 kTile = 4;  // positions (scores) or vectors (sums) whose chains run side by side

/// What one row keeps while it walks its pages. Strides are multiples of kPadLanes.
struct AttentionRow {
  f32* q;        // [G, d_stride], zero past D
  f32* out;      // [G, d_stride]: sum of weight * v so far
  f32* scores;   // [G, page_stride]: then the weights of the page at hand
  f32* maximum;  // [G]
  f32* total;    // [G]: sum of weights so far
  u64 d_stride;
  u64 page_stride;
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

/// One head's query or key: norm if there is one, then rotation.
GPURT_SIMD_FN void prepare_head(const AttentionTask& task, const f32* from, const f32* norm,
                                u32 position, f32* to, u64 stride) {
  copy_row(from, to, task.head_dim, stride);
  if (norm) normalise_row(to, norm, task.head_dim, task.eps);
  rotate(to, task.rope + u64{position} * task.head_dim, task.head_dim);
}

template <class C>
GPURT_SIMD_FN void write_cache(const AttentionTask& task, const BodyContext& context, f32* head,
                               u64 stride) {
  const u32 d = task.head_dim;
  const u64 width = u64{2} * task.kv_heads * d;
  const f32* const k_norm = task.qk_norm ? task.qk_norm + d : nullptr;
  for (u32 row = 0; row < context.step->rows; ++row) {
    const RowState& state = context.rows[row];
    const f32* const k = task.kv + row * width + u64{task.kv_head} * d;
    const f32* const v = k + u64{task.kv_heads} * d;
    const u64 at = task.cache_at(state.slot, state.position);
    C* const k_to = static_cast<C*>(task.k_cache) + at;
    C* const v_to = static_cast<C*>(task.v_cache) + at;
    prepare_head(task, k, k_norm, state.position, head, stride);
    for (u32 i = 0; i < d; ++i) from_f32(head[i], k_to + i);
    for (u32 i = 0; i < d; ++i) from_f32(v[i], v_to + i);
  }
}

/// scores[g, j] = q[g] . k[j] for the first `count` positions of a page.
template <class C>
GPURT_SIMD_FN void score_page(const AttentionTask& task, const AttentionRow& row, const C* k,
                              u32 count) {
  const u32 d = task.head_dim;
  const u32 whole = d / kLanes * kLanes;
  for (u32 j = 0; j < count; j += kTile) {
    const C* keys[kTile];
    // Past the end the last key is read again: what lies beyond it may be anything.
    for (u32 t = 0; t < kTile; ++t) keys[t] = k + u64{j + t < count ? j + t : count - 1} * d;
    for (u32 g = 0; g < task.group; ++g) {
      const f32* const q = row.q + g * row.d_stride;
      Vf sum[kTile];
      for (u32 t = 0; t < kTile; ++t) sum[t] = splat(0.0F);
      for (u32 i = 0; i < whole; i += kLanes) {
        const Vf v = load(q + i);
        for (u32 t = 0; t < kTile; ++t) sum[t] = fma(load(keys[t] + i), v, sum[t]);
      }
      if (whole < d) {
        const Vf v = load(q + whole);
        for (u32 t = 0; t < kTile; ++t) {
          sum[t] = fma(load_part(keys[t] + whole, d - whole), v, sum[t]);
        }
      }
      f32* const to = row.scores + g * row.page_stride + j;
      for (u32 t = 0; t < kTile; ++t) to[t] = sum_of(sum[t]);
    }
  }
}

/// Turns a page's scores of one head into weights and folds the new maximum into what was summed.
GPURT_SIMD_FN void weigh_page(const AttentionRow& row, u32 g, u32 count) {
  f32* const scores = row.scores + g * row.page_stride;
  const u64 padded = padded_lanes(count);
  const f32 none = -__builtin_inff();
  for (u64 j = count; j < padded; ++j) scores[j] = none;
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

/// out[g] += weight[g, j] * v[j], position after position.
template <class C>
GPURT_SIMD_FN void gather_page(const AttentionTask& task, const AttentionRow& row, const C* v,
                               u32 count) {
  const u32 d = task.head_dim;
  for (u32 g = 0; g < task.group; ++g) {
    const f32* const weights = row.scores + g * row.page_stride;
    f32* const out = row.out + g * row.d_stride;
    u32 i = 0;
    for (; i + kTile * kLanes <= d; i += kTile * kLanes) {
      Vf sum[kTile];
      for (u32 t = 0; t < kTile; ++t) sum[t] = load(out + i + t * kLanes);
      for (u32 j = 0; j < count; ++j) {
        const Vf weight = splat(weights[j]);
        const C* const from = v + u64{j} * d + i;
        for (u32 t = 0; t < kTile; ++t) sum[t] = fma(weight, load(from + t * kLanes), sum[t]);
      }
      for (u32 t = 0; t < kTile; ++t) store(out + i + t * kLanes, sum[t]);
    }
    for (; i < d; i += kLanes) {
      const u32 width = d - i < kLanes ? d - i : kLanes;
      Vf sum = load(out + i);
      for (u32 j = 0; j < count; ++j) {
        const C* const from = v + u64{j} * d + i;
        const Vf value = width == kLanes ? load(from) : load_part(from, width);
        sum = fma(splat(weights[j]), value, sum);
      }
      store(out + i, sum);
    }
  }
}

template <class C>
GPURT_SIMD_FN void attend(const AttentionTask& task, const RowState& state, const AttentionRow& row,
                          const f32* q, f32* out) {
  const u32 d = task.head_dim;
  for (u32 g = 0; g < task.group; ++g) {
    f32* const head = row.q + g * row.d_stride;
    prepare_head(task, q + u64{g} * d, task.qk_norm, state.position, head, row.d_stride);
    for (u64 i = 0; i < row.d_stride; i += kLanes) {
      store(head + i, mul(load(head + i), splat(task.scale)));
      store(row.out + g * row.d_stride + i, splat(0.0F));
    }
    row.maximum[g] = -__builtin_inff();
    row.total[g] = 0.0F;
  }
  for (u32 begin = 0; begin <= state.position; begin += task.page) {
    const u32 left = state.position + 1 - begin;
    const u32 count = left < task.page ? left : task.page;
    const u64 at = task.cache_at(state.slot, begin);
    score_page(task, row, static_cast<const C*>(task.k_cache) + at, count);
    for (u32 g = 0; g < task.group; ++g) weigh_page(row, g, count);
    gather_page(task, row, static_cast<const C*>(task.v_cache) + at, count);
  }
  for (u32 g = 0; g < task.group; ++g) {
    const f32* const sums = row.out + g * row.d_stride;
    for (u32 i = 0; i < d; ++i) out[u64{g} * d + i] = sums[i] / row.total[g];
  }
}

template <class C>
GPURT_SIMD_FN void attend_rows(const AttentionTask& task, const BodyContext& context,
                               const AttentionRow& row, f32* head) {
  write_cache<C>(task, context, head, row.d_stride);
  const u64 width = u64{task.heads} * task.head_dim;
  const u64 first = u64{task.kv_head} * task.group * task.head_dim;
  for (u32 r = 0; r < context.step->rows; ++r) {
    const u64 at = r * width + first;
    attend<C>(task, context.rows[r], row, task.q + at, task.out + at);
  }
}

GPURT_SIMD_FN void attention_run(const AttentionTask& task, const BodyContext& context) {
  using W = Workspace;
  AttentionRow row{};
  row.d_stride = padded_lanes(task.head_dim);
  row.page_stride = padded_lanes(task.page);
  const u64 g = task.group;
  Workspace workspace(context, 2 * W::padded<f32>(g * row.d_stride) +
                                   W::padded<f32>(g * row.page_stride) + 2 * W::padded<f32>(g) +
                                   W::padded<f32>(row.d_stride));
  row.q = workspace.take<f32>(g * row.d_stride);
  row.out = workspace.take<f32>(g * row.d_stride);
  row.scores = workspace.take<f32>(g * row.page_stride);
  row.maximum = workspace.take<f32>(g);
  row.total = workspace.take<f32>(g);
  f32* const head = workspace.take<f32>(row.d_stride);
  switch (task.cache_dtype) {
    case kF32:
      attend_rows<f32>(task, context, row, head);
      break;
    case kF16:
      attend_rows<F16>(task, context, row, head);
      break;
    default:
      attend_rows<Bf16>(task, context, row, head);
  }
}

}  // namespace gpurt::host::GPURT_SIMD_LEVEL
