// A client's whole local training in one launch, for stacks of one to three linear layers. The formulas are those of
// `kernels/mlp.py` and `backends/torch/local_training.py`; sizes come as macros: LAYERS, ROWS, FEATURES, FIRST, SECOND,
// CLASSES, BLOCKS, THREADS.
//
// The blocks of a client slot (a client of a run) have its weights in shared memory from the first step to the last.
// A step:
//
//   1  z += x W₁ᵀ over the own features, for all rows                                       → cluster waits
//   2  own rows: z summed over all blocks, layers above, loss, δ; δ broadcast to all blocks → cluster waits
//   3  own features: W₁ −= η δ₁ᵀ x; own units of the layers above: W −= η δᵀ a, broadcast to all blocks

// All steps of every slot. The `result` is its trained model [slots, SIZE], or with SAVE what the backward pass needs
// of every step [steps, slots, SAVED_PER_STEP]. Losses are one sum for every warp [slots, BLOCKS, WARPS].
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
forward(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
        const real* step_sizes, const real* factors, const real* class_weights, real* result,
        const real* start, real* losses, real* outer_losses, real* outer_gradients, real* scratch, int slots,
        double mu) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int slot = slot_of_cluster(), rank = rank_in_cluster(), begin = rank * OWN_FEATURES;
    Data data = {x, y, rows, means, class_weights, slots, slot, begin, factors[slot]};
    Sgd sgd = {step_sizes[slot], real(mu)};
    const real* anchor = start + (long long)slot * SIZE;
    real* sums = SUMS ? outer_gradients + (long long)slot * SIZE : nullptr;
    // Sums of the first layer lie in the order of threads, for coalesced access.
    real* first_sums = SUMS ? scratch + ((long long)slot * BLOCKS + rank) * SCRATCH : nullptr;
    real loss = 0, outer = 0;
    int total = steps[slot];

    Prefetched prefetched;
    s.w.read(anchor, begin);
    for (int n = thread(); SAVE && rank == 0 && n < SIZE - WEIGHT2; n += THREADS)
        result[(long long)slot * SAVED_PER_STEP + n] = anchor[WEIGHT2 + n];
    data.load_row_numbers(0, s.batch);
    block_sync();
    data.fetch(0, s.batch, prefetched);
    data.store(prefetched, s.batch);
    block_sync();
    for (int step = 0; step < total; ++step) {
        bool last = step + 1 == total;
        real* saved = result + ((long long)step * slots + slot) * SAVED_PER_STEP;
        real* trained = last && !SAVE ? result + (long long)slot * SIZE : nullptr;

        project(s.batch.x, s.w.first, s.z);
        if (!last) data.load_row_numbers(step + 1, s.batch);
        cluster_sync();
        upper_layers(s, rank, loss, outer, saved + SAVED_ABOVE);
        cluster_sync();
        if (!last) data.fetch(step + 1, s.batch, prefetched);
        outer_products<SUMS>(s.batch.x, s.z, s.batch.scale, [&](int place, int f, int u, real sum, real scaled) {
            if (u >= FIRST || begin + f >= FEATURES) return;
            int at = u * FEATURES + begin + f;
            real& w = s.w.first[f * UNITS + u];
            w = sgd.step(w, sum, anchor, at);
            if (trained) trained[at] = w;
            if (SUMS) first_sums[place] += scaled;
        });
        for (int u = thread(); u < FIRST; u += THREADS) {
            s.w.bias1[u] = sgd.step(s.w.bias1[u], column(s.z + u, UNITS), anchor, BIAS1 + u);
            if (trained && rank == 0) trained[BIAS1 + u] = s.w.bias1[u];
            if (SUMS && rank == 0) sums[BIAS1 + u] += column(s.z + u, UNITS, s.batch.scale);
        }
#if LAYERS > 1
        real* next_saved = last || !SAVE ? nullptr : saved + (long long)slots * SAVED_PER_STEP;
        step_upper_layers(s, rank, sgd, anchor, trained ? trained + WEIGHT2 : next_saved, sums);
#endif
        block_sync();
        data.store(prefetched, s.batch);
        block_sync();
    }
    cluster_sync();  // no block exits while others may still write to its memory
    for (int tile = thread(); SUMS && tile < TILES; tile += THREADS)
        each_weight(tile, [&](int, int place, int f, int u) {
            if (u < FIRST && begin + f < FEATURES) sums[u * FEATURES + begin + f] += first_sums[place];
        });
    if (thread() % 32 == 0) {
        int at = (slot * BLOCKS + rank) * WARPS + thread() / 32;
        losses[at] = loss, outer_losses[at] = outer;
    }
}
