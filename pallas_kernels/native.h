// Shared by the native CPU kernels: the FFI headers, a parallel loop on XLA's own thread pool, 16-lane float arithmetic.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace zccp {

namespace ffi = xla::ffi;

using v16 = float __attribute__((vector_size(64)));

inline v16 load(const float* p) {
  v16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, v16 v) { std::memcpy(p, &v, sizeof v); }
inline v16 splat(float x) { return x - v16{}; }
inline float sum(v16 v) { return _mm512_reduce_add_ps((__m512)v); }

// e^x for x <= 0 to about 2 ulp, 0 below -87: split into 2^n * e^r, a degree-6 polynomial in r. Cephes' coefficients (expf, public domain).
inline v16 exp16(v16 x) {
  const __m512 clamped = _mm512_max_ps((__m512)x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
  const v16 r = (v16)clamped - (v16)n * 0.693359375f + (v16)n * 2.12194440e-4f;
  v16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
  return (v16)_mm512_maskz_scalef_ps(alive, (__m512)p, n);
}

// A tile of sums, kRows x kVectors, as one member a vector: members stay in registers, which GCC does not manage for arrays
// whose loops it unrolls. Ops gives Sum, Vector, Number, kNumbers of which make a vector, and multiply_add(sum, columns, row).
template <typename Ops, int kVectors>
struct TileRow {
  typename Ops::Sum sum = {};
  TileRow<Ops, kVectors - 1> rest = {};

  [[gnu::always_inline]] void multiply_add(const typename Ops::Number* columns, typename Ops::Vector row) {
    typename Ops::Vector vector;
    std::memcpy(&vector, columns, sizeof vector);
    sum = Ops::multiply_add(sum, vector, row);
    rest.multiply_add(columns + Ops::kNumbers, row);
  }
  template <typename Body>
  [[gnu::always_inline]] void each(int row, int vector, const Body& body) {
    body(row, vector, sum);
    rest.each(row, vector + 1, body);
  }
};
template <typename Ops>
struct TileRow<Ops, 0> {
  [[gnu::always_inline]] void multiply_add(const typename Ops::Number*, typename Ops::Vector) {}
  template <typename Body>
  [[gnu::always_inline]] void each(int, int, const Body&) {}
};

template <typename Ops, int kRows, int kVectors>
struct Tile {
  TileRow<Ops, kVectors> row = {};
  Tile<Ops, kRows - 1, kVectors> rest = {};

  // Adds columns[kVectors] times broadcast(0), .., broadcast(kRows - 1) of the first operand.
  template <typename Broadcast>
  [[gnu::always_inline]] void multiply_add(const typename Ops::Number* columns, const Broadcast& broadcast, int first = 0) {
    row.multiply_add(columns, broadcast(first));
    rest.multiply_add(columns, broadcast, first + 1);
  }
  // Calls body(row, vector, sum) for every sum; body may change it.
  template <typename Body>
  [[gnu::always_inline]] void each(const Body& body, int first = 0) {
    row.each(first, 0, body);
    rest.each(body, first + 1);
  }
};
template <typename Ops, int kVectors>
struct Tile<Ops, 0, kVectors> {
  template <typename Broadcast>
  [[gnu::always_inline]] void multiply_add(const typename Ops::Number*, const Broadcast&, int = 0) {}
  template <typename Body>
  [[gnu::always_inline]] void each(const Body&, int = 0) {}
};

// How numbers are held and multiplied: kPair neighbours along the summed dimension make one Number.
struct Float32Ops {
  using Number = float;
  using Sum = v16;
  using Vector = v16;
  static constexpr int64_t kPair = 1, kNumbers = 16;

  [[gnu::always_inline]] static Sum multiply_add(Sum sum, Vector columns, Vector row) { return sum + columns * row; }
  static Vector broadcast(Number x) { return splat(x); }

  static void pack_row(const float* from, int64_t n, float factor, Number* to) {
    for (int64_t i = 0; i < n; i += 16) store(to + i, load(from + i) * factor);
  }

  static void pack_rows(const float* const* rows, int64_t n, Number* to) { std::memcpy(to, rows[0], n * sizeof(float)); }
};

#ifdef __AVX512BF16__
struct Bf16Ops {
  using Number = uint32_t;
  using Sum = v16;
  using Vector = __m512i;
  static constexpr int64_t kPair = 2, kNumbers = 16;

  [[gnu::always_inline]] static Sum multiply_add(Sum sum, Vector columns, Vector row) {
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)columns, (__m512bh)row);
  }
  static Vector broadcast(Number x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }

  // n floats to n / 2 pairs of neighbours.
  static void pack_row(const float* from, int64_t n, float factor, Number* to) {
    for (int64_t i = 0; i < n; i += 16) {
      const __m256bh half = _mm512_cvtneps_pbh((__m512)(load(from + i) * factor));
      std::memcpy(to + i / 2, &half, sizeof half);
    }
  }

  // Two rows of n floats to n pairs, the first row low.
  static void pack_rows(const float* const* rows, int64_t n, Number* to) {
    for (int64_t i = 0; i < n; i += 16) {
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)load(rows[0] + i)));
      const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)load(rows[1] + i)));
      _mm512_storeu_si512(to + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
};
#else
using Bf16Ops = Float32Ops;  // exact instead of fast
#endif

// Runs body(i) for i in [0, items) on the calling thread and on whatever pool threads come to help. The caller takes items
// until none is left and then waits only for those that others have begun, so that it never waits for a busy pool.
template <typename Body>
void parallel_for(ffi::ThreadPool& pool, int64_t items, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, items - 1);
  if (helpers <= 0) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  auto work = [shared, items, &body] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      body(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t h = 0; h < helpers; ++h) pool.Schedule([work] { work(); });
  work();
  while (shared->done.load(std::memory_order_acquire) < items) _mm_pause();
}

}  // namespace zccp
