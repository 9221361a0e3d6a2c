// Pages of the quantised formats as floats, for the native CPU kernels. kv_layout.py has the words; nothing here knows a pool.
//
// Codes become numbers by a table in a register: a shift brings a code to the lowest bits of its lane, and a permutation, which
// looks at four bits, puts that entry of the table there. Scales are in the table. Bits above a code are other codes and never
// cleared: a table of fewer than 16 entries repeats itself.
#pragma once

#include "pallas_kernels/native.h"

namespace zccp {

constexpr int64_t kBlock = 128, kSinks = 16, kRecent = kSinks + kBlock, kQuarter = kBlock / 4;

inline float bf16_low(int32_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float bf16_high(int32_t word) { return bf16_low(static_cast<int32_t>(static_cast<uint32_t>(word) >> 16)); }

// n bf16 numbers, a multiple of 16.
inline void widen(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 16) {
    __m256i bits;
    std::memcpy(&bits, from + i, sizeof bits);
    _mm512_storeu_si512(to + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
}

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

// One int8 vector of d channels.
inline void unpack_int8(const int32_t* words, int64_t d, float scale, float* to) {
  const int64_t quarter = d / 4;
  for (int64_t j = 0; j < quarter; j += 16) {
    const __mmask16 here = first_lanes(quarter - j);
    const __m512i codes = _mm512_maskz_loadu_epi32(here, words + j);
    const auto put = [&](int64_t part, __m512i top) {  // a byte at the top of its word, moved down with its sign
      const v16 x = (v16)_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)) * scale;
      _mm512_mask_storeu_ps(to + part * quarter + j, here, (__m512)x);
    };
    put(0, _mm512_slli_epi32(codes, 24));
    put(1, _mm512_slli_epi32(codes, 16));
    put(2, _mm512_slli_epi32(codes, 8));
    put(3, codes);
  }
}

// n positions of an int8 page from `first` on: keys [n, d], values [n, d].
inline void unpack_int8_page(const int32_t* page, int64_t page_size, int64_t d, int64_t first, int64_t n, float* keys,
                             float* values) {
  const int32_t* const scales = page + page_size * (d / 2);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t* const codes = page + (first + i) * (d / 4);
    unpack_int8(codes, d, bf16_low(scales[first + i]), keys + i * d);
    unpack_int8(codes + page_size * (d / 4), d, bf16_high(scales[first + i]), values + i * d);
  }
}

// A block of bmq4 (kBits 4) or bmq2 (kBits 2); d is a multiple of 16.
template <int kBits>
class BitmaskBlock {
 public:
  static constexpr int64_t kParts = 8 / kBits;

  static int64_t lanes(int64_t d) { return kBits == 4 ? d / 4 : d / 2; }
  static int64_t words(int64_t d) { return d / kParts * 32 + lanes(d) * 8 + 16 * d + d + kBlock / 2 + 8; }

  BitmaskBlock(const int32_t* words, int64_t d)
      : d_(d), low_(words), high_(low_ + d / kParts * 32), values_(high_ + lanes(d) * 8), affine_(values_ + 16 * d),
        value_scale_(affine_ + d), mask_(value_scale_ + kBlock / 2) {
    int below = 0;
    for (int w = 0; w < 8; ++w) {
      below_[w] = below;
      below += __builtin_popcount(static_cast<uint32_t>(mask_[w]));
    }
  }

  // A channel's keys, 16 positions at a time.
  class Channel {
   public:
    Channel(const BitmaskBlock& block, int64_t channel) {
      const int64_t part = block.d_ / kParts;
      low_ = block.low_ + channel % part * 32;
      shift_ = static_cast<unsigned>(channel / part) * 4 * kBits;
      const float scale = bf16_low(block.affine_[channel]), least = bf16_high(block.affine_[channel]);
      const v16 codes = {0, 1, 2, 3, 4 % kMost, 5 % kMost, 6 % kMost, 7 % kMost, 8 % kMost, 9 % kMost, 10 % kMost, 11 % kMost,
                         12 % kMost, 13 % kMost, 14 % kMost, 15 % kMost};
      const v16 upper = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
      low_table_ = codes * scale + least;
      high_table_ = upper * (scale * kMost);
      const uint32_t marks = static_cast<uint32_t>(block.mask_[channel / 32]);
      const uint32_t bit = 1u << channel % 32;
      const int64_t lane = block.below_[channel / 32] + __builtin_popcount(marks & (bit - 1));
      high_ = marks & bit ? block.high_ + lane * 8 : nullptr;
    }

