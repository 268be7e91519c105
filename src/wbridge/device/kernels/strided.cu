// Strided copies between parameters and one slot: a table of them in one launch.
//
// A copy is `count` items in the order in which its destination is written; `descriptors.py` builds the table,
// chooses an item's kind and size, and cuts each copy into tiles of about the same bytes. A warp does one tile at
// a time. Everything here includes nothing and also compiles as C++, where one thread plays all lanes of a warp
// in turn: what lanes exchange through shared memory lies in two calls of `each_lane`.

using Byte = unsigned char;
using U16 = unsigned short;
using U32 = unsigned int;
using I64 = long long;
using U64 = unsigned long long;

#ifndef LANE_STEP
#define LANE_STEP 32
#endif

constexpr U32 lanes = 32;
constexpr U32 warps = 8;           // of a block
constexpr U32 batch = 4;           // items that a lane has under way
constexpr U32 square_batch = 4;    // the same for the elements of a square
constexpr U32 square_nbytes = 4352;  // the largest square with its padding

// One loop of a copy. Strides are bytes; `magic` and `shift` divide by `extent`.
struct alignas(16) Loop {
    I64 to;
    I64 from;
    U32 extent;
    U32 magic;
    U32 shift;
    U32 unused;
};

struct alignas(16) Copy {
    U64 parameter;  // address
    I64 slot;       // offset in bytes
    U32 first_tile;
    U32 per_tile;  // items
    U32 count;     // items, below 2^31 by more than what a warp has under way
    U32 first_loop;
    U32 rank;  // loops, the innermost first; for squares those along `to` and along `from`, then the others
    U32 kind;
    U64 unused;
};

// What one warp does at a time.
struct Tile {
    char *to;
    const char *from;
    const Loop *loops;
    U32 rank;
    U32 start;
    U32 stop;
};

// Calls `work(lane)` in all lanes of the warp; what they wrote to shared memory is visible to all afterwards.
template <class Work>
__device__ inline void each_lane(Work work) {
    for (U32 lane = threadIdx.x % lanes; lane < lanes; lane += LANE_STEP) work(lane);
    __syncwarp();
}

__device__ inline U32 smaller(U32 a, U32 b) { return a < b ? a : b; }

// Exact for n < 2^31 (Granlund and Montgomery 1994).
__device__ inline U32 divide(U32 n, const Loop &loop) { return (__umulhi(n, loop.magic) + n) >> loop.shift; }

// Finds the offsets of N items; leaves `items` undefined.
template <U32 N>
__device__ inline void locate(const Loop *loops, U32 rank, U32 (&items)[N], I64 (&to)[N], I64 (&from)[N]) {
#pragma unroll
    for (U32 n = 0; n < N; ++n) to[n] = from[n] = 0;
#pragma unroll 1
    for (U32 k = 0; k + 1 < rank; ++k) {
        const Loop loop = loops[k];
#pragma unroll
        for (U32 n = 0; n < N; ++n) {
            const U32 outer = divide(items[n], loop);
            const I64 index = items[n] - outer * loop.extent;
            to[n] += index * loop.to;
            from[n] += index * loop.from;
            items[n] = outer;
        }
    }
    const Loop loop = loops[rank - 1];
#pragma unroll
    for (U32 n = 0; n < N; ++n) {
        to[n] += static_cast<I64>(items[n]) * loop.to;
        from[n] += static_cast<I64>(items[n]) * loop.from;
    }
}

// Moves items that are a `Source` each; `Target` is made of one.
template <class Source, class Target>
__device__ __noinline__ void copy_items(const Tile tile) {
    each_lane([=](U32 lane) {
#pragma unroll 1
        for (U32 first = tile.start + lane; first < tile.stop; first += lanes * batch) {
            U32 items[batch];
            I64 to[batch], from[batch];
            // What is past the end reads the last item again: a load under a condition would put the values into
            // local memory.
#pragma unroll
            for (U32 n = 0; n < batch; ++n) items[n] = smaller(first + lanes * n, tile.stop - 1);
            locate(tile.loops, tile.rank, items, to, from);
            Source value[batch];
#pragma unroll
            for (U32 n = 0; n < batch; ++n) value[n] = *reinterpret_cast<const Source *>(tile.from + from[n]);
#pragma unroll
            for (U32 n = 0; n < batch; ++n)
                if (first + lanes * n < tile.stop) *reinterpret_cast<Target *>(tile.to + to[n]) = Target(value[n]);
        }
    });
}

