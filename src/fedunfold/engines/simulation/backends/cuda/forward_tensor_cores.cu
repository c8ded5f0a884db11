// A client's whole local walk in one launch by two programs on tensor cores, for stacks of three linear layers. The
// formulas are those of `linear_stack` and `walk`; besides those of `mlp.cuh`, macros are THREADS, PARTS and HELD. Many
// lanes find room side by side: a lane takes two multiprocessors, where `forward.cu` takes eight.
//
// Weights of the first layer stay where they are used from the first step to the last: features go in sixteens, each to
// one of two programs and there to one of two halves of its warps, and units in quarters to the warps of a half. Of its
// weights a warp holds HELD sixteens in registers, the others in shared memory, as tiles that the tensor cores read and
// add to as they are. Of the second layer a program owns half of the units, with their columns of the third. A step:
//
//   z₁ over the own features      → added over the pair → a₁ = max(z₁ + b₁, 0)
//   a₂ of the own units; logits over them → added over the pair → loss, δ₃
//   δ₂ of the own units; W₃, W₂ −= η δᵀ a; δ₁ over them → added over the pair
//   own features: W₁ −= η δ₁ᵀ x
//
// Both programs add the same two numbers and so have the same sums, bit for bit.

constexpr int HALVES = 2, QUARTERS = 4;             // of the warps, by features and by units
constexpr int DEEP = up(ROWS, 8) / 8;               // tiles of rows
constexpr int PADDED = 8 * DEEP;                    // rows
constexpr int SIXTEENS = up(FEATURES, 16) / 16;     // of features
constexpr int UNITS = up(FIRST, 16 * QUARTERS);     // of the first layer
constexpr int TILES = UNITS / 16 / QUARTERS;        // of units, to a warp
constexpr int OWN = up(SECOND, 32) / 2;             // units of the second layer, to a program
constexpr int TOP = 16;                             // classes, padded
constexpr int STRIDE1 = UNITS + 4, STRIDE2 = OWN + 4, STRIDE3 = TOP + 4;  // 4 more, so that banks do not clash
constexpr int TILE = 128;                           // numbers of a tile, 16 by 8

// Sixteen number 4 j + s is the j-th of stripe s = 2 half + rank. What is not held lies in shared memory.
__device__ constexpr int sixteens_of(int stripe) { return (SIXTEENS - stripe + 3) / 4; }
constexpr int LAID_LOW = sixteens_of(0) - HELD, LAID_HIGH = sixteens_of(2) - HELD;  // at most, of a half
static_assert(HELD < sixteens_of(3) && TILES <= 2 && OWN <= 64 && CLASSES <= TOP && DEEP <= 8 && FEATURES % 4 == 0);
static_assert(LAYERS == 3 && THREADS == 32 * HALVES * QUARTERS && PARTS == 2 && !PROX && !SUMS);

struct alignas(2 * sizeof(real)) Duo {
    real v[2];
};
__device__ __forceinline__ bool is_there(int feature) { return FEATURES % 16 == 0 || feature < FEATURES; }

// Thread 4 g + t of a warp, and which warp of its program.
__device__ __forceinline__ int g() { return thread() % 32 / 4; }
__device__ __forceinline__ int t() { return thread() % 4; }
__device__ __forceinline__ int warp() { return thread() / 32; }
__device__ __forceinline__ int quarter() { return warp() % QUARTERS; }
__device__ __forceinline__ int half() { return warp() / QUARTERS; }

// Tiles of a matrix whose rows lie `down` apart and whose columns lie `across` apart.
__device__ __forceinline__ Left left_tile(const real* p, int down, int across) {
    const real *upper = p + g() * down + 2 * t() * across, *lower = upper + 8 * down;
    return left({upper[0], upper[across], lower[0], lower[across]});
}
__device__ __forceinline__ Right right_tile(const real* p, int down, int across) {
    p += 2 * t() * down + g() * across;
    return right(p[0], p[down]);
}

template <int N>
__device__ __forceinline__ void clear(real (&sum)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[0][n][i] = 0;
}

// sum[n] += left right(n).
template <int N, class R>
__device__ __forceinline__ void add_row(real (&sum)[1][N][4], Left left, R right_at) {
    Left a[1] = {left};
    Right b[N];
#pragma unroll
    for (int n = 0; n < N; ++n) b[n] = right_at(n);
    add_products(sum, a, b);
}

