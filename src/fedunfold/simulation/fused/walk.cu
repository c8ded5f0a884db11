// A client's whole local walk in one launch, for stacks of one to three linear layers. The formulas are those of
// `linear_stack` and `walk`; sizes come as macros: LAYERS, ROWS, FEATURES, FIRST, SECOND, CLASSES, PARTS, THREADS.
//
// Every lane (a client of a run) is walked by a cluster of PARTS programs that keep its weights in shared memory from
// the first step to the last. Each program owns a slice of the features, and with it those columns of the first layer;
// it also owns a slice of the minibatch's rows. A step:
//
//   1  z += x W₁ᵀ over the own features, for all rows                    → cluster waits
//   2  own rows: z summed over all programs, layers above, loss, slopes; slopes handed to all programs → cluster waits
//   3  own features: W₁ −= η δ₁ᵀ x; own units of the layers above: W −= η δᵀ a, handed to all programs
//
// No number is written by two programs, and sums have a fixed order: the same launch gives the same bits.

constexpr int WARPS = THREADS / 32;
constexpr int SLICE = up(up(FEATURES, PARTS) / PARTS, 8);  // features of a program
constexpr int PADDED = up(ROWS, 4);                        // rows
constexpr int OWN = up(ROWS, PARTS) / PARTS;               // rows of a program
constexpr int QUADS = up(OWN, 4) / 4;
constexpr int OWN4 = 4 * QUADS;
constexpr int UNITS = up(FIRST, 8);                        // of the first layer
constexpr int HALF = UNITS / 2;
constexpr int SHARE = up(up(ABOVE, PARTS) / PARTS, 4);     // those of a program
constexpr int STRIDE = UNITS + 4;                          // of its weights; 4 more, so that banks do not clash
constexpr int TOP = SECOND + 1;                            // likewise of the third layer's
constexpr int PER_THREAD = up(CLASSES, 128) / 32;          // classes that a thread of a warp holds, four and four

// A minibatch in shared memory: the own features of all rows, labels, 1/|b|, and what a row counts in the outer loss.
struct Minibatch {
    real x[PADDED * SLICE];
    real mean[PADDED], scale[PADDED];
    int label[PADDED], next_row[PADDED];
};

// The same on its way from global memory, in registers.
struct Arriving {
    static constexpr int EACH = (PADDED * SLICE + THREADS - 1) / THREADS;
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
    int lanes, lane, begin;  // the first of the own features
    real factor;

    __device__ __forceinline__ long long at(int step, int row) const {
        return ((long long)step * lanes + lane) * ROWS + row;
    }
    __device__ __forceinline__ void note_rows(int step, Minibatch& batch) const {
        for (int i = thread(); i < ROWS; i += THREADS) batch.next_row[i] = rows[at(step, i)];
    }
    __device__ __forceinline__ void fetch(int step, const Minibatch& batch, Arriving& arriving) const {
#pragma unroll
        for (int n = 0; n < Arriving::EACH; ++n) {
            int index = thread() + n * THREADS, i = index / SLICE, f = begin + index % SLICE;
            bool real_one = i < ROWS && f < FEATURES;
            arriving.x[n] = real_one ? x[(long long)batch.next_row[i] * FEATURES + f] : real(0);
        }
        int i = thread();
        bool real_one = i < ROWS;
        arriving.label = real_one ? (int)y[batch.next_row[i]] : 0;
        arriving.mean = real_one ? means[at(step, i)] : real(0);
        arriving.scale = factor;
        if (BALANCED) arriving.scale *= class_weights[arriving.label];
    }
    __device__ __forceinline__ void settle(const Arriving& arriving, Minibatch& batch) const {
#pragma unroll
        for (int n = 0; n < Arriving::EACH; ++n) {
            int index = thread() + n * THREADS;
            if (index < PADDED * SLICE) batch.x[index] = arriving.x[n];
        }
        int i = thread();
        if (i < PADDED) batch.label[i] = arriving.label, batch.mean[i] = arriving.mean, batch.scale[i] = arriving.scale;
    }
};

