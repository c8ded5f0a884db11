// A client's whole local training in one launch by two thread blocks on tensor cores, for stacks of three linear
// layers. The formulas are those of `kernels/mlp.py` and `backends/torch/local_training.py`; besides those of
// `mlp.cuh`, macros are THREADS, BLOCKS and REGISTER_GROUPS. Many client slots run at once: each takes two
// multiprocessors, where `forward.cu` takes eight.
//
// Weights of the first layer stay where they are used from the first step to the last: a group of 16 features belongs
// to one of the two blocks and to one of two halves of its warps, and a quarter of the units to each warp of a half. A
// warp has REGISTER_GROUPS of its groups in registers, the others in shared memory, as tiles that the tensor cores read
// and add to directly. Of the second layer a block owns half of the units, with their columns of the third. A step:
//
//   z₁ over the own features      → added over the blocks → a₁ = max(z₁ + b₁, 0)
//   a₂ of the own units; logits over them → added over the blocks → loss, δ₃
//   δ₂ of the own units; W₃, W₂ −= η δᵀ a; δ₁ over them → added over the blocks
//   own features: W₁ −= η δ₁ᵀ x
//
// Both blocks add the same two numbers and so have the same sums, bit for bit.

// All steps of every slot; arguments are those of the kernel in `forward.cu`, of which some are not needed here.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
forward_tensor_cores(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
                     const real* step_sizes, const real* factors, const real* class_weights, real* models,
                     const real* start, real* losses, real* outer_losses, real*, real*, int slots, double) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    int slot = slot_of_cluster(), rank = rank_in_cluster(), stripe = 2 * half() + rank, total = steps[slot];
    real rate = step_sizes[slot], factor = factors[slot], loss = 0, outer = 0;
    const real* anchor = start + (long long)slot * SIZE;
    FirstLayer layer = {s, stripe, groups_of(stripe)};

    // Beyond the last of a minibatch's rows that row is read again, with weight 0.
    auto place_of = [&](int step) {
        int i = thread() < ROWS ? thread() : ROWS - 1;
        return ((long long)step * slots + slot) * ROWS + i;
    };
    auto store_row = [&](Minibatch& batch, int row) {
        if (thread() < PADDED_ROWS) batch.row[thread()] = row;
    };
    auto store_label = [&](Minibatch& batch, int label, real mean) {
        if (thread() >= PADDED_ROWS) return;
        int i = thread();
        batch.label[i] = label, batch.mean[i] = i < ROWS ? mean : real(0);
        batch.scale[i] = BALANCED ? factor * class_weights[label] : factor;
    };

    layer.read(anchor);
    each_upper(s, rank * OWN_UNITS, [&](real& number, int at) { number = at < 0 ? real(0) : anchor[at]; });
    int row = rows[place_of(0)];
    store_row(s.batch[0], row);
    store_label(s.batch[0], (int)y[row], means[place_of(0)]);
    block_sync();
    for (int step = 0; step < total; ++step) {
        const Minibatch& batch = s.batch[step % 2];
        Minibatch& next = s.batch[(step + 1) % 2];
        int next_step = step + 1 < total ? step + 1 : step;
        row = rows[place_of(next_step)];
        project(x, layer, batch.row);
        int label;
        real mean;
        auto load_next = [&] {
            store_row(next, row);
            label = (int)y[row], mean = means[place_of(next_step)];
        };
        add_over_cluster<UNITS, STRIDE1>(s.z, load_next, [&](real value, int unit) {
            value += s.bias1[unit];
            return value < 0 ? real(0) : value;
        });
        upper_layers(s, batch, rate, loss, outer);
        store_label(next, label, mean);
        prefetch_rows(x, next.row, rank);
        constexpr int HELD = REGISTER_GROUPS ? REGISTER_GROUPS : 1, AT_ONCE = 3;
        if (REGISTER_GROUPS)
            descend<HELD>(x, layer, batch.row, 0, REGISTER_GROUPS, [&](int, const real(&sum)[TILES][2 * HELD][4]) {
#pragma unroll
                for (int n = 0; n < HELD; ++n) subtract<HELD>(rate, sum, n, layer.in_registers[n]);
            });
        auto step_stored = [&](int j, const real(&sum)[TILES][2 * AT_ONCE][4]) {
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                if (j + n >= layer.count) break;
                Weights w;
                layer.load(j + n, w);
                subtract<AT_ONCE>(rate, sum, n, w);
                layer.store(j + n, w);
            }
        };
        descend<AT_ONCE>(x, layer, batch.row, REGISTER_GROUPS, layer.count, step_stored);
        // From the last thread on: the first half of the warps may have more features.
        for (int u = THREADS - 1 - thread(); u < FIRST; u += THREADS) s.bias1[u] -= rate * column(s.z + u, STRIDE1);
        block_sync();
    }
    real* trained = models + (long long)slot * SIZE;
    layer.write(trained);
    each_upper(s, rank * OWN_UNITS, [&](real number, int at) {
        bool shared = at < WEIGHT2 || at >= BIAS3;
        if (at >= 0 && !(shared && rank)) trained[at] = number;
    });
    loss = warp_sum(rank ? real(0) : loss), outer = warp_sum(rank ? real(0) : outer);
    if (thread() % 32 == 0) {
        int at = (slot * BLOCKS + rank) * (THREADS / 32) + warp();
        losses[at] = loss, outer_losses[at] = outer;
    }
}
