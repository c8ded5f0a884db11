// Products of small matrices on one core, in registers: what a local step is made of.
//
// A left factor is given by a pointer to each of its rows, so that rows of the data are read where they lie, and by its
// nonzero bits: where a tile of it is 0, nothing is done. A right factor that is read repeatedly, a layer's weights,
// lies panel by panel: the columns of a tile are one piece of memory. All other matrices are row-major. The number of
// columns is padded.

#define UNROLLED _Pragma("GCC unroll 8")

// A tile of a result has so many rows and 128 bytes of columns, and its sums fill the registers of the processor: low
// tiles skip more zeros of the left factor, high ones read the right factor less often.
constexpr int VECTORS = 128 / BYTES;
constexpr int TILE = BYTES == 32 ? 3 : 6;
constexpr int DEPTH = 256;  // rows of the right factor that stay in the first cache with the columns of a tile
template <class T> constexpr int PADDING = VECTORS / 2 * WIDTH<T>;  // columns are a multiple of this

// Calls work(height, row) for tiles that cover `rows`.
template <class Work> INLINE void in_tiles(int rows, Work work) {
    int row = 0;
    for (; row + TILE <= rows; row += TILE) work(std::integral_constant<int, TILE>(), row);
    for (; row + 2 <= rows; row += 2) work(std::integral_constant<int, 2>(), row);
    if (row < rows) work(std::integral_constant<int, 1>(), row);
}

// Calls work(vectors, column) for tiles that cover `columns`.
template <class T, class Work> INLINE void in_panels(int columns, Work work) {
    int column = 0;
    for (; column + VECTORS * WIDTH<T> <= columns; column += VECTORS * WIDTH<T>)
        work(std::integral_constant<int, VECTORS>(), column);
    if (column < columns) work(std::integral_constant<int, VECTORS / 2>(), column);
}

// Sums begin at 0 and are added to the result at the end: a small change of a large weight is rounded once.

// c[M × N vectors] = begin + a b over the given columns of a; `begin` has a stride (0: the same row for all).
template <int M, int N, class T>
INLINE void multiply_tile(const T* const* a, const int* which, int count, const T* b, const T* begin, int stride, T* c,
                          int columns) {
    typename Vector<T>::type sum[M][N], factor[M];
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) sum[m][n] = typename Vector<T>::type{};
    for (int e = 0; e < count; e++) {
        const T* row = b + (long)which[e] * (N * WIDTH<T>);
        asm("" : "+r"(row));  // one address, and all else at fixed distances from it
        UNROLLED for (int m = 0; m < M; m++) factor[m] = a[m][which[e]] - typename Vector<T>::type{};
        UNROLLED for (int n = 0; n < N; n++)
            UNROLLED for (int m = 0; m < M; m++) sum[m][n] += factor[m] * at(row + n * WIDTH<T>);
    }
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++)
            at(c + m * columns + n * WIDTH<T>) = at(begin + m * stride + n * WIDTH<T>) + sum[m][n];
}

// c[M × N vectors] += aᵀ b over the given rows of a, for M columns of it from `column` on.
template <int M, int N, class T>
INLINE void add_transposed_tile(const T* const* a, int column, const int* which, int count, const T* b, int columns,
                                T* c) {
    typename Vector<T>::type sum[M][N], factor[M];
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) sum[m][n] = typename Vector<T>::type{};
    for (int e = 0; e < count; e++) {
        const T *factors = a[which[e]] + column, *row = b + (long)which[e] * columns;
        asm("" : "+r"(row), "+r"(factors));
        UNROLLED for (int m = 0; m < M; m++) factor[m] = factors[m] - typename Vector<T>::type{};
        UNROLLED for (int n = 0; n < N; n++)
            UNROLLED for (int m = 0; m < M; m++) sum[m][n] += factor[m] * at(row + n * WIDTH<T>);
    }
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int n = 0; n < N; n++) at(c + (m * N + n) * WIDTH<T>) += sum[m][n];
}

// The left factor of a product. `nonzero`, where it is given, has a bit for every entry of a row that is not 0.
template <class T> struct Left {
    const T* const* rows;
    const uint64_t* const* nonzero;
    int count, depth;
};

// Bit j of word i becomes bit i of word j, of a square of bits: its halves, quarters … change places.
inline void transpose_bits(uint64_t (&bits)[64]) {
    uint64_t low = 0xFFFFFFFF;
    for (int side = 32; side; side >>= 1, low ^= low << side)
        for (int i = 0; i < 64; i = (i + side + 1) & ~side) {
            const uint64_t changed = ((bits[i] >> side) ^ bits[i + side]) & low;
            bits[i] ^= changed << side;
            bits[i + side] ^= changed;
        }
}

