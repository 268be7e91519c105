// Contiguous bytes of a Python object.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace wbridge {

// Held as long as this exists.
class Bytes {
public:
    Bytes(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) throw nanobind::python_error();
    }
    Bytes(const Bytes &) = delete;
    ~Bytes() { PyBuffer_Release(&buffer_); }
    char *data() const { return static_cast<char *>(buffer_.buf); }
    std::int64_t nbytes() const { return buffer_.len; }

private:
    Py_buffer buffer_;
};

}  // namespace wbridge
