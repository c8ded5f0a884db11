// Launches of the kernels in `walk.cu`, `pair.cu` and `back.cu`, lane by lane, to be called from Python.

#ifdef WALK  // `forward` or `pair`
extern "C" void emulated_walk(const real* x, const long long* y, const int* rows, const real* means, const int* steps,
                              const real* step_sizes, const real* factors, const real* class_weights, real* result,
                              const real* start, real* losses, real* outer_losses, real* outer_gradients, real* scratch,
                              int lanes, double mu) {
    for (int lane = 0; lane < lanes; ++lane)
        run_cluster(lane, sizeof(Shared), [=] {
            WALK(x, y, rows, means, steps, step_sizes, factors, class_weights, result, start, losses, outer_losses,
                 outer_gradients, scratch, lanes, mu);
        });
}
#else
extern "C" void emulated_backward(const real* x, const long long* y, const int* rows, const real* means,
                                  const int* steps, const real* step_sizes, const real* factors,
                                  const real* class_weights, const real* tape, real* adjoint, int lanes, int outer) {
    for (int lane = 0; lane < lanes; ++lane)
        run_cluster(lane, sizeof(Shared), [=] {
            backward(x, y, rows, means, steps, step_sizes, factors, class_weights, tape, adjoint, lanes, outer);
        });
}
#endif
