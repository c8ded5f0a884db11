// The softmax of one row, in vectors; `columns`, a multiple of their width, is what there is room for.

// e^x for x ≤ 0, and e^−87 for all below −87: x = n ln 2 + r, and a polynomial in r, which is that of Cephes' expf
// (S. L. Moshier).
INLINE Vector<float>::type exponential(Vector<float>::type x) {
    typedef int32_t Whole __attribute__((vector_size(BYTES)));
    x = x < -87.0f ? -87.0f - Vector<float>::type{} : x;
    const Whole n = __builtin_convertvector(x * 1.44269504f - 0.5f, Whole);
    const Vector<float>::type whole = __builtin_convertvector(n, Vector<float>::type);
    const Vector<float>::type r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector<float>::type p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (Vector<float>::type)((n + 127) << 23);
}
INLINE Vector<double>::type exponential(Vector<double>::type x) {
    for (int i = 0; i < WIDTH<double>; i++) x[i] = std::exp(x[i]);
    return x;
}

// fold(fold(…, z[1]), z[0]) over n numbers, in any order
template <class T, class Fold> INLINE T reduce(const T* z, int n, T begin, Fold fold) {
    T all = begin;
    int c = 0;
    if (n >= WIDTH<T>) {
        typename Vector<T>::type parts = at(z);
        for (c = WIDTH<T>; c + WIDTH<T> <= n; c += WIDTH<T>) parts = fold(at(z + c), parts);
        for (int i = 0; i < WIDTH<T>; i++) all = fold(T(parts[i]), all);
    }
    for (; c < n; c++) all = fold(z[c], all);
    return all;
}

// s = softmax(z), 0 beyond the classes; gives the cross-entropy log Σ e^z − z[label].
template <class T> INLINE T softmax(const T* z, int classes, int columns, int64_t label, T* s) {
    const T largest = reduce(z, classes, z[0], [](auto a, auto b) { return a > b ? a : b; });
    for (int c = 0; c < columns; c += WIDTH<T>) {
        const auto below = at(z + c) - largest;
        at(s + c) = exponential(below < 0 ? below : below - below);  // NaN stays NaN
    }
    const T sum = reduce(s, classes, T(0), [](auto a, auto b) { return a + b; }), share = 1 / sum;
    for (int c = 0; c < columns; c += WIDTH<T>) at(s + c) *= share;
    std::fill(s + classes, s + columns, T(0));
    return largest - z[label] + std::log(sum);  // in this order: logits can be much larger than the loss
}
