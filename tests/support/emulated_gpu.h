// The primitives of `primitives.cuh` on a CPU and in double precision, so that kernels can be tested where there is no
// GPU. Every GPU thread is a coroutine that runs until it has to wait for others: for its warp, its block, or the
// cluster. Threads are resumed in another order each time, so that what depends on their order shows.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __cluster_dims__(...)
#define __launch_bounds__(...)

#ifndef REAL
#define REAL double
#endif
typedef REAL real;
struct alignas(4 * sizeof(real)) Quad {
    real v[4];
};

struct Four {
    real v[4];
};
struct Left {
    real v[4];
};
struct Right {
    real v[2];
};
struct Tiles {
    Left left;
    Right right;
};

enum Wait { NOTHING, WARP, BLOCK, CLUSTER, END };
struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    int block, thread;
    Wait waits = NOTHING;
};
static std::vector<Coroutine> coroutines;
static std::vector<std::vector<char>> memories;
static std::vector<real> exchanged;
static std::vector<Tiles> tiles;
static Coroutine* current;
static ucontext_t scheduler;
static std::function<void()> kernel;
static int current_slot;

static void wait_for(Wait what) {
    current->waits = what;
    swapcontext(&current->context, &scheduler);
}
static void fail(const char* why) {
    fprintf(stderr, "emulated GPU: %s\n", why);
    abort();
}
static char* memory_of(int block) {
    return reinterpret_cast<char*>((reinterpret_cast<size_t>(memories[block].data()) + 63) / 64 * 64);
}
static real* peer(const real* own, int rank) {
    size_t offset = reinterpret_cast<const char*>(own) - memory_of(current->block);
    if (rank < 0 || rank >= BLOCKS || offset >= memories[0].size() - 64) fail("outside of a block's memory");
    return reinterpret_cast<real*>(memory_of(rank) + offset);
}

inline int thread() { return current->thread; }
inline int rank_in_cluster() { return current->block; }
inline int slot_of_cluster() { return current_slot; }
inline char* own_memory() { return memory_of(current->block); }
inline void block_sync() { wait_for(BLOCK); }
inline void cluster_sync() { wait_for(CLUSTER); }
static void check_four(const real* own) {
    if (reinterpret_cast<size_t>(own) % sizeof(Quad)) fail("four numbers that do not begin at a multiple of four");
}
inline Quad peer_load(const real* own, int rank) {
    check_four(own);
    return *reinterpret_cast<Quad*>(peer(own, rank));
}
inline void peer_store(real* own, int rank, real value) { *peer(own, rank) = value; }
inline void peer_store(real* own, int rank, Quad q) {
    check_four(own);
    *reinterpret_cast<Quad*>(peer(own, rank)) = q;
}
inline void prefetch(const real*) {}
inline real exponential(real x) { return std::exp(x); }
inline real logarithm(real x) { return std::log(x); }

template <class Combine>
inline real over_warp(real value, Combine combine) {
    int index = current->block * THREADS + current->thread, first = index / 32 * 32;
    exchanged[index] = value;
    wait_for(WARP);
    real out = exchanged[first];
    for (int i = 1; i < 32; ++i) out = combine(out, exchanged[first + i]);
    wait_for(WARP);
    return out;
}
inline real warp_sum(real value) {
    return over_warp(value, [](real a, real b) { return a + b; });
}
inline real warp_max(real value) {
    return over_warp(value, [](real a, real b) { return a > b ? a : b; });
}

inline Left left(Four values) { return {values.v[0], values.v[1], values.v[2], values.v[3]}; }
inline Right right(real upper, real lower) { return {upper, lower}; }
inline void add_product(real (&sum)[4], const Left& a, const Right& b) {
    int index = current->block * THREADS + current->thread, first = index / 32 * 32;
    tiles[index] = {a, b};
    wait_for(WARP);
    for (int i = 0; i < 4; ++i) {
        int row = index % 32 / 4 + i / 2 * 8, column = index % 4 * 2 + i % 2;
        for (int k = 0; k < 8; ++k)
            sum[i] += tiles[first + row % 8 * 4 + k / 2].left.v[row / 8 * 2 + k % 2] *
                      tiles[first + column * 4 + k / 2].right.v[k % 2];
    }
    wait_for(WARP);
}
template <int M, int N>
inline void add_products(real (&sum)[M][N][4], const Left (&a)[M], const Right (&b)[N]) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) add_product(sum[m][n], a[m], b[n]);
}

static void run_coroutine() {
    kernel();
    wait_for(END);
}
static void resume(int index) {
    current = &coroutines[index];
    current->waits = NOTHING;
    swapcontext(&scheduler, &current->context);
}
// Resume groups of `size` threads that all wait for the same.
static bool release(Wait what, int size, int stride) {
    bool any = false;
    int total = static_cast<int>(coroutines.size());
    for (int first = 0; first < total; first += size) {
        bool all = true;
        for (int i = 0; i < size; ++i) all = all && coroutines[first + i].waits == what;
        if (!all) continue;
        any = true;
        for (int i = 0; i < size; ++i) resume(first + (i * stride) % size);
    }
    return any;
}
static void run_cluster(int slot, size_t bytes, std::function<void()> body) {
    int total = BLOCKS * THREADS;
    current_slot = slot, kernel = body;
    memories.assign(BLOCKS, std::vector<char>(bytes + 128, static_cast<char>(0xff)));  // NaN, until written
    exchanged.assign(total, 0), tiles.resize(total);
    coroutines = std::vector<Coroutine>(total);
    for (int i = 0; i < total; ++i) {
        Coroutine& c = coroutines[i];
        c.block = i / THREADS, c.thread = i % THREADS;
        c.stack.resize(1 << 16);
        getcontext(&c.context);
        c.context.uc_stack.ss_sp = c.stack.data();
        c.context.uc_stack.ss_size = c.stack.size();
        c.context.uc_link = &scheduler;
        makecontext(&c.context, run_coroutine, 0);
    }
    for (int i = total - 1; i >= 0; --i) resume(i);
    while (true) {
        if (release(WARP, 32, 31) || release(BLOCK, THREADS, 37) || release(CLUSTER, total, 53)) continue;
        for (const Coroutine& c : coroutines)
            if (c.waits != END) fail("threads wait for each other in vain");
        return;
    }
}
