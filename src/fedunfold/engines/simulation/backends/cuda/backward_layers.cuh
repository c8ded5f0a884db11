// The layers of `backward.cu`: how a block stores them, and a step through those above the first.

constexpr int PADDED_CLASSES = up(CLASSES, 4);

#if LAYERS > 1
// What a block has of the layers above the first: the weights of its own units, and all biases of the third.
struct Above {
    alignas(16) real second[OWN_UNITS * STRIDE2], bias2[OWN_UNITS];
#if LAYERS == 3
    alignas(16) real third[PADDED_CLASSES * OWN_UNITS], bias3[PADDED_CLASSES];
#endif

    // visit(number, where it stands among the parameters, whether all blocks have it)
    template <class Visit>
    __device__ __forceinline__ void each(int rank, Visit visit) {
        int from = rank * OWN_UNITS, own = ABOVE - from < OWN_UNITS ? ABOVE - from : OWN_UNITS;
        for (int n = thread(); n < own * FIRST; n += THREADS)
            visit(second[n / FIRST * STRIDE2 + n % FIRST], WEIGHT2 + from * FIRST + n, false);
        for (int u = thread(); u < own; u += THREADS) visit(bias2[u], BIAS2 + from + u, false);
#if LAYERS == 3
        for (int n = thread(); n < CLASSES * OWN_UNITS; n += THREADS)
            if (n % OWN_UNITS < own) visit(third[n], WEIGHT3 + n / OWN_UNITS * SECOND + from + n % OWN_UNITS, false);
        for (int c = thread(); c < CLASSES; c += THREADS) visit(bias3[c], BIAS3 + c, true);
#endif
    }
};
#endif

struct Shared {
    alignas(16) real first[OWN_FEATURES * UNITS], bias1[UNITS];  // V₁ and v₁
    alignas(16) Minibatch batch;
    alignas(16) real z[PADDED_ROWS * UNITS];  // this block's part of ż₁, then of γ₁; at last γ₁
#if LAYERS > 1
    Above w, p;
    alignas(16) real a1[PADDED_ROWS * UNITS], tangent1[PADDED_ROWS * UNITS];
    alignas(16) real a2[PADDED_ROWS * OWN_UNITS], tangent2[PADDED_ROWS * OWN_UNITS];
    alignas(16) real delta2[PADDED_ROWS * OWN_UNITS], gamma2[PADDED_ROWS * OWN_UNITS];
#endif
#if LAYERS == 3
    alignas(16) real z3[PADDED_ROWS * PADDED_CLASSES], tangent3[PADDED_ROWS * PADDED_CLASSES];  // the own units' part
    alignas(16) real delta3[PADDED_ROWS * PADDED_CLASSES], gamma3[PADDED_ROWS * PADDED_CLASSES];  // of all units
#endif

    // visit(number, where it stands among the parameters, whether all blocks have it) for p in the first layer
    template <class Visit>
    __device__ __forceinline__ void each_first(int begin, Visit visit) {
        for (int n = thread(); n < OWN_FEATURES * FIRST; n += THREADS) {
            int u = n / OWN_FEATURES, f = n % OWN_FEATURES;
            if (begin + f < FEATURES) visit(first[f * UNITS + u], u * FEATURES + begin + f, false);
        }
        for (int u = thread(); u < FIRST; u += THREADS) visit(bias1[u], BIAS1 + u, true);
    }
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) == SHARED_BYTES);
#endif

#if LAYERS > 1
// What local training saved of a step.
__device__ __forceinline__ void load_saved(Shared& s, int rank, const real* saved) {
    for (int n = thread() * 4; n < ROWS * UNITS; n += THREADS * 4) set(s.a1 + n, quad(saved + SAVED_ABOVE + n));
    s.w.each(rank, [&](real& number, int place, bool) { number = saved[place - WEIGHT2]; });
}

