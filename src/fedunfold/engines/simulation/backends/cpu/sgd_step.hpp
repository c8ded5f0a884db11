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

// One lane under way. `tape` keeps what the way back needs of every step.
template <class T> struct Lane {
    std::vector<T> model, anchor, sums, adjoint, gain, tape;
    double loss = 0, outer_loss = 0;
    int done = 0, steps = 0;

    void forget() {
        for (auto* numbers : {&model, &anchor, &sums, &adjoint, &gain, &tape}) std::vector<T>().swap(*numbers);
    }
};

// Steps of lanes, one after the other, by the formulas of `linear_stack.py` and `walk.py`; a thread has one of these.
template <class T> class Step {
    using Layer = typename Stack<T>::Layer;
    const Round<T>& round;
    const Stack<T>& stack;
    const std::vector<Layer>& layers;
    const int last;
    std::vector<Matrix<T>> activations, slopes, chains, moved;  // of every layer's outputs
    std::vector<std::vector<T>> turned;                         // W_l of every layer, as right factors
    std::vector<T> zeros, sum;
    std::vector<const T*> x;
    std::vector<const uint64_t*> marks;
    Lists lists;

    int index = 0, rows = 0;  // of the lane, of the minibatch
    const int32_t* batch = nullptr;
    const T* means = nullptr;

   public:
    Step(const Round<T>& round, const Stack<T>& stack)
        : round(round), stack(stack), layers(stack.layers), last((int)layers.size() - 1), zeros(stack.widest), sum(stack.widest),
          x(round.rows), marks(round.rows), lists((int)round.rows, std::max(stack.widest, layers[0].in)) {
        for (const Layer& layer : layers) {
            for (auto* matrices : {&activations, &slopes, &chains, &moved}) matrices->emplace_back(round.rows, layer.columns);
            turned.emplace_back(&layer == &layers[0] ? 0 : (long)layer.out * layers[turned.size() - 1].columns);
        }
    }

    // w ← w − η (∇ℓ_b(w) + μ (w − w^(t))), adding up losses and outer gradients where they are wanted
    void walk(int lane_index, Lane<T>& lane, int step, bool seen) {
        begin(lane_index, step);
        T* w = lane.model.data();
        activate(w);
        const T rate = round.step_sizes[lane_index];
        if (seen && round.sums) {
            differentiate([&](int i) { return outer_coefficient(i); });
            descend(w, slopes);
            add(slopes, lane.sums.data());
        }
        differentiate([&](int i) { return -rate * means[i]; }, seen ? &lane : nullptr);
        if (rate == 0) return;
        descend(w, slopes);
        if (round.mu) {
            const T pull = rate * (T)round.mu;
            for (long i = 0; i < stack.size; i++) w[i] += pull * (lane.anchor[i] - w[i]);
        }
        add(slopes, w);
    }

    // Of every row the predicted class, the first where logits are alike, and the cross-entropy
    void predict(int lane_index, const T* w, int step) {
        begin(lane_index, step);
        activate(w);
        const long first = batch - round.batches;
        const int classes = layers[last].out;
        for (int i = 0; i < rows; i++) {
            const T* z = activations[last].row(i);
            T* shares = slopes[last].row(i);
            round.predicted[first + i] = std::max_element(z, z + classes) - z;
            round.row_losses[first + i] = softmax(z, classes, layers[last].columns, round.labels[batch[i]], shares);
        }
    }

    // A step of the walk, keeping what the way back needs of it: activations, and the model but for its first layer.
    void keep(int lane_index, Lane<T>& lane, int step) {
        T* kept = lane.tape.data() + step * kept_numbers(round, stack);
        kept = std::copy(lane.model.begin() + stack.first_size, lane.model.end(), kept);
        walk(lane_index, lane, step, false);
        for (auto& activation : activations) kept = std::copy(activation.values.begin(), activation.values.end(), kept);
    }

    static long kept_numbers(const Round<T>& round, const Stack<T>& stack) {
        long numbers = stack.size - stack.first_size;
        for (const Layer& layer : stack.layers) numbers += round.rows * layer.columns;
        return numbers;
    }

    // p ← p − η (H_b(w) + μ I) p + ∇ℓ^out_b(w)
    void walk_back(int lane_index, Lane<T>& lane, int step) {
        begin(lane_index, step);
        const T* kept = lane.tape.data() + step * kept_numbers(round, stack);
        const T* upper = kept;
        const auto weight = [&](int l) { return upper + layers[l].weight - stack.first_size; };
        kept += stack.size - stack.first_size;
        for (auto& activation : activations) {
            std::copy(kept, kept + activation.values.size(), activation.values.begin());
            kept += activation.values.size();
        }
        T* p = lane.adjoint.data();
        for (int l = 0; l <= last; l++) {
            apply(l, p, moved[l]);
            if (l) multiply(left(moved, l - 1), lists, weight(l), layers[l].columns, moved[l].data(),
                            layers[l].columns, moved[l].data());
            if (l < last) mask(moved[l], activations[l]);
        }
        const T rate = round.step_sizes[lane_index];
        turn_logits(rate);
        for (int l = last; l > 0; l--) {
            const int below = layers[l - 1].columns;
            turn(p + layers[l].weight, l);
            multiply(left(slopes, l), lists, turned[l].data(), below, zeros.data(), 0, chains[l - 1].data());
            turn(weight(l), l);
            multiply(left(chains, l), lists, turned[l].data(), below, chains[l - 1].data(), below, chains[l - 1].data());
            multiply(left(slopes, l), lists, turned[l].data(), below, zeros.data(), 0, slopes[l - 1].data());
            mask(chains[l - 1], activations[l - 1]);
            mask(slopes[l - 1], activations[l - 1]);
        }
        if (round.mu) {
            const T pull = rate * (T)round.mu;
            for (long i = 0; i < stack.size; i++) {
                lane.gain[i] += pull * p[i];
                p[i] -= pull * p[i];
            }
        }
        add(chains, p);
        for (int l = 1; l <= last; l++)
            add_transposed(left(moved, l - 1), lists, slopes[l].data(), layers[l].columns, p + layers[l].weight);
    }

   private:
    void begin(int lane_index, int step) {
        index = lane_index;
        const long minibatch = (long)step * round.lanes + index;
        batch = round.batches + minibatch * round.rows;
        means = round.means + minibatch * round.rows;
        rows = round.counts[minibatch];
        const long words = (layers[0].in + 63) / 64;
        for (int i = 0; i < rows; i++) {
            x[i] = round.x + (long)batch[i] * layers[0].in;
            if (round.marks) marks[i] = round.marks + batch[i] * words;
        }
    }

    // Outputs of layer l as a left factor.
    Left<T> left(const std::vector<Matrix<T>>& outputs, int l) const {
        return {outputs[l].rows.data(), nullptr, rows, layers[l].out};
    }
    Left<T> input(int l) const {
        if (l) return left(activations, l - 1);
        return {x.data(), round.marks ? marks.data() : nullptr, rows, layers[0].in};
    }

    // to = a_{l−1} W_lᵀ + b_l
    void apply(int l, const T* model, Matrix<T>& to) {
        const Layer& layer = layers[l];
        const T* bias = model + layer.bias;
        if (l || !round.background) {
            multiply(input(l), lists, model + layer.weight, layer.columns, bias, 0, to.data());
            return;
        }
        const T *shift = model + stack.shift(), *reached = model + stack.reached();
        for (int i = 0; i < rows; i++) {
            const T overlap = round.overlaps[batch[i]];
            T* row = to.row(i);
            for (int c = 0; c < layer.columns; c++) row[c] = bias[c] + reached[c] + overlap * shift[c];
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
    void add(std::vector<Matrix<T>>& deltas, T* into) {
        for (int l = 0; l <= last; l++) {
            const Layer& layer = layers[l];
            add_transposed(input(l), lists, deltas[l].data(), layer.columns, into + layer.weight);
            add_rows(deltas[l], [](int) { return T(1); }, into + layer.bias);
        }
        if (!round.background) return;
        add_rows(deltas[0], [](int) { return T(1); }, into + stack.shift());
        const auto reach = [&](int i) { return round.overlaps[batch[i]] + stack.background_square; };
        add_rows(deltas[0], reach, into + stack.reached());
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

    // δ_L = factor (softmax − onehot); the losses are added up in a lane, where one is given.
    template <class Factor> void differentiate(Factor factor, Lane<T>* seen = nullptr) {
        for (int i = 0; i < rows; i++) {
            const T* z = activations[last].row(i);
            T* slope = slopes[last].row(i);
            const int64_t label = round.labels[batch[i]];
            const T loss = softmax(z, layers[last].out, layers[last].columns, label, slope);
            slope[label] -= 1;
            const T by = factor(i);
            for (int c = 0; c < layers[last].out; c++) slope[c] *= by;
            if (seen) {
                seen->loss += means[i] * loss;
                if (round.along) seen->outer_loss += outer_coefficient(i) * loss;
            }
        }
    }

    // chains = ε − u (diag(s) − s sᵀ) ż,   slopes = −u (s − onehot)
    void turn_logits(T rate) {
        for (int i = 0; i < rows; i++) {
            const T* change = moved[last].row(i);
            T *slope = slopes[last].row(i), *chain = chains[last].row(i);
            const int64_t label = round.labels[batch[i]];
            softmax(activations[last].row(i), layers[last].out, layers[last].columns, label, slope);
            const T curvature = rate * means[i], outer = round.along ? outer_coefficient(i) : 0;
            T along = 0;
            for (int c = 0; c < layers[last].out; c++) along += slope[c] * change[c];
            for (int c = 0; c < layers[last].out; c++) {
                const T error = slope[c] - (c == label);
                chain[c] = outer * error - curvature * slope[c] * (change[c] - along);
                slope[c] = -curvature * error;
            }
        }
    }

    T outer_coefficient(int i) const {
        const T weight = means[i] * round.factors[index];
        return round.class_weights ? weight * round.class_weights[round.labels[batch[i]]] : weight;
    }

    // δ_{l−1} = (δ_l W_l) ⊙ [a_{l−1} > 0], down from the logits
    void descend(const T* w, std::vector<Matrix<T>>& deltas) {
        for (int l = last; l > 0; l--) {
            turn(w + layers[l].weight, l);
            multiply(left(deltas, l), lists, turned[l].data(), layers[l - 1].columns, zeros.data(), 0, deltas[l - 1].data());
            mask(deltas[l - 1], activations[l - 1]);
        }
    }

    // W_l as the right factor of δ_l W_l
    void turn(const T* weight, int l) {
        const Layer& layer = layers[l];
        const int below = layers[l - 1].columns;
        for (int unit = 0; unit < layer.out; unit++) {
            const Place from = place<T>(unit, layer.in, layer.columns);
            const T* own = weight + from.first;
            for (int j = 0; j < layer.in;) {
                const Place to = place<T>(j, layer.out, below);
                T* row = turned[l].data() + to.first + (long)unit * to.stride;
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
