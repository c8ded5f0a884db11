// A matrix of a minibatch [rows × columns], and pointers to its rows.
template <class T> struct Matrix {
    int columns;
    std::vector<T> values;
    std::vector<const T*> rows;

    Matrix(long count, int columns) : columns(columns), values(count * columns), rows(count) {
        for (long i = 0; i < count; i++) rows[i] = values.data() + i * columns;
    }
    T* data() { return values.data(); }
    T* row(int i) { return values.data() + (long)i * columns; }
};

// The state of one client slot. `saved` has, of every step, what its backward pass needs.
template <class T> struct Slot {
    std::vector<T> model, anchor, sums, adjoint, anchor_adjoint, saved;
    double loss = 0, outer_loss = 0;
    int done = 0, steps = 0;

    void free_memory() {
        for (auto* numbers : {&model, &anchor, &sums, &adjoint, &anchor_adjoint, &saved})
            std::vector<T>().swap(*numbers);
    }
};

// Steps of slots, one after the other, by the formulas of `kernels/mlp.py` and `backends/torch/local_training.py`, with
// δ in `deltas`, γ in `gammas` and ż, ȧ in `tangents`; each thread has one of these.
template <class T> class SgdStep {
    using Layer = typename MlpLayout<T>::Layer;
    const CallArgs<T>& args;
    const MlpLayout<T>& layout;
    const std::vector<Layer>& layers;
    const int last;
    std::vector<Matrix<T>> activations, deltas, gammas, tangents;  // of every layer's outputs
    std::vector<std::vector<T>> transposed;                        // W_l of every layer, as right factors
    std::vector<T> zeros, sum;
    std::vector<const T*> x;
    std::vector<const uint64_t*> nonzero;
    IndexLists lists;

    int index = 0, rows = 0;  // of the slot, of the minibatch
    const int32_t* batch = nullptr;
    const T* means = nullptr;

   public:
    SgdStep(const CallArgs<T>& args, const MlpLayout<T>& layout)
        : args(args), layout(layout), layers(layout.layers), last((int)layers.size() - 1), zeros(layout.widest),
          sum(layout.widest), x(args.rows), nonzero(args.rows),
          lists((int)args.rows, std::max(layout.widest, layers[0].in)) {
        for (const Layer& layer : layers) {
            for (auto* matrices : {&activations, &deltas, &gammas, &tangents})
                matrices->emplace_back(args.rows, layer.columns);
            transposed.emplace_back(&layer == &layers[0] ? 0 : (long)layer.out * layers[transposed.size() - 1].columns);
        }
    }

    // w ← w − η (∇ℓ_b(w) + μ (w − w^(t))), summing losses and outer gradients where `tallies` is set
    void train(int slot_index, Slot<T>& slot, int step, bool tallies) {
        begin(slot_index, step);
        T* w = slot.model.data();
        activate(w);
        const T rate = args.step_sizes[slot_index];
        if (tallies && args.sums) {
            differentiate([&](int i) { return outer_coefficient(i); });
            backpropagate(w);
            add(deltas, slot.sums.data());
        }
        differentiate([&](int i) { return -rate * means[i]; }, tallies ? &slot : nullptr);
        if (rate == 0) return;
        backpropagate(w);
        if (args.mu) {
            const T prox = rate * (T)args.mu;
            for (long i = 0; i < layout.size; i++) w[i] += prox * (slot.anchor[i] - w[i]);
        }
        add(deltas, w);
    }

    // Σ_i c_i ce_i(w) and its gradient, with the coefficients c_i in `means`, added to the sums of a slot
    void evaluate(int slot_index, const T* w, Slot<T>& slot, int step) {
        begin(slot_index, step);
        activate(w);
        differentiate([&](int i) { return means[i]; }, &slot);
        backpropagate(w);
        add(deltas, slot.sums.data());
    }

    // Of every row the predicted class, the first where logits are alike, and the cross-entropy
    void predict(int slot_index, const T* w, int step) {
        begin(slot_index, step);
        activate(w);
        const long first = batch - args.batches;
        const int classes = layers[last].out;
        for (int i = 0; i < rows; i++) {
            const T* z = activations[last].row(i);
            T* probabilities = deltas[last].row(i);
            args.predicted[first + i] = std::max_element(z, z + classes) - z;
            args.row_losses[first + i] =
                softmax(z, classes, layers[last].columns, args.labels[batch[i]], probabilities);
        }
    }

    // The same step, saving what its backward pass needs: activations, and the model above its first layer.
    void train_and_save(int slot_index, Slot<T>& slot, int step) {
        T* to = slot.saved.data() + step * saved_per_step(args, layout);
        to = std::copy(slot.model.begin() + layout.first_size, slot.model.end(), to);
        train(slot_index, slot, step, false);
        for (auto& activation : activations) to = std::copy(activation.values.begin(), activation.values.end(), to);
    }

    static long saved_per_step(const CallArgs<T>& args, const MlpLayout<T>& layout) {
        long numbers = layout.size - layout.first_size;
        for (const Layer& layer : layout.layers) numbers += args.rows * layer.columns;
        return numbers;
    }

    // p ← p − η (H_b(w) + μ I) p + ∇ℓ^out_b(w)
    void backward(int slot_index, Slot<T>& slot, int step) {
        begin(slot_index, step);
        const T* from = slot.saved.data() + step * saved_per_step(args, layout);
        const T* upper = from;
        const auto weight = [&](int l) { return upper + layers[l].weight - layout.first_size; };
        from += layout.size - layout.first_size;
        for (auto& activation : activations) {
            std::copy(from, from + activation.values.size(), activation.values.begin());
            from += activation.values.size();
        }
        T* p = slot.adjoint.data();
        for (int l = 0; l <= last; l++) {
            apply(l, p, tangents[l]);
            if (l) multiply(left(tangents, l - 1), lists, weight(l), layers[l].columns, tangents[l].data(),
                            layers[l].columns, tangents[l].data());
            if (l < last) mask(tangents[l], activations[l]);
        }
        const T rate = args.step_sizes[slot_index];
        backward_logits(rate);
        for (int l = last; l > 0; l--) {
            const int below = layers[l - 1].columns;
            transpose(p + layers[l].weight, l);
            multiply(left(deltas, l), lists, transposed[l].data(), below, zeros.data(), 0, gammas[l - 1].data());
            transpose(weight(l), l);
            multiply(left(gammas, l), lists, transposed[l].data(), below, gammas[l - 1].data(), below,
                     gammas[l - 1].data());
            multiply(left(deltas, l), lists, transposed[l].data(), below, zeros.data(), 0, deltas[l - 1].data());
            mask(gammas[l - 1], activations[l - 1]);
            mask(deltas[l - 1], activations[l - 1]);
        }
        if (args.mu) {
            const T prox = rate * (T)args.mu;
            for (long i = 0; i < layout.size; i++) {
                slot.anchor_adjoint[i] += prox * p[i];
                p[i] -= prox * p[i];
            }
        }
        add(gammas, p);
        for (int l = 1; l <= last; l++)
            add_transposed(left(tangents, l - 1), lists, deltas[l].data(), layers[l].columns, p + layers[l].weight);
    }

   private:
    void begin(int slot_index, int step) {
        index = slot_index;
        const long minibatch = (long)step * args.slots + index;
        batch = args.batches + minibatch * args.rows;
        means = args.means + minibatch * args.rows;
        rows = args.counts[minibatch];
        const long words = (layers[0].in + 63) / 64;
        for (int i = 0; i < rows; i++) {
            x[i] = args.x + (long)batch[i] * layers[0].in;
            if (args.nonzero) nonzero[i] = args.nonzero + batch[i] * words;
        }
    }

    // Outputs of layer l as a left factor.
    Left<T> left(const std::vector<Matrix<T>>& outputs, int l) const {
        return {outputs[l].rows.data(), nullptr, rows, layers[l].out};
    }
    Left<T> input(int l) const {
        if (l) return left(activations, l - 1);
        return {x.data(), args.nonzero ? nonzero.data() : nullptr, rows, layers[0].in};
    }

    // to = a_{l−1} W_lᵀ + b_l
    void apply(int l, const T* model, Matrix<T>& to) {
        const Layer& layer = layers[l];
        const T* bias = model + layer.bias;
        if (l || !args.background) {
            multiply(input(l), lists, model + layer.weight, layer.columns, bias, 0, to.data());
            return;
        }
        const T *shift = model + layout.background_shift(), *output = model + layout.background_output();
        for (int i = 0; i < rows; i++) {
            const T overlap = args.overlaps[batch[i]];
            T* row = to.row(i);
            for (int c = 0; c < layer.columns; c++) row[c] = bias[c] + output[c] + overlap * shift[c];
        }
        multiply(input(l), lists, model + layer.weight, layer.columns, to.data(), layer.columns, to.data());
    }

    // a_l = max(0, W_l a_{l−1} + b_l), and the logits in the last layer
    void activate(const T* w) {
        for (int l = 0; l <= last; l++) {
            apply(l, w, activations[l]);
            T* a = activations[l].data();
            for (long i = 0; l < last && i < (long)rows * layers[l].columns; i++) a[i] = a[i] < 0 ? 0 : a[i];
        }
    }

    // W_lᵀ += a_{l−1}ᵀ δ_l and b_l += Σ δ_l, in every layer
    void add(std::vector<Matrix<T>>& signals, T* into) {
        for (int l = 0; l <= last; l++) {
            const Layer& layer = layers[l];
            add_transposed(input(l), lists, signals[l].data(), layer.columns, into + layer.weight);
            add_rows(signals[l], [](int) { return T(1); }, into + layer.bias);
        }
        if (!args.background) return;
        add_rows(signals[0], [](int) { return T(1); }, into + layout.background_shift());
        const auto factor = [&](int i) { return args.overlaps[batch[i]] + layout.background_square; };
        add_rows(signals[0], factor, into + layout.background_output());
    }

    // to += Σ factor(i) delta_i
    template <class Factor> void add_rows(const Matrix<T>& delta, Factor factor, T* to) {
        std::fill(sum.begin(), sum.end(), T(0));
        for (int i = 0; i < rows; i++) {
            const T by = factor(i);
            const T* row = delta.rows[i];
            for (int c = 0; c < delta.columns; c++) sum[c] += by * row[c];
        }
        for (int c = 0; c < delta.columns; c++) to[c] += sum[c];
    }

    // δ_L = factor (softmax − onehot); losses are added to the sums of a slot, where one is given.
    template <class Factor> void differentiate(Factor factor, Slot<T>* tally = nullptr) {
        for (int i = 0; i < rows; i++) {
            const T* z = activations[last].row(i);
            T* delta = deltas[last].row(i);
            const int64_t label = args.labels[batch[i]];
            const T loss = softmax(z, layers[last].out, layers[last].columns, label, delta);
            delta[label] -= 1;
            const T by = factor(i);
            for (int c = 0; c < layers[last].out; c++) delta[c] *= by;
            if (tally) {
                tally->loss += means[i] * loss;
                if (args.outer_on_path) tally->outer_loss += outer_coefficient(i) * loss;
            }
        }
    }

    // γ_L = ε − u (diag(s) − s sᵀ) ż_L,   δ_L = −u (s − onehot)
    void backward_logits(T rate) {
        for (int i = 0; i < rows; i++) {
            const T* tangent = tangents[last].row(i);
            T *delta = deltas[last].row(i), *gamma = gammas[last].row(i);
            const int64_t label = args.labels[batch[i]];
            softmax(activations[last].row(i), layers[last].out, layers[last].columns, label, delta);
            const T curvature = rate * means[i], outer = args.outer_on_path ? outer_coefficient(i) : 0;
            T inner = 0;
            // Written out where compilers may round products differently from one kind of processor to another.
            for (int c = 0; c < layers[last].out; c++) inner = std::fma(delta[c], tangent[c], inner);
            for (int c = 0; c < layers[last].out; c++) {
                const T error = delta[c] - (c == label);
                gamma[c] = std::fma(outer, error, -curvature * delta[c] * (tangent[c] - inner));
                delta[c] = -curvature * error;
            }
        }
    }

    T outer_coefficient(int i) const {
        const T weight = means[i] * args.factors[index];
        return args.class_weights ? weight * args.class_weights[args.labels[batch[i]]] : weight;
    }

    // δ_{l−1} = (δ_l W_l) ⊙ [a_{l−1} > 0], down from the logits
    void backpropagate(const T* w) {
        for (int l = last; l > 0; l--) {
            transpose(w + layers[l].weight, l);
            multiply(left(deltas, l), lists, transposed[l].data(), layers[l - 1].columns, zeros.data(), 0,
                     deltas[l - 1].data());
            mask(deltas[l - 1], activations[l - 1]);
        }
    }

    // W_l as the right factor of δ_l W_l
    void transpose(const T* weight, int l) {
        const Layer& layer = layers[l];
        const int below = layers[l - 1].columns;
        for (int unit = 0; unit < layer.out; unit++) {
            const Place from = place<T>(unit, layer.in, layer.columns);
            const T* own = weight + from.first;
            for (int j = 0; j < layer.in;) {
                const Place to = place<T>(j, layer.out, below);
                T* row = transposed[l].data() + to.first + (long)unit * to.stride;
                const int until = std::min(layer.in, j + to.stride);
                for (int first = j; j < until; j++) row[j - first] = own[(long)j * from.stride];
            }
        }
    }

    void mask(Matrix<T>& values, Matrix<T>& activation) const {
        T* v = values.data();
        const T* a = activation.data();
        for (long i = 0; i < (long)rows * values.columns; i++) v[i] = a[i] > 0 ? v[i] : 0;
    }
};
