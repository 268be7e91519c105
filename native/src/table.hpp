// A table of strided copies between live parameters and a slot, compiled once and run for every version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wbridge {

// One loop of a copy; strides in bytes.
struct Loop {
    std::int64_t extent;
    std::int64_t to;
    std::int64_t from;
};

enum class Kind : std::uint8_t {
    move,       // `run` bytes at each index of the loops
    transpose,  // `run`-byte elements; the last loop is contiguous in `to`, the one before it in `from`
    narrow,     // `run` elements, float32 to bfloat16
    widen,      // `run` elements, bfloat16 to float32
};

// A part of one copy that one thread does at a time.
struct Piece {
    std::uintptr_t parameter;  // address
    std::int64_t slot;         // offset in bytes
    std::int64_t run;
    std::uint32_t first_loop;
    std::uint8_t num_loops;
    Kind kind;
};

class Pool;

class Table {
public:
    // `rows` is the concatenation of rows of
    //   address, slot offset, parameter itemsize, slot itemsize, rank,
    //   rank extents, rank parameter strides, rank slot strides (bytes).
    // Equal item sizes are copied as bits; sizes 4 and 2 are float32 and bfloat16.
    // Raises std::invalid_argument if they do not parse.
    Table(const std::int64_t *rows, std::size_t length, bool into_slot);

    // Copies between the parameters and `slot` at byte `base`; `slot` has `nbytes`.
    // Raises std::out_of_range, before anything is copied, if a copy leaves the slot.
    void run(Pool &pool, char *slot, std::int64_t nbytes, std::int64_t base) const;

    bool into_slot() const { return into_slot_; }
    std::int64_t nbytes() const { return nbytes_; }
    std::size_t num_pieces() const { return pieces_.size(); }

private:
    struct Copy;
    void add(Copy copy, bool is_cast);
    void split(Copy &copy, std::size_t depth);
    void push(const Copy &copy);
    void close_units();
    void run_unit(std::size_t unit, char *slot, bool stream) const;

    bool into_slot_;
    std::int64_t nbytes_ = 0;  // written by one run
    std::int64_t first_ = 0;   // bytes of the slot that are touched: first_ <= byte < stop_
    std::int64_t stop_ = 0;
    std::vector<Loop> loops_;
    std::vector<Piece> pieces_;
    std::vector<std::int64_t> piece_nbytes_;  // only while building
    std::vector<std::size_t> units_;          // unit k is pieces [units_[k], units_[k + 1])
};

}  // namespace wbridge