// sum[n] = Σ_k left(k) right(k, n).
template <int DEPTH, int N, class L, class R>
__device__ __forceinline__ void products(real (&sum)[1][N][4], L left_at, R right_at) {
    clear(sum);
#pragma unroll 4
    for (int k = 0; k < DEPTH; ++k) add_row(sum, left_at(k), [&](int n) { return right_at(k, n); });
}

// give(row, column, value) for what this thread has of a sum's tile that begins there.
template <class Give>
__device__ __forceinline__ void each(const real (&sum)[4], int row, int column, Give give) {
#pragma unroll
    for (int i = 0; i < 4; ++i) give(row + g() + i / 2 * 8, column + 2 * t() + i % 2, sum[i]);
}

struct Minibatch {
    real mean[PADDED], scale[PADDED];
    int row[PADDED], label[PADDED];
};

struct Shared {
    alignas(16) real first[(LAID_LOW + LAID_HIGH) * 2 * QUARTERS * TILES * TILE];
    alignas(16) real second[OWN * STRIDE1];  // [own unit][unit below]
    alignas(16) real third[TOP * STRIDE2];   // [class][own unit]
    alignas(16) real bias1[UNITS], bias2[OWN], bias3[TOP];
    alignas(16) real z[PADDED * STRIDE1];    // z₁, then a₁, then δ₁
    alignas(16) real a2[PADDED * STRIDE2];   // of the own units; then δ₂
    alignas(16) real top[PADDED * STRIDE3];  // logits, then δ₃
    alignas(16) Minibatch batch[2];          // of this step and of the next
};
#ifdef PAIR_BYTES
static_assert(sizeof(Shared) == PAIR_BYTES);
#endif

// What a warp has of the first layer: of the j-th sixteen of its stripe the weights of TILES times 16 units, as two
// tiles. Column c of tile i is feature 2 c + i of the sixteen, so that what a thread needs of x lies side by side.
typedef real Weights[2][TILES][4];

struct Own {
    Shared& s;
    int stripe, count;
    Weights held[HELD ? HELD : 1];

    __device__ __forceinline__ int feature(int j) const { return 16 * (4 * j + stripe); }
    __device__ __forceinline__ real* laid(int j, int i, int m) const {
        int place = j - HELD + half() * LAID_LOW;
        return s.first + (((place * 2 + i) * QUARTERS + quarter()) * TILES + m) * TILE + thread() % 32 * 4;
    }
    __device__ __forceinline__ void get(int j, Weights& w) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                Quad q = quad(laid(j, i, m));
#pragma unroll
                for (int e = 0; e < 4; ++e) w[i][m][e] = q.v[e];
            }
    }
    __device__ __forceinline__ void put(int j, const Weights& w) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) set(laid(j, i, m), {w[i][m][0], w[i][m][1], w[i][m][2], w[i][m][3]});
    }
    // give(weight, where it stands among the parameters) for the weights of a sixteen that there are.
    template <class W, class Give>
    __device__ __forceinline__ void each_weight(int j, W& w, Give give) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int unit = (quarter() * TILES + m) * 16 + g() + e / 2 * 8;
                    int f = feature(j) + 2 * (2 * t() + e % 2) + i;
                    give(w[i][m][e], unit < FIRST && f < FEATURES ? unit * FEATURES + f : -1);
                }
    }
    __device__ __forceinline__ void read(const real* flat) {
        auto fill = [&](real& w, int at) { w = at < 0 ? real(0) : flat[at]; };
#pragma unroll
        for (int j = 0; j < HELD; ++j) each_weight(j, held[j], fill);
        for (int j = HELD; j < count; ++j) {
            Weights w;
            each_weight(j, w, fill);
            put(j, w);
        }
    }
    __device__ __forceinline__ void write(real* flat) const {
        auto out = [&](real w, int at) {
            if (at >= 0) flat[at] = w;
        };
#pragma unroll
        for (int j = 0; j < HELD; ++j) each_weight(j, held[j], out);
        for (int j = HELD; j < count; ++j) {
            Weights w;
            get(j, w);
            each_weight(j, w, out);
        }
    }
};

