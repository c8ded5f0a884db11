// A client's whole local walk in one launch, for stacks of one to three linear layers. The formulas are those of
// `linear_stack` and `walk`; sizes come as macros: LAYERS, ROWS, FEATURES, FIRST, SECOND, CLASSES, PARTS, THREADS.
//
// The programs of a lane (a client of a run) keep its weights in shared memory from the first step to the last. A step:
//
//   1  z += x W₁ᵀ over the own features, for all rows                    → cluster waits
//   2  own rows: z summed over all programs, layers above, loss, slopes; slopes handed to all programs → cluster waits
//   3  own features: W₁ −= η δ₁ᵀ x; own units of the layers above: W −= η δᵀ a, handed to all programs

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
// The own rows through the layers above the first, and back to δ₁. With TAPE what the first layer gave is `kept`.
__device__ __forceinline__ void above(Shared& s, int rank, real& loss, real& outer, real* kept) {
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
            if (TAPE) set(kept + at, a);
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

// The own units of the layers above the first, of which every program keeps a copy; `after` begins with these layers.
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
                    if (after) after[at - WEIGHT2] = w.v[j];
                    if (SUMS) sums[at] += scaled[m][j];
                }
            hand_round(place, w);
        }
    }
    for (int u = thread(); u < own; u += THREADS) {
        int at = BIAS2 + from + u;
        real stepped = rates.step(s.w.bias2[from + u], column(s.slope2 + u, SHARE), anchor, at);
        for (int q = 0; q < PARTS; ++q) peer_store(s.w.bias2 + from + u, q, stepped);
        if (after) after[at - WEIGHT2] = stepped;
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
        if (after) after[at - WEIGHT2] = stepped;
        if (SUMS) sums[at] += scaled;
    }
    for (int c = THREADS - 1 - thread(); c < CLASSES; c += THREADS) {
        s.w.bias3[c] = rates.step(s.w.bias3[c], column(s.slope3 + c, CLASSES), anchor, BIAS3 + c);
        if (after && rank == 0) after[BIAS3 - WEIGHT2 + c] = s.w.bias3[c];
        if (SUMS && rank == 0) sums[BIAS3 + c] += column(s.slope3 + c, CLASSES, s.batch.scale);
    }
#endif
}
#else
// The only layer: own rows' logits, loss and slope. With TAPE logits are `kept`.
__device__ __forceinline__ void above(Shared& s, int rank, real& loss, real& outer, real* kept) {
    int from = rank * OWN;
    for (int row = from + thread() / 32; row < from + OWN && row < ROWS; row += WARPS) {
        real z[PER_THREAD] = {};
        logits<UNITS>(s.z, s.w.bias1, row, z);
#pragma unroll
        for (int n = 0; n < PER_THREAD; n += 4)
            if (TAPE && class_of(n) < UNITS)
                set(kept + row * UNITS + class_of(n), {z[n], z[n + 1], z[n + 2], z[n + 3]});
        real value = softmax(z, s.batch.label[row]), mean = s.batch.mean[row];
        loss += value * mean, outer += value * mean * s.batch.scale[row];
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n)
            z[n] = class_of(n) < CLASSES ? (z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0))) * mean : real(0);
        hand_round_row<UNITS>(s.z, row, z);
    }
}
#endif

// All steps of every lane. The `result` is its last model [lanes, SIZE], or with TAPE a record of every step
// [steps, lanes, RECORD]. Losses are left as one sum for every warp [lanes, PARTS, WARPS].
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
forward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
        const real* step_sizes, const real* factors, const real* class_weights, real* result,
        const real* start, real* losses, real* outer_losses, real* outer_gradients, real* scratch, int lanes,
        double mu) {
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
    for (int n = thread(); TAPE && rank == 0 && n < SIZE - WEIGHT2; n += THREADS)
        result[(long long)lane * RECORD + n] = anchor[WEIGHT2 + n];
    data.note_rows(0, s.batch);
    block_sync();
    data.fetch(0, s.batch, arriving);
    data.settle(arriving, s.batch);
    block_sync();
    for (int step = 0; step < total; ++step) {
        bool last = step + 1 == total;
        real* record = result + ((long long)step * lanes + lane) * RECORD;
        real* after = last && !TAPE ? result + (long long)lane * SIZE : nullptr;

        project(s.batch.x, s.w.first, s.z);
        if (!last) data.note_rows(step + 1, s.batch);
        cluster_sync();
        above(s, rank, loss, outer, record + KEPT_ABOVE);
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
        real* next_record = last || !TAPE ? nullptr : record + (long long)lanes * RECORD;
        descend_above(s, rank, rates, anchor, after ? after + WEIGHT2 : next_record, sums);
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
