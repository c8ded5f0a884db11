// Launches of the kernels in `walk.cu` and `pair.cu`, lane by lane, to be called from Python.

// WALK is `forward` or `pair`.
extern "C" void emulated_walk(const real* x, const long long* y, const int* rows, const real* means,
                                 const int* steps, const real* step_sizes, const real* factors,
                                 const real* class_weights, real* parameters, const real* start, real* losses,
                                 real* outer_losses, real* outer_gradients, real* scratch, int lanes, int copies,
                                 double mu) {
    for (int lane = 0; lane < lanes; ++lane)
        run_cluster(lane, sizeof(Shared), [=] {
            WALK(x, y, rows, means, steps, step_sizes, factors, class_weights, parameters, start, losses,
                    outer_losses, outer_gradients, scratch, lanes, copies, mu);
        });
}

#if LAYERS == 1  // a pair has three
extern "C" void emulated_backward(const real* x, const long long* y, const int* rows, const real* means,
                                  const int* steps, const real* step_sizes, const real* factors,
                                  const real* class_weights, const real* parameters, real* adjoint, int lanes,
                                  int outer) {
    for (int lane = 0; lane < lanes; ++lane)
        run_cluster(lane, sizeof(SharedBack), [=] {
            backward(x, y, rows, means, steps, step_sizes, factors, class_weights, parameters, adjoint, lanes, outer);
        });
}
#endif