// z₁ = x W₁ᵀ over the own features, left in s.z.
__device__ __forceinline__ void project(const real* x, const Own& own, const int* row) {
    Shared& s = own.s;
    const Quad* fours = reinterpret_cast<const Quad*>(x);
    real sum[TILES][DEEP][4] = {};
    Quad now[DEEP], next[DEEP];
    unsigned from[DEEP];  // where rows begin, in fours
#pragma unroll
    for (int n = 0; n < DEEP; ++n) from[n] = (unsigned)row[8 * n + g()] * (FEATURES / 4);
    auto fetch = [&](int j) {
        int f = own.feature(j) / 4 + t();
#pragma unroll
        for (int n = 0; n < DEEP; ++n) next[n] = is_there(4 * f) ? fours[from[n] + f] : Quad{};
    };
    auto add = [&](const Weights& w, int following) {
#pragma unroll
        for (int n = 0; n < DEEP; ++n) now[n] = next[n];
        if (following < own.count) fetch(following);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Left a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m) a[m] = left({w[i][m][0], w[i][m][1], w[i][m][2], w[i][m][3]});
            Right b[DEEP];
#pragma unroll
            for (int n = 0; n < DEEP; ++n) b[n] = right(now[n].v[i], now[n].v[2 + i]);
            add_products(sum, a, b);
        }
    };
    fetch(0);
#pragma unroll
    for (int j = 0; j < HELD; ++j) add(own.held[j], j + 1);
#pragma unroll 1
    for (int j = HELD; j < own.count; ++j) {
        Weights w;
        own.get(j, w);
        add(w, j + 1);
    }
    auto leave = [&](bool more) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < DEEP; ++n)
                each(sum[m][n], (quarter() * TILES + m) * 16, 8 * n, [&](int unit, int i, real value) {
                    real& z = s.z[i * STRIDE1 + unit];
                    z = more ? z + value : value;
                });
    };
    if (half() == 1) leave(false);
    block_sync();
    if (half() == 0) leave(true);
}

constexpr int AHEAD = 2;  // tiles of rows that are on their way
static_assert(DEEP >= AHEAD);

// W₁ −= η δ₁ᵀ x for the sixteens from the j-th to the last of this warp before `end`, N at once. step(j, sum) is given
// δ₁ᵀ x of those from the j-th on; beyond the end there are sums of no meaning.
template <int N, class Step>
__device__ __forceinline__ void descend(const real* x, const Own& own, const int* row, int j, int end, Step step) {
    const Duo* twos = reinterpret_cast<const Duo*>(x);
    Duo ahead[AHEAD][N][2];
    auto fetch = [&](int j, int k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            unsigned from = (unsigned)row[8 * k + 2 * t() + e] * (FEATURES / 2) + g();
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int f = own.feature(j + n < end ? j + n : j) / 2;
                ahead[AHEAD - 1][n][e] = is_there(2 * (f + g())) ? twos[from + f] : Duo{};
            }
        }
    };
    auto shift = [&] {
#pragma unroll
        for (int k = 0; k + 1 < AHEAD; ++k)
#pragma unroll
            for (int n = 0; n < N; ++n) ahead[k][n][0] = ahead[k + 1][n][0], ahead[k][n][1] = ahead[k + 1][n][1];
    };
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) shift(), fetch(j, k);
#pragma unroll 1
    for (; j < end; j += N) {
        real sum[TILES][2 * N][4] = {};
#pragma unroll
        for (int k = 0; k < DEEP; ++k) {
            Left a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m)
                a[m] = left_tile(own.s.z + 8 * k * STRIDE1 + (quarter() * TILES + m) * 16, 1, STRIDE1);
            Right b[2 * N];
#pragma unroll
            for (int n = 0; n < 2 * N; ++n) b[n] = right(ahead[0][n / 2][0].v[n % 2], ahead[0][n / 2][1].v[n % 2]);
            shift();
            if (k + AHEAD < DEEP)
                fetch(j, k + AHEAD);
            else if (j + N < end)
                fetch(j + N, k + AHEAD - DEEP);
            add_products(sum, a, b);
        }
        step(j, sum);
    }
}

template <int N>
__device__ __forceinline__ void subtract(real rate, const real (&sum)[TILES][2 * N][4], int n, Weights& w) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) w[i][m][e] -= rate * sum[m][2 * n + i][e];
}

// Have the next minibatch's rows brought to the multiprocessors' common memory; each program asks for half of them.
__device__ __forceinline__ void bring_near(const real* x, const int* row, int rank) {
    constexpr int LINE = 32, LINES = FEATURES / LINE + 1;
    for (int n = thread(); n < PADDED / 2 * LINES; n += THREADS) {
        int i = n / LINES * 2 + rank, f = n % LINES * LINE;
        prefetch(x + (long long)row[i] * FEATURES + (f < FEATURES ? f : FEATURES - 1));
    }
}

