// Where the tensors of a framework lie, asked of them in one call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wbridge {

struct Exchange;

// Knows tensors by name, and where they were. Of what DLPack cannot describe, or not through this type, it says
// that it has moved: whoever asks then has to look in another way.
class Places {
public:
    Places(nanobind::handle tensor_type, nanobind::tuple names, nanobind::sequence tensors);
    nanobind::list moved(nanobind::handle parameters, std::size_t begin, std::size_t end) const;

private:
    struct Place {
        void *address = nullptr;
        nanobind::dlpack::dtype dtype{};
        std::int32_t num_axes = -1;  // not known
        std::size_t axes = 0;        // where its lengths begin in `axes_`, with its strides behind them
    };

    bool describe(PyObject *tensor, nanobind::dlpack::dltensor &found) const;
    bool is_there(const Place &place, PyObject *tensor) const;

    const Exchange *exchange_ = nullptr;
    PyTypeObject *tensor_type_;
    nanobind::object kept_type_;
    nanobind::tuple names_;
    std::vector<Place> places_;
    std::vector<std::int64_t> axes_;
};

}  // namespace wbridge