// z[row][unit] = Σ_f x[row][f] w[f][unit] over the own features; 4 rows by 8 units a thread.
__device__ __forceinline__ void project(const real* x, const real* w, real* z) {
    for (int tile = thread(); tile < PADDED / 4 * (UNITS / 8); tile += THREADS) {
        int row = tile / (UNITS / 8) * 4, unit = tile % (UNITS / 8) * 4;
        real sum[4][8] = {};
        for (int f = 0; f < SLICE; f += 4) {
            Quad rows[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i] = quad(x + (row + i) * SLICE + f);
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
constexpr int TALL = SLICE / 8 * (UNITS / 8) >= THREADS / 2 ? 8 : 4;
constexpr int WIDE = SLICE / TALL * (UNITS / 8) >= THREADS / 2 ? 8 : 4;
constexpr int ACROSS = UNITS / WIDE;
constexpr int TILES = SLICE / TALL * ACROSS;
constexpr int SCRATCH = up(TILES, THREADS) * TALL * WIDE;  // numbers of a program

// give(n, f, u) for every weight of a tile; n is a place that belongs to this thread and weight alone.
template <class Give>
__device__ __forceinline__ void each_weight(int tile, Give give) {
    int f = tile / ACROSS * TALL, unit = tile % ACROSS * 4, base = tile / THREADS * TALL * WIDE;
#pragma unroll
    for (int n = 0; n < TALL; ++n)
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
            give(n * WIDE + j, (base + n * WIDE + j) * THREADS + thread(), f + n, j < 4 ? unit + j : HALF + unit + j - 4);
}

// give(place, f, u, Σ_i x[i][f] δ[i][u], Σ_i c_i x[i][f] δ[i][u]) for all own features and units, the last where asked.
template <bool SCALED, class Give>
__device__ __forceinline__ void outer_products(const real* x, const real* slope, const real* scale, Give give) {
    for (int tile = thread(); tile < TILES; tile += THREADS) {
        int f = tile / ACROSS * TALL, unit = tile % ACROSS * 4;
        real sum[TALL * WIDE] = {}, scaled[SCALED ? TALL * WIDE : 1] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad slopes[WIDE / 4];
#pragma unroll
            for (int m = 0; m < WIDE / 4; ++m) slopes[m] = quad(slope + i * UNITS + m * HALF + unit);
            real c = SCALED ? scale[i] : real(0);
#pragma unroll
            for (int n = 0; n < TALL; n += 4) {
                Quad values = quad(x + i * SLICE + f + n);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    real value = values.v[k], weighted = c * value;
#pragma unroll
                    for (int j = 0; j < WIDE; ++j) {
                        sum[(n + k) * WIDE + j] += value * slopes[j / 4].v[j % 4];
                        if (SCALED) scaled[(n + k) * WIDE + j] += weighted * slopes[j / 4].v[j % 4];
                    }
                }
            }
        }
        each_weight(tile, [&](int n, int place, int f, int u) {
            give(place, f, u, sum[n], SCALED ? scaled[n] : real(0));
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

// The own rows' sums over all programs, of what each has of z; four units.
__device__ __forceinline__ Quad summed(const real* z, int index) {
    Quad sum = {};
#pragma unroll
    for (int q = 0; q < PARTS; ++q) {
        Quad part = peer_load(z + index, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] += part.v[j];
    }
    return sum;
}

// The class that is the n-th of this thread's in a row that a warp shares: four and four in turn.
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

// Four of a row's numbers to all programs.
__device__ __forceinline__ void hand_round(real* own, Quad values) {
#pragma unroll
    for (int q = 0; q < PARTS; ++q) peer_store(own, q, values);
}

struct Rates {
    real rate, mu;
    // w − η (g + μ (w − w^(t)))
    __device__ __forceinline__ real step(real w, real gradient, const real* anchor, int at) const {
        if (PROX) gradient += mu * (w - anchor[at]);
        return w - rate * gradient;
    }
};

struct Weights {
    alignas(16) real first[SLICE * UNITS], bias1[UNITS];
#if LAYERS > 1
    alignas(16) real second[ABOVE * STRIDE], bias2[ABOVE];
#endif
#if LAYERS == 3
    alignas(16) real third[CLASSES * TOP], bias3[CLASSES];
#endif

    // From, or with `out` to, the flat parameters of a lane; every program writes its own part of them.
    __device__ __forceinline__ void read(const real* flat, int begin) {
        for (int n = thread(); n < SLICE * UNITS; n += THREADS) {
            int u = n / SLICE, f = n % SLICE;
            first[f * UNITS + u] = u < FIRST && begin + f < FEATURES ? flat[u * FEATURES + begin + f] : real(0);
        }
        for (int u = thread(); u < UNITS; u += THREADS) bias1[u] = u < FIRST ? flat[BIAS1 + u] : real(0);
#if LAYERS > 1
        for (int n = thread(); n < ABOVE * STRIDE; n += THREADS)
            second[n] = n % STRIDE < FIRST ? flat[WEIGHT2 + n / STRIDE * FIRST + n % STRIDE] : real(0);
        for (int u = thread(); u < ABOVE; u += THREADS) bias2[u] = flat[BIAS2 + u];
#endif
#if LAYERS == 3
        for (int n = thread(); n < CLASSES * TOP; n += THREADS)
            third[n] = n % TOP < SECOND ? flat[WEIGHT3 + n / TOP * SECOND + n % TOP] : real(0);
        for (int c = thread(); c < CLASSES; c += THREADS) bias3[c] = flat[BIAS3 + c];
#endif
    }
};

struct Shared {
    Weights w;
    alignas(16) Minibatch batch;
    alignas(16) real z[PADDED * UNITS];  // what this program has of z₁; after the second wait δ₁
#if LAYERS > 1
    alignas(16) real a1[PADDED * UNITS], own_a1[UNITS * OWN4];       // all rows; own rows, row by row beside each other
    alignas(16) real slope2[PADDED * SHARE], own_slope2[ABOVE * OWN4];  // own units of all rows; all units of own rows
#endif
#if LAYERS == 3
    alignas(16) real a2[PADDED * SHARE], own_a2[SECOND * OWN4];
    alignas(16) real slope3[PADDED * CLASSES], own_slope3[CLASSES * OWN4];
#endif
};

#ifdef FORWARD_BYTES
static_assert(sizeof(Shared) == FORWARD_BYTES);
#endif

#if LAYERS > 1
// The own rows through the layers above the first, and back to δ₁.
__device__ __forceinline__ void above(Shared& s, int rank, real& loss, real& outer) {
    int from = rank * OWN, own = ROWS - from < OWN ? ROWS - from : OWN;
    for (int n = thread(); n < OWN4 * (UNITS / 4); n += THREADS) {
        int r = n / (UNITS / 4), u = n % (UNITS / 4) * 4, at = (from + r) * UNITS + u;
        Quad a = {};
        if (r < own) {
            a = summed(s.z, at);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                real z = a.v[j] + s.w.bias1[u + j];
                a.v[j] = z > 0 ? z : real(0);
            }
            hand_round(s.a1 + at, a);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) s.own_a1[(u + j) * OWN4 + r] = a.v[j];
    }
    block_sync();
    for (int n = thread(); n < ABOVE * QUADS; n += THREADS) {
        int u = n % ABOVE, r = n / ABOVE * 4;
        Quad sum = {s.w.bias2[u], s.w.bias2[u], s.w.bias2[u], s.w.bias2[u]};
        for (int k = 0; k < UNITS; k += 4) {
            Quad w = quad(s.w.second + u * STRIDE + k);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                Quad a = quad(s.own_a1 + (k + m) * OWN4 + r);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum.v[i] += w.v[m] * a.v[i];
            }
        }
#if LAYERS == 3
        for (int i = 0; i < 4; ++i) sum.v[i] = sum.v[i] > 0 ? sum.v[i] : real(0);
        set(s.own_a2 + u * OWN4 + r, sum);
#else
        set(s.own_slope2 + u * OWN4 + r, sum);  // logits, for now
#endif
    }
    block_sync();
#if LAYERS == 3
    real* slopes = s.own_slope3;
#else
    real* slopes = s.own_slope2;
#endif
    for (int r = thread() / 32; r < OWN4; r += WARPS) {
        bool there = r < own;
        real z[PER_THREAD] = {};
#if LAYERS == 3
#pragma unroll 4
        for (int c = 0; c < CLASSES; ++c) {
            real sum = 0;
            for (int k = thread() % 32; k < SECOND; k += 32) sum += s.own_a2[k * OWN4 + r] * s.w.third[c * TOP + k];
            sum = warp_sum(sum) + s.w.bias3[c];
#pragma unroll
            for (int n = 0; n < PER_THREAD; ++n)
                if (class_of(n) == c) z[n] = sum;
        }
#else
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            if (class_of(n) < CLASSES) z[n] = slopes[class_of(n) * OWN4 + r];
#endif
        int row = there ? from + r : 0;
        real mean = there ? s.batch.mean[row] : real(0);
        real value = softmax(z, s.batch.label[row]);
        loss += value * mean, outer += value * mean * s.batch.scale[row];
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            int c = class_of(n);
            if (c >= CLASSES) continue;
            real slope = (z[n] - (c == s.batch.label[row] ? real(1) : real(0))) * mean;
            slopes[c * OWN4 + r] = slope;
            if (!there) continue;
#if LAYERS == 3
            for (int q = 0; q < PARTS; ++q) peer_store(s.slope3 + row * CLASSES + c, q, slope);
#else
            peer_store(s.slope2 + row * SHARE + c % SHARE, c / SHARE, slope);
#endif
        }
    }
    block_sync();
#if LAYERS == 3
    for (int n = thread(); n < ABOVE * QUADS; n += THREADS) {
        int u = n % ABOVE, r = n / ABOVE * 4;
        Quad sum = {}, a = quad(s.own_a2 + u * OWN4 + r);
        for (int c = 0; c < CLASSES; ++c) {
            Quad slope = quad(s.own_slope3 + c * OWN4 + r);
            real w = s.w.third[c * TOP + u];
#pragma unroll
            for (int i = 0; i < 4; ++i) sum.v[i] += w * slope.v[i];
        }
        for (int i = 0; i < 4; ++i) {
            sum.v[i] = a.v[i] > 0 ? sum.v[i] : real(0);
            if (r + i < own) {
                int at = (from + r + i) * SHARE + u % SHARE;
                peer_store(s.slope2 + at, u / SHARE, sum.v[i]);
                peer_store(s.a2 + at, u / SHARE, a.v[i]);
            }
        }
        set(s.own_slope2 + u * OWN4 + r, sum);
    }
    block_sync();
#endif
    for (int n = thread(); n < UNITS / 4 * OWN; n += THREADS) {
        int k = n % (UNITS / 4) * 4, r = n / (UNITS / 4);
        if (r >= own) continue;
        Quad sum = {};
#pragma unroll 4
        for (int u = 0; u < ABOVE; ++u) {
            Quad w = quad(s.w.second + u * STRIDE + k);
            real slope = s.own_slope2[u * OWN4 + r];
#pragma unroll
            for (int j = 0; j < 4; ++j) sum.v[j] += w.v[j] * slope;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] = s.own_a1[(k + j) * OWN4 + r] > 0 ? sum.v[j] : real(0);
        hand_round(s.z + (from + r) * UNITS + k, sum);
    }
}

// The own units of the layers above the first, of which every program keeps a copy.
__device__ __forceinline__ void descend_above(
    Shared& s, int rank, const Rates& rates, const real* anchor, real* after, real* sums) {
    int from = rank * SHARE, own = ABOVE - from < SHARE ? ABOVE - from : SHARE;
    // From the last thread on, because the first are busy with the biases.
    for (int n = THREADS - 1 - thread(); n < SHARE / 4 * (UNITS / 4); n += THREADS) {
        int u = n / (UNITS / 4) * 4, k = n % (UNITS / 4) * 4;
        real sum[4][4] = {}, scaled[4][4] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad slope = quad(s.slope2 + i * SHARE + u), a = quad(s.a1 + i * UNITS + k);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sum[m][j] += slope.v[m] * a.v[j];
                    if (SUMS) scaled[m][j] += s.batch.scale[i] * slope.v[m] * a.v[j];
                }
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            if (u + m >= own) break;
            real* place = s.w.second + (from + u + m) * STRIDE + k;
            Quad w = quad(place);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (k + j < FIRST) {
                    int at = WEIGHT2 + (from + u + m) * FIRST + k + j;
                    w.v[j] = rates.step(w.v[j], sum[m][j], anchor, at);
                    if (after) after[at] = w.v[j];
                    if (SUMS) sums[at] += scaled[m][j];
                }
            hand_round(place, w);
        }
    }
    for (int u = thread(); u < own; u += THREADS) {
        int at = BIAS2 + from + u;
        real stepped = rates.step(s.w.bias2[from + u], column(s.slope2 + u, SHARE), anchor, at);
        for (int q = 0; q < PARTS; ++q) peer_store(s.w.bias2 + from + u, q, stepped);
        if (after) after[at] = stepped;
        if (SUMS) sums[at] += column(s.slope2 + u, SHARE, s.batch.scale);
    }
#if LAYERS == 3
    for (int n = thread(); n < CLASSES * SHARE; n += THREADS) {
        int c = n / SHARE, u = n % SHARE, at = WEIGHT3 + c * SECOND + from + u;
        if (u >= own) continue;
        real sum = 0, scaled = 0;
#pragma unroll 8
        for (int i = 0; i < ROWS; ++i) {
            real product = s.slope3[i * CLASSES + c] * s.a2[i * SHARE + u];
            sum += product;
            if (SUMS) scaled += s.batch.scale[i] * product;
        }
        real* w = s.w.third + c * TOP + from + u;
        real stepped = rates.step(*w, sum, anchor, at);
        for (int q = 0; q < PARTS; ++q) peer_store(w, q, stepped);
        if (after) after[at] = stepped;
        if (SUMS) sums[at] += scaled;
    }
    for (int c = THREADS - 1 - thread(); c < CLASSES; c += THREADS) {
        s.w.bias3[c] = rates.step(s.w.bias3[c], column(s.slope3 + c, CLASSES), anchor, BIAS3 + c);
        if (after && rank == 0) after[BIAS3 + c] = s.w.bias3[c];
        if (SUMS && rank == 0) sums[BIAS3 + c] += column(s.slope3 + c, CLASSES, s.batch.scale);
    }
#endif
}
#else
// A row of z, summed over all programs, shared among a warp.
__device__ __forceinline__ void logits(const real* z, const real* bias, int row, real (&out)[PER_THREAD]) {
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4)
        if (class_of(n) < UNITS) {
            Quad sum = summed(z, row * UNITS + class_of(n));
#pragma unroll
            for (int j = 0; j < 4; ++j) out[n + j] = sum.v[j] + bias[class_of(n) + j];
        }
}

