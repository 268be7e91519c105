// Digests of tensors on checkpoint coordinates: `digest.py` says what is summed. Compiled behind strided.cu, whose
// lanes, loops and casts it uses; a loop's `to` is here the step in memory, and `from` that in the checkpoint.

struct alignas(16) Part {
    U64 address;  // of the first element
    I64 first;    // its index in the checkpoint tensor
    U64 seed;     // of the tensor's name
    U64 nan_mask;  // a NaN: its bits under the mask are above `nan_above`
    U64 nan_above;
    U32 first_tile;
    U32 per_tile;  // elements
    U32 count;     // elements, as the items of a copy
    U32 first_loop;
    U32 rank;
    U32 kind;
    U32 sum;  // which one it is added to
    U32 unused;
    U64 unused_too;
};

// The bits as `digest.py` widens them: bytes without a sign, the others with theirs.
__device__ inline U64 widened_bits(Byte bits) { return bits; }
__device__ inline U64 widened_bits(U16 bits) { return static_cast<U64>(static_cast<I64>(static_cast<short>(bits))); }
__device__ inline U64 widened_bits(U32 bits) { return static_cast<U64>(static_cast<I64>(static_cast<int>(bits))); }
__device__ inline U64 widened_bits(U64 bits) { return bits; }

template <class T>
struct Plain {
    using Memory = T;
    __device__ static T wire(T bits) { return bits; }
};

template <class Source, class Target>
struct Narrowed {
    using Memory = Source;
    __device__ static auto wire(Source element) { return Target::rounded(element.widened()).bits; }
};

__device__ inline U64 mixed(U64 z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

__device__ inline U64 digest_element(const Part &part, I64 index, U64 wire, U64 bits) {
    if ((wire & part.nan_mask) > part.nan_above) bits = ~0ull;
    const U64 key = mixed(static_cast<U64>(part.first + index + 1) * 0x9E3779B97F4A7C15ull + part.seed);
    return mixed(key + bits * 0xD1342543DE82EF95ull);
}

// Adds up the elements from `start` to `stop`, lane by lane.
template <class Element>
__device__ __noinline__ void digest_elements(const Part part, const Loop *loops, U32 start, U32 stop, U64 *totals) {
    using Memory = typename Element::Memory;
    const char *memory = reinterpret_cast<const char *>(part.address);
    each_lane([=](U32 lane) {
        U64 total = 0;
#pragma unroll 1
        for (U32 first = start + lane; first < stop; first += lanes * batch) {
            U32 items[batch];
            I64 at[batch], index[batch];
#pragma unroll
            for (U32 n = 0; n < batch; ++n) items[n] = smaller(first + lanes * n, stop - 1);
            locate(loops, part.rank, items, at, index);
            Memory value[batch];
#pragma unroll
            for (U32 n = 0; n < batch; ++n) value[n] = *reinterpret_cast<const Memory *>(memory + at[n]);
#pragma unroll
            for (U32 n = 0; n < batch; ++n) {
                const auto wire = Element::wire(value[n]);
                const U64 found = digest_element(part, index[n], static_cast<U64>(wire), widened_bits(wire));
                total += first + lanes * n < stop ? found : 0;
            }
        }
        totals[lane] = total;
    });
}

// Kinds are numbered as in `digests.py`.
__device__ inline void digest_tile(const Part &part, const Loop *loops, U32 start, U32 stop, U64 *totals) {
    switch (part.kind) {
        case 0: return digest_elements<Plain<Byte>>(part, loops, start, stop, totals);
        case 1: return digest_elements<Plain<U16>>(part, loops, start, stop, totals);
        case 2: return digest_elements<Plain<U32>>(part, loops, start, stop, totals);
        case 3: return digest_elements<Plain<U64>>(part, loops, start, stop, totals);
        case 4: return digest_elements<Narrowed<Float32, BFloat16>>(part, loops, start, stop, totals);
        case 5: return digest_elements<Narrowed<Float32, Float16>>(part, loops, start, stop, totals);
        case 6: return digest_elements<Narrowed<BFloat16, Float16>>(part, loops, start, stop, totals);
        case 7: return digest_elements<Narrowed<Float16, BFloat16>>(part, loops, start, stop, totals);
    }
}

// `tiles` names the part of each tile. Sums are mod 2^64, so the order in which they are added does not matter.
extern "C" __global__ void __launch_bounds__(lanes *warps)
    digest_table(const Part *parts, const Loop *loops, const U32 *tiles, I64 num_tiles, U64 *sums) {
    __shared__ U64 totals[warps][lanes];
    const U32 warp = threadIdx.x / lanes;
    const I64 step = static_cast<I64>(gridDim.x) * warps;
    for (I64 index = static_cast<I64>(blockIdx.x) * warps + warp; index < num_tiles; index += step) {
        const Part part = parts[tiles[index]];
        const U32 start = (static_cast<U32>(index) - part.first_tile) * part.per_tile;
        const U32 stop = part.count - start < part.per_tile ? part.count : start + part.per_tile;
        digest_tile(part, loops + part.first_loop, start, stop, totals[warp]);
        const U64 *of_lanes = totals[warp];
        each_lane([=](U32 lane) {
            if (lane > 0) return;
            U64 total = 0;
            for (U32 other = 0; other < lanes; ++other) total += of_lanes[other];
            atomicAdd(sums + part.sum, total);
        });
    }
}
