#include "table.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#include "pool.hpp"

namespace wbridge {

namespace {

// Small enough to share work evenly and to stay in a second-level cache, large enough to start a thread for.
constexpr std::int64_t unit_nbytes = 512 * 1024;
// The sides of a transposed piece are multiples of this, except at the ends.
constexpr std::int64_t tile_side = 64;
// Shorter inner loops are not worth their own overhead.
constexpr std::int64_t short_loop = 8;
// Copies at least this large go past the caches, into slots too: what is read from them next comes faster from memory
// than plain stores into a cache take longer.
constexpr std::int64_t streamed_nbytes = 1024 * 1024;
constexpr std::size_t max_rank = 64;
constexpr std::size_t row_header = 5;

std::int64_t multiply(std::int64_t left, std::int64_t right) {
    std::int64_t product;
    if (__builtin_mul_overflow(left, right, &product)) throw std::invalid_argument("a copy overflows 64 bits");
    return product;
}

std::int64_t add_up(std::int64_t left, std::int64_t right) {
    std::int64_t sum;
    if (__builtin_add_overflow(left, right, &sum)) throw std::invalid_argument("a copy overflows 64 bits");
    return sum;
}

std::int64_t magnitude(std::int64_t stride) { return stride < 0 ? -stride : stride; }

void collapse(std::vector<Loop> &loops) {
    std::vector<Loop> kept;
    for (const Loop &loop : loops) {
        if (loop.extent == 1) continue;
        Loop *outer = kept.empty() ? nullptr : &kept.back();
        if (outer && outer->to == loop.extent * loop.to && outer->from == loop.extent * loop.from) {
            *outer = {outer->extent * loop.extent, loop.to, loop.from};
        } else {
            kept.push_back(loop);
        }
    }
    loops = std::move(kept);
}

}  // namespace

struct Table::Copy {
    std::uintptr_t parameter;
    std::int64_t slot;
    std::int64_t run;       // elements, then bytes if nothing is cast
    std::int64_t to_item;   // bytes of what `run` counts, at the destination
    std::int64_t from_item;
    Kind kind;
    std::vector<Loop> loops;

