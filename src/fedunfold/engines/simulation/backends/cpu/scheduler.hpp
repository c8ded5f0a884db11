// Lanes are dealt out in pieces, always of the lane with most left to do, and smaller ones towards the end, so that
// threads end together.
template <class T, class Begin, class Walk, class End>
void deal(const Round<T>& round, const Stack<T>& stack, int passes, Begin begin, Walk walk, End end) {
    std::vector<Lane<T>> lanes(round.lanes);
    for (long place = 0; place < round.steps * round.lanes; place++)
        lanes[place % round.lanes].steps += passes * (round.counts[place] > 0);
    // The lanes that nobody is at, by the steps they have left and then by their number.
    std::priority_queue<std::pair<int, int>> waiting;
    int open = 0;
    for (int l = 0; l < (int)lanes.size(); l++) {
        if (lanes[l].steps) {
            waiting.emplace(lanes[l].steps, -l);
            open++;
        } else {
            begin(l, lanes[l]);
            end(l, lanes[l]);
        }
    }
    std::mutex lock;
    std::condition_variable freed;
    std::exception_ptr failed;

    const auto work = [&] {
        try {
            Step<T> step(round, stack);
            std::unique_lock<std::mutex> held(lock);
            while (!failed && open) {
                if (waiting.empty()) {
                    freed.wait(held);
                    continue;
                }
                const int index = -waiting.top().second;
                waiting.pop();
                held.unlock();
                Lane<T>& lane = lanes[index];
                if (lane.done == 0) begin(index, lane);
                const int until = lane.done + std::max(1, (lane.steps - lane.done) / 4);
                for (; lane.done < until && !*round.stopped; lane.done++) walk(step, index, lane, lane.done);
                const bool ended = lane.done == lane.steps || *round.stopped;
                if (ended) {
                    end(index, lane);
                    lane.forget();
                }
                held.lock();
                if (ended)
                    open--;
                else
                    waiting.emplace(lane.steps - lane.done, -index);
                freed.notify_all();
            }
        } catch (...) {
            const std::lock_guard<std::mutex> held(lock);
            failed = std::current_exception();
            freed.notify_all();
        }
    };
    std::vector<std::thread> others;
    try {
        for (int t = 1; t < std::min(round.threads, round.lanes); t++) others.emplace_back(work);
    } catch (...) {
        // No more threads to be had, or no memory for them: those there are do it.
    }
    work();
    for (std::thread& other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

// w_k of every lane from w^(t), with losses, and outer gradients where they are wanted.
template <class T> void forward(const Round<T>& round) {
    const Stack<T> stack(round);
    const auto begin = [&](int l, Lane<T>& lane) {
        lane.model = stack.held(round.start + l * round.start_stride);
        if (round.mu) lane.anchor = lane.model;
        if (round.sums) lane.sums.assign(stack.size, 0);
    };
    const auto walk = [](Step<T>& step, int l, Lane<T>& lane, int s) { step.walk(l, lane, s, true); };
    const auto end = [&](int l, Lane<T>& lane) {
        stack.release(lane.model, round.models + l * stack.flat_size, [](T& to, T from) { to = from; });
        if (round.sums) stack.release(lane.sums, round.sums + l * stack.flat_size, [](T& to, T from) { to += from; });
        round.losses[l] = (T)lane.loss;
        round.losses[round.lanes + l] = (T)lane.outer_loss;
    };
    deal(round, stack, 1, begin, walk, end);
}

// dL/dw^(t) through every lane, given dL/dw_k: the walk again, keeping what is needed, and then back.
template <class T> void backward(const Round<T>& round) {
    const Stack<T> stack(round);
    const auto begin = [&](int l, Lane<T>& lane) {
        lane.model = stack.held(round.start + l * round.start_stride);
        lane.adjoint = stack.held(round.models + l * stack.flat_size);
        if (round.mu) lane.anchor = lane.model;
        if (round.mu) lane.gain.assign(stack.size, 0);
        lane.tape.resize(lane.steps / 2 * Step<T>::kept_numbers(round, stack));
    };
    const auto walk = [](Step<T>& step, int l, Lane<T>& lane, int s) {
        if (s < lane.steps / 2)
            step.keep(l, lane, s);
        else
            step.walk_back(l, lane, lane.steps - 1 - s);
    };
    const auto end = [&](int l, Lane<T>& lane) {
        for (size_t i = 0; i < lane.gain.size(); i++) lane.adjoint[i] += lane.gain[i];
        stack.release(lane.adjoint, round.models + l * stack.flat_size, [](T& to, T from) { to = from; });
    };
    deal(round, stack, 2, begin, walk, end);
}

// What one model that does not move, and that all lanes share, makes of every row.
template <class T> void predict(const Round<T>& round) {
    const Stack<T> stack(round);
    const std::vector<T> model = stack.held(round.start);
    const auto nothing = [](int, Lane<T>&) {};
    const auto walk = [&](Step<T>& step, int l, Lane<T>&, int s) { step.predict(l, model.data(), s); };
    deal(round, stack, 1, nothing, walk, nothing);
}
