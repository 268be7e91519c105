#include "kernels.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace wbridge {

namespace {

constexpr std::int64_t line = 64;
// A shorter run has too many of its bytes in lines that it does not fill; one that lies apart from the next must
// be longer, since the processor then reads ahead only inside it.
constexpr std::int64_t shortest_stream = 512;
constexpr std::int64_t shortest_stream_apart = 4096;
#if defined(__SSE2__)
constexpr std::int64_t page = 4096;

void stream_line(char *to, const char *from) {
    const auto *source = reinterpret_cast<const __m128i *>(from);
    auto *target = reinterpret_cast<__m128i *>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}
#endif

// Two pages side by side, since a processor reads ahead within a page only: on small pages one after the other took
// a third longer. What it reads ahead goes to all caches; fetched past them (NTA), it took as long as plain stores.
void stream_run(char *to, const char *from, std::int64_t nbytes) {
#if defined(__SSE2__)
    const std::int64_t head = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(to) % line);
    std::memcpy(to, from, static_cast<std::size_t>(head));
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 2 * page; to += 2 * page, from += 2 * page, nbytes -= 2 * page) {
        for (std::int64_t first = 0, second = page; first < page; first += line, second += line) {
            _mm_prefetch(from + 2 * page + first, _MM_HINT_T0);
            stream_line(to + first, from + first);
            _mm_prefetch(from + 2 * page + second, _MM_HINT_T0);
            stream_line(to + second, from + second);
        }
    }
    for (; nbytes >= line; to += line, from += line, nbytes -= line) {
        _mm_prefetch(from + page / 2, _MM_HINT_T0);
        stream_line(to, from);
    }
#endif
    std::memcpy(to, from, static_cast<std::size_t>(nbytes));
}

// Calls `work(to, from)` at every index of the outer loops.
template <class Work>
void walk(const Loop *loops, std::size_t num_loops, char *to, const char *from, const Work &work) {
    if (num_loops == 0) return work(to, from);
    const Loop loop = *loops;
    for (std::int64_t k = 0; k < loop.extent; ++k, to += loop.to, from += loop.from) {
        if (num_loops == 1) {
            work(to, from);
        } else {
            walk(loops + 1, num_loops - 1, to, from, work);
        }
    }
}

// Elements of a size known here, over the two innermost loops.
template <std::size_t size>
void move_fixed(const Loop *loops, std::size_t num_loops, char *to, const char *from) {
    if (num_loops == 0) {
        std::memcpy(to, from, size);
        return;
    }
    const Loop inner = loops[num_loops - 1];
    walk(loops, num_loops - 1, to, from, [inner](char *row_to, const char *row_from) {
        if (inner.to == size) {  // the compiler writes whole vectors
            for (std::int64_t k = 0; k < inner.extent; ++k)
                std::memcpy(row_to + k * static_cast<std::int64_t>(size), row_from + k * inner.from, size);
        } else if (inner.from == size) {
            for (std::int64_t k = 0; k < inner.extent; ++k)
                std::memcpy(row_to + k * inner.to, row_from + k * static_cast<std::int64_t>(size), size);
        } else {
            for (std::int64_t k = 0; k < inner.extent; ++k)
                std::memcpy(row_to + k * inner.to, row_from + k * inner.from, size);
        }
    });
}

void move_runs(const Loop *loops, std::size_t num_loops, char *to, const char *from, std::int64_t run, bool stream) {
    switch (run) {
        case 1: return move_fixed<1>(loops, num_loops, to, from);
        case 2: return move_fixed<2>(loops, num_loops, to, from);
        case 4: return move_fixed<4>(loops, num_loops, to, from);
        case 8: return move_fixed<8>(loops, num_loops, to, from);
        case 16: return move_fixed<16>(loops, num_loops, to, from);
        case 32: return move_fixed<32>(loops, num_loops, to, from);
        case 64: return move_fixed<64>(loops, num_loops, to, from);
        default: break;
    }
    const bool is_apart = num_loops > 0 && loops[num_loops - 1].from != run;
    if (stream && run >= (is_apart ? shortest_stream_apart : shortest_stream))
        return walk(loops, num_loops, to, from, [run](char *t, const char *f) { stream_run(t, f, run); });
    const auto length = static_cast<std::size_t>(run);
    walk(loops, num_loops, to, from, [length](char *t, const char *f) { std::memcpy(t, f, length); });
}

#if defined(__SSE2__)
template <std::size_t size>
__m128i interleave(__m128i left, __m128i right, bool high) {
    if constexpr (size == 1) return high ? _mm_unpackhi_epi8(left, right) : _mm_unpacklo_epi8(left, right);
    if constexpr (size == 2) return high ? _mm_unpackhi_epi16(left, right) : _mm_unpacklo_epi16(left, right);
    if constexpr (size == 4) return high ? _mm_unpackhi_epi32(left, right) : _mm_unpacklo_epi32(left, right);
    return high ? _mm_unpackhi_epi64(left, right) : _mm_unpacklo_epi64(left, right);
}