// values [PADDED][WIDTH] plus those of the other program, as `become` makes them of the sum and its column; while these
// are on their way, `meanwhile` is done.
template <int WIDTH, int STRIDE, class Meanwhile, class Become>
__device__ __forceinline__ void add_over_pair(real* values, Meanwhile meanwhile, Become become) {
    constexpr int QUADS = PADDED * WIDTH / 4, EACH = (QUADS + THREADS - 1) / THREADS;
    Quad sums[EACH];
    cluster_sync();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        int index = thread() + n * THREADS;
        if (index >= QUADS) continue;
        sums[n] = peer_load(values + index / (WIDTH / 4) * STRIDE + index % (WIDTH / 4) * 4, 1 - rank_in_cluster());
    }
    meanwhile();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        int index = thread() + n * THREADS, column = index % (WIDTH / 4) * 4;
        if (index >= QUADS) continue;
        Quad own = quad(values + index / (WIDTH / 4) * STRIDE + column);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n].v[i] = become(own.v[i] + sums[n].v[i], column + i);
    }
    cluster_sync();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        int index = thread() + n * THREADS;
        if (index < QUADS) set(values + index / (WIDTH / 4) * STRIDE + index % (WIDTH / 4) * 4, sums[n]);
    }
    block_sync();
}

// The softmax of a row's logits, which become slopes; gives the row's cross-entropy.
__device__ __forceinline__ real softmax(real* logits, int label, real mean) {
    real z[CLASSES], top = -1e30, norm = 0, chosen = logits[label];
#pragma unroll
    for (int c = 0; c < CLASSES; ++c) z[c] = logits[c], top = z[c] > top ? z[c] : top;
#pragma unroll
    for (int c = 0; c < CLASSES; ++c) z[c] = exponential(z[c] - top), norm += z[c];
#pragma unroll
    for (int c = 0; c < TOP; ++c)
        logits[c] = c < CLASSES ? (z[c < CLASSES ? c : 0] / norm - (c == label ? real(1) : real(0))) * mean : real(0);
    return top + logarithm(norm) - chosen;
}

