// What the custom calls for CPUs share: registers of floats, and XLA's threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a register
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kWidth * sizeof(float))));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof(v)); }

inline Vec all(float x) { return x - Vec{}; }

// a * b + sum, rounded once where the processor can. GCC writes `a * b + sum` so for some numbers of rows and not for others (for
// AMD's processors it breaks up long chains), which then differ in the last bit.
inline float multiply_add(float a, float b, float sum) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, sum);
#else
  return a * b + sum;
#endif
}

inline Vec multiply_add(Vec a, Vec b, Vec sum) {
#if defined(__FMA__) && defined(__AVX512F__)
  return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif defined(__FMA__)
  return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(sum)));
#elif defined(__aarch64__)
  return Vec(vfmaq_f32(float32x4_t(sum), float32x4_t(a), float32x4_t(b)));
#else
  return a * b + sum;
#endif
}

// c[Rows, N registers] (+)= a[Rows, depth] * b[depth, N registers]
template <int Rows, int N, bool kAdd>
inline void micro(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int depth) {
  Vec sum[Rows][N];
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = kAdd ? load(c + r * ldc + n * kWidth) : Vec{};
  for (int k = 0; k < depth; ++k) {
    Vec line[N];
    for (int n = 0; n < N; ++n) line[n] = load(b + k * ldb + n * kWidth);
    for (int r = 0; r < Rows; ++r) {
      Vec x = all(a[r * lda + k]);
      for (int n = 0; n < N; ++n) sum[r][n] = multiply_add(x, line[n], sum[r][n]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * kWidth, sum[r][n]);
}

// Computes items 0 to count - 1 with this thread and up to `helpers` of XLA's, each taking the next.
template <typename Compute>
void share(xla::ffi::ThreadPool& threads, int64_t count, int64_t helpers, Compute compute) {
  // Outlives the call: a thread that comes late finds no item left.
  struct Work {
    Compute compute;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};

    void run() {
      for (int64_t i; (i = next.fetch_add(1)) < count;) {
        compute(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  std::shared_ptr<Work> work(new Work{std::move(compute), count});
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([work] { work->run(); });
  work->run();
  while (work->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace jaxserve
