// The layers of `forward.cu`: how a block stores them, and a step through those above the first.

struct Sgd {
    real rate, mu;
    // w − η (g + μ (w − w^(t)))
    __device__ __forceinline__ real step(real w, real gradient, const real* anchor, int at) const {
        if (PROX) gradient += mu * (w - anchor[at]);
        return w - rate * gradient;
    }
};

struct Weights {
    alignas(16) real first[OWN_FEATURES * UNITS], bias1[UNITS];
#if LAYERS > 1
    alignas(16) real second[ABOVE * STRIDE2], bias2[ABOVE];
#endif
#if LAYERS == 3
    alignas(16) real third[CLASSES * STRIDE3], bias3[CLASSES];
#endif

    // From the flat parameters of a slot; zeros where there are none.
    __device__ __forceinline__ void read(const real* flat, int begin) {
        for (int n = thread(); n < OWN_FEATURES * UNITS; n += THREADS) {
            int u = n / OWN_FEATURES, f = n % OWN_FEATURES;
            first[f * UNITS + u] = u < FIRST && begin + f < FEATURES ? flat[u * FEATURES + begin + f] : real(0);
        }
        for (int u = thread(); u < UNITS; u += THREADS) bias1[u] = u < FIRST ? flat[BIAS1 + u] : real(0);
#if LAYERS > 1
        for (int n = thread(); n < ABOVE * STRIDE2; n += THREADS)
            second[n] = n % STRIDE2 < FIRST ? flat[WEIGHT2 + n / STRIDE2 * FIRST + n % STRIDE2] : real(0);
        for (int u = thread(); u < ABOVE; u += THREADS) bias2[u] = flat[BIAS2 + u];
#endif
#if LAYERS == 3
        for (int n = thread(); n < CLASSES * STRIDE3; n += THREADS)
            third[n] = n % STRIDE3 < SECOND ? flat[WEIGHT3 + n / STRIDE3 * SECOND + n % STRIDE3] : real(0);
        for (int c = thread(); c < CLASSES; c += THREADS) bias3[c] = flat[BIAS3 + c];
#endif
    }
};

struct Shared {
    Weights w;
    alignas(16) Minibatch batch;
    alignas(16) real z[PADDED_ROWS * UNITS];  // this block's part of z₁; after the second wait δ₁
#if LAYERS > 1
    // Of all rows, and transposed of the own rows; δ₂ of the own units of all rows, and of all units of the own rows.
    alignas(16) real a1[PADDED_ROWS * UNITS], own_a1[UNITS * OWN_ROWS4];
    alignas(16) real delta2[PADDED_ROWS * OWN_UNITS], own_delta2[ABOVE * OWN_ROWS4];
#endif
#if LAYERS == 3
    alignas(16) real a2[PADDED_ROWS * OWN_UNITS], own_a2[SECOND * OWN_ROWS4];
    alignas(16) real delta3[PADDED_ROWS * CLASSES], own_delta3[CLASSES * OWN_ROWS4];
#endif
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES);
#endif

#if LAYERS > 1
// Forward pass of the own rows through the layers above the first, and backward to δ₁. With SAVE the first layer's
// outputs are `saved`.
__device__ __forceinline__ void upper_layers(Shared& s, int rank, real& loss, real& outer, real* saved) {
    int from = rank * OWN_ROWS, own = ROWS - from < OWN_ROWS ? ROWS - from : OWN_ROWS;
    for (int n = thread(); n < OWN_ROWS4 * (UNITS / 4); n += THREADS) {
        int r = n / (UNITS / 4), u = n % (UNITS / 4) * 4, at = (from + r) * UNITS + u;
        Quad a = {};
        if (r < own) {
            a = cluster_sum(s.z, at);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                real z = a.v[j] + s.w.bias1[u + j];
                a.v[j] = z > 0 ? z : real(0);
            }
            broadcast(s.a1 + at, a);
            if (SAVE) set(saved + at, a);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) s.own_a1[(u + j) * OWN_ROWS4 + r] = a.v[j];
    }
    block_sync();
    for (int n = thread(); n < ABOVE * QUADS; n += THREADS) {
        int u = n % ABOVE, r = n / ABOVE * 4;
        Quad sum = {s.w.bias2[u], s.w.bias2[u], s.w.bias2[u], s.w.bias2[u]};
        for (int k = 0; k < UNITS; k += 4) {
            Quad w = quad(s.w.second + u * STRIDE2 + k);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                Quad a = quad(s.own_a1 + (k + m) * OWN_ROWS4 + r);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum.v[i] += w.v[m] * a.v[i];
            }
        }
