// The backward pass through a client's local steps in one launch, for the stacks of `forward.cu`:
//
//   p ← p − η H_b(w^τ) p + ∇ℓ^out_b(w^τ)      from the last step to the first
//
// With p = (V_l, v_l), a dot for derivatives along p, s the softmax, κ = η / |b| and ε the outer loss' coefficient, a
// step goes up and down the layers (a₀ = x, ȧ₀ = 0; what is behind a ReLU that is off is 0):
//
//   ż_l = ȧ_{l−1} W_lᵀ + a_{l−1} V_lᵀ + v_l
//   δ = −κ (s − onehot)        γ = ε (s − onehot) − κ (diag(s) − s sᵀ) ż          at the logits
//   δ_{l−1} = δ_l W_l          γ_{l−1} = γ_l W_l + δ_l V_l
//   V_l += γ_lᵀ a_{l−1} + δ_lᵀ ȧ_{l−1}        v_l += Σ γ_l
//
// Weights above the first layer and that layer's outputs were saved by `forward.cu`. Beside its features and rows, each
// block owns a slice of the second layer's units: their weights, and the third layer's columns of them. A step, with a
// wait of the cluster after each:
//
//   1  ż₁ over the own features                         2  own rows: ż₁ summed, ȧ₁ broadcast
//   3  own units: z₂, ż₂, and their part of z₃, ż₃      4  own rows: γ and δ at the logits, broadcast
//   5  own units: γ₂, δ₂, and their part of γ₁          6  own rows: γ₁ summed, broadcast; own units: V₂, V₃
//
// and then V₁ of the own features. One layer has 1 and 4 alone.

// A row's logits and their tangent, distributed over a warp.
__device__ __forceinline__ void load_logits(
    const Shared& s, const real* saved, int row, real (&z)[PER_THREAD], real (&tangent)[PER_THREAD]) {
#if LAYERS == 3
    logits<PADDED_CLASSES>(s.z3, s.w.bias3, row, z);
    logits<PADDED_CLASSES>(s.tangent3, s.p.bias3, row, tangent);
#else
#if LAYERS == 1
    logits<UNITS>(s.z, s.bias1, row, tangent);
#endif
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4) {
        int c = class_of(n);
        if (c >= CLASSES) continue;
#if LAYERS == 1
        Quad known = quad(saved + SAVED_ABOVE + row * UNITS + c);
#else
        Quad known = peer_load(s.a2 + row * OWN_UNITS + c % OWN_UNITS, c / OWN_UNITS);
        Quad along = peer_load(s.tangent2 + row * OWN_UNITS + c % OWN_UNITS, c / OWN_UNITS);
#pragma unroll
        for (int j = 0; j < 4; ++j) tangent[n + j] = along.v[j];
#endif
#pragma unroll
        for (int j = 0; j < 4; ++j) z[n + j] = known.v[j];
    }
#endif
}

// γ and δ of a row to the blocks that need them.
__device__ __forceinline__ void distribute(
    Shared& s, int row, const real (&gamma)[PER_THREAD], const real (&delta)[PER_THREAD]) {
#if LAYERS == 1
    broadcast_row<UNITS>(s.z, row, gamma);
#elif LAYERS == 2
#pragma unroll
    for (int n = 0; n < PER_THREAD; n += 4) {
        int c = class_of(n), at = row * OWN_UNITS + c % OWN_UNITS;
        if (c >= CLASSES) continue;
        peer_store(s.gamma2 + at, c / OWN_UNITS, {gamma[n], gamma[n + 1], gamma[n + 2], gamma[n + 3]});
        peer_store(s.delta2 + at, c / OWN_UNITS, {delta[n], delta[n + 1], delta[n + 2], delta[n + 3]});
    }
#else
    broadcast_row<PADDED_CLASSES>(s.gamma3, row, gamma);
    broadcast_row<PADDED_CLASSES>(s.delta3, row, delta);
#endif
}

