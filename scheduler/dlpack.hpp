// DLPack in: a numpy view of another library's tensor, without a copy. numpy's own from_dlpack
// refuses bfloat16, so bf16 comes out as its uint16 bit patterns, which is how gpurt stores it.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "types.hpp"

namespace gpurt {

// The structs of dlpack.h, version 0: a stable ABI.
struct DlTensor {
  void* data;
  i32 device_type;
  i32 device_index;
  i32 axis_count;
  u8 type_code;
  u8 type_bits;
  u16 type_lanes;
  i64* shape;
  i64* strides;  // in elements; null for row-major
  u64 byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* owner;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlTensor) == 48 && sizeof(DlManagedTensor) == 64);

constexpr i32 kDlCpu = 1;
constexpr i32 kDlCudaHost = 3;  // pinned

inline std::string dlpack_format(const DlTensor& tensor) {
  if (tensor.type_lanes != 1) return "";
  const std::string bytes = std::to_string(tensor.type_bits / 8);
  switch (tensor.type_code) {
    case 0:
      return "i" + bytes;
    case 1:
      return "u" + bytes;
    case 2:
      return "f" + bytes;
    case 4:
      return "u2";  // bfloat16
    case 6:
      return "u1";  // bool
    default:
      return "";
  }
}

// The array keeps the tensor alive.
inline pybind11::array dlpack_view(const pybind11::object& source) {
  namespace py = pybind11;
  const py::capsule capsule = source.attr("__dlpack__")();
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  const DlTensor& tensor = managed->tensor;
  const std::string format = dlpack_format(tensor);
  if (tensor.device_type != kDlCpu && tensor.device_type != kDlCudaHost)
    throw py::value_error("a tensor on DLPack device type " + std::to_string(tensor.device_type) +
                          " cannot be viewed - at gpurt DLPack - copy it to the CPU first");
  if (format.empty())
    throw py::value_error("DLPack type code " + std::to_string(tensor.type_code) +
                          " has no numpy dtype - at gpurt DLPack - convert the tensor first");
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  const py::capsule owner(managed, [](void* p) {
    auto* m = static_cast<DlManagedTensor*>(p);
    if (m->deleter != nullptr) m->deleter(m);
  });
  const auto axes = static_cast<std::size_t>(tensor.axis_count);
  const py::ssize_t item = tensor.type_bits / 8;
  std::vector<py::ssize_t> shape(axes);
  std::vector<py::ssize_t> strides(axes);
  py::ssize_t stride = item;
  for (std::size_t axis = axes; axis-- > 0;) {
    shape[axis] = tensor.shape[axis];
    strides[axis] = tensor.strides != nullptr ? tensor.strides[axis] * item : stride;
    stride *= shape[axis];
  }
  const void* data = static_cast<const u8*>(tensor.data) + tensor.byte_offset;
  return py::array(py::dtype(format), shape, strides, data, owner);
}

}  // namespace gpurt
