// Launches of the kernels in `forward.cu`, `forward_tensor_cores.cu` and `backward.cu`, slot by slot, to be called from
// Python.

#ifdef KERNEL  // `forward` or `forward_tensor_cores`
extern "C" void emulated_forward(const real* x, const long long* y, const int* rows, const real* means,
                                 const int* steps, const real* step_sizes, const real* factors,
                                 const real* class_weights, real* result, const real* start, real* losses,
                                 real* outer_losses, real* outer_gradients, real* scratch, int slots, double mu) {
    for (int slot = 0; slot < slots; ++slot)
        run_cluster(slot, sizeof(Shared), [=] {
            KERNEL(x, y, rows, means, steps, step_sizes, factors, class_weights, result, start, losses, outer_losses,
                   outer_gradients, scratch, slots, mu);
        });
}
#else
extern "C" void emulated_backward(const real* x, const long long* y, const int* rows, const real* means,
                                  const int* steps, const real* step_sizes, const real* factors,
                                  const real* class_weights, const real* saved, real* adjoint, int slots, int outer) {
    for (int slot = 0; slot < slots; ++slot)
        run_cluster(slot, sizeof(Shared), [=] {
            backward(x, y, rows, means, steps, step_sizes, factors, class_weights, saved, adjoint, slots, outer);
        });
}
#endif