    // Those at positions 16 * w and following.
    v16 keys(int64_t w) const {
      const __m512i word = _mm512_loadu_si512(low_ + w % 2 * 16);
      const __m512i code = _mm512_srl_epi32(word, _mm_cvtsi32_si128(static_cast<int>(shift_ + w / 2 * kBits)));
      const v16 low = (v16)_mm512_permutexvar_ps(code, (__m512)low_table_);
      if (!high_) return low;
      const __m512i shifts = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      const __m512i upper = _mm512_srlv_epi32(_mm512_set1_epi32(high_[w]), shifts);
      return low + (v16)_mm512_permutexvar_ps(upper, (__m512)high_table_);
    }

   private:
    static constexpr int kMost = 1 << kBits;
    const int32_t *low_, *high_;
    unsigned shift_;
    v16 low_table_, high_table_;
  };

  // The keys of one channel at all positions.
  void channel_keys(int64_t channel, float* to) const {
    const Channel of(*this, channel);
    for (int64_t w = 0; w < 8; ++w) store(to + 16 * w, of.keys(w));
  }

  // The keys at positions 32 * g and following: [32, d].
  void quarter_keys(int64_t g, float* to) const {
    for (int64_t i = 0; i < d_; i += 16) {
      v16 lanes[2][16];
      for (int64_t j = 0; j < 16; ++j) {
        const Channel of(*this, i + j);
        lanes[0][j] = of.keys(2 * g);
        lanes[1][j] = of.keys(2 * g + 1);
      }
      for (int64_t half = 0; half < 2; ++half) {
        transpose16(lanes[half]);
        for (int64_t j = 0; j < 16; ++j) store(to + (16 * half + j) * d_ + i, lanes[half][j]);
      }
    }
  }

  // The values at positions 32 * g and following, as they were turned: [32, d]. Those outside of [first, end) are zero.
  void quarter_values(int64_t g, int64_t first, int64_t end, float* to) const {
    const v16 middle = {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f, 0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f};
    const int64_t half = d_ / 2;
    for (int64_t t = 0; t < kQuarter; ++t, to += d_) {
      const int64_t position = kQuarter * g + t;
      if (position < first || position >= end) {
        std::fill(to, to + d_, 0.0f);
        continue;
      }
      const int32_t pair = value_scale_[position % (kBlock / 2)];
      const __m512 table = (__m512)(middle * (position < kBlock / 2 ? bf16_low(pair) : bf16_high(pair)));
      for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 here = first_lanes(half - i);
        const __m512i word = _mm512_maskz_loadu_epi32(here, values_ + t * half + i);
        const auto codes = [&](int64_t n) { return _mm512_srl_epi32(word, _mm_cvtsi32_si128(static_cast<int>(4 * n))); };
        _mm512_mask_storeu_ps(to + i, here, _mm512_permutexvar_ps(codes(g), table));
        _mm512_mask_storeu_ps(to + half + i, here, _mm512_permutexvar_ps(codes(4 + g), table));
      }
    }
  }

 private:
  int64_t d_;
  const int32_t *low_, *high_, *values_, *affine_, *value_scale_, *mask_;
  int64_t below_[8];  // marked channels below each word of the mask
};

// What a slot of one kv head keeps in bf16: keys [kRecent, d], then values.
struct RecentRows {
  const uint16_t* rows;
  int64_t head_dim;

  static int64_t row(int64_t position) { return position < kSinks ? position : kSinks + position % kBlock; }
  const uint16_t* key(int64_t position) const { return rows + row(position) * head_dim; }
  const uint16_t* value(int64_t position) const { return key(position) + kRecent * head_dim; }
};

// to [d] = x [d] times matrix [d, d].
inline void turn(const float* x, const float* matrix, int64_t d, float* to) {
  for (int64_t j = 0; j < d; j += 16) {
    v16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int64_t i = 0; i < d; i += 4) {
      sums[0] += load(matrix + i * d + j) * x[i];
      sums[1] += load(matrix + (i + 1) * d + j) * x[i + 1];
      sums[2] += load(matrix + (i + 2) * d + j) * x[i + 2];
      sums[3] += load(matrix + (i + 3) * d + j) * x[i + 3];
    }
    store(to + j, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

}  // namespace zccp