#if LAYERS == 3
        for (int i = 0; i < 4; ++i) sum.v[i] = sum.v[i] > 0 ? sum.v[i] : real(0);
        set(s.own_a2 + u * OWN_ROWS4 + r, sum);
#else
        set(s.own_delta2 + u * OWN_ROWS4 + r, sum);  // logits; δ below
#endif
    }
    block_sync();
#if LAYERS == 3
    real* deltas = s.own_delta3;
#else
    real* deltas = s.own_delta2;
#endif
    for (int r = thread() / 32; r < OWN_ROWS4; r += WARPS) {
        bool is_own = r < own;
        real z[PER_THREAD] = {};
#if LAYERS == 3
#pragma unroll 4
        for (int c = 0; c < CLASSES; ++c) {
            real sum = 0;
            for (int k = thread() % 32; k < SECOND; k += 32)
                sum += s.own_a2[k * OWN_ROWS4 + r] * s.w.third[c * STRIDE3 + k];
            sum = warp_sum(sum) + s.w.bias3[c];
#pragma unroll
            for (int n = 0; n < PER_THREAD; ++n)
                if (class_of(n) == c) z[n] = sum;
        }
#else
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            if (class_of(n) < CLASSES) z[n] = deltas[class_of(n) * OWN_ROWS4 + r];
#endif
        int row = is_own ? from + r : 0;
        real mean = is_own ? s.batch.mean[row] : real(0);
        real value = softmax(z, s.batch.label[row]);
        loss += value * mean, outer += value * mean * s.batch.scale[row];
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            int c = class_of(n);
            if (c >= CLASSES) continue;
            real delta = (z[n] - (c == s.batch.label[row] ? real(1) : real(0))) * mean;
            deltas[c * OWN_ROWS4 + r] = delta;
            if (!is_own) continue;
#if LAYERS == 3
            for (int q = 0; q < BLOCKS; ++q) peer_store(s.delta3 + row * CLASSES + c, q, delta);
#else
            peer_store(s.delta2 + row * OWN_UNITS + c % OWN_UNITS, c / OWN_UNITS, delta);
#endif
        }
    }
    block_sync();
#if LAYERS == 3
    for (int n = thread(); n < ABOVE * QUADS; n += THREADS) {
        int u = n % ABOVE, r = n / ABOVE * 4;
        Quad sum = {}, a = quad(s.own_a2 + u * OWN_ROWS4 + r);
        for (int c = 0; c < CLASSES; ++c) {
            Quad delta = quad(s.own_delta3 + c * OWN_ROWS4 + r);
            real w = s.w.third[c * STRIDE3 + u];
#pragma unroll
            for (int i = 0; i < 4; ++i) sum.v[i] += w * delta.v[i];
        }
        for (int i = 0; i < 4; ++i) {
            sum.v[i] = a.v[i] > 0 ? sum.v[i] : real(0);
            if (r + i < own) {
                int at = (from + r + i) * OWN_UNITS + u % OWN_UNITS;
                peer_store(s.delta2 + at, u / OWN_UNITS, sum.v[i]);
                peer_store(s.a2 + at, u / OWN_UNITS, a.v[i]);
            }
        }
        set(s.own_delta2 + u * OWN_ROWS4 + r, sum);
    }
    block_sync();
#endif
    for (int n = thread(); n < UNITS / 4 * OWN_ROWS; n += THREADS) {
        int k = n % (UNITS / 4) * 4, r = n / (UNITS / 4);
        if (r >= own) continue;
        Quad sum = {};
#pragma unroll 4
        for (int u = 0; u < ABOVE; ++u) {
            Quad w = quad(s.w.second + u * STRIDE2 + k);
            real delta = s.own_delta2[u * OWN_ROWS4 + r];
#pragma unroll
            for (int j = 0; j < 4; ++j) sum.v[j] += w.v[j] * delta;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] = s.own_a1[(k + j) * OWN_ROWS4 + r] > 0 ? sum.v[j] : real(0);
        broadcast(s.z + (from + r) * UNITS + k, sum);
    }
}