// The own rows' sums of z over all blocks, plus `shift`, where a₁ > 0; broadcast to all blocks.
__device__ __forceinline__ void sum_rows(Shared& s, int rank, const real* shift, real* to) {
    for (int n = thread(); n < OWN_ROWS * (UNITS / 4); n += THREADS) {
        int row = rank * OWN_ROWS + n / (UNITS / 4), u = n % (UNITS / 4) * 4, at = row * UNITS + u;
        if (row >= ROWS) break;
        Quad sum = cluster_sum(s.z, at), a = quad(s.a1 + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.v[j] = a.v[j] > 0 ? sum.v[j] + (shift ? shift[u + j] : real(0)) : real(0);
        broadcast(to + at, sum);
    }
}

// z₂ and ż₂ of the own units, of four rows a thread.
__device__ __forceinline__ void propagate_second(Shared& s) {
    for (int tile = thread(); tile < PADDED_ROWS / 4 * OWN_UNITS; tile += THREADS) {
        int u = tile % OWN_UNITS, row = tile / OWN_UNITS * 4;
        real z[4], tangent[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = s.w.bias2[u], tangent[i] = s.p.bias2[u];
#pragma unroll 2
        for (int k = 0; k < UNITS; k += 4) {
            Quad w = quad(s.w.second + u * STRIDE2 + k), p = quad(s.p.second + u * STRIDE2 + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Quad a = quad(s.a1 + (row + i) * UNITS + k), a_tangent = quad(s.tangent1 + (row + i) * UNITS + k);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    z[i] += a.v[j] * w.v[j];
                    tangent[i] += a_tangent.v[j] * w.v[j] + a.v[j] * p.v[j];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bool on = LAYERS == 2 || z[i] > 0;
            s.a2[(row + i) * OWN_UNITS + u] = on ? z[i] : real(0);
            s.tangent2[(row + i) * OWN_UNITS + u] = on ? tangent[i] : real(0);
        }
    }
}

// The own units' part of γ₁, four rows by four units of the first layer a thread.
__device__ __forceinline__ void backpropagate_first(Shared& s) {
    for (int tile = thread(); tile < PADDED_ROWS / 4 * (UNITS / 4); tile += THREADS) {
        int row = tile / (UNITS / 4) * 4, k = tile % (UNITS / 4) * 4;
        real sum[4][4] = {};
        for (int u = 0; u < OWN_UNITS; u += 4) {
            Quad delta[4], gamma[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                delta[i] = quad(s.delta2 + (row + i) * OWN_UNITS + u);
                gamma[i] = quad(s.gamma2 + (row + i) * OWN_UNITS + u);
            }
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                Quad w = quad(s.w.second + (u + m) * STRIDE2 + k), p = quad(s.p.second + (u + m) * STRIDE2 + k);
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] += delta[i].v[m] * p.v[j] + gamma[i].v[m] * w.v[j];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) set(s.z + (row + i) * UNITS + k, {sum[i][0], sum[i][1], sum[i][2], sum[i][3]});
    }
}

// V_l += γ_lᵀ a_{l−1} + δ_lᵀ ȧ_{l−1} and v_l += Σ γ_l above the first layer.
__device__ __forceinline__ void add_above(Shared& s) {
    // From the last thread on: the first have γ₁.
    for (int n = THREADS - 1 - thread(); n < OWN_UNITS / 4 * (UNITS / 4); n += THREADS) {
        int u = n / (UNITS / 4) * 4, k = n % (UNITS / 4) * 4;
        real sum[4][4] = {};
#pragma unroll 2
        for (int i = 0; i < ROWS; ++i) {
            Quad gamma = quad(s.gamma2 + i * OWN_UNITS + u), delta = quad(s.delta2 + i * OWN_UNITS + u);
            Quad a = quad(s.a1 + i * UNITS + k), tangent = quad(s.tangent1 + i * UNITS + k);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[m][j] += gamma.v[m] * a.v[j] + delta.v[m] * tangent.v[j];
        }
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j) s.p.second[(u + m) * STRIDE2 + k + j] += sum[m][j];
    }
    for (int u = thread(); u < OWN_UNITS; u += THREADS) s.p.bias2[u] += column(s.gamma2 + u, OWN_UNITS);
#if LAYERS == 3
    for (int n = thread(); n < CLASSES * OWN_UNITS; n += THREADS) {
        int c = n / OWN_UNITS, u = n % OWN_UNITS;
        real sum = 0;
#pragma unroll 4
        for (int i = 0; i < ROWS; ++i)
            sum += s.gamma3[i * PADDED_CLASSES + c] * s.a2[i * OWN_UNITS + u] +
                   s.delta3[i * PADDED_CLASSES + c] * s.tangent2[i * OWN_UNITS + u];
        s.p.third[n] += sum;
    }
    for (int c = THREADS - 1 - thread(); c < CLASSES; c += THREADS)
        s.p.bias3[c] += column(s.gamma3 + c, PADDED_CLASSES);
#endif
}
#endif

#if LAYERS == 3
// The own units' part of z₃ and ż₃.
__device__ __forceinline__ void propagate_third(Shared& s) {
    for (int n = thread(); n < ROWS * PADDED_CLASSES; n += THREADS) {
        int row = n / PADDED_CLASSES, c = n % PADDED_CLASSES;
        real z = 0, tangent = 0;
#pragma unroll
        for (int u = 0; u < OWN_UNITS; u += 4) {
            Quad a = quad(s.a2 + row * OWN_UNITS + u), a_tangent = quad(s.tangent2 + row * OWN_UNITS + u);
            Quad w = quad(s.w.third + c * OWN_UNITS + u), p = quad(s.p.third + c * OWN_UNITS + u);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                z += a.v[j] * w.v[j];
                tangent += a_tangent.v[j] * w.v[j] + a.v[j] * p.v[j];
            }
        }
        s.z3[n] = z, s.tangent3[n] = tangent;
    }
}

// γ₂ and δ₂ of the own units.
__device__ __forceinline__ void backpropagate_second(Shared& s) {
    for (int n = thread(); n < ROWS * (OWN_UNITS / 4); n += THREADS) {
        int row = n / (OWN_UNITS / 4), u = n % (OWN_UNITS / 4) * 4;
        Quad delta = {}, gamma = {}, a = quad(s.a2 + row * OWN_UNITS + u);
#pragma unroll 2
        for (int c = 0; c < CLASSES; ++c) {
            Quad w = quad(s.w.third + c * OWN_UNITS + u), p = quad(s.p.third + c * OWN_UNITS + u);
            real delta3 = s.delta3[row * PADDED_CLASSES + c], gamma3 = s.gamma3[row * PADDED_CLASSES + c];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                delta.v[j] += delta3 * w.v[j];
                gamma.v[j] += delta3 * p.v[j] + gamma3 * w.v[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(a.v[j] > 0)) delta.v[j] = gamma.v[j] = 0;
        set(s.delta2 + row * OWN_UNITS + u, delta);
        set(s.gamma2 + row * OWN_UNITS + u, gamma);
    }
}
#endif
