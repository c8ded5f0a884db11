// A stack of linear layers as all kernels see it; sizes come as macros: LAYERS, ROWS, FEATURES, FIRST, SECOND, CLASSES.

__device__ constexpr int up(int n, int to) { return (n + to - 1) / to * to; }

constexpr int ABOVE = LAYERS == 3 ? SECOND : CLASSES;  // units of the layer above the first
constexpr int BIAS1 = FIRST * FEATURES;                // where parameters lie in the flat vector
constexpr int WEIGHT2 = BIAS1 + FIRST;
constexpr int BIAS2 = WEIGHT2 + ABOVE * FIRST;
constexpr int WEIGHT3 = BIAS2 + ABOVE;
constexpr int BIAS3 = WEIGHT3 + CLASSES * SECOND;
constexpr int SIZE = LAYERS == 1 ? WEIGHT2 : LAYERS == 2 ? WEIGHT3 : BIAS3 + CLASSES;

__device__ __forceinline__ Quad quad(const real* p) { return *reinterpret_cast<const Quad*>(p); }
__device__ __forceinline__ void set(real* p, Quad q) { *reinterpret_cast<Quad*>(p) = q; }

// Σ_i values[i · stride] over the rows of a minibatch.
__device__ __forceinline__ real column(const real* values, int stride) {
    real sum = 0;
#pragma unroll 8
    for (int i = 0; i < ROWS; ++i) sum += values[i * stride];
    return sum;
}
