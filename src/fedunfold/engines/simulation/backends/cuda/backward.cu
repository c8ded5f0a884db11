// A client's walk back through its local steps in one launch, for the stacks of `forward.cu`:
//
//   p ← p − η H_b(w^τ) p + ∇ℓ^out_b(w^τ)      from the last step to the first
//
// With p = (V_l, v_l), a dot for what changes along p, s the softmax, κ = η / |b| and ε the outer loss' coefficient, it
// goes up and down the layers (a₀ = x, ȧ₀ = 0; what is behind a ReLU that is off is 0):
//
//   ż_l = ȧ_{l−1} W_lᵀ + a_{l−1} V_lᵀ + v_l
//   δ = −κ (s − onehot)        γ = ε (s − onehot) − κ (diag(s) − s sᵀ) ż          at the logits
//   δ_{l−1} = δ_l W_l          γ_{l−1} = γ_l W_l + δ_l V_l
//   V_l += γ_lᵀ a_{l−1} + δ_lᵀ ȧ_{l−1}        v_l += Σ γ_l
//
// Weights above the first layer and that layer's outputs come from the tape of the walk. Beside its features and rows, each
// program owns a slice of the second layer's units: their weights, and those of the third layer that lead away from them.
// A step, with a wait of the cluster after each:
//
//   1  ż₁ over the own features           2  own rows: ż₁ summed, ȧ₁ handed to all
//   3  own units: z₂, ż₂, and their part of z₃, ż₃      4  own rows: γ and δ at the logits, handed to all
//   5  own units: γ₂, δ₂, and their part of γ₁          6  own rows: γ₁ summed, handed to all; own units: V₂, V₃
//
// and then V₁ of the own features. One layer has 1 and 4 alone.

constexpr int TOPS = up(CLASSES, 4);

#if LAYERS > 1
// What a program has of the layers above the first: those of its own units, and all biases of the third.
struct Above {
    alignas(16) real second[SHARE * STRIDE], bias2[SHARE];
#if LAYERS == 3
    alignas(16) real third[TOPS * SHARE], bias3[TOPS];
#endif

    // give(number, where it stands among the parameters, whether all programs have it)
    template <class Give>
    __device__ __forceinline__ void each(int rank, Give give) {
        int from = rank * SHARE, own = ABOVE - from < SHARE ? ABOVE - from : SHARE;
        for (int n = thread(); n < own * FIRST; n += THREADS)
            give(second[n / FIRST * STRIDE + n % FIRST], WEIGHT2 + from * FIRST + n, false);
        for (int u = thread(); u < own; u += THREADS) give(bias2[u], BIAS2 + from + u, false);
#if LAYERS == 3
        for (int n = thread(); n < CLASSES * SHARE; n += THREADS)
            if (n % SHARE < own) give(third[n], WEIGHT3 + n / SHARE * SECOND + from + n % SHARE, false);
        for (int c = thread(); c < CLASSES; c += THREADS) give(bias3[c], BIAS3 + c, true);
#endif
    }
};
#endif

struct Shared {
    alignas(16) real first[SLICE * UNITS], bias1[UNITS];  // V₁ and v₁
    alignas(16) Minibatch batch;
    alignas(16) real z[PADDED * UNITS];  // what this program has of ż₁, then of γ₁; at last γ₁
#if LAYERS > 1
    Above w, p;
    alignas(16) real a1[PADDED * UNITS], moved1[PADDED * UNITS];
    alignas(16) real a2[PADDED * SHARE], moved2[PADDED * SHARE], slope2[PADDED * SHARE], chain2[PADDED * SHARE];
#endif
#if LAYERS == 3
    alignas(16) real z3[PADDED * TOPS], moved3[PADDED * TOPS];      // what the own units have of them
    alignas(16) real slope3[PADDED * TOPS], chain3[PADDED * TOPS];  // of all
#endif

    // give(number, where it stands among the parameters, whether all programs have it) for p in the first layer
    template <class Give>
    __device__ __forceinline__ void each_first(int begin, Give give) {
        for (int n = thread(); n < SLICE * FIRST; n += THREADS) {
            int u = n / SLICE, f = n % SLICE;
            if (begin + f < FEATURES) give(first[f * UNITS + u], u * FEATURES + begin + f, false);
        }
        for (int u = thread(); u < FIRST; u += THREADS) give(bias1[u], BIAS1 + u, true);
    }
};

