// The layers of `forward_tensor_cores.cu` above the first, and sums over the two blocks.

// transform(sum, column) of values [PADDED_ROWS][WIDTH] plus those of the other block; `meanwhile` is done while these
// are loaded.
template <int WIDTH, int STRIDE, class Meanwhile, class Transform>
__device__ __forceinline__ void add_over_cluster(real* values, Meanwhile meanwhile, Transform transform) {
    constexpr int QUADS = PADDED_ROWS * WIDTH / 4, EACH = (QUADS + THREADS - 1) / THREADS;
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
        for (int i = 0; i < 4; ++i) sums[n].v[i] = transform(own.v[i] + sums[n].v[i], column + i);
    }
    cluster_sync();
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        int index = thread() + n * THREADS;
        if (index < QUADS) set(values + index / (WIDTH / 4) * STRIDE + index % (WIDTH / 4) * 4, sums[n]);
    }
    block_sync();
}

// The row's cross-entropy; its logits become δ₃ = (softmax − onehot) / |b|.
__device__ __forceinline__ real softmax(real* logits, int label, real mean) {
    real z[CLASSES], top = -1e30, norm = 0, chosen = logits[label];
#pragma unroll
    for (int c = 0; c < CLASSES; ++c) z[c] = logits[c], top = z[c] > top ? z[c] : top;
#pragma unroll
    for (int c = 0; c < CLASSES; ++c) z[c] = exponential(z[c] - top), norm += z[c];
#pragma unroll
    for (int c = 0; c < PADDED_CLASSES; ++c)
        logits[c] = c < CLASSES ? (z[c < CLASSES ? c : 0] / norm - (c == label ? real(1) : real(0))) * mean : real(0);
    return top + logarithm(norm) - chosen;
}

// The layers above the first: from a₁ to δ₁, both in s.z, and the step of their weights.
__device__ __forceinline__ void upper_layers(Shared& s, const Minibatch& batch, real rate, real& loss, real& outer) {
    constexpr int WIDE = (ROW_TILES + 1) / 2;  // tiles of rows for a half of the warps
    constexpr int BELOW = UNITS / 8 / 2;       // tiles of a₁'s units for it
    int m = quarter(), from = half() * WIDE;   // tile of own units, first tile of rows
    bool has_units = OWN_UNITS == 16 * QUARTERS || 16 * m < OWN_UNITS;
    // With an odd number of tiles, the last of the second half comes twice; all that it changes is written once.
    auto tile_of_rows = [&](int n) { return from + n < ROW_TILES ? from + n : ROW_TILES - 1; };

    real sum[1][WIDE][4];
    if (has_units) {
        products<UNITS / 8>(
            sum, [&](int k) { return left_tile(s.second + 16 * m * STRIDE1 + 8 * k, STRIDE1, 1); },
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
    if (warp() < ROW_TILES) {
        products<OWN_UNITS / 8>(
            logits, [&](int k) { return left_tile(s.third + 8 * k, STRIDE2, 1); },
            [&](int k, int) { return right_tile(s.a2 + 8 * warp() * STRIDE2 + 8 * k, 1, STRIDE2); });
        each(logits[0][0], 0, 8 * warp(), [&](int c, int i, real value) { s.top[i * STRIDE3 + c] = value; });
    }
    add_over_cluster<PADDED_CLASSES, STRIDE3>(s.top, [] {}, [&](real value, int c) { return value + s.bias3[c]; });
    if (thread() < PADDED_ROWS) {
        int i = thread();
        real mean = batch.mean[i], value = softmax(s.top + i * STRIDE3, batch.label[i], mean);
        loss += value * mean, outer += value * mean * batch.scale[i];
    }
    block_sync();

    real third[1][1][4];
    if (has_units)
        products<PADDED_CLASSES / 8>(
            sum, [&](int k) { return left_tile(s.third + 8 * k * STRIDE2 + 16 * m, 1, STRIDE2); },
            [&](int k, int n) { return right_tile(s.top + 8 * tile_of_rows(n) * STRIDE3 + 8 * k, 1, STRIDE3); });
    if (8 * warp() < OWN_UNITS)
        products<ROW_TILES>(
            third, [&](int k) { return left_tile(s.top + 8 * k * STRIDE3, 1, STRIDE3); },
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
    if (8 * warp() < OWN_UNITS)
        each(third[0][0], 0, 8 * warp(),
             [&](int c, int unit, real value) { s.third[c * STRIDE2 + unit] -= rate * value; });
    for (int c = thread(); c < CLASSES; c += THREADS) s.bias3[c] -= rate * column(s.top + c, STRIDE3);
    block_sync();

    // Both in one loop, because each alone would wait for its own products.
    real second[1][BELOW][4], delta1[1][ROW_TILES][4];
    bool has_inputs = UNITS == 16 * HALVES * QUARTERS || 16 * warp() < UNITS;
    clear(second), clear(delta1);
#pragma unroll 1
    for (int k = 0; k < ROW_TILES || k < OWN_UNITS / 8; ++k) {
        if (k < ROW_TILES && has_units)
            add_row(second, left_tile(s.a2 + 8 * k * STRIDE2 + 16 * m, 1, STRIDE2), [&](int n) {
                return right_tile(s.z + 8 * k * STRIDE1 + 8 * (half() * BELOW + n), STRIDE1, 1);
            });
        if (k < OWN_UNITS / 8 && has_inputs)
            add_row(delta1, left_tile(s.second + 8 * k * STRIDE1 + 16 * warp(), 1, STRIDE1),
                    [&](int n) { return right_tile(s.a2 + 8 * n * STRIDE2 + 8 * k, 1, STRIDE2); });
    }
    for (int u = thread(); u < OWN_UNITS; u += THREADS) s.bias2[u] -= rate * column(s.a2 + u, STRIDE2);
    block_sync();
    if (has_inputs)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
            each(delta1[0][n], 16 * warp(), 8 * n, [&](int unit, int i, real value) {
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
    add_over_cluster<UNITS, STRIDE1>(s.z, step_second, [](real value, int) { return value; });
}

// visit(number, its place among the parameters, or −1 for padding) for all but the weights of the first layer.
template <class Visit>
__device__ __forceinline__ void each_upper(Shared& s, int first_unit, Visit visit) {
    for (int u = thread(); u < UNITS; u += THREADS) visit(s.bias1[u], u < FIRST ? BIAS1 + u : -1);
    for (int n = thread(); n < OWN_UNITS * STRIDE1; n += THREADS) {
        int unit = first_unit + n / STRIDE1, below = n % STRIDE1;
        visit(s.second[n], unit < SECOND && below < FIRST ? WEIGHT2 + unit * FIRST + below : -1);
    }
    for (int u = thread(); u < OWN_UNITS; u += THREADS)
        visit(s.bias2[u], first_unit + u < SECOND ? BIAS2 + first_unit + u : -1);
    for (int n = thread(); n < PADDED_CLASSES * STRIDE2; n += THREADS) {
        int c = n / STRIDE2, own = n % STRIDE2, unit = first_unit + own;
        visit(s.third[n], c < CLASSES && own < OWN_UNITS && unit < SECOND ? WEIGHT3 + c * SECOND + unit : -1);
    }
    for (int c = thread(); c < PADDED_CLASSES; c += THREADS) visit(s.bias3[c], c < CLASSES ? BIAS3 + c : -1);
}