template <class T>
__device__ inline void move(const Tile &tile) {
    copy_items<T, T>(tile);
}

// Items are squares: A elements along the loop that is contiguous in `to`, B along the one contiguous in `from`.
template <class T, U32 A, U32 B>
__device__ __noinline__ void transpose(const Tile tile, Byte *square) {
    constexpr U32 size = sizeof(T);
    constexpr U32 pitch = B * size + (size < 4 ? 4 : size);  // so that a column's elements are in different banks
    static_assert(A * pitch <= square_nbytes && A * B % (lanes * square_batch) == 0, "a square does not fit");
    const Loop across = tile.loops[0], along = tile.loops[1];
    const U32 num_across = (across.extent + A - 1) / A, num_along = (along.extent + B - 1) / B;
#pragma unroll 1
    for (U32 item = tile.start; item < tile.stop; ++item) {
        const U32 row = item / num_across, first_a = (item - row * num_across) * A;
        U32 outer[1] = {row / num_along};
        const U32 first_b = (row - outer[0] * num_along) * B;
        I64 to[1] = {0}, from[1] = {0};
        if (tile.rank > 2) locate(tile.loops + 2, tile.rank - 2, outer, to, from);
        const U32 num_a = smaller(across.extent - first_a, A), num_b = smaller(along.extent - first_b, B);
        const char *source = tile.from + from[0] + first_a * across.from + static_cast<I64>(first_b) * size;
        char *target = tile.to + to[0] + static_cast<I64>(first_a) * size + first_b * along.to;
        each_lane([=](U32 lane) {
#pragma unroll 1
            for (U32 first = lane; first < num_a * B; first += lanes * square_batch) {
                T value[square_batch];
#pragma unroll
                for (U32 n = 0; n < square_batch; ++n) {
                    const U32 element = first + lanes * n, a = element / B, b = element % B;
                    value[n] = *reinterpret_cast<const T *>(
                        source + smaller(a, num_a - 1) * across.from + smaller(b, num_b - 1) * size);
                }
#pragma unroll
                for (U32 n = 0; n < square_batch; ++n) {
                    const U32 element = first + lanes * n, a = element / B, b = element % B;
                    if (a < num_a && b < num_b) *reinterpret_cast<T *>(square + a * pitch + b * size) = value[n];
                }
            }
        });
        each_lane([=](U32 lane) {
#pragma unroll 4
            for (U32 element = lane; element < num_b * A; element += lanes) {
                const U32 b = element / A, a = element % A;
                if (a < num_a)
                    *reinterpret_cast<T *>(target + b * along.to + a * size) =
                        *reinterpret_cast<const T *>(square + a * pitch + b * size);
            }
        });
    }
}

// Elements as their bits. Casts go through float32 and round to the nearest, ties to even; a NaN stays one.
struct Float32 {
    U32 bits;
    Float32() = default;
    __device__ explicit Float32(U32 bits) : bits(bits) {}
    __device__ U32 widened() const { return bits; }
    __device__ static Float32 rounded(U32 single) { return Float32(single); }
};

struct BFloat16 {
    U16 bits;
    __device__ U32 widened() const { return static_cast<U32>(bits) << 16; }
    __device__ static BFloat16 rounded(U32 single) {
        const bool is_nan = (single & 0x7fffffffu) > 0x7f800000u;
        const U32 upper = (single + 0x7fffu + (single >> 16 & 1u)) >> 16;
        return {static_cast<U16>(is_nan ? 0x7fc0u : upper)};
    }
};

