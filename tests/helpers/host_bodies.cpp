// The host bodies behind one C function, for tests and tools/bench: no executor, no plan.
#include <chrono>

#include "acceptance.hpp"
#include "bodies/registry.hpp"
#define GPURT_EACH_LEVEL "peak_kernels.hpp"
#include "bodies/simd_each.hpp"
#define GPURT_EACH_LEVEL "decode_kernels.hpp"
#include "bodies/simd_each.hpp"

using gpurt::BodyContext;
using gpurt::TaskRecord;

namespace {

BodyContext make_context(const gpurt::Program& program, const gpurt::u8* step_state,
                         const gpurt::SlotState* slots, gpurt::u8* scratch,
                         gpurt::u64 scratch_bytes) {
  BodyContext context{};
  context.program = &program;
  context.step = reinterpret_cast<const gpurt::StepState*>(step_state);
  context.rows = reinterpret_cast<const gpurt::RowState*>(step_state + sizeof(gpurt::StepState));
  context.sample_rows = reinterpret_cast<const gpurt::u32*>(context.rows + program.rows_capacity);
  context.slots = slots;
  context.scratch = scratch;
  context.scratch_bytes = scratch_bytes;
  return context;
}

}  // namespace

extern "C" {

/// 0, or -1 with a message if GPURT_SIMD is bad.
int body_level(char* message, int message_bytes) {
  try {
    return static_cast<int>(gpurt::host::simd_level());
  } catch (const std::invalid_argument& error) {
    std::strncpy(message, error.what(), static_cast<std::size_t>(message_bytes) - 1);
    return -1;
  }
}

/// Runs `records` one after another, `repeats` times. Returns the last body's FaultKind, and the
/// fastest repeat's nanoseconds in *best_ns.
int body_run(const char* name, const TaskRecord* records, int count, const gpurt::u8* step_state,
             gpurt::u32 rows_capacity, const gpurt::SlotState* slots, gpurt::u8* scratch,
             gpurt::u64 scratch_bytes, int repeats, gpurt::u32* detail, double* best_ns) {
  gpurt::Program program{};
  program.rows_capacity = rows_capacity;
  BodyContext context = make_context(program, step_state, slots, scratch, scratch_bytes);
  const gpurt::HostBody run = gpurt::find_host_body(name);
  if (run == nullptr) return -1;
  gpurt::u32 kind = 0;
  *best_ns = 1e30;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) kind = run(records[i], context);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    if (took.count() < *best_ns) *best_ns = took.count();
  }
  std::memcpy(detail, context.detail, sizeof(context.detail));
  return static_cast<int>(kind);
}

/// The rows of a block, and the bits of those accepted, as `first << 16 | second`.
gpurt::u32 body_accept(const gpurt::RowState* rows, const gpurt::u32* sample_rows,
                       const gpurt::u32* sampled, gpurt::u32 sample_count, gpurt::u32 first) {
  const gpurt::u32 length = gpurt::block_rows(rows, sample_rows, sample_count, first);
  return length << 16 | gpurt::accepted_rows(rows, sample_rows, sampled, sample_count, first);
}

/// `count` blocks of nvfp4 as floats.
void body_decode_nvfp4(const gpurt::u8* blocks, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    GPURT_AT_LEVEL(decode_block, blocks + i * gpurt::host::kNvfp4Bytes, to + i * 16);
  }
}

/// The fastest of `repeats` reads of `count` floats, in nanoseconds.
double body_peak_read(const float* from, gpurt::u64 count, int repeats, float* sum) {
  double best_ns = 1e30;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    *sum += GPURT_AT_LEVEL(peak_read, from, count);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    if (took.count() < best_ns) best_ns = took.count();
  }
  return best_ns;
}

/// The fewest nanoseconds that 8 * count blocks of 32 codes take, over `repeats`.
double body_peak_codes(const gpurt::u8* block, const std::int16_t* codes, const float* scale,
                       gpurt::u64 count, int repeats, float* sum) {
  double best_ns = 1e30;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    *sum += GPURT_AT_LEVEL(peak_codes, block, codes, scale, count);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    if (took.count() < best_ns) best_ns = took.count();
  }
  return best_ns;
}
}
