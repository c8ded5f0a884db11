// The state of a block of `forward_tensor_cores.cu`, and the first layer: its forward pass and its step.

struct Minibatch {
    real mean[PADDED_ROWS], scale[PADDED_ROWS];
    int row[PADDED_ROWS], label[PADDED_ROWS];
};

struct Shared {
    alignas(16) real first[(STORED_LOW + STORED_HIGH) * 2 * QUARTERS * TILES * TILE];
    alignas(16) real second[OWN_UNITS * STRIDE1];  // [own unit][unit below]
    alignas(16) real third[PADDED_CLASSES * STRIDE2];   // [class][own unit]
    alignas(16) real bias1[UNITS], bias2[OWN_UNITS], bias3[PADDED_CLASSES];
    alignas(16) real z[PADDED_ROWS * STRIDE1];    // z₁, then a₁, then δ₁
    alignas(16) real a2[PADDED_ROWS * STRIDE2];   // of the own units; then δ₂
    alignas(16) real top[PADDED_ROWS * STRIDE3];  // logits, then δ₃
    alignas(16) Minibatch batch[2];          // of this step and of the next
};
#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES);
#endif

// A warp's part of the first layer: of the j-th group of its stripe the weights of TILES times 16 units, as two tiles.
// Column c of tile i is feature 2 c + i of the group, so that what a thread needs of x is contiguous.
typedef real Weights[2][TILES][4];

struct FirstLayer {
    Shared& s;
    int stripe, count;
    Weights in_registers[REGISTER_GROUPS ? REGISTER_GROUPS : 1];

    __device__ __forceinline__ int feature(int j) const { return 16 * (4 * j + stripe); }
    __device__ __forceinline__ real* address(int j, int i, int m) const {
        int place = j - REGISTER_GROUPS + half() * STORED_LOW;
        return s.first + (((place * 2 + i) * QUARTERS + quarter()) * TILES + m) * TILE + thread() % 32 * 4;
    }
    __device__ __forceinline__ void load(int j, Weights& w) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                Quad q = quad(address(j, i, m));
#pragma unroll
                for (int e = 0; e < 4; ++e) w[i][m][e] = q.v[e];
            }
    }
    __device__ __forceinline__ void store(int j, const Weights& w) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m) set(address(j, i, m), {w[i][m][0], w[i][m][1], w[i][m][2], w[i][m][3]});
    }
    // visit(weight, its place among the parameters, or −1 for padding) for the weights of a group.
    template <class W, class Visit>
    __device__ __forceinline__ void each_weight(int j, W& w, Visit visit) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int unit = (quarter() * TILES + m) * 16 + g() + e / 2 * 8;
                    int f = feature(j) + 2 * (2 * t() + e % 2) + i;
                    visit(w[i][m][e], unit < FIRST && f < FEATURES ? unit * FEATURES + f : -1);
                }
    }
    __device__ __forceinline__ void read(const real* flat) {
        auto fill = [&](real& w, int at) { w = at < 0 ? real(0) : flat[at]; };
#pragma unroll
        for (int j = 0; j < REGISTER_GROUPS; ++j) each_weight(j, in_registers[j], fill);
        for (int j = REGISTER_GROUPS; j < count; ++j) {
            Weights w;
            each_weight(j, w, fill);
            store(j, w);
        }
    }
    __device__ __forceinline__ void write(real* flat) const {
        auto out = [&](real w, int at) {
            if (at >= 0) flat[at] = w;
        };
#pragma unroll
        for (int j = 0; j < REGISTER_GROUPS; ++j) each_weight(j, in_registers[j], out);
        for (int j = REGISTER_GROUPS; j < count; ++j) {
            Weights w;
            load(j, w);
            each_weight(j, w, out);
        }
    }
};

// z₁ = x W₁ᵀ over the own features, in s.z.
__device__ __forceinline__ void project(const real* x, const FirstLayer& layer, const int* row) {
    Shared& s = layer.s;
    const Quad* fours = reinterpret_cast<const Quad*>(x);
    real sum[TILES][ROW_TILES][4] = {};
    Quad now[ROW_TILES], next[ROW_TILES];
    unsigned from[ROW_TILES];  // where rows begin, in fours
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) from[n] = (unsigned)row[8 * n + g()] * (FEATURES / 4);
    auto fetch = [&](int j) {
        int f = layer.feature(j) / 4 + t();
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) next[n] = is_feature(4 * f) ? fours[from[n] + f] : Quad{};
    };
    auto add = [&](const Weights& w, int following) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) now[n] = next[n];
        if (following < layer.count) fetch(following);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Left a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m) a[m] = left({w[i][m][0], w[i][m][1], w[i][m][2], w[i][m][3]});
            Right b[ROW_TILES];
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) b[n] = right(now[n].v[i], now[n].v[2 + i]);
            add_products(sum, a, b);
        }
    };
    fetch(0);
#pragma unroll
    for (int j = 0; j < REGISTER_GROUPS; ++j) add(layer.in_registers[j], j + 1);
#pragma unroll 1
    for (int j = REGISTER_GROUPS; j < layer.count; ++j) {
        Weights w;
        layer.load(j, w);
        add(w, j + 1);
    }
    auto store = [&](bool adds) {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
                each(sum[m][n], (quarter() * TILES + m) * 16, 8 * n, [&](int unit, int i, real value) {
                    real& z = s.z[i * STRIDE1 + unit];
                    z = adds ? z + value : value;
                });
    };
    if (half() == 1) store(false);
    block_sync();
    if (half() == 0) store(true);
}

constexpr int AHEAD = 2;  // tiles of rows that are being loaded
static_assert(ROW_TILES >= AHEAD);

// W₁ −= η δ₁ᵀ x for this warp's groups from the j-th to the last before `end`, N at once. step(j, sum) gets δ₁ᵀ x of
// those from the j-th on; sums beyond the end have no meaning.
template <int N, class Step>
__device__ __forceinline__ void descend(
    const real* x, const FirstLayer& layer, const int* row, int j, int end, Step step) {
    const Duo* twos = reinterpret_cast<const Duo*>(x);
    Duo ahead[AHEAD][N][2];
    auto fetch = [&](int j, int k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            unsigned from = (unsigned)row[8 * k + 2 * t() + e] * (FEATURES / 2) + g();
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int f = layer.feature(j + n < end ? j + n : j) / 2;
                ahead[AHEAD - 1][n][e] = is_feature(2 * (f + g())) ? twos[from + f] : Duo{};
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
        for (int k = 0; k < ROW_TILES; ++k) {
            Left a[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m)
                a[m] = left_tile(layer.s.z + 8 * k * STRIDE1 + (quarter() * TILES + m) * 16, 1, STRIDE1);
            Right b[2 * N];
#pragma unroll
            for (int n = 0; n < 2 * N; ++n) b[n] = right(ahead[0][n / 2][0].v[n % 2], ahead[0][n / 2][1].v[n % 2]);
            shift();
            if (k + AHEAD < ROW_TILES)
                fetch(j, k + AHEAD);
            else if (j + N < end)
                fetch(j + N, k + AHEAD - ROW_TILES);
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

// Load the next minibatch's rows into the L2 cache; each block loads half of them.
__device__ __forceinline__ void prefetch_rows(const real* x, const int* row, int rank) {
    constexpr int LINE = 32, LINES = FEATURES / LINE + 1;
    for (int n = thread(); n < PADDED_ROWS / 2 * LINES; n += THREADS) {
        int i = n / LINES * 2 + rank, f = n % LINES * LINE;
        prefetch(x + (long long)row[i] * FEATURES + (f < FEATURES ? f : FEATURES - 1));
    }
}
