// What the kernels need of a GPU: a cluster of thread blocks that access each other's shared memory (Hopper and later).

typedef float real;

__device__ __forceinline__ int thread() { return threadIdx.x; }
__device__ __forceinline__ int rank_in_cluster() { return blockIdx.x % BLOCKS; }
__device__ __forceinline__ int slot_of_cluster() { return blockIdx.x / BLOCKS; }
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// Waits for all blocks of the cluster, and makes what they wrote visible.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ unsigned peer(const void* own, int rank) {
    unsigned address = (unsigned)__cvta_generic_to_shared(own), there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

struct alignas(4 * sizeof(real)) Quad {
    real v[4];
};

// The four numbers that the block of that rank has where this one has own[0 … 3].
__device__ __forceinline__ Quad peer_load(const real* own, int rank) {
    Quad q;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(q.v[0]), "=f"(q.v[1]), "=f"(q.v[2]), "=f"(q.v[3])
                 : "r"(peer(own, rank))
                 : "memory");
    return q;
}

__device__ __forceinline__ void peer_store(real* own, int rank, Quad q) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(peer(own, rank)), "f"(q.v[0]),
                 "f"(q.v[1]), "f"(q.v[2]), "f"(q.v[3])
                 : "memory");
}

__device__ __forceinline__ void peer_store(real* own, int rank, real value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer(own, rank)), "f"(value) : "memory");
}

__device__ __forceinline__ real warp_sum(real value) {
    for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

__device__ __forceinline__ real warp_max(real value) {
    for (int offset = 16; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

__device__ __forceinline__ real exponential(real x) { return expf(x); }
__device__ __forceinline__ real logarithm(real x) { return logf(x); }

// Products by a warp, of tiles of which thread 4 g + t holds these places: of a left factor and of a sum, 16 by 8,
// [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]; of a right factor, 8 by 8, [2t][g] and [2t + 1][g].
//
// Tensor cores read 11 significant bits of a number. Each is given as high + low with 11 bits in either, and a product
// as high·high + high·low + low·high: what is left out is 2⁻²² of it, about what single precision leaves out of a sum.
struct Left {
    unsigned high[4], low[4];
};
struct Right {
    unsigned high[2], low[2];
};
struct Four {
    real v[4];
};

__device__ __forceinline__ void prefetch(const real* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void split(real value, unsigned& high, unsigned& low) {
    high = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(value - __uint_as_float(high));
}

__device__ __forceinline__ Left left(Four values) {
    Left a;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(values.v[i], a.high[i], a.low[i]);
    return a;
}

__device__ __forceinline__ Right right(real upper, real lower) {
    Right b;
    split(upper, b.high[0], b.low[0]), split(lower, b.high[1], b.low[1]);
    return b;
}

__device__ __forceinline__ void add_product(real (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    // Columns 2t and 2t + 1 of the left factor stand for the hardware's t and t + 4, and so do rows of the right one.
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sum[m][n] += a[m] b[n]. A tensor core takes long for a product, but has several at work: those that follow each other
// have nothing to do with each other.
template <int M, int N>
__device__ __forceinline__ void add_products(real (&sum)[M][N][4], const Left (&a)[M], const Right (&b)[N]) {
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
                add_product(sum[m][n], part == 0 ? a[m].low : a[m].high, part == 1 ? b[n].low : b[n].high);
}
