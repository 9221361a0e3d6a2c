// Shared by linear's native kernels: int8 codes in the order in which dot products read them.
#pragma once

#include "pallas_kernels/native.h"

namespace zccp {

constexpr int64_t kColumns = 64;  // columns of a block of codes: four vectors of sixteen sums
constexpr int64_t kAhead = 8;     // rows of k that are fetched ahead: they lie a page or more apart

// Four neighbours along k make a number: unsigned ones of the columns, signed ones of the rows.
struct Int8Ops {
  using Number = uint32_t;
  using Sum = __m512i;
  using Vector = __m512i;
  static constexpr int64_t kPair = 4, kNumbers = 16;

  [[gnu::always_inline]] static Sum multiply_add(Sum sum, Vector columns, Vector row) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(columns), "v"(row));  // in place, see TileRow
    return sum;
  }
  static Vector broadcast(Number x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
};

// The largest magnitude of n numbers, at least 1e-30; NaN if one of them is NaN, which rounding would hide.
inline float largest(const float* x, int64_t n) {
  __m512 most = _mm512_set1_ps(1e-30f);
  __mmask16 unordered = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps(n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1), x + i);
    unordered |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
  }
  return unordered ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(most);
}

// Rows i, .., i + kCount - 1 of 64 columns of codes [k, n] that begin at `codes`, of which `width` exist; what does not exist
// reads as zero, from `edge`.
template <int kCount>
inline void rows_of_codes(const int8_t* codes, int64_t i, int64_t k, int64_t n, int64_t width, int8_t (*edge)[kColumns],
                          const int8_t** rows) {
  for (int64_t j = 0; j < kCount; ++j) {
    rows[j] = codes + (i + j) * n;
    __builtin_prefetch(rows[j] + kAhead * n);
    if (width < kColumns || i + j >= k) {  // last columns or rows: read no further than the array
      std::memset(edge[j], 0, kColumns);
      if (i + j < k) std::memcpy(edge[j], rows[j], std::min(kColumns, width));
      rows[j] = edge[j];
    }
  }
}

// Interleaves four rows of 64 codes to four vectors of 16 columns x 4 k, and makes them unsigned by adding 128. Lane 4 g + j of
// vector v belongs to column 16 g + 4 v + j, the order in which unpack leaves them; in_order undoes it.
inline void interleave(const int8_t* const rows[4], __m512i out[4]) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm512_xor_si512(_mm512_loadu_si512(rows[i]), flip);
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  out[0] = _mm512_unpacklo_epi16(a, c);
  out[1] = _mm512_unpackhi_epi16(a, c);
  out[2] = _mm512_unpacklo_epi16(b, d);
  out[3] = _mm512_unpackhi_epi16(b, d);
}

// Four vectors from interleave's order to columns 0..63: a transposition of 4 x 4 groups of four lanes.
inline void in_order(__m512i v[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[2] = _mm512_shuffle_i32x4(a, c, 0xdd);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

}  // namespace zccp
