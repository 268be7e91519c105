// The Python face of the UCX worker. Built only where UCX's headers are.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bytes.hpp"
#include "ucx_worker.hpp"

namespace nb = nanobind;

namespace {

using wbridge::Bytes;
using wbridge::UcxRun;
using wbridge::UcxWorker;
using Released = nb::call_guard<nb::gil_scoped_release>;

std::string copy(nb::bytes bytes) { return std::string(bytes.c_str(), bytes.size()); }

nb::bytes to_bytes(const std::string &text) { return nb::bytes(text.data(), text.size()); }

nb::list drain(UcxWorker &worker) {
    nb::list drained;
    for (const auto &event : worker.drain())
        drained.append(nb::make_tuple(static_cast<int>(event.kind), event.number, to_bytes(event.text)));
    return drained;
}

}  // namespace

NB_MODULE(_ucx, module) {
    module.doc() = "A UCX worker with one-sided puts, progressed outside the GIL.";
    module.attr("INTERFACE") = 3;
    nb::set_leak_warnings(false);  // an adapter that nobody closes lives in a thread that the exit of Python freezes
    module.attr("FINISHED") = static_cast<int>(wbridge::UcxEvent::finished);
    module.attr("FRAME") = static_cast<int>(wbridge::UcxEvent::frame);
    module.attr("LOST") = static_cast<int>(wbridge::UcxEvent::lost);

    nb::class_<UcxWorker>(module, "Worker", "Memory that a running operation uses is the caller's to keep.")
        .def(
            "__init__",
            [](UcxWorker *self, const UcxWorker::Settings &required, const UcxWorker::Settings &preferred,
               std::uint64_t frame_tag, std::size_t frame_nbytes, std::pair<std::uintptr_t, std::uintptr_t> entrance) {
                const nb::gil_scoped_release released;  // the entrance may be Python's
                new (self) UcxWorker(required, preferred, frame_tag, frame_nbytes,
                                     {reinterpret_cast<int (*)(void *)>(entrance.first),
                                      reinterpret_cast<void *>(entrance.second)});
            },
            nb::kw_only(), nb::arg("required"), nb::arg("preferred"), nb::arg("frame_tag"), nb::arg("frame_nbytes"),
            nb::arg("entrance") = std::pair<std::uintptr_t, std::uintptr_t>(0, 0),
            "`entrance`: the address of a C function and its argument, for the thread to call first.")
        .def_prop_ro("address", [](const UcxWorker &self) { return to_bytes(self.address()); })
        .def_prop_ro("descriptor", &UcxWorker::descriptor, "An eventfd, readable while `drain` has something.")
        .def_prop_ro("kinds", &UcxWorker::kinds, "Names of the kinds of memory that UCX handles here.")
        .def_prop_ro("num_wakeups", &UcxWorker::num_wakeups, "How often the thread has woken up.")
        .def(
            "connect",
            [](UcxWorker &self, nb::bytes address, bool watched) {
                const std::string copied = copy(address);
                const nb::gil_scoped_release released;
                return self.connect(copied, watched);
            },
            nb::arg("address"), nb::kw_only(), nb::arg("watched"), "Return the number of a route.")
        .def(
            "map",
            [](UcxWorker &self, nb::handle memory, const std::string &kind) {
                const Bytes bytes(memory, PyBUF_WRITABLE);
                const nb::gil_scoped_release released;
                return self.map(bytes.data(), static_cast<std::size_t>(bytes.nbytes()), kind);
            },
            nb::arg("memory"), nb::kw_only(), nb::arg("kind"),
            nb::sig("def map(self, memory: typing_extensions.Buffer, *, kind: str) -> int"),
            "Let peers write `memory`, the addresses of memory of that kind; return the number of a region.")
        .def("unmap", &UcxWorker::unmap, nb::arg("region"), Released())
        .def(
            "pack",
            [](UcxWorker &self, std::uint64_t region) {
                std::string packed;
                {
                    const nb::gil_scoped_release released;
                    packed = self.pack(region);
                }
                return to_bytes(packed);
            },
            nb::arg("region"), "Return the key that a peer needs to write the region.")
        .def(
            "unpack",
            [](UcxWorker &self, std::uint64_t route, nb::bytes key) {
                const std::string copied = copy(key);
                const nb::gil_scoped_release released;
                return self.unpack(route, copied);
            },
            nb::arg("route"), nb::arg("key"), "Return the number of a key for puts on this route.")
        .def("forget_key", &UcxWorker::forget_key, nb::arg("key"), Released())
        .def("settle", &UcxWorker::settle, Released(), "Handle all that a dead peer of this host has sent.")
        .def(
            "send_frame",
            [](UcxWorker &self, std::uint64_t route, nb::bytes frame) { return self.send_frame(route, copy(frame)); },
            nb::arg("route"), nb::arg("frame"))
        .def(
            "send",
            [](UcxWorker &self, std::uint64_t route, nb::handle memory, std::uint64_t tag) {
                const Bytes bytes(memory, PyBUF_SIMPLE);
                return self.send(route, bytes.data(), static_cast<std::size_t>(bytes.nbytes()), tag);
            },
            nb::arg("route"), nb::arg("memory"), nb::arg("tag"),
            nb::sig("def send(self, route: int, memory: typing_extensions.Buffer, tag: int) -> int"))
        .def(
            "receive",
            [](UcxWorker &self, nb::handle memory, std::uint64_t tag) {
                const Bytes bytes(memory, PyBUF_WRITABLE);
                return self.receive(bytes.data(), static_cast<std::size_t>(bytes.nbytes()), tag);
            },
            nb::arg("memory"), nb::arg("tag"),
            nb::sig("def receive(self, memory: typing_extensions.Buffer, tag: int) -> int"))
        .def(
            "put",
            [](UcxWorker &self, std::uint64_t route, nb::handle memory, std::uint64_t remote, std::uint64_t key,
               const std::string &kind) {
                const Bytes bytes(memory, PyBUF_SIMPLE);
                return self.put(route, bytes.data(), static_cast<std::size_t>(bytes.nbytes()), remote, key, kind);
            },
            nb::arg("route"), nb::arg("memory"), nb::arg("remote"), nb::arg("key"), nb::kw_only(), nb::arg("kind"),
            nb::sig("def put(self, route: int, memory: typing_extensions.Buffer, remote: int, key: int, *, kind: str) -> int"),
            "Write `memory`, of that kind, to the peer's address `remote`; over when the bytes are in place there.")
        .def(
            "put_runs",
            [](UcxWorker &self, std::uint64_t route, nb::handle runs, std::uint64_t base, std::uint64_t remote,
               std::uint64_t key) {
                const Bytes bytes(runs, PyBUF_SIMPLE);
                const auto nbytes = static_cast<std::size_t>(bytes.nbytes());
                if (nbytes % sizeof(UcxRun) != 0) throw std::invalid_argument("runs are rows of three 64-bit integers");
                std::vector<UcxRun> copied(nbytes / sizeof(UcxRun));
                if (nbytes > 0) std::memcpy(copied.data(), bytes.data(), nbytes);
                return self.put_runs(route, std::move(copied), base, remote, key);
            },
            nb::arg("route"), nb::arg("runs"), nb::arg("base"), nb::arg("remote"), nb::arg("key"),
            nb::sig("def put_runs(self, route: int, runs: typing_extensions.Buffer, base: int, remote: int, key: int) -> int"),
            "Write all runs, rows of (from, to, nbytes), from `base` to the peer's address `remote`, as one put.")
        .def("drain", &drain, nb::sig("def drain(self) -> list[tuple[int, int, bytes]]"),
             "Return what has happened: kind, number, and the frame or the reason of a failure.")
        .def("close", &UcxWorker::close, nb::arg("timeout_s"), Released(), "End the thread. Idempotent.");
}