__device__ __forceinline__ void hand_round_row(real* z, int row, const real (&values)[PER_THREAD]) {
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4)
        if (class_of(n) < UNITS)
            hand_round(z + row * UNITS + class_of(n), {values[n], values[n + 1], values[n + 2], values[n + 3]});
}

// The only layer: own rows' logits, loss and slope.
__device__ __forceinline__ void above(Shared& s, int rank, real& loss, real& outer) {
    int from = rank * OWN;
    for (int row = from + thread() / 32; row < from + OWN && row < ROWS; row += WARPS) {
        real z[PER_THREAD] = {};
        logits(s.z, s.w.bias1, row, z);
        real value = softmax(z, s.batch.label[row]), mean = s.batch.mean[row];
        loss += value * mean, outer += value * mean * s.batch.scale[row];
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            z[n] = class_of(n) < CLASSES ? (z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0))) * mean : real(0);
        hand_round_row(s.z, row, z);
    }
}
#endif

// All steps of every lane. w^τ stands in copy τ mod `copies` of `parameters` [copies, lanes, SIZE]; with one copy only
// the last is written. Losses are left as one sum for every warp [lanes, PARTS, WARPS].
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
forward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
        const real* step_sizes, const real* factors, const real* class_weights, real* parameters, const real* start,
        real* losses, real* outer_losses, real* outer_gradients, real* scratch, int lanes, int copies, double mu) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int lane = lane_of_cluster(), rank = rank_in_cluster(), begin = rank * SLICE;
    Data data = {x, y, rows, means, class_weights, lanes, lane, begin, factors[lane]};
    Rates rates = {step_sizes[lane], real(mu)};
    const real* anchor = start + (long long)lane * SIZE;
    real* sums = SUMS ? outer_gradients + (long long)lane * SIZE : nullptr;
    // Sums of the first layer lie in the order of threads, which read and write them side by side.
    real* first_sums = SUMS ? scratch + ((long long)lane * PARTS + rank) * SCRATCH : nullptr;
    real loss = 0, outer = 0;
    int total = steps[lane];

    Arriving arriving;
    s.w.read(anchor, begin);
    data.note_rows(0, s.batch);
    block_sync();
    data.fetch(0, s.batch, arriving);
    data.settle(arriving, s.batch);
    block_sync();
    for (int step = 0; step < total; ++step) {
        bool last = step + 1 == total;
        long long copy = copies > 1 ? step + 1 : 0;
        real* after = copies > 1 || last ? parameters + (copy * lanes + lane) * SIZE : nullptr;

        project(s.batch.x, s.w.first, s.z);
        if (!last) data.note_rows(step + 1, s.batch);
        cluster_sync();
        above(s, rank, loss, outer);
        cluster_sync();
        if (!last) data.fetch(step + 1, s.batch, arriving);
        outer_products<SUMS>(s.batch.x, s.z, s.batch.scale, [&](int place, int f, int u, real sum, real scaled) {
            if (u >= FIRST || begin + f >= FEATURES) return;
            int at = u * FEATURES + begin + f;
            real& w = s.w.first[f * UNITS + u];
            w = rates.step(w, sum, anchor, at);
            if (after) after[at] = w;
            if (SUMS) first_sums[place] += scaled;
        });
        for (int u = thread(); u < FIRST; u += THREADS) {
            s.w.bias1[u] = rates.step(s.w.bias1[u], column(s.z + u, UNITS), anchor, BIAS1 + u);
            if (after && rank == 0) after[BIAS1 + u] = s.w.bias1[u];
            if (SUMS && rank == 0) sums[BIAS1 + u] += column(s.z + u, UNITS, s.batch.scale);
        }
#if LAYERS > 1
        descend_above(s, rank, rates, anchor, after, sums);
#endif
        block_sync();
        data.settle(arriving, s.batch);
        block_sync();
    }
    cluster_sync();  // nobody leaves while others may still write to it
    for (int tile = thread(); SUMS && tile < TILES; tile += THREADS)
        each_weight(tile, [&](int, int place, int f, int u) {
            if (u < FIRST && begin + f < FEATURES) sums[u * FEATURES + begin + f] += first_sums[place];
        });
    if (thread() % 32 == 0) {
        int at = (lane * PARTS + rank) * WARPS + thread() / 32;
        losses[at] = loss, outer_losses[at] = outer;
    }
}

