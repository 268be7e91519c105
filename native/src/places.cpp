#include "places.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace wbridge {

// DLPack's table of C functions, `__dlpack_c_exchange_api__` of a tensor type, as its version 1 lays it out.
struct Exchange {
    std::uint32_t major, minor;
    const Exchange *older;
    void *allocate, *lend, *take;
    int (*show)(void *object, nb::dlpack::dltensor *found);
    void *stream;
};

namespace {

constexpr std::uint32_t known_major = 1;

const Exchange *exchange_of(nb::handle tensor_type) {
    const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    if (capsule.is_none()) return nullptr;
    auto found = static_cast<const Exchange *>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr) throw nb::python_error();
    while (found != nullptr && found->major != known_major) found = found->older;
    return found != nullptr && found->show != nullptr ? found : nullptr;
}

}  // namespace

Places::Places(nb::handle tensor_type, nb::tuple names, nb::sequence tensors)
    : exchange_(exchange_of(tensor_type)),
      tensor_type_(reinterpret_cast<PyTypeObject *>(tensor_type.ptr())),
      kept_type_(nb::borrow(tensor_type)),
      names_(std::move(names)) {
    if (nb::len(tensors) != names_.size()) throw std::invalid_argument("each tensor has one name");
    places_.reserve(names_.size());
    for (nb::handle tensor : tensors) {
        nb::dlpack::dltensor found{};
        auto &place = places_.emplace_back();
        if (!describe(tensor.ptr(), found)) continue;
        place = {found.data, found.dtype, found.ndim, axes_.size()};
        axes_.insert(axes_.end(), found.shape, found.shape + found.ndim);
        axes_.insert(axes_.end(), found.strides, found.strides + found.ndim);
    }
}

nb::list Places::moved(nb::handle parameters, std::size_t begin, std::size_t end) const {
    nb::list names;
    const bool is_dict = PyDict_CheckExact(parameters.ptr());
    const nb::object get = nb::getattr(parameters, "get");
    for (std::size_t k = begin; k < std::min(end, places_.size()); ++k) {
        const nb::object name = names_[k];
        nb::object found;
        if (is_dict) {
            found = nb::borrow(PyDict_GetItemWithError(parameters.ptr(), name.ptr()));
            if (!found.is_valid() && PyErr_Occurred()) throw nb::python_error();
        } else {
            found = get(name);
        }
        if (!found.is_valid() || !is_there(places_[k], found.ptr())) names.append(name);
    }
    return names;
}

bool Places::describe(PyObject *tensor, nb::dlpack::dltensor &found) const {
    if (exchange_ == nullptr || !PyObject_TypeCheck(tensor, tensor_type_)) return false;
    if (exchange_->show(tensor, &found) == 0) return true;
    PyErr_Clear();
    return false;
}

bool Places::is_there(const Place &place, PyObject *tensor) const {
    nb::dlpack::dltensor found{};
    if (place.num_axes < 0 || !describe(tensor, found)) return false;
    const auto axes = axes_.begin() + static_cast<std::ptrdiff_t>(place.axes);
    return found.data == place.address && found.ndim == place.num_axes &&
           std::memcmp(&found.dtype, &place.dtype, sizeof place.dtype) == 0 &&
           std::equal(found.shape, found.shape + found.ndim, axes) &&
           std::equal(found.strides, found.strides + found.ndim, axes + found.ndim);
}

}  // namespace wbridge