// γ and δ at the logits of the own rows.
__device__ __forceinline__ void backward_logits(Shared& s, int rank, const real* saved, real rate, bool outer) {
    int from = rank * OWN_ROWS;
    for (int row = from + thread() / 32; row < from + OWN_ROWS && row < ROWS; row += WARPS) {
        real z[PER_THREAD] = {}, tangent[PER_THREAD] = {}, inner = 0;
        load_logits(s, saved, row, z, tangent);
        softmax(z, s.batch.label[row]);
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) inner += z[n] * tangent[n];
        inner = warp_sum(inner);
        real mean = s.batch.mean[row], weight = outer ? s.batch.scale[row] : real(0);
#pragma unroll
        for (int n = 0; n < PER_THREAD; ++n) {
            bool is_real = class_of(n) < CLASSES;
            real error = z[n] - (class_of(n) == s.batch.label[row] ? real(1) : real(0));
            real gamma = mean * (weight * error - rate * z[n] * (tangent[n] - inner));
            tangent[n] = is_real ? gamma : real(0);
            z[n] = is_real ? -rate * mean * error : real(0);
        }
        distribute(s, row, tangent, z);
    }
}

// `adjoint` [slots, SIZE] is p of every slot, changed in place, `all_saved` what `forward` saved of every step, and
// `outer` whether minibatches enter the outer loss.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
backward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
         const real* step_sizes, const real* factors, const real* class_weights, const real* all_saved,
         real* adjoint, int slots, int outer) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int slot = slot_of_cluster(), rank = rank_in_cluster(), begin = rank * OWN_FEATURES;
    Data data = {x, y, rows, means, class_weights, slots, slot, begin, factors[slot]};
    real rate = step_sizes[slot];
    real* flat = adjoint + (long long)slot * SIZE;
    int total = steps[slot];

    for (int n = thread(); n < int(sizeof(Shared) / sizeof(real)); n += THREADS) reinterpret_cast<real*>(&s)[n] = 0;
    block_sync();
    const auto read = [&](real& number, int place, bool) { number = flat[place]; };
    s.each_first(begin, read);
#if LAYERS > 1
    s.p.each(rank, read);
#endif
    Prefetched prefetched;
    data.load_row_numbers(total - 1, s.batch);
    block_sync();
    data.fetch(total - 1, s.batch, prefetched);
    data.store(prefetched, s.batch);
    cluster_sync();  // before any block writes to what another clears
    for (int step = total - 1; step >= 0; --step) {
        const real* saved = all_saved + ((long long)step * slots + slot) * SAVED_PER_STEP;
        for (int n = (rank * THREADS + thread()) * 32; step && n < SAVED_PER_STEP; n += BLOCKS * THREADS * 32)
            prefetch(saved - (long long)slots * SAVED_PER_STEP + n);
#if LAYERS > 1
        load_saved(s, rank, saved);
#endif
        project(s.batch.x, s.first, s.z);
        if (step) data.load_row_numbers(step - 1, s.batch);
        cluster_sync();
#if LAYERS > 1
        sum_rows(s, rank, s.bias1, s.tangent1);
        cluster_sync();
        propagate_second(s);
#if LAYERS == 3
        block_sync();
        propagate_third(s);
#endif
        cluster_sync();
#endif
        backward_logits(s, rank, saved, rate, outer);
        cluster_sync();
#if LAYERS > 1
#if LAYERS == 3
        backpropagate_second(s);
        block_sync();
#endif
        backpropagate_first(s);
        cluster_sync();
        sum_rows(s, rank, nullptr, s.z);
        add_above(s);
        cluster_sync();
#endif
        if (step) data.fetch(step - 1, s.batch, prefetched);
        outer_products<false>(s.batch.x, s.z, s.batch.scale,
                              [&](int, int f, int u, real sum, real) { s.first[f * UNITS + u] += sum; });
        for (int u = thread(); u < FIRST; u += THREADS) s.bias1[u] += column(s.z + u, UNITS);
        block_sync();
        data.store(prefetched, s.batch);
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
