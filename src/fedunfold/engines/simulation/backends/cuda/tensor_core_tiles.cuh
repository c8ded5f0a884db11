// Sizes of `forward_tensor_cores.cu`, and products of tiles of matrices by the tensor cores.

constexpr int HALVES = 2, QUARTERS = 4;          // of the warps, by features and by units
constexpr int ROW_TILES = up(ROWS, 8) / 8;
constexpr int PADDED_ROWS = 8 * ROW_TILES;
constexpr int GROUPS = up(FEATURES, 16) / 16;    // of 16 features
constexpr int UNITS = up(FIRST, 16 * QUARTERS);  // of the first layer
constexpr int TILES = UNITS / 16 / QUARTERS;     // of units, of a warp
constexpr int OWN_UNITS = up(SECOND, 32) / 2;    // of the second layer, of a block
constexpr int PADDED_CLASSES = 16;
constexpr int STRIDE1 = UNITS + 4, STRIDE2 = OWN_UNITS + 4, STRIDE3 = PADDED_CLASSES + 4;  // 4 more: no bank conflicts
constexpr int TILE = 128;                        // numbers of a tile, 16 by 8

// Group 4 j + s is the j-th of stripe s = 2 half + rank. What is not in registers is in shared memory.
__device__ constexpr int groups_of(int stripe) { return (GROUPS - stripe + 3) / 4; }
constexpr int STORED_LOW = groups_of(0) - REGISTER_GROUPS;   // of the first half of the warps, at most
constexpr int STORED_HIGH = groups_of(2) - REGISTER_GROUPS;  // of the second
static_assert(REGISTER_GROUPS < groups_of(3) && FEATURES % 4 == 0 && ROW_TILES <= 8);
static_assert(TILES <= 2 && OWN_UNITS <= 64 && CLASSES <= PADDED_CLASSES);
static_assert(LAYERS == 3 && THREADS == 32 * HALVES * QUARTERS && BLOCKS == 2 && !PROX && !SUMS);

struct alignas(2 * sizeof(real)) Duo {
    real v[2];
};
__device__ __forceinline__ bool is_feature(int feature) { return FEATURES % 16 == 0 || feature < FEATURES; }

// Thread 4 g + t of a warp, and which warp of its block.
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

// visit(row, column, value) for this thread's part of a sum's tile that begins at that row and column.
template <class Visit>
__device__ __forceinline__ void each(const real (&sum)[4], int row, int column, Visit visit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(row + g() + i / 2 * 8, column + 2 * t() + i % 2, sum[i]);
}
