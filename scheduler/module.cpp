// gpurt._native: binds the host executor for Python. Decides nothing.
//
// A Python body runs on a worker thread under the GIL; every call that may wait releases it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bodies/expert_units.hpp"
#include "bodies/mma16_units.hpp"
#include "bodies/registry.hpp"
#include "dlpack.hpp"
#include "host_executor.hpp"
#include "wire_layout.hpp"

namespace gpurt {
namespace {

namespace py = pybind11;

u64 to_ns(double seconds) {
  return seconds <= 0 ? 0 : static_cast<u64>(std::min(seconds, 1e9) * 1e9);
}

// Owns what the threads use: the executor goes first, then the memory, then the callbacks.
class PyHostExecutor {
 public:
  PyHostExecutor(u64 program, const std::vector<std::optional<std::string>>& bodies,
                 py::list callbacks, py::object memory, u64 scratch_bytes,
                 std::shared_ptr<Parking> parking)
      : callbacks_(std::move(callbacks)), memory_(std::move(memory)) {
    std::vector<HostBody> table;
    for (const std::optional<std::string>& name : bodies) {
      table.push_back(name ? find_host_body(name->c_str()) : nullptr);
      if (name && table.back() == nullptr)
        throw py::value_error("no host body is named '" + *name +
                              "' - at gpurt._native - see body_names()");
    }
    executor_ = std::make_unique<HostExecutor>(
        *at<const Program>(program), std::move(table),
        [this](u32 task, u32 worker) { return call(task, worker); }, scratch_bytes,
        std::move(parking));
  }
  PyHostExecutor(const PyHostExecutor&) = delete;
  PyHostExecutor& operator=(const PyHostExecutor&) = delete;
  // The threads are joined, not abandoned; a failure to join has no better place than terminate().
  // NOLINTNEXTLINE(bugprone-exception-escape)
  ~PyHostExecutor() {
    const py::gil_scoped_release release;  // a worker may be waiting for the GIL
    executor_.reset();
  }

  bool launch() {
    error_ = py::none();
    const py::gil_scoped_release release;
    return executor_->launch();
  }
  bool running() const { return executor_->running(); }
  bool join(double timeout_s) {
    const py::gil_scoped_release release;
    return executor_->join(to_ns(timeout_s));
  }
  void abort() { executor_->abort(); }
  void wake() { executor_->wake(); }
  py::object body_error() const { return error_; }

 private:
  u32 call(u32 task, u32 worker) {
    (void)worker;
    const py::gil_scoped_acquire acquire;
    try {
      callbacks_[task]();
      return kFaultNone;
    } catch (py::error_already_set& error) {
      if (error_.is_none()) error_ = error.value();
      return kFaultHostBody;
    }
  }

  py::list callbacks_;
  py::object memory_;
  py::object error_ = py::none();
  std::unique_ptr<HostExecutor> executor_;
};

// Spins for some microseconds, since a token may be about to come, then naps, longer and longer: a
// reader that polls through a step of milliseconds takes a core from the workers.
std::pair<u64, u32> wait_output(u64 output_address, u64 seen_count, double timeout_s) {
  constexpr u32 kSpinPolls = 200;
  constexpr u64 kNapNsMax = 400'000;
  u64 nap_ns = 20'000;
  const auto* output = at<const RequestOutput>(output_address);
  const u64 deadline_ns = clock_ns() + to_ns(timeout_s);
  for (u32 polls = 0;; ++polls) {
    // The reason first: it is stored last, so with a reason the count is final.
    const u32 reason = load_acquire_system(&output->finish_reason);
    const u64 count = load_acquire_system(&output->token_count);
    if (reason != kFinishNone || count > seen_count) return {count, reason};
    const u64 now_ns = clock_ns();
    if (now_ns >= deadline_ns) return {count, reason};
    if (polls < kSpinPolls) {
      spin_pause();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap_ns, deadline_ns - now_ns)));
      nap_ns = std::min(2 * nap_ns, kNapNsMax);
    }
  }
}

std::vector<std::string> body_names() {
  std::vector<std::string> names;
  for (const HostBodyEntry& entry : kHostBodies) names.emplace_back(entry.name);
  return names;
}

void pack_nvfp4_units(u64 byte_table, u64 scale_table, u64 blocks, u64 rows, u64 count, u64 units) {
  const host::Nvfp4Tables tables{at<const u32>(byte_table), at<const u8>(scale_table)};
  host::pack_nvfp4_units(tables, at<const u8>(blocks), rows, count, at<u8>(units));
}

void pack_mma16_units(u64 w, u64 rows, u64 k, u32 group, u64 units) {
  const auto pack = group == 4   ? host::pack_mma16_units<4>
                    : group == 8 ? host::pack_mma16_units<8>
                                 : host::pack_mma16_units<16>;
  pack(at<const u16>(w), rows, k, at<u8>(units));
}

void bind_atomics(py::module_& m) {
  m.def("load_acquire_u32", [](u64 p) { return load_acquire_system(at<const u32>(p)); });
  m.def("load_acquire_u64", [](u64 p) { return load_acquire_system(at<const u64>(p)); });
  m.def("store_release_u32", [](u64 p, u32 v) { store_release_system(at<u32>(p), v); });
  m.def("store_release_u64", [](u64 p, u64 v) { store_release_system(at<u64>(p), v); });
  m.def("add_u32", [](u64 p, u32 v) { return add_acq_rel_system(at<u32>(p), v); });
  m.def("fence_seq_cst", [] { fence_seq_cst_system(); });
}

}  // namespace
}  // namespace gpurt

PYBIND11_MODULE(_native, m) {
  namespace py = pybind11;
  using gpurt::PyHostExecutor;
  m.doc() = "The host executor: threads as workers, and atomics on memory shared with them.";
  gpurt::bind_atomics(m);
  m.def("wire_layout", &gpurt::wire_layout);
  m.def("wire_constants", &gpurt::wire_constants);
  m.def("body_names", &gpurt::body_names);
  m.def("simd_level", [] { return gpurt::host::simd_name(gpurt::host::simd_level()); });
  m.def("dlpack_view", &gpurt::dlpack_view);
  m.def("pack_mma16_units", &gpurt::pack_mma16_units, py::call_guard<py::gil_scoped_release>());
  m.def("pack_nvfp4_units", &gpurt::pack_nvfp4_units, py::call_guard<py::gil_scoped_release>());
  m.def("clock_ns", [] { return gpurt::clock_ns(); });
  m.def("wait_output", &gpurt::wait_output, py::call_guard<py::gil_scoped_release>());
  py::class_<gpurt::Parking, std::shared_ptr<gpurt::Parking>>(m, "Parking")
      .def(py::init<bool>(), py::arg("hears_all") = true);
  py::class_<PyHostExecutor>(m, "HostExecutor")
      .def(py::init<gpurt::u64, const std::vector<std::optional<std::string>>&, py::list,
                    py::object, gpurt::u64, std::shared_ptr<gpurt::Parking>>())
      .def("launch", &PyHostExecutor::launch)
      .def("running", &PyHostExecutor::running)
      .def("join", &PyHostExecutor::join)
      .def("abort", &PyHostExecutor::abort)
      .def("wake", &PyHostExecutor::wake)
      .def("body_error", &PyHostExecutor::body_error);
}