struct Float16 {
    U16 bits;
    __device__ U32 widened() const {
        const U32 sign = static_cast<U32>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
        if (rest >= 0x7c00u) return sign | 0x7f800000u | rest << 13;                             // infinite, NaN
        if (rest < 0x0400u) return sign | __float_as_uint(static_cast<float>(rest) * 0x1p-24f);  // subnormal
        return sign | ((rest << 13) + (112u << 23));
    }
    __device__ static Float16 rounded(U32 single) {
        const U32 sign = single >> 16 & 0x8000u, rest = single & 0x7fffffffu;
        U32 half;
        if (rest > 0x7f800000u) {
            half = 0x7e00u;
        } else if (rest >= 0x477ff000u) {  // 65520, half way to what would come after the largest
            half = 0x7c00u;
        } else if (rest < 0x38800000u) {  // subnormal: the last bit of 0.5 + x is 2^-24
            half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
        } else {
            half = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
        }
        return {static_cast<U16>(sign | half)};
    }
};

template <class T, U32 N>
struct alignas(sizeof(T) * N) Pack {
    T element[N];
    Pack() = default;
    template <class Other>
    __device__ explicit Pack(const Pack<Other, N> &other) {
#pragma unroll
        for (U32 n = 0; n < N; ++n) element[n] = T::rounded(other.element[n].widened());
    }
};

template <class Source, class Target>
__device__ inline void cast(const Tile &tile, bool is_wide) {
    if (is_wide) {
        copy_items<Pack<Source, 4>, Pack<Target, 4>>(tile);
    } else {
        copy_items<Pack<Source, 1>, Pack<Target, 1>>(tile);
    }
}

// Kinds are numbered as in `descriptors.py`.
__device__ inline void run_tile(const Tile &tile, U32 kind, Byte *square) {
    const bool is_wide = kind % 2 == 1;
    switch (kind) {
        case 0: return move<Byte>(tile);
        case 1: return move<U16>(tile);
        case 2: return move<U32>(tile);
        case 3: return move<U64>(tile);
        case 4: return move<uint4>(tile);
        case 5: return transpose<Byte, 64, 64>(tile, square);
        case 6: return transpose<U16, 32, 64>(tile, square);
        case 7: return transpose<U32, 32, 32>(tile, square);
        case 8: return transpose<U64, 16, 32>(tile, square);
        case 9: return transpose<uint4, 16, 16>(tile, square);
        case 10: case 11: return cast<Float32, BFloat16>(tile, is_wide);
        case 12: case 13: return cast<BFloat16, Float32>(tile, is_wide);
        case 14: case 15: return cast<Float32, Float16>(tile, is_wide);
        case 16: case 17: return cast<Float16, Float32>(tile, is_wide);
        case 18: case 19: return cast<BFloat16, Float16>(tile, is_wide);
        case 20: case 21: return cast<Float16, BFloat16>(tile, is_wide);
    }
}

// `tiles` names the copy of each tile. `slot` is aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(lanes *warps, 4)
    copy_table(const Copy *copies, const Loop *loops, const U32 *tiles, I64 num_tiles, char *slot, I64 into_slot) {
    alignas(16) __shared__ Byte squares[warps][square_nbytes];
    const U32 warp = threadIdx.x / lanes;
    const I64 step = static_cast<I64>(gridDim.x) * warps;
    for (I64 index = static_cast<I64>(blockIdx.x) * warps + warp; index < num_tiles; index += step) {
        const Copy copy = copies[tiles[index]];
        char *parameter = reinterpret_cast<char *>(copy.parameter), *place = slot + copy.slot;
        Tile tile;
        tile.to = into_slot ? place : parameter;
        tile.from = into_slot ? parameter : place;
        tile.loops = loops + copy.first_loop;
        tile.rank = copy.rank;
        tile.start = (static_cast<U32>(index) - copy.first_tile) * copy.per_tile;
        tile.stop = copy.count - tile.start < copy.per_tile ? copy.count : tile.start + copy.per_tile;
        run_tile(tile, copy.kind, squares[warp]);
    }
}