// The layers above the first, from a₁ to δ₁, both in s.z, and their weights' step.
__device__ __forceinline__ void above(Shared& s, const Minibatch& batch, real rate, real& loss, real& outer) {
    constexpr int WIDE = (DEEP + 1) / 2;      // tiles of rows for a half of the warps
    constexpr int BELOW = UNITS / 8 / 2;      // tiles of a₁'s units for it
    int m = quarter(), from = half() * WIDE;  // tile of own units, first tile of rows
    bool has_units = OWN == 16 * QUARTERS || 16 * m < OWN;
    // With an odd number of tiles, the last of the second half is there twice; all that it changes is written once.
    auto tile_of_rows = [&](int n) { return from + n < DEEP ? from + n : DEEP - 1; };

    real sum[1][WIDE][4];
    if (has_units) {
        products<UNITS / 8>(sum, [&](int k) { return left_tile(s.second + 16 * m * STRIDE1 + 8 * k, STRIDE1, 1); },
                 [&](int k, int n) { return right_tile(s.z + 8 * tile_of_rows(n) * STRIDE1 + 8 * k, 1, STRIDE1); });
#pragma unroll
        for (int n = 0; n < WIDE; ++n)
            each(sum[0][n], 16 * m, 8 * tile_of_rows(n), [&](int unit, int i, real value) {
                value += s.bias2[unit];
                s.a2[i * STRIDE2 + unit] = value < 0 ? real(0) : value;  // NaN stays
            });
    }
    block_sync();
    real logits[1][1][4];
    if (warp() < DEEP) {
        products<OWN / 8>(logits, [&](int k) { return left_tile(s.third + 8 * k, STRIDE2, 1); },
                 [&](int k, int) { return right_tile(s.a2 + 8 * warp() * STRIDE2 + 8 * k, 1, STRIDE2); });
        each(logits[0][0], 0, 8 * warp(), [&](int c, int i, real value) { s.top[i * STRIDE3 + c] = value; });
    }
    add_over_pair<TOP, STRIDE3>(s.top, [] {}, [&](real value, int c) { return value + s.bias3[c]; });
    if (thread() < PADDED) {
        int i = thread();
        real mean = batch.mean[i], value = softmax(s.top + i * STRIDE3, batch.label[i], mean);
        loss += value * mean, outer += value * mean * batch.scale[i];
    }
    block_sync();

    real third[1][1][4];
    if (has_units)
        products<TOP / 8>(sum, [&](int k) { return left_tile(s.third + 8 * k * STRIDE2 + 16 * m, 1, STRIDE2); },
                 [&](int k, int n) { return right_tile(s.top + 8 * tile_of_rows(n) * STRIDE3 + 8 * k, 1, STRIDE3); });
    if (8 * warp() < OWN)
        products<DEEP>(third, [&](int k) { return left_tile(s.top + 8 * k * STRIDE3, 1, STRIDE3); },
                 [&](int k, int) { return right_tile(s.a2 + 8 * k * STRIDE2 + 8 * warp(), STRIDE2, 1); });
    if (has_units)
#pragma unroll
        for (int n = 0; n < WIDE; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int unit = 16 * m + g() + e / 2 * 8, i = 8 * tile_of_rows(n) + 2 * t() + e % 2;
                if (!(s.a2[i * STRIDE2 + unit] > 0)) sum[0][n][e] = 0;
            }
    block_sync();
    if (has_units)
#pragma unroll
        for (int n = 0; n < WIDE; ++n)
            each(sum[0][n], 16 * m, 8 * tile_of_rows(n),
                 [&](int unit, int i, real value) { s.a2[i * STRIDE2 + unit] = value; });
    if (8 * warp() < OWN)
        each(third[0][0], 0, 8 * warp(), [&](int c, int unit, real value) { s.third[c * STRIDE2 + unit] -= rate * value; });
    for (int c = thread(); c < CLASSES; c += THREADS) s.bias3[c] -= rate * column(s.top + c, STRIDE3);
    block_sync();

    // Both in one loop, because each alone would wait for its own products.
    real second[1][BELOW][4], back[1][DEEP][4];
    bool has_inputs = UNITS == 16 * HALVES * QUARTERS || 16 * warp() < UNITS;
    clear(second), clear(back);
#pragma unroll 1
    for (int k = 0; k < DEEP || k < OWN / 8; ++k) {
        if (k < DEEP && has_units)
            add_row(second, left_tile(s.a2 + 8 * k * STRIDE2 + 16 * m, 1, STRIDE2), [&](int n) {
                return right_tile(s.z + 8 * k * STRIDE1 + 8 * (half() * BELOW + n), STRIDE1, 1);
            });
        if (k < OWN / 8 && has_inputs)
            add_row(back, left_tile(s.second + 8 * k * STRIDE1 + 16 * warp(), 1, STRIDE1),
                    [&](int n) { return right_tile(s.a2 + 8 * n * STRIDE2 + 8 * k, 1, STRIDE2); });
    }
    for (int u = thread(); u < OWN; u += THREADS) s.bias2[u] -= rate * column(s.a2 + u, STRIDE2);
    block_sync();
    if (has_inputs)
#pragma unroll
        for (int n = 0; n < DEEP; ++n)
            each(back[0][n], 16 * warp(), 8 * n, [&](int unit, int i, real value) {
                real& a = s.z[i * STRIDE1 + unit];
                a = a > 0 ? value : real(0);
            });
    auto step_second = [&] {
        if (has_units)
#pragma unroll
            for (int n = 0; n < BELOW; ++n)
                each(second[0][n], 16 * m, 8 * (half() * BELOW + n),
                     [&](int unit, int below, real value) { s.second[unit * STRIDE1 + below] -= rate * value; });
    };
    add_over_pair<UNITS, STRIDE1>(s.z, step_second, [](real value, int) { return value; });
}

// give(number, where it stands among the parameters, or −1 for padding) for all but the weights of the first layer.
template <class Give>
__device__ __forceinline__ void each_above(Shared& s, int first_unit, Give give) {
    for (int u = thread(); u < UNITS; u += THREADS) give(s.bias1[u], u < FIRST ? BIAS1 + u : -1);
    for (int n = thread(); n < OWN * STRIDE1; n += THREADS) {
        int unit = first_unit + n / STRIDE1, below = n % STRIDE1;
        give(s.second[n], unit < SECOND && below < FIRST ? WEIGHT2 + unit * FIRST + below : -1);
    }
    for (int u = thread(); u < OWN; u += THREADS) give(s.bias2[u], first_unit + u < SECOND ? BIAS2 + first_unit + u : -1);
    for (int n = thread(); n < TOP * STRIDE2; n += THREADS) {
        int c = n / STRIDE2, own = n % STRIDE2, unit = first_unit + own;
        give(s.third[n], c < CLASSES && own < OWN && unit < SECOND ? WEIGHT3 + c * SECOND + unit : -1);
    }
    for (int c = thread(); c < TOP; c += THREADS) give(s.bias3[c], c < CLASSES ? BIAS3 + c : -1);
}

