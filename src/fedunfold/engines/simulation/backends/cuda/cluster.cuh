// What local training of a client slot and its backward pass have in common. Either is done by a cluster of BLOCKS
// thread blocks, of which each owns a slice of the features, and with it those columns of the first layer, and a slice
// of the minibatch's rows.
//
// No number is written by two blocks, and sums have a fixed order: the same launch gives the same bits.

constexpr int WARPS = THREADS / 32;
constexpr int OWN_FEATURES = up(up(FEATURES, BLOCKS) / BLOCKS, 8);  // of a block
constexpr int PADDED_ROWS = up(ROWS, 4);
constexpr int OWN_ROWS = up(ROWS, BLOCKS) / BLOCKS;                 // of a block
constexpr int QUADS = up(OWN_ROWS, 4) / 4;
constexpr int OWN_ROWS4 = 4 * QUADS;
constexpr int UNITS = up(FIRST, 8);                                 // of the first layer
constexpr int HALF = UNITS / 2;
constexpr int OWN_UNITS = up(up(ABOVE, BLOCKS) / BLOCKS, 4);        // of the layer above, of a block
constexpr int STRIDE2 = UNITS + 4;                                  // of its weights; 4 more to avoid bank conflicts
constexpr int STRIDE3 = SECOND + 1;                                 // likewise of the third layer's
constexpr int PER_THREAD = up(CLASSES, 128) / 32;                   // classes of a thread of a warp, four and four

// What the backward pass needs of a step: the weights above the first layer, and that layer's outputs, after the ReLU
// if it has one.
constexpr int SAVED_ABOVE = up(SIZE - WEIGHT2, 4);
constexpr int SAVED_PER_STEP = SAVED_ABOVE + ROWS * UNITS;

// A minibatch in shared memory: the own features of all rows, labels, 1/|b|, and every row's coefficient in the outer
// loss.
struct Minibatch {
    real x[PADDED_ROWS * OWN_FEATURES];
    real mean[PADDED_ROWS], scale[PADDED_ROWS];
    int label[PADDED_ROWS], next_row[PADDED_ROWS];
};

// The next one, in registers while it is loaded from global memory.
struct Prefetched {
    static constexpr int EACH = (PADDED_ROWS * OWN_FEATURES + THREADS - 1) / THREADS;
    real x[EACH];
    real mean, scale;
    int label;
};

struct Data {
    const real* x;
    const long long* y;
    const int* rows;
    const real* means;
    const real* class_weights;
    int slots, slot, begin;  // begin: the first of the own features
    real factor;

    __device__ __forceinline__ long long at(int step, int row) const {
        return ((long long)step * slots + slot) * ROWS + row;
    }
    __device__ __forceinline__ void load_row_numbers(int step, Minibatch& batch) const {
        for (int i = thread(); i < ROWS; i += THREADS) batch.next_row[i] = rows[at(step, i)];
    }
    __device__ __forceinline__ void fetch(int step, const Minibatch& batch, Prefetched& prefetched) const {
#pragma unroll
        for (int n = 0; n < Prefetched::EACH; ++n) {
            int index = thread() + n * THREADS, i = index / OWN_FEATURES, f = begin + index % OWN_FEATURES;
            bool is_real = i < ROWS && f < FEATURES;
            prefetched.x[n] = is_real ? x[(long long)batch.next_row[i] * FEATURES + f] : real(0);
        }
        int i = thread();
        bool is_real = i < ROWS;
        prefetched.label = is_real ? (int)y[batch.next_row[i]] : 0;
        prefetched.mean = is_real ? means[at(step, i)] : real(0);
        prefetched.scale = factor;
        if (BALANCED) prefetched.scale *= class_weights[prefetched.label];
    }
    __device__ __forceinline__ void store(const Prefetched& prefetched, Minibatch& batch) const {
#pragma unroll
        for (int n = 0; n < Prefetched::EACH; ++n) {
            int index = thread() + n * THREADS;
            if (index < PADDED_ROWS * OWN_FEATURES) batch.x[index] = prefetched.x[n];
        }
        int i = thread();
        if (i >= PADDED_ROWS) return;
        batch.label[i] = prefetched.label, batch.mean[i] = prefetched.mean, batch.scale[i] = prefetched.scale;
    }
};