    std::int64_t nbytes() const {
        std::int64_t product = run * to_item;
        for (const Loop &loop : loops) product *= loop.extent;
        return product;
    }
};

Table::Table(const std::int64_t *rows, std::size_t length, bool into_slot) : into_slot_(into_slot) {
    bool is_first = true;
    for (std::size_t at = 0; at < length;) {
        if (length - at < row_header) throw std::invalid_argument("a row of the copy table is cut short");
        const std::int64_t *row = rows + at, *body = row + row_header;
        const std::int64_t parameter_item = row[2], slot_item = row[3];
        if (row[4] < 0 || static_cast<std::size_t>(row[4]) > max_rank)
            throw std::invalid_argument("a copy has " + std::to_string(row[4]) + " loops");
        const std::size_t rank = static_cast<std::size_t>(row[4]);
        if (length - at < row_header + 3 * rank)
            throw std::invalid_argument("a row of the copy table is cut short");
        at += row_header + 3 * rank;
        const bool is_cast = parameter_item != slot_item;
        if (parameter_item < 1 || slot_item < 1 || (is_cast && parameter_item + slot_item != 6))
            throw std::invalid_argument("no copy from " + std::to_string(parameter_item) + " to " +
                                        std::to_string(slot_item) + " bytes per element");

        Copy copy{static_cast<std::uintptr_t>(row[0]), row[1], 1, slot_item, parameter_item, Kind::move, {}};
        if (!into_slot) std::swap(copy.to_item, copy.from_item);
        std::int64_t elements = 1, low = row[1], high = add_up(row[1], slot_item);
        for (std::size_t k = 0; k < rank; ++k) {
            const std::int64_t extent = body[k], inside = body[rank + k], outside = body[2 * rank + k];
            if (extent < 0) throw std::invalid_argument("a copy has a negative extent");
            elements = multiply(elements, extent);
            if (extent == 0) continue;
            multiply(extent, inside);  // so that no sum or product of these overflows later
            const std::int64_t reach = multiply(extent, outside) - outside;
            (reach < 0 ? low : high) = add_up(reach < 0 ? low : high, reach);
            copy.loops.push_back(into_slot ? Loop{extent, outside, inside} : Loop{extent, inside, outside});
        }
        if (elements == 0) continue;
        nbytes_ = add_up(nbytes_, multiply(elements, copy.to_item));
        first_ = is_first ? low : std::min(first_, low);
        stop_ = is_first ? high : std::max(stop_, high);
        is_first = false;
        add(std::move(copy), is_cast);
    }
    close_units();
}

// Brings the loops into the order in which the destination is written, and finds the kernel for them.
void Table::add(Copy copy, bool is_cast) {
    std::vector<Loop> &loops = copy.loops;
    std::stable_sort(loops.begin(), loops.end(), [](const Loop &left, const Loop &right) {
        if (magnitude(left.to) != magnitude(right.to)) return magnitude(left.to) > magnitude(right.to);
        return magnitude(left.from) > magnitude(right.from);
    });
    collapse(loops);
    if (!loops.empty() && loops.back().to == copy.to_item && loops.back().from == copy.from_item) {
        copy.run = loops.back().extent;
        loops.pop_back();
    }
    if (is_cast) {
        copy.kind = copy.to_item < copy.from_item ? Kind::narrow : Kind::widen;
    } else {
        copy.run *= copy.to_item;
        copy.to_item = copy.from_item = 1;
        if (loops.size() >= 2 && is_tile_element(copy.run) && loops.back().to == copy.run) {
            auto along = std::find_if(loops.begin(), loops.end() - 1, [&copy](const Loop &loop) {
                return loop.from == copy.run && loop.extent >= short_loop;
            });
            if (along != loops.end() - 1 && loops.back().extent >= short_loop) {
                std::rotate(along, along + 1, loops.end() - 1);
                copy.kind = Kind::transpose;
            }
        }
    }
    if (copy.kind != Kind::transpose && loops.size() >= 2) {
        Loop &inner = loops.back(), &next = loops[loops.size() - 2];
        if (inner.extent < short_loop && inner.extent < next.extent) std::swap(inner, next);
    }
    split(copy, 0);
}

// Cuts the copy into pieces of at most `unit_nbytes`, outermost loop first.
void Table::split(Copy &copy, std::size_t depth) {
    const std::int64_t nbytes = copy.nbytes();
    const std::size_t rank = copy.loops.size();
    if (nbytes <= unit_nbytes) return push(copy);
    const bool is_run = depth == rank;
    if (is_run && copy.kind == Kind::transpose) return push(copy);
    const Loop whole = is_run ? Loop{copy.run, copy.to_item, copy.from_item} : copy.loops[depth];
    const std::int64_t side = copy.kind == Kind::transpose && depth + 2 >= rank ? tile_side : 1;
    const std::int64_t fitting = std::max<std::int64_t>(unit_nbytes / (nbytes / whole.extent), 1);
    const std::int64_t step = std::min(std::max(fitting / side * side, side), whole.extent);
    std::int64_t &extent = is_run ? copy.run : copy.loops[depth].extent;
    const std::uintptr_t parameter = copy.parameter;
    const std::int64_t slot = copy.slot;
    const std::int64_t in_slot = into_slot_ ? whole.to : whole.from;
    const std::int64_t in_parameter = into_slot_ ? whole.from : whole.to;
    for (std::int64_t start = 0; start < whole.extent; start += step) {
        extent = std::min(step, whole.extent - start);
        copy.slot = slot + start * in_slot;
        copy.parameter = parameter + static_cast<std::uintptr_t>(start * in_parameter);
        is_run ? push(copy) : split(copy, depth + 1);
    }
    extent = whole.extent;
    copy.parameter = parameter;
    copy.slot = slot;
}

void Table::push(const Copy &copy) {
    const std::size_t first = loops_.size();
    for (std::size_t k = 0; k < copy.loops.size(); ++k) {
        const bool is_tiled = copy.kind == Kind::transpose && k + 2 >= copy.loops.size();
        if (copy.loops[k].extent > 1 || is_tiled) loops_.push_back(copy.loops[k]);
    }
    const auto num_loops = static_cast<std::uint8_t>(loops_.size() - first);
    if (first > UINT32_MAX) throw std::invalid_argument("a table has too many loops");
    pieces_.push_back({copy.parameter, copy.slot, copy.run, static_cast<std::uint32_t>(first), num_loops, copy.kind});
    piece_nbytes_.push_back(copy.nbytes());
}

void Table::close_units() {
    units_.push_back(0);
    std::int64_t nbytes = 0;
    for (std::size_t k = 0; k < pieces_.size(); ++k) {
        if (nbytes > 0 && nbytes + piece_nbytes_[k] > unit_nbytes) {
            units_.push_back(k);
            nbytes = 0;
        }
        nbytes += piece_nbytes_[k];
    }
    if (!pieces_.empty()) units_.push_back(pieces_.size());
    piece_nbytes_ = {};
    pieces_.shrink_to_fit();
    loops_.shrink_to_fit();
}

void Table::run(Pool &pool, char *slot, std::int64_t nbytes, std::int64_t base) const {
    if (pieces_.empty()) return;
    if (base < -first_ || base > nbytes - stop_)
        throw std::out_of_range("bytes " + std::to_string(first_) + " to " + std::to_string(stop_) +
                                " from byte " + std::to_string(base) + " leave a slot of " +
                                std::to_string(nbytes) + " bytes");
    const bool stream = nbytes_ >= streamed_nbytes;
    pool.run(units_.size() - 1, [&](std::size_t unit) { run_unit(unit, slot + base, stream); });
}

void Table::run_unit(std::size_t unit, char *slot, bool stream) const {
    for (std::size_t k = units_[unit]; k < units_[unit + 1]; ++k) {
        const Piece &piece = pieces_[k];
        char *parameter = reinterpret_cast<char *>(piece.parameter), *place = slot + piece.slot;
        char *to = into_slot_ ? place : parameter, *from = into_slot_ ? parameter : place;
        copy_piece(piece, loops_.data() + piece.first_loop, piece.num_loops, to, from, stream);
    }
    if (stream) finish_streaming();
}

}  // namespace wbridge