#ifdef BACKWARD_BYTES
static_assert(sizeof(Shared) == BACKWARD_BYTES);
#endif

#if LAYERS > 1
// What the tape has of a step.
__device__ __forceinline__ void recall(Shared& s, int rank, const real* record) {
    for (int n = thread() * 4; n < ROWS * UNITS; n += THREADS * 4) set(s.a1 + n, quad(record + KEPT_ABOVE + n));
    s.w.each(rank, [&](real& number, int place, bool) { number = record[place - WEIGHT2]; });
}

// Own rows' sums of z over all programs, plus `shift`, where a₁ is on; handed to all.
__device__ __forceinline__ void sum_rows(Shared& s, int rank, const real* shift, real* to) {
    for (int n = thread(); n < OWN * (UNITS / 4); n += THREADS) {
        int row = rank * OWN + n / (UNITS / 4), u = n % (UNITS / 4) * 4, at = row * UNITS + u;
        if (row >= ROWS) break;
        Quad sum = summed(s.z, at), a = quad(s.a1 + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] = a.v[j] > 0 ? sum.v[j] + (shift ? shift[u + j] : real(0)) : real(0);
        hand_round(to + at, sum);
    }
}

// z₂ and ż₂ of the own units, of four rows a thread.
__device__ __forceinline__ void move_second(Shared& s) {
    for (int tile = thread(); tile < PADDED / 4 * SHARE; tile += THREADS) {
        int u = tile % SHARE, row = tile / SHARE * 4;
        real z[4], moved[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = s.w.bias2[u], moved[i] = s.p.bias2[u];
#pragma unroll 2
        for (int k = 0; k < UNITS; k += 4) {
            Quad w = quad(s.w.second + u * STRIDE + k), p = quad(s.p.second + u * STRIDE + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Quad a = quad(s.a1 + (row + i) * UNITS + k), change = quad(s.moved1 + (row + i) * UNITS + k);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    z[i] += a.v[j] * w.v[j];
                    moved[i] += change.v[j] * w.v[j] + a.v[j] * p.v[j];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bool on = LAYERS == 2 || z[i] > 0;
            s.a2[(row + i) * SHARE + u] = on ? z[i] : real(0);
            s.moved2[(row + i) * SHARE + u] = on ? moved[i] : real(0);
        }
    }
}

// The own units' part of γ₁, four rows by four units of the first layer a thread.
__device__ __forceinline__ void chain_first(Shared& s) {
    for (int tile = thread(); tile < PADDED / 4 * (UNITS / 4); tile += THREADS) {
        int row = tile / (UNITS / 4) * 4, k = tile % (UNITS / 4) * 4;
        real sum[4][4] = {};
        for (int u = 0; u < SHARE; u += 4) {
            Quad slope[4], chain[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                slope[i] = quad(s.slope2 + (row + i) * SHARE + u);
                chain[i] = quad(s.chain2 + (row + i) * SHARE + u);
            }
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                Quad w = quad(s.w.second + (u + m) * STRIDE + k), p = quad(s.p.second + (u + m) * STRIDE + k);
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] += slope[i].v[m] * p.v[j] + chain[i].v[m] * w.v[j];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) set(s.z + (row + i) * UNITS + k, {sum[i][0], sum[i][1], sum[i][2], sum[i][3]});
    }
}

// V_l += γ_lᵀ a_{l−1} + δ_lᵀ ȧ_{l−1} and v_l += Σ γ_l above the first layer.
__device__ __forceinline__ void add_above(Shared& s) {
    // From the last thread on, because the first are busy with γ₁.
    for (int n = THREADS - 1 - thread(); n < SHARE / 4 * (UNITS / 4); n += THREADS) {
        int u = n / (UNITS / 4) * 4, k = n % (UNITS / 4) * 4;
        real sum[4][4] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad chain = quad(s.chain2 + i * SHARE + u), slope = quad(s.slope2 + i * SHARE + u);
            Quad a = quad(s.a1 + i * UNITS + k), moved = quad(s.moved1 + i * UNITS + k);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[m][j] += chain.v[m] * a.v[j] + slope.v[m] * moved.v[j];
        }
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j) s.p.second[(u + m) * STRIDE + k + j] += sum[m][j];
    }
    for (int u = thread(); u < SHARE; u += THREADS) s.p.bias2[u] += column(s.chain2 + u, SHARE);
