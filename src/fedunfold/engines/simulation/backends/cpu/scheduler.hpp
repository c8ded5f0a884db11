// Client slots are scheduled in pieces: always the slot with most steps left, in smaller pieces towards the end, so
// that all threads finish together.
template <class T, class Begin, class Advance, class End>
void schedule(const CallArgs<T>& args, const MlpLayout<T>& layout, int passes, Begin begin, Advance advance, End end) {
    std::vector<Slot<T>> slots(args.slots);
    for (long place = 0; place < args.steps * args.slots; place++)
        slots[place % args.slots].steps += passes * (args.counts[place] > 0);
    // Slots that no thread works on, by the steps they have left and then by their number.
    std::priority_queue<std::pair<int, int>> waiting;
    int open = 0;
    for (int k = 0; k < (int)slots.size(); k++) {
        if (slots[k].steps) {
            waiting.emplace(slots[k].steps, -k);
            open++;
        } else {
            begin(k, slots[k]);
            end(k, slots[k]);
        }
    }
    std::mutex lock;
    std::condition_variable freed;
    std::exception_ptr failed;

    const auto work = [&] {
        try {
            SgdStep<T> step(args, layout);
            std::unique_lock<std::mutex> guard(lock);
            while (!failed && open) {
                if (waiting.empty()) {
                    freed.wait(guard);
                    continue;
                }
                const int index = -waiting.top().second;
                waiting.pop();
                guard.unlock();
                Slot<T>& slot = slots[index];
                if (slot.done == 0) begin(index, slot);
                const int until = slot.done + std::max(1, (slot.steps - slot.done) / 4);
                for (; slot.done < until && !*args.stopped; slot.done++) advance(step, index, slot, slot.done);
                const bool ended = slot.done == slot.steps || *args.stopped;
                if (ended) {
                    end(index, slot);
                    slot.free_memory();
                }
                guard.lock();
                if (ended)
                    open--;
                else
                    waiting.emplace(slot.steps - slot.done, -index);
                freed.notify_all();
            }
        } catch (...) {
            const std::lock_guard<std::mutex> guard(lock);
            failed = std::current_exception();
            freed.notify_all();
        }
    };
    std::vector<std::thread> others;
    try {
        for (int t = 1; t < std::min(args.threads, args.slots); t++) others.emplace_back(work);
    } catch (...) {
        // No further thread or no memory for one: those that have started do the work.
    }
    work();
    for (std::thread& other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

// w_k of every slot from w^(t), with losses, and outer gradients where there is a place for them.
template <class T> void forward(const CallArgs<T>& args) {
    const MlpLayout<T> layout(args);
    const auto begin = [&](int k, Slot<T>& slot) {
        slot.model = layout.pack(args.start + k * args.start_stride);
        if (args.mu) slot.anchor = slot.model;
        if (args.sums) slot.sums.assign(layout.size, 0);
    };
    const auto advance = [](SgdStep<T>& step, int k, Slot<T>& slot, int s) { step.train(k, slot, s, true); };
    const auto end = [&](int k, Slot<T>& slot) {
        layout.unpack(slot.model, args.models + k * layout.flat_size, [](T& to, T from) { to = from; });
        if (args.sums) layout.unpack(slot.sums, args.sums + k * layout.flat_size, [](T& to, T from) { to += from; });
        args.losses[k] = (T)slot.loss;
        args.losses[args.slots + k] = (T)slot.outer_loss;
    };
    schedule(args, layout, 1, begin, advance, end);
}

// dL/dw^(t) through every slot, given dL/dw_k: local training again, saving activations, then its backward pass.
template <class T> void backward(const CallArgs<T>& args) {
    const MlpLayout<T> layout(args);
    const auto begin = [&](int k, Slot<T>& slot) {
        slot.model = layout.pack(args.start + k * args.start_stride);
        slot.adjoint = layout.pack(args.models + k * layout.flat_size);
        if (args.mu) slot.anchor = slot.model;
        if (args.mu) slot.anchor_adjoint.assign(layout.size, 0);
        slot.saved.resize(slot.steps / 2 * SgdStep<T>::saved_per_step(args, layout));
    };
    const auto advance = [](SgdStep<T>& step, int k, Slot<T>& slot, int s) {
        if (s < slot.steps / 2)
            step.train_and_save(k, slot, s);
        else
            step.backward(k, slot, slot.steps - 1 - s);
    };
    const auto end = [&](int k, Slot<T>& slot) {
        for (size_t i = 0; i < slot.anchor_adjoint.size(); i++) slot.adjoint[i] += slot.anchor_adjoint[i];
        layout.unpack(slot.adjoint, args.models + k * layout.flat_size, [](T& to, T from) { to = from; });
    };
    schedule(args, layout, 2, begin, advance, end);
}

// Weighted losses of every slot's rows at fixed parameters that all slots share, and their gradients.
template <class T> void evaluate(const CallArgs<T>& args) {
    const MlpLayout<T> layout(args);
    const std::vector<T> model = layout.pack(args.start);
    const auto begin = [&](int, Slot<T>& slot) { slot.sums.assign(layout.size, 0); };
    const auto advance = [&](SgdStep<T>& step, int k, Slot<T>& slot, int s) {
        step.evaluate(k, model.data(), slot, s);
    };
    const auto end = [&](int k, Slot<T>& slot) {
        layout.unpack(slot.sums, args.sums + k * layout.flat_size, [](T& to, T from) { to += from; });
        args.losses[k] = (T)slot.loss;
    };
    schedule(args, layout, 1, begin, advance, end);
}

// Predicted class and loss of every row at fixed parameters that all slots share.
template <class T> void predict(const CallArgs<T>& args) {
    const MlpLayout<T> layout(args);
    const std::vector<T> model = layout.pack(args.start);
    const auto nothing = [](int, Slot<T>&) {};
    const auto advance = [&](SgdStep<T>& step, int k, Slot<T>&, int s) { step.predict(k, model.data(), s); };
    schedule(args, layout, 1, nothing, advance, nothing);
}