// Which entries of a left factor are not 0; each thread has one, so that a product allocates no memory.
class IndexLists {
    struct List {
        const int* which;
        int count;
    };
    std::vector<int> all, some;
    std::vector<List> tiles;
    std::vector<uint64_t> transposed;  // the bits by columns: of every 64 rows, a bit for each that is not 0

   public:
    IndexLists(int rows, int depth)
        : all(std::max(rows, depth)), some((long)rows * DEPTH), tiles(rows),
          transposed((rows + 63) / 64 * ((depth + 63) / 64) * 64L) {
        std::iota(all.begin(), all.end(), 0);
    }

    // For every tile of rows, the columns from `from` (a multiple of 64) to `to` where any of them is not 0.
    template <class T> const List* columns(const Left<T>& a, int from, int to) {
        int* next = some.data();
        List* tile = tiles.data();
        in_tiles(a.count, [&](auto height, int row) {
            *tile = {all.data() + from, to - from};
            if (a.nonzero) {
                tile->which = next;
                for (int word = from / 64; word * 64 < to; word++) {
                    uint64_t any = 0;
                    for (int m = 0; m < height; m++) any |= a.nonzero[row + m][word];
                    for (; any; any &= any - 1) *next++ = word * 64 + __builtin_ctzll(any);
                }
                tile->count = (int)(next - tile->which);
            }
            tile++;
        });
        return tiles.data();
    }

    // To be called before `rows`; apart, so that the loops of products have all registers.
    template <class T> __attribute__((noinline)) void transpose_nonzero(const Left<T>& a) {
        if (!a.nonzero) return;
        const int words = (a.depth + 63) / 64;
        uint64_t* next = transposed.data();
        for (int from = 0; from < a.count; from += 64)
            for (int word = 0; word < words; word++, next += 64) {
                uint64_t bits[64] = {};
                for (int i = from; i < a.count && i < from + 64; i++) bits[i - from] = a.nonzero[i][word];
                transpose_bits(bits);
                std::copy(bits, bits + 64, next);
            }
    }

    // The rows where any of `height` columns from `column` on is not 0.
    template <class T> INLINE List rows(const Left<T>& a, int column, int height) {
        if (!a.nonzero) return {all.data(), a.count};
        int* next = some.data();
        const uint64_t* nonzero = transposed.data() + column;
        for (int from = 0; from < a.count; from += 64, nonzero += (a.depth + 63) / 64 * 64) {
            uint64_t any = 0;
            for (int m = 0; m < height; m++) any |= nonzero[m];
            for (; any; any &= any - 1) *next++ = from + __builtin_ctzll(any);
        }
        return {some.data(), (int)(next - some.data())};
    }
};

// c[rows × columns] = begin + a b[depth × columns]; `begin` is one row (stride 0), or c itself (stride columns).
template <class T>
void multiply(const Left<T>& a, IndexLists& lists, const T* b, int columns, const T* begin, int stride, T* c) {
    for (int from = 0; from < a.depth; from += DEPTH) {
        const auto* tiles = lists.columns(a, from, std::min(from + DEPTH, a.depth));
        in_panels<T>(columns, [&](auto vectors, int panel) {
            const auto* tile = tiles;
            in_tiles(a.count, [&](auto height, int row) {
                multiply_tile<height.value, vectors.value>(
                    a.rows + row, tile->which, tile->count, b + (long)panel * a.depth,
                    begin + (long)row * stride + panel, stride, c + (long)row * columns + panel, columns);
                tile++;
            });
        });
        begin = c;
        stride = columns;
    }
}

// c[depth × columns] += aᵀ b[rows × columns]
template <class T> void add_transposed(const Left<T>& a, IndexLists& lists, const T* b, int columns, T* c) {
    lists.transpose_nonzero(a);
    in_tiles(a.depth, [&](auto height, int column) {
        const auto [which, count] = lists.rows(a, column, height);
        if (!count) return;
        in_panels<T>(columns, [&, which = which, count = count](auto vectors, int panel) {
            T* here = c + (long)panel * a.depth + column * vectors.value * WIDTH<T>;
            add_transposed_tile<height.value, vectors.value>(a.rows, column, which, count, b + panel, columns, here);
        });
    });
}

// Where column `column` of row 0 lies in a right factor [depth × columns]; row k lies k times `stride` further on.
struct Place {
    long first;
    int stride;
};
template <class T> INLINE Place place(int column, int depth, int columns) {
    constexpr int WHOLE = VECTORS * WIDTH<T>;
    const int panel = column / WHOLE * WHOLE;
    return {(long)panel * depth + column - panel, std::min(WHOLE, columns - panel)};
}