#if LAYERS == 3
    for (int n = thread(); n < CLASSES * SHARE; n += THREADS) {
        int c = n / SHARE, u = n % SHARE;
        real sum = 0;
#pragma unroll 4
        for (int i = 0; i < ROWS; ++i)
            sum += s.chain3[i * TOPS + c] * s.a2[i * SHARE + u] + s.slope3[i * TOPS + c] * s.moved2[i * SHARE + u];
        s.p.third[n] += sum;
    }
    for (int c = THREADS - 1 - thread(); c < CLASSES; c += THREADS) s.p.bias3[c] += column(s.chain3 + c, TOPS);
#endif
}
#endif

#if LAYERS == 3
// What the own units have of z₃ and ż₃.
__device__ __forceinline__ void move_third(Shared& s) {
    for (int n = thread(); n < ROWS * TOPS; n += THREADS) {
        int row = n / TOPS, c = n % TOPS;
        real z = 0, moved = 0;
#pragma unroll
        for (int u = 0; u < SHARE; u += 4) {
            Quad a = quad(s.a2 + row * SHARE + u), change = quad(s.moved2 + row * SHARE + u);
            Quad w = quad(s.w.third + c * SHARE + u), p = quad(s.p.third + c * SHARE + u);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                z += a.v[j] * w.v[j];
                moved += change.v[j] * w.v[j] + a.v[j] * p.v[j];
            }
        }
        s.z3[n] = z, s.moved3[n] = moved;
    }
}

// γ₂ and δ₂ of the own units.
__device__ __forceinline__ void chain_second(Shared& s) {
    for (int n = thread(); n < ROWS * (SHARE / 4); n += THREADS) {
        int row = n / (SHARE / 4), u = n % (SHARE / 4) * 4;
        Quad slope = {}, chain = {}, a = quad(s.a2 + row * SHARE + u);
#pragma unroll 2
        for (int c = 0; c < CLASSES; ++c) {
            Quad w = quad(s.w.third + c * SHARE + u), p = quad(s.p.third + c * SHARE + u);
            real down = s.slope3[row * TOPS + c], along = s.chain3[row * TOPS + c];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                slope.v[j] += down * w.v[j];
                chain.v[j] += down * p.v[j] + along * w.v[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(a.v[j] > 0)) slope.v[j] = chain.v[j] = 0;
        set(s.slope2 + row * SHARE + u, slope);
        set(s.chain2 + row * SHARE + u, chain);
    }
}
#endif

// A row's logits and their change, shared among a warp.
__device__ __forceinline__ void top(
    const Shared& s, const real* record, int row, real (&z)[PER_THREAD], real (&moved)[PER_THREAD]) {
#if LAYERS == 3
    logits<TOPS>(s.z3, s.w.bias3, row, z);
    logits<TOPS>(s.moved3, s.p.bias3, row, moved);
#else
#if LAYERS == 1
    logits<UNITS>(s.z, s.bias1, row, moved);
#endif
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4) {
        int c = class_of(n);
        if (c >= CLASSES) continue;
#if LAYERS == 1
        Quad known = quad(record + KEPT_ABOVE + row * UNITS + c);
#else
        Quad known = peer_load(s.a2 + row * SHARE + c % SHARE, c / SHARE);
        Quad change = peer_load(s.moved2 + row * SHARE + c % SHARE, c / SHARE);
#pragma unroll
        for (int j = 0; j < 4; ++j) moved[n + j] = change.v[j];
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) z[n + j] = known.v[j];
    }
#endif
}

// γ and δ of a row to those who need them.
__device__ __forceinline__ void hand_out(Shared& s, int row, const real (&chain)[PER_THREAD], const real (&slope)[PER_THREAD]) {
#if LAYERS == 1
    hand_round_row<UNITS>(s.z, row, chain);
#elif LAYERS == 2
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4) {
        int c = class_of(n), at = row * SHARE + c % SHARE;
        if (c >= CLASSES) continue;
        peer_store(s.chain2 + at, c / SHARE, {chain[n], chain[n + 1], chain[n + 2], chain[n + 3]});
        peer_store(s.slope2 + at, c / SHARE, {slope[n], slope[n + 1], slope[n + 2], slope[n + 3]});
    }