// A step of the own units above the first layer, for the copies of all blocks; `trained` begins with these layers.
__device__ __forceinline__ void step_upper_layers(
    Shared& s, int rank, const Sgd& sgd, const real* anchor, real* trained, real* sums) {
    int from = rank * OWN_UNITS, own = ABOVE - from < OWN_UNITS ? ABOVE - from : OWN_UNITS;
    // From the last thread on: the first have the biases.
    for (int n = THREADS - 1 - thread(); n < OWN_UNITS / 4 * (UNITS / 4); n += THREADS) {
        int u = n / (UNITS / 4) * 4, k = n % (UNITS / 4) * 4;
        real sum[4][4] = {}, scaled[4][4] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad delta = quad(s.delta2 + i * OWN_UNITS + u), a = quad(s.a1 + i * UNITS + k);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sum[m][j] += delta.v[m] * a.v[j];
                    if (SUMS) scaled[m][j] += s.batch.scale[i] * delta.v[m] * a.v[j];
                }
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            if (u + m >= own) break;
            real* place = s.w.second + (from + u + m) * STRIDE2 + k;
            Quad w = quad(place);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (k + j < FIRST) {
                    int at = WEIGHT2 + (from + u + m) * FIRST + k + j;
                    w.v[j] = sgd.step(w.v[j], sum[m][j], anchor, at);
                    if (trained) trained[at - WEIGHT2] = w.v[j];
                    if (SUMS) sums[at] += scaled[m][j];
                }
            broadcast(place, w);
        }
    }
    for (int u = thread(); u < own; u += THREADS) {
        int at = BIAS2 + from + u;
        real stepped = sgd.step(s.w.bias2[from + u], column(s.delta2 + u, OWN_UNITS), anchor, at);
        for (int q = 0; q < BLOCKS; ++q) peer_store(s.w.bias2 + from + u, q, stepped);
        if (trained) trained[at - WEIGHT2] = stepped;
        if (SUMS) sums[at] += column(s.delta2 + u, OWN_UNITS, s.batch.scale);
    }
#if LAYERS == 3
    for (int n = thread(); n < CLASSES * OWN_UNITS; n += THREADS) {
        int c = n / OWN_UNITS, u = n % OWN_UNITS, at = WEIGHT3 + c * SECOND + from + u;
        if (u >= own) continue;
        real sum = 0, scaled = 0;
#pragma unroll 8
        for (int i = 0; i < ROWS; ++i) {
            real product = s.delta3[i * CLASSES + c] * s.a2[i * OWN_UNITS + u];
            sum += product;
            if (SUMS) scaled += s.batch.scale[i] * product;
        }
        real* w = s.w.third + c * STRIDE3 + from + u;
        real stepped = sgd.step(*w, sum, anchor, at);
        for (int q = 0; q < BLOCKS; ++q) peer_store(w, q, stepped);
        if (trained) trained[at - WEIGHT2] = stepped;
        if (SUMS) sums[at] += scaled;
    }
    for (int c = THREADS - 1 - thread(); c < CLASSES; c += THREADS) {
        s.w.bias3[c] = sgd.step(s.w.bias3[c], column(s.delta3 + c, CLASSES), anchor, BIAS3 + c);
        if (trained && rank == 0) trained[BIAS3 - WEIGHT2 + c] = s.w.bias3[c];
        if (SUMS && rank == 0) sums[BIAS3 + c] += column(s.delta3 + c, CLASSES, s.batch.scale);
    }
#endif
}
#else
// The only layer: logits, loss and δ of the own rows. With SAVE the logits are `saved`.
__device__ __forceinline__ void upper_layers(Shared& s, int rank, real& loss, real& outer, real* saved) {
    int from = rank * OWN_ROWS;
    for (int row = from + thread() / 32; row < from + OWN_ROWS && row < ROWS; row += WARPS) {
        real z[PER_THREAD] = {};
        logits<UNITS>(s.z, s.w.bias1, row, z);
#pragma unroll
        for (int n = 0; n < PER_THREAD; n += 4)
            if (SAVE && class_of(n) < UNITS)
                set(saved + row * UNITS + class_of(n), {z[n], z[n + 1], z[n + 2], z[n + 3]});
        real value = softmax(z, s.batch.label[row]), mean = s.batch.mean[row];
        loss += value * mean, outer += value * mean * s.batch.scale[row];
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            z[n] = class_of(n) < CLASSES
                       ? (z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0))) * mean
                       : real(0);
        broadcast_row<UNITS>(s.z, row, z);
    }
}
#endif
