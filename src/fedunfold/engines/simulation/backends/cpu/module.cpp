// Local training of a cohort on a CPU, for stacks of linear layers; loaded by `bindings.py`.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <queue>
#include <thread>
#include <type_traits>
#include <vector>

#define INLINE inline __attribute__((always_inline))

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || defined(_WIN32)
#error "written and measured for GCC on x86-64 and a 64-bit long; elsewhere torch trains"
#endif
#pragma GCC target("avx2,fma")

namespace {
constexpr int BYTES = 32;  // of a vector
#include "vectors.hpp"
#include "permutations.hpp"
#include "softmax.hpp"

// The same sources for either kind of processor, which give the same bits: only zeros that are skipped differ.
namespace avx2 {
#include "gemm.hpp"
#include "mlp.hpp"
#include "sgd_step.hpp"
#include "scheduler.hpp"
}  // namespace avx2

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl")
namespace avx512 {
constexpr int BYTES = 64;
#include "vectors.hpp"
#include "gemm.hpp"
#include "mlp.hpp"
#include "sgd_step.hpp"
#include "scheduler.hpp"
}  // namespace avx512
#pragma GCC pop_options

template <class Work> int run(Work work) {
    try {
        work();
        return 0;
    } catch (...) {  // std::bad_alloc; nothing else is thrown
        return 1;
    }
}
}  // namespace

#define EXPORTED(NAME, FUNCTION, T, TARGET) \
    int NAME##_##TARGET(const TARGET::CallArgs<T>* args) { return run([=] { TARGET::FUNCTION(*args); }); }
#define EXPORTED_FOR(TARGET)                          \
    EXPORTED(forward_float, forward, float, TARGET)   \
    EXPORTED(forward_double, forward, double, TARGET) \
    EXPORTED(backward_float, backward, float, TARGET) \
    EXPORTED(backward_double, backward, double, TARGET) \
    EXPORTED(evaluate_float, evaluate, float, TARGET) \
    EXPORTED(evaluate_double, evaluate, double, TARGET) \
    EXPORTED(predict_float, predict, float, TARGET)   \
    EXPORTED(predict_double, predict, double, TARGET)

extern "C" {
int64_t call_args_bytes() { return sizeof(avx2::CallArgs<float>); }
EXPORTED_FOR(avx2)
EXPORTED_FOR(avx512)
int shuffle_rows(int32_t* rows, const uint64_t* keys, const int64_t* epochs, int64_t count, int64_t slots,
                 int64_t width, int64_t threads) {
    return run([=] { shuffle_epochs(rows, keys, epochs, count, slots, width, threads); });
}
int last_rows(int32_t* ends, const uint64_t* keys, const int64_t* epochs, int64_t count) {
    return run([=] { shuffle_ends(ends, keys, epochs, count); });
}
}
