// Just enough CUDA to run the kernels on a CPU: one thread is each warp in turn, and all lanes of it.
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __shared__ static
#define __noinline__
#define __launch_bounds__(...)
#define LANE_STEP 1

struct Index {
    unsigned x = 0;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static inline void __syncwarp() {}

static inline unsigned __umulhi(unsigned left, unsigned right) {
    return static_cast<unsigned>(static_cast<std::uint64_t>(left) * right >> 32);
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline std::uint64_t atomicAdd(unsigned long long *sum, unsigned long long value) {
    const unsigned long long before = *sum;
    *sum += value;
    return before;
}

#include COPY_SOURCE
#include DIGEST_SOURCE

// Calls `kernel` for each warp of each block.
template <class Kernel>
static void for_each_warp(unsigned num_blocks, Kernel kernel) {
    gridDim.x = num_blocks;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x)
        for (unsigned warp = 0; warp < warps; ++warp) {
            threadIdx.x = warp * lanes;
            kernel();
        }
}

extern "C" void run_grid(unsigned num_blocks, const Copy *copies, const Loop *loops, const U32 *tiles,
                         I64 num_tiles, char *slot, I64 into_slot) {
    for_each_warp(num_blocks, [=] { copy_table(copies, loops, tiles, num_tiles, slot, into_slot); });
}

extern "C" void run_digest(unsigned num_blocks, const Part *parts, const Loop *loops, const U32 *tiles, I64 num_tiles,
                           U64 *sums) {
    for_each_warp(num_blocks, [=] { digest_table(parts, loops, tiles, num_tiles, sums); });
}