// All steps of every lane; arguments are those of the kernel in `forward.cu`, of which some are not needed here.
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
pair(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
        const real* step_sizes, const real* factors, const real* class_weights, real* models,
        const real* start, real* losses, real* outer_losses, real*, real*, int lanes, double) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int lane = lane_of_cluster(), rank = rank_in_cluster(), stripe = 2 * half() + rank, total = steps[lane];
    real rate = step_sizes[lane], factor = factors[lane], loss = 0, outer = 0;
    const real* begun = start + (long long)lane * SIZE;
    Own own = {s, stripe, sixteens_of(stripe)};

    // Beyond the last of a minibatch's rows that row is read again; it counts nothing.
    auto place_of = [&](int step) {
        int i = thread() < ROWS ? thread() : ROWS - 1;
        return ((long long)step * lanes + lane) * ROWS + i;
    };
    auto note_row = [&](Minibatch& batch, int row) {
        if (thread() < PADDED) batch.row[thread()] = row;
    };
    auto note = [&](Minibatch& batch, int label, real mean) {
        if (thread() >= PADDED) return;
        int i = thread();
        batch.label[i] = label, batch.mean[i] = i < ROWS ? mean : real(0);
        batch.scale[i] = BALANCED ? factor * class_weights[label] : factor;
    };

    own.read(begun);
    each_above(s, rank * OWN, [&](real& number, int at) { number = at < 0 ? real(0) : begun[at]; });
    int row = rows[place_of(0)];
    note_row(s.batch[0], row);
    note(s.batch[0], (int)y[row], means[place_of(0)]);
    block_sync();
    for (int step = 0; step < total; ++step) {
        const Minibatch& batch = s.batch[step % 2];
        Minibatch& next = s.batch[(step + 1) % 2];
        int coming = step + 1 < total ? step + 1 : step;
        row = rows[place_of(coming)];
        project(x, own, batch.row);
        int label;
        real mean;
        auto ask_for_next = [&] {
            note_row(next, row);
            label = (int)y[row], mean = means[place_of(coming)];
        };
        add_over_pair<UNITS, STRIDE1>(s.z, ask_for_next, [&](real value, int unit) {
            value += s.bias1[unit];
            return value < 0 ? real(0) : value;
        });
        above(s, batch, rate, loss, outer);
        note(next, label, mean);
        bring_near(x, next.row, rank);
        constexpr int BESIDE = HELD ? HELD : 1, TOGETHER = 3;
        if (HELD)
            descend<BESIDE>(x, own, batch.row, 0, HELD, [&](int, const real(&sum)[TILES][2 * BESIDE][4]) {
#pragma unroll
                for (int n = 0; n < BESIDE; ++n) subtract<BESIDE>(rate, sum, n, own.held[n]);
            });
        descend<TOGETHER>(x, own, batch.row, HELD, own.count, [&](int j, const real(&sum)[TILES][2 * TOGETHER][4]) {
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                if (j + n >= own.count) break;
                Weights w;
                own.get(j + n, w);
                subtract<TOGETHER>(rate, sum, n, w);
                own.put(j + n, w);
            }
        });
        // From the last thread on: the first half of the warps may have more features.
        for (int u = THREADS - 1 - thread(); u < FIRST; u += THREADS) s.bias1[u] -= rate * column(s.z + u, STRIDE1);
        block_sync();
    }
    real* after = models + (long long)lane * SIZE;
    own.write(after);
    each_above(s, rank * OWN, [&](real number, int at) {
        bool shared = at < WEIGHT2 || at >= BIAS3;
        if (at >= 0 && !(shared && rank)) after[at] = number;
    });
    loss = warp_sum(rank ? real(0) : loss), outer = warp_sum(rank ? real(0) : outer);
    if (thread() % 32 == 0) {
        int at = (lane * PARTS + rank) * (THREADS / 32) + warp();
        losses[at] = loss, outer_losses[at] = outer;
    }
}