// A square as wide as a vector: interleaving row k with row k + half, once per bit of the index, transposes it.
template <std::size_t size>
void transpose_square(char *to, const char *from) {
    constexpr int side = 16 / size;
    __m128i rows[side], mixed[side];
    for (int k = 0; k < side; ++k) rows[k] = _mm_load_si128(reinterpret_cast<const __m128i *>(from + k * line));
    for (int bit = 1; bit < side; bit *= 2) {
        for (int k = 0; k < side / 2; ++k) {
            mixed[2 * k] = interleave<size>(rows[k], rows[k + side / 2], false);
            mixed[2 * k + 1] = interleave<size>(rows[k], rows[k + side / 2], true);
        }
        for (int k = 0; k < side; ++k) rows[k] = mixed[k];
    }
    for (int k = 0; k < side; ++k) _mm_store_si128(reinterpret_cast<__m128i *>(to + k * line), rows[k]);
}
#endif

// Between two aligned tiles of rows of one cache line.
template <std::size_t size>
void transpose_tile(char *to, const char *from) {
    constexpr std::int64_t side = line / static_cast<std::int64_t>(size);
#if defined(__SSE2__)
    if constexpr (size < 16) {
        constexpr std::int64_t square = 16 / static_cast<std::int64_t>(size);
        for (std::int64_t i = 0; i < side; i += square)
            for (std::int64_t j = 0; j < side; j += square)
                transpose_square<size>(to + j * line + i * static_cast<std::int64_t>(size),
                                       from + i * line + j * static_cast<std::int64_t>(size));
        return;
    }
#endif
    for (std::int64_t i = 0; i < side; ++i)
        for (std::int64_t j = 0; j < side; ++j)
            std::memcpy(to + j * line + i * static_cast<std::int64_t>(size),
                        from + i * line + j * static_cast<std::int64_t>(size), size);
}

// A tile is one cache line wide on both sides, so every line is read once and written once, whatever the strides.
template <std::size_t size>
void transpose(Loop along, Loop across, char *to, const char *from, bool stream) {
    constexpr std::int64_t side = line / static_cast<std::int64_t>(size);
    alignas(line) char rows[side * line], columns[side * line];
    for (std::int64_t i = 0; i < along.extent; i += side) {
        for (std::int64_t j = 0; j < across.extent; j += side) {
            const std::int64_t width = std::min(side, along.extent - i), height = std::min(side, across.extent - j);
            const char *source = from + i * along.from + j * across.from;
            char *target = to + i * along.to + j * across.to;
            if (width == side && height == side) {
                for (std::int64_t k = 0; k < side; ++k) std::memcpy(rows + k * line, source + k * across.from, line);
                transpose_tile<size>(columns, rows);
                for (std::int64_t k = 0; k < side; ++k) {
                    char *end = target + k * along.to;
                    stream ? stream_run(end, columns + k * line, line)
                           : static_cast<void>(std::memcpy(end, columns + k * line, line));
                }
            } else {
                for (std::int64_t r = 0; r < width; ++r)
                    for (std::int64_t c = 0; c < height; ++c)
                        std::memcpy(target + r * along.to + c * across.to,
                                    source + r * along.from + c * across.from, size);
            }
        }
    }
}

void transpose_tiles(const Loop *loops, std::size_t num_loops, char *to, const char *from, std::int64_t run,
                     bool stream) {
    const Loop along = loops[num_loops - 2], across = loops[num_loops - 1];
    walk(loops, num_loops - 2, to, from, [=](char *t, const char *f) {
        switch (run) {
            case 1: return transpose<1>(along, across, t, f, stream);
            case 2: return transpose<2>(along, across, t, f, stream);
            case 4: return transpose<4>(along, across, t, f, stream);
            case 8: return transpose<8>(along, across, t, f, stream);
            default: return transpose<16>(along, across, t, f, stream);
        }
    });
}

// Round to nearest, ties to even; a NaN stays one.
inline std::uint16_t narrow(std::uint32_t bits) {
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

// Compiled for wide vectors too where the loader can choose; sanitizers start too late for that.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
#define WBRIDGE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WBRIDGE_WIDE
#endif

WBRIDGE_WIDE void narrow_run(char *__restrict to, const char *__restrict from, std::int64_t num_elements) {
    for (std::int64_t k = 0; k < num_elements; ++k) {
        std::uint32_t bits;
        std::memcpy(&bits, from + 4 * k, 4);
        const std::uint16_t result = narrow(bits);
        std::memcpy(to + 2 * k, &result, 2);
    }
}

WBRIDGE_WIDE void widen_run(char *__restrict to, const char *__restrict from, std::int64_t num_elements) {
    for (std::int64_t k = 0; k < num_elements; ++k) {
        std::uint16_t upper;
        std::memcpy(&upper, from + 2 * k, 2);
        const std::uint32_t bits = static_cast<std::uint32_t>(upper) << 16;
        std::memcpy(to + 4 * k, &bits, 4);
    }
}

}  // namespace

void copy_piece(const Piece &piece, const Loop *loops, std::size_t num_loops, char *to, const char *from,
                bool stream) {
    const std::int64_t run = piece.run;
    switch (piece.kind) {
        case Kind::move: return move_runs(loops, num_loops, to, from, run, stream);
        case Kind::transpose: return transpose_tiles(loops, num_loops, to, from, run, stream);
        case Kind::narrow:
            return walk(loops, num_loops, to, from, [run](char *t, const char *f) { narrow_run(t, f, run); });
        case Kind::widen:
            return walk(loops, num_loops, to, from, [run](char *t, const char *f) { widen_run(t, f, run); });
    }
}

bool is_tile_element(std::int64_t nbytes) {
    return nbytes == 1 || nbytes == 2 || nbytes == 4 || nbytes == 8 || nbytes == 16;
}

void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace wbridge
