// The arguments of a call, in the order of `bindings.py`; every field has eight bytes.
template <class T> struct CallArgs {
    int64_t layers, slots, steps, rows, threads, start_stride, outer_on_path;
    double mu;
    const int64_t* sizes;    // [layers + 1]: features, units of every layer
    const T* x;              // [N × features], the data less their background
    const uint64_t* nonzero;  // [N × words of 64 features], a bit for each entry that is not 0; null for dense data
    const T* background;     // [features], c; null where it is 0
    const T* overlaps;       // [N], x_i · c
    const int64_t* labels;   // [N]
    const int32_t* batches;  // [steps × slots × rows], rows of the data
    const int32_t* counts;   // [steps × slots], how many of them are not padding
    const T* means;          // [steps × slots × rows], 1/|b|
    const T* step_sizes;     // [slots]
    const T* factors;        // [slots], of the outer loss
    const T* class_weights;  // [classes]; null where all are 1
    const T* start;          // [slots × d], one slot every `start_stride` numbers
    T* models;               // [slots × d]: w_k in the forward pass; in the backward pass the adjoint, in place
    T* losses;               // [2 × slots], of training and outer; by `evaluate` [slots]
    T* sums;                 // [slots × d], gradients of the outer loss are added to it; null where none are computed
    int64_t* predicted;      // [steps × slots × rows]; this and the next are written by `predict` alone
    T* row_losses;           // [steps × slots × rows]
    const volatile int64_t* stopped;  // not 0 once the call has been interrupted
};

// How a slot stores its model: the weights of every layer transposed, W_lᵀ [in × out], panel by panel, then the biases.
//
// Where rows of the data are x_i + c, with few entries of x_i that are not 0, the first layer is stored as Uᵀ, v and r,
//
//     Wᵀ = Uᵀ + c vᵀ,   r = W c,   so that   W (x_i + c) = U x_i + (x_i · c) v + r,
//
// and a gradient Σ δ_i (x_i + c)ᵀ is added by Uᵀ += Σ x_i δ_iᵀ, v += Σ δ_i and r += Σ (x_i · c + |c|²) δ_i.
template <class T> struct MlpLayout {
    struct Layer {
        int in, out, columns;  // columns: `out`, padded
        long weight, bias;     // where they begin in a packed model
    };
    std::vector<Layer> layers;
    const T* background;
    T background_square = 0;
    long size = 0, first_size = 0, flat_size = 0;
    int widest = 0;

    explicit MlpLayout(const CallArgs<T>& args) : background(args.background) {
        for (int l = 0; l < args.layers; l++) {
            const int in = (int)args.sizes[l], out = (int)args.sizes[l + 1];
            const int columns = (out + PADDING<T> - 1) / PADDING<T> * PADDING<T>;
            layers.push_back({in, out, columns, size, size + (long)in * columns});
            size += (long)(in + 1) * columns;
            flat_size += (long)(in + 1) * out;
            if (l == 0) size += 2 * columns;
            if (l == 0) first_size = size;
            widest = std::max(widest, columns);
        }
        for (int j = 0; background && j < layers[0].in; j++) background_square += background[j] * background[j];
    }

    long background_shift() const { return layers[0].bias + layers[0].columns; }      // v
    long background_output() const { return layers[0].bias + 2 * layers[0].columns; }  // r

    std::vector<T> pack(const T* flat) const {
        std::vector<T> model(size, T(0));
        for (const Layer& layer : layers) {
            for (int unit = 0; unit < layer.out; unit++, flat += layer.in) {
                const Place at = place<T>(unit, layer.in, layer.columns);
                T* to = model.data() + layer.weight + at.first;
                for (int j = 0; j < layer.in; j++) to[(long)j * at.stride] = flat[j];
                if (background && layer.weight == 0)
                    model[background_output() + unit] = std::inner_product(flat, flat + layer.in, background, T(0));
            }
            std::copy(flat, flat + layer.out, model.data() + layer.bias);
            flat += layer.out;
        }
        return model;
    }

    // put(entry of the flat model, entry of the packed one), for all of them
    template <class Put> void unpack(const std::vector<T>& model, T* flat, Put put) const {
        for (const Layer& layer : layers) {
            for (int unit = 0; unit < layer.out; unit++, flat += layer.in) {
                const Place at = place<T>(unit, layer.in, layer.columns);
                const T* from = model.data() + layer.weight + at.first;
                const bool shifted = background && layer.weight == 0;
                const T by = model[background_shift() + unit];
                for (int j = 0; j < layer.in; j++)
                    put(flat[j], from[(long)j * at.stride] + (shifted ? background[j] * by : T(0)));
            }
            for (int unit = 0; unit < layer.out; unit++) put(flat[unit], model[layer.bias + unit]);
            flat += layer.out;
        }
    }
};
