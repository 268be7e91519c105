// The Python face of the native copies.
#include <nanobind/nanobind.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>

#include "bytes.hpp"
#include "places.hpp"
#include "pool.hpp"
#include "ring.hpp"
#include "table.hpp"

namespace nb = nanobind;

namespace {

using wbridge::Bytes;
using wbridge::Places;
using wbridge::Pool;
using wbridge::Table;

std::size_t default_threads() {
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return static_cast<std::size_t>(std::clamp(count, 1, 4));
}

// Never destroyed: its threads may outlive every static object.
Pool &pool() {
    static Pool *shared = new Pool(default_threads());
    return *shared;
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "Strided copies between parameters and slots, outside the GIL.";
    module.attr("INTERFACE") = 3;
    nb::set_leak_warnings(false);  // an adapter that nobody closes lives in a thread that the exit of Python freezes

    module.def("num_threads", [] { return pool().num_threads(); },
               "Return how many threads one copy may use, the calling one included.");
    module.def(
        "set_num_threads",
        [](std::size_t num_threads) {
            if (num_threads < 1) throw std::invalid_argument("a copy needs at least one thread");
            pool().set_num_threads(num_threads);
        },
        nb::arg("num_threads"), "Bound the threads of every later copy of this process.");

    module.def("ring_address", [] { return reinterpret_cast<std::uintptr_t>(&wbridge::ring); },
               "Return where a C function lies that takes an eventfd as its only argument, a pointer, and adds 1.");

    nb::class_<Table>(module, "Table", "Copies of one direction, compiled once and run for every version.")
        .def(
            "__init__",
            [](Table *self, nb::handle rows, bool into_slot) {
                const Bytes bytes(rows, PyBUF_SIMPLE);
                if (bytes.nbytes() % 8 != 0) throw std::invalid_argument("rows are 64-bit integers");
                new (self) Table(reinterpret_cast<const std::int64_t *>(bytes.data()),
                                 static_cast<std::size_t>(bytes.nbytes() / 8), into_slot);
            },
            nb::arg("rows"), nb::kw_only(), nb::arg("into_slot"), nb::sig(
                "def __init__(self, rows: typing_extensions.Buffer, *, into_slot: bool) -> None"))
        .def(
            "run",
            [](const Table &self, nb::handle slot, std::int64_t base) {
                const Bytes bytes(slot, self.into_slot() ? PyBUF_WRITABLE : PyBUF_SIMPLE);
                nb::gil_scoped_release released;
                self.run(pool(), bytes.data(), bytes.nbytes(), base);
            },
            nb::arg("slot"), nb::arg("base"),
            nb::sig("def run(self, slot: typing_extensions.Buffer, base: int) -> None"),
            "Copy to or from `slot` at byte `base`, without the GIL.")
        .def_prop_ro("nbytes", &Table::nbytes, "Bytes that one run writes.")
        .def_prop_ro("num_pieces", &Table::num_pieces, "Parts that the copies were cut into.");

    nb::class_<Places>(module, "Places", "Where the tensors of a mapping were when this was built.")
        .def(nb::init<nb::handle, nb::tuple, nb::sequence>(), nb::arg("tensor_type"), nb::arg("names"), nb::arg("tensors"),
             nb::sig("def __init__(self, tensor_type: type, names: tuple[str, ...], "
                     "tensors: collections.abc.Sequence[object]) -> None"))
        .def("moved", &Places::moved, nb::arg("parameters"), nb::arg("begin"), nb::arg("end"),
             nb::sig("def moved(self, parameters: collections.abc.Mapping[str, object], begin: int, end: int) -> list[str]"),
             "Return the names, from number `begin` to `end`, whose tensors lie elsewhere or cannot be looked at.");
}