#else
    hand_round_row<TOPS>(s.chain3, row, chain);
    hand_round_row<TOPS>(s.slope3, row, slope);
#endif
}

// γ and δ at the logits of the own rows.
__device__ __forceinline__ void turn(Shared& s, int rank, const real* record, real rate, bool outer) {
    int from = rank * OWN;
    for (int row = from + thread() / 32; row < from + OWN && row < ROWS; row += WARPS) {
        real z[PER_THREAD] = {}, moved[PER_THREAD] = {}, along = 0;
        top(s, record, row, z, moved);
        softmax(z, s.batch.label[row]);
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) along += z[n] * moved[n];
        along = warp_sum(along);
        real mean = s.batch.mean[row], weight = outer ? s.batch.scale[row] : real(0);
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            bool real_one = class_of(n) < CLASSES;
            real error = z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0));
            real chain = mean * (weight * error - rate * z[n] * (moved[n] - along));
            moved[n] = real_one ? chain : real(0);
            z[n] = real_one ? -rate * mean * error : real(0);
        }
        hand_out(s, row, moved, z);
    }
}

// `adjoint` [lanes, SIZE] is p of every lane before and after; `outer` says whether minibatches met on the way count.
extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
backward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
         const real* step_sizes, const real* factors, const real* class_weights, const real* tape, real* adjoint,
         int lanes, int outer) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int lane = lane_of_cluster(), rank = rank_in_cluster(), begin = rank * SLICE;
    Data data = {x, y, rows, means, class_weights, lanes, lane, begin, factors[lane]};
    real rate = step_sizes[lane];
    real* flat = adjoint + (long long)lane * SIZE;
    int total = steps[lane];

    for (int n = thread(); n < int(sizeof(Shared) / sizeof(real)); n += THREADS) reinterpret_cast<real*>(&s)[n] = 0;
    block_sync();
    const auto read = [&](real& number, int place, bool) { number = flat[place]; };
    s.each_first(begin, read);
#if LAYERS > 1
    s.p.each(rank, read);
#endif
    Arriving arriving;
    data.note_rows(total - 1, s.batch);
    block_sync();
    data.fetch(total - 1, s.batch, arriving);
    data.settle(arriving, s.batch);
    cluster_sync();  // nobody clears what others write to
    for (int step = total - 1; step >= 0; --step) {
        const real* record = tape + ((long long)step * lanes + lane) * RECORD;
        for (int n = (rank * THREADS + thread()) * 32; step && n < RECORD; n += PARTS * THREADS * 32)
            prefetch(record - (long long)lanes * RECORD + n);
#if LAYERS > 1
        recall(s, rank, record);
#endif
        project(s.batch.x, s.first, s.z);
        if (step) data.note_rows(step - 1, s.batch);
        cluster_sync();
#if LAYERS > 1
        sum_rows(s, rank, s.bias1, s.moved1);
        cluster_sync();
        move_second(s);
#if LAYERS == 3
        block_sync();
        move_third(s);
#endif
        cluster_sync();
#endif
        turn(s, rank, record, rate, outer);
        cluster_sync();
#if LAYERS > 1
#if LAYERS == 3
        chain_second(s);
        block_sync();
#endif
        chain_first(s);
        cluster_sync();
        sum_rows(s, rank, nullptr, s.z);
        add_above(s);
        cluster_sync();
#endif
        if (step) data.fetch(step - 1, s.batch, arriving);
        outer_products<false>(s.batch.x, s.z, s.batch.scale,
                              [&](int, int f, int u, real sum, real) { s.first[f * UNITS + u] += sum; });
        for (int u = thread(); u < FIRST; u += THREADS) s.bias1[u] += column(s.z + u, UNITS);
        block_sync();
        data.settle(arriving, s.batch);
        block_sync();
    }
    const auto write = [&](real& number, int place, bool of_all) {
        if (!of_all || rank == 0) flat[place] = number;
    };
    s.each_first(begin, write);
#if LAYERS > 1
    s.p.each(rank, write);
#endif
}
