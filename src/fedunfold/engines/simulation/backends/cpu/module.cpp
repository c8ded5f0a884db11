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
#include "gemm.hpp"
#include "permutations.hpp"
#include "softmax.hpp"
#include "mlp.hpp"
#include "sgd_step.hpp"
#include "scheduler.hpp"

template <class Work> int run(Work work) {
    try {
        work();
        return 0;
    } catch (...) {  // std::bad_alloc; nothing else is thrown
        return 1;
    }
}
}  // namespace

extern "C" {
int64_t call_args_bytes() { return sizeof(CallArgs<float>); }
int forward_float(const CallArgs<float>* args) { return run([=] { forward(*args); }); }
int forward_double(const CallArgs<double>* args) { return run([=] { forward(*args); }); }
int backward_float(const CallArgs<float>* args) { return run([=] { backward(*args); }); }
int backward_double(const CallArgs<double>* args) { return run([=] { backward(*args); }); }
int evaluate_float(const CallArgs<float>* args) { return run([=] { evaluate(*args); }); }
int evaluate_double(const CallArgs<double>* args) { return run([=] { evaluate(*args); }); }
int predict_float(const CallArgs<float>* args) { return run([=] { predict(*args); }); }
int predict_double(const CallArgs<double>* args) { return run([=] { predict(*args); }); }
int shuffle_rows(int32_t* rows, const uint64_t* keys, const int64_t* epochs, int64_t count, int64_t slots,
                 int64_t width, int64_t threads) {
    return run([=] { shuffle_epochs(rows, keys, epochs, count, slots, width, threads); });
}
int last_rows(int32_t* ends, const uint64_t* keys, const int64_t* epochs, int64_t count) {
    return run([=] { shuffle_ends(ends, keys, epochs, count); });
}
}