#if LAYERS == 1
struct SharedBack {
    alignas(16) real w[SLICE * UNITS], p[SLICE * UNITS], bias[UNITS], shift[UNITS];
    alignas(16) Minibatch batch;
    alignas(16) real z[PADDED * UNITS], moved[PADDED * UNITS];
};

#ifdef BACKWARD_BYTES
static_assert(sizeof(SharedBack) == BACKWARD_BYTES);
#endif

// The walk back through one layer: p ← p − η H_b(w^τ) p + ∇ℓ^out_b(w^τ), from the last step to the first. With s the
// softmax and ż = x Vᵀ + v the change of the logits along p = (V, v):   γ = ε − u (diag(s) − s sᵀ) ż,   p += γᵀ (x, 1).
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
backward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
         const real* step_sizes, const real* factors, const real* class_weights, const real* parameters, real* adjoint,
         int lanes, int outer) {
    extern __shared__ __align__(16) char memory[];
    SharedBack& s = *reinterpret_cast<SharedBack*>(memory);
    int lane = lane_of_cluster(), rank = rank_in_cluster(), begin = rank * SLICE;
    Data data = {x, y, rows, means, class_weights, lanes, lane, begin, factors[lane]};
    real rate = step_sizes[lane];
    real* flat = adjoint + (long long)lane * SIZE;
    int total = steps[lane];

    auto read = [&](const real* from, real* weight, real* bias) {
        for (int n = thread(); n < SLICE * UNITS; n += THREADS) {
            int u = n / SLICE, f = n % SLICE;
            weight[f * UNITS + u] = u < FIRST && begin + f < FEATURES ? from[u * FEATURES + begin + f] : real(0);
        }
        for (int u = thread(); u < UNITS; u += THREADS) bias[u] = u < FIRST ? from[BIAS1 + u] : real(0);
    };
    read(flat, s.p, s.shift);
    Arriving arriving;
    for (int step = total - 1; step >= 0; --step) {
        data.note_rows(step, s.batch);
        read(parameters + ((long long)step * lanes + lane) * SIZE, s.w, s.bias);
        block_sync();
        data.fetch(step, s.batch, arriving);
        data.settle(arriving, s.batch);
        block_sync();
        project(s.batch.x, s.w, s.z);
        project(s.batch.x, s.p, s.moved);
        cluster_sync();
        int from = rank * OWN;
        for (int row = from + thread() / 32; row < from + OWN && row < ROWS; row += WARPS) {
            real z[PER_THREAD] = {}, moved[PER_THREAD] = {}, along = 0;
            logits(s.z, s.bias, row, z);
            logits(s.moved, s.shift, row, moved);
            softmax(z, s.batch.label[row]);
#pragma unroll
            for (int n = 0; n < PER_THREAD; ++n) along += z[n] * moved[n];
            along = warp_sum(along);
            real mean = s.batch.mean[row], weight = outer ? s.batch.scale[row] : real(0);
#pragma unroll
            for (int n = 0; n < PER_THREAD; ++n) {
                real error = z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0));
                real chain = mean * (weight * error - rate * z[n] * (moved[n] - along));
                z[n] = class_of(n) < CLASSES ? chain : real(0);
            }
            hand_round_row(s.z, row, z);
        }
        cluster_sync();
        outer_products<false>(s.batch.x, s.z, s.batch.scale,
                              [&](int, int f, int u, real sum, real) { s.p[f * UNITS + u] += sum; });
        for (int u = thread(); u < FIRST; u += THREADS) s.shift[u] += column(s.z + u, UNITS);
        block_sync();
    }
    cluster_sync();
    for (int n = thread(); n < SLICE * UNITS; n += THREADS) {
        int u = n / SLICE, f = n % SLICE;
        if (u < FIRST && begin + f < FEATURES) flat[u * FEATURES + begin + f] = s.p[f * UNITS + u];
    }
    for (int u = thread(); u < FIRST; u += THREADS)
        if (rank == 0) flat[BIAS1 + u] = s.shift[u];
}
#endif
