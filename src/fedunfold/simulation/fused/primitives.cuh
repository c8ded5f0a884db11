// What the walk asks of a GPU: a cluster of programs that reach into each other's shared memory (Hopper on).

typedef float real;

__device__ __forceinline__ int thread() { return threadIdx.x; }
__device__ __forceinline__ int rank_in_cluster() { return blockIdx.x % PARTS; }
__device__ __forceinline__ int lane_of_cluster() { return blockIdx.x / PARTS; }
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// All programs of the cluster have come here, and see what the others wrote.
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

// The four numbers that the program of that rank holds where this one holds own[0 … 3].
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
