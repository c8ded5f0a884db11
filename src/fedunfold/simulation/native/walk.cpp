// The walk of a round on a CPU, for stacks of linear layers; loaded by `library.py`.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <queue>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#define INLINE inline __attribute__((always_inline))

#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || defined(_WIN32)
#error "written and measured for GCC on x86-64 and a 64-bit long; elsewhere torch makes the walk"
#endif
#pragma GCC target("avx2,fma")

namespace {
constexpr int BYTES = 32;  // of a vector
#include "products.hpp"
#include "softmax.hpp"
#include "stack.hpp"
#include "step.hpp"
#include "walk.hpp"

template <class T> int run(void (*walk)(const Round<T>&), const Round<T>* round) {
    try {
        walk(*round);
        return 0;
    } catch (...) {  // memory that is not there; nothing else is thrown
        return 1;
    }
}
}  // namespace

extern "C" {
int64_t round_bytes() { return sizeof(Round<float>); }
int forward_float(const Round<float>* round) { return run(forward<float>, round); }
int forward_double(const Round<double>* round) { return run(forward<double>, round); }
int backward_float(const Round<float>* round) { return run(backward<float>, round); }
int backward_double(const Round<double>* round) { return run(backward<double>, round); }
int predict_float(const Round<float>* round) { return run(predict<float>, round); }
int predict_double(const Round<double>* round) { return run(predict<double>, round); }
}
