// Shared by the native CPU kernels: the FFI headers, a parallel loop on XLA's own thread pool, 16-lane float arithmetic.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace zccp {

namespace ffi = xla::ffi;

using v16 = float __attribute__((vector_size(64)));

constexpr float kLog2E = 1.44269504f;

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
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(kLog2E)), 0);
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

// 2^x for a polynomial 2^r = p[0] + p[1] r + .. on |r| <= 1/2, which sets the error; 0 far below 0. Coefficients: least relative
// error, by iterated weighted least squares.
template <size_t kTerms>
inline v16 exp2_16(v16 x, const float (&p)[kTerms]) {
  const v16 r = (v16)_mm512_reduce_ps((__m512)x, 0);
  v16 sum = splat(p[kTerms - 1]);
  for (size_t i = kTerms - 1; i-- > 0;) sum = sum * r + p[i];
  return (v16)_mm512_scalef_ps((__m512)sum, (__m512)(x - r));
}

// Transposes 16 x 16 floats in place.
inline void transpose16(v16 lanes[16]) {
  __m512 v[16];
  std::memcpy(v, lanes, sizeof v);
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  const auto pairs = [](__m512 a, __m512 b, bool high) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  };
  for (int i = 0; i < 16; i += 4) {  // v[i + c]: element c of each quarter of rows i, .., i + 3
    v[i] = pairs(t[i], t[i + 2], false);
    v[i + 1] = pairs(t[i], t[i + 2], true);
    v[i + 2] = pairs(t[i + 1], t[i + 3], false);
    v[i + 3] = pairs(t[i + 1], t[i + 3], true);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(v[c], v[4 + c], 0x88), b = _mm512_shuffle_f32x4(v[c], v[4 + c], 0xdd);
    const __m512 e = _mm512_shuffle_f32x4(v[8 + c], v[12 + c], 0x88), f = _mm512_shuffle_f32x4(v[8 + c], v[12 + c], 0xdd);
    t[c] = _mm512_shuffle_f32x4(a, e, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(a, e, 0xdd);
    t[4 + c] = _mm512_shuffle_f32x4(b, f, 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(b, f, 0xdd);
  }
  std::memcpy(lanes, t, sizeof t);
}

// A tile of sums, kRows x kVectors, as one member a vector: members stay in registers, which GCC does not manage for arrays
// whose loops it unrolls. The dot-product instructions are written out, because GCC 12 copies sums around their intrinsics.
// Ops gives Sum, Vector, Number, kNumbers of which make a vector, and multiply_add(sum, columns, row).
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
  template <typename Other, typename Body>
  [[gnu::always_inline]] void merge(const Other& other, int row, const Body& body) {
    body(row, sum, other.sum);
    rest.merge(other.rest, row, body);
  }
};
template <typename Ops>
struct TileRow<Ops, 0> {
  [[gnu::always_inline]] void multiply_add(const typename Ops::Number*, typename Ops::Vector) {}
  template <typename Body>
  [[gnu::always_inline]] void each(int, int, const Body&) {}
  template <typename Other, typename Body>
  [[gnu::always_inline]] void merge(const Other&, int, const Body&) {}
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
  // Calls body(row, sum, the other tile's sum) for every sum; body may change the first.
  template <typename Other, typename Body>
  [[gnu::always_inline]] void merge(const Other& other, const Body& body, int first = 0) {
    row.merge(other.row, first, body);
    rest.merge(other.rest, body, first + 1);
  }
};
template <typename Ops, int kVectors>
struct Tile<Ops, 0, kVectors> {
  template <typename Broadcast>
  [[gnu::always_inline]] void multiply_add(const typename Ops::Number*, const Broadcast&, int = 0) {}
  template <typename Body>
  [[gnu::always_inline]] void each(const Body&, int = 0) {}
  template <typename Other, typename Body>
  [[gnu::always_inline]] void merge(const Other&, const Body&, int = 0) {}
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

  // One vector of floats for each of kPair rows.
  static void pack_pair(const v16 rows[kPair], Number* to) { store(to, rows[0]); }

  static v16 exp2(v16 x) {  // to about 1 ulp
    return exp2_16(x, {1.0f, 6.9314720574e-01f, 2.4022646891e-01f, 5.5503287770e-02f, 9.6184889582e-03f, 1.3399931217e-03f,
                       1.5345811717e-04f});
  }
};

#ifdef __AVX512BF16__
struct Bf16Ops {
  using Number = uint32_t;
  using Sum = v16;
  using Vector = __m512i;
  static constexpr int64_t kPair = 2, kNumbers = 16;

  [[gnu::always_inline]] static Sum multiply_add(Sum sum, Vector columns, Vector row) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(columns), "v"(row));  // in place, see TileRow
    return sum;
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
      const v16 pair[2] = {load(rows[0] + i), load(rows[1] + i)};
      pack_pair(pair, to + i);
    }
  }

  static void pack_pair(const v16 rows[kPair], Number* to) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
  }

  static v16 exp2(v16 x) {  // to 7.5e-5, an eighth of a rounding to bf16
    return exp2_16(x, {9.9992807357e-01f, 6.9326098599e-01f, 2.4261112197e-01f, 5.5171666189e-02f});
  }
};
#else
using Bf16Ops = Float32Ops;  // exact instead of fast
#endif

// 16 rows of n floats to [n / kPair, 16], `stride` numbers apart: rows become lanes.
template <typename Ops, typename Number = typename Ops::Number>
void pack_lanes(const float* const rows[16], int64_t n, float factor, Number* to, int64_t stride) {
  for (int64_t i = 0; i < n; i += 16) {
    v16 lanes[16];
    for (int64_t j = 0; j < 16; ++j) lanes[j] = load(rows[j] + i) * factor;
    transpose16(lanes);
    for (int64_t j = 0; j < 16; j += Ops::kPair) Ops::pack_pair(lanes + j, to + (i + j) / Ops::kPair * stride);
  }
}

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