// z[row][unit] = Σ_f x[row][f] w[f][unit] over the own features; 4 rows by 8 units a thread.
__device__ __forceinline__ void project(const real* x, const real* w, real* z) {
    for (int tile = thread(); tile < PADDED_ROWS / 4 * (UNITS / 8); tile += THREADS) {
        int row = tile / (UNITS / 8) * 4, unit = tile % (UNITS / 8) * 4;
        real sum[4][8] = {};
        for (int f = 0; f < OWN_FEATURES; f += 4) {
            Quad rows[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = quad(x + (row + i) * OWN_FEATURES + f);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                Quad low = quad(w + (f + n) * UNITS + unit), high = quad(w + (f + n) * UNITS + HALF + unit);
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        sum[i][j] += rows[i].v[n] * low.v[j];
                        sum[i][4 + j] += rows[i].v[n] * high.v[j];
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            set(z + (row + i) * UNITS + unit, {sum[i][0], sum[i][1], sum[i][2], sum[i][3]});
            set(z + (row + i) * UNITS + HALF + unit, {sum[i][4], sum[i][5], sum[i][6], sum[i][7]});
        }
    }
}

// Weights of the first layer are updated in tiles of TALL features by WIDE units, small ones where there are few.
constexpr int TALL = OWN_FEATURES / 8 * (UNITS / 8) >= THREADS / 2 ? 8 : 4;
constexpr int WIDE = OWN_FEATURES / TALL * (UNITS / 8) >= THREADS / 2 ? 8 : 4;
constexpr int ACROSS = UNITS / WIDE;
constexpr int TILES = OWN_FEATURES / TALL * ACROSS;
constexpr int SCRATCH = up(TILES, THREADS) * TALL * WIDE;  // numbers of a block

// visit(n, place, f, u) for every weight of a tile, its n-th; the place belongs to this thread and weight alone.
template <class Visit>
__device__ __forceinline__ void each_weight(int tile, Visit visit) {
    int f = tile / ACROSS * TALL, unit = tile % ACROSS * 4, base = tile / THREADS * TALL * WIDE;
#pragma unroll
    for (int n = 0; n < TALL; ++n)
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            visit(n * WIDE + j, (base + n * WIDE + j) * THREADS + thread(), f + n,
                  j < 4 ? unit + j : HALF + unit + j - 4);
}

// visit(place, f, u, Σ_i x[i][f] δ[i][u], Σ_i c_i x[i][f] δ[i][u]) for all own features and units, the last if SCALED.
template <bool SCALED, class Visit>
__device__ __forceinline__ void outer_products(const real* x, const real* delta, const real* scale, Visit visit) {
    for (int tile = thread(); tile < TILES; tile += THREADS) {
        int f = tile / ACROSS * TALL, unit = tile % ACROSS * 4;
        real sum[TALL * WIDE] = {}, scaled[SCALED ? TALL * WIDE : 1] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad deltas[WIDE / 4];
#pragma unroll
            for (int m = 0; m < WIDE / 4; ++m) deltas[m] = quad(delta + i * UNITS + m * HALF + unit);
            real c = SCALED ? scale[i] : real(0);
#pragma unroll
            for (int n = 0; n < TALL; n += 4) {
                Quad values = quad(x + i * OWN_FEATURES + f + n);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    real value = values.v[k], weighted = c * value;
#pragma unroll
                    for (int j = 0; j < WIDE; ++j) {
                        sum[(n + k) * WIDE + j] += value * deltas[j / 4].v[j % 4];
                        if (SCALED) scaled[(n + k) * WIDE + j] += weighted * deltas[j / 4].v[j % 4];
                    }
                }
            }
        }
        each_weight(tile, [&](int n, int place, int f, int u) {
            visit(place, f, u, sum[n], SCALED ? scaled[n] : real(0));
        });
    }
}

// Σ_i c_i values[i · stride], row by row.
__device__ __forceinline__ real column(const real* values, int stride, const real* scale) {
    real sum = 0;
#pragma unroll 8
    for (int i = 0; i < ROWS; ++i) sum += scale[i] * values[i * stride];
    return sum;
}

// The sum of z over all blocks; four units of an own row.
__device__ __forceinline__ Quad cluster_sum(const real* z, int index) {
    Quad sum = {};
#pragma unroll
    for (int q = 0; q < BLOCKS; ++q) {
        Quad part = peer_load(z + index, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] += part.v[j];
    }
    return sum;
}

// The class that is the n-th of this thread's in a row distributed over a warp: four and four in turn.
__device__ __forceinline__ int class_of(int n) { return n / 4 * 128 + thread() % 32 * 4 + n % 4; }

// A warp's softmax over the logits z; gives the row's cross-entropy.
__device__ __forceinline__ real softmax(real (&z)[PER_THREAD], int label) {
    real top = -1e30, chosen = 0, norm = 0;
#pragma unroll
    for (int n = 0; n < PER_THREAD; ++n)
        if (class_of(n) < CLASSES) {
            top = z[n] > top ? z[n] : top;
            if (class_of(n) == label) chosen = z[n];
        }
    top = warp_max(top), chosen = warp_sum(chosen);
#pragma unroll
    for (int n = 0; n < PER_THREAD; ++n) {
        z[n] = class_of(n) < CLASSES ? exponential(z[n] - top) : real(0);
        norm += z[n];
    }
    norm = warp_sum(norm);
#pragma unroll
    for (int n = 0; n < PER_THREAD; ++n) z[n] /= norm;
    return top + logarithm(norm) - chosen;
}

// Four of a row's numbers to all blocks.
__device__ __forceinline__ void broadcast(real* own, Quad values) {
#pragma unroll
    for (int q = 0; q < BLOCKS; ++q) peer_store(own, q, values);
}

// A row of z [rows, WIDTH], summed over all blocks, distributed over a warp.
template <int WIDTH>
__device__ __forceinline__ void logits(const real* z, const real* bias, int row, real (&out)[PER_THREAD]) {
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4)
        if (class_of(n) < WIDTH) {
            Quad sum = cluster_sum(z, row * WIDTH + class_of(n));
#pragma unroll
            for (int j = 0; j < 4; ++j) out[n + j] = sum.v[j] + bias[class_of(n) + j];
        }
}

template <int WIDTH>
__device__ __forceinline__ void broadcast_row(real* z, int row, const real (&values)[PER_THREAD]) {
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4)
        if (class_of(n) < WIDTH)
            broadcast(z + row * WIDTH + class_of(n), {values[n], values[n + 1], values[n + 2], values[n + 3]});
}
