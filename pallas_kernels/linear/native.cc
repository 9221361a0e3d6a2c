// linear, int8: y[r, n] = (x @ codes)[r, n] * scale[n], with x as two int8 planes (few rows) or in bf16 (many rows).
//
// Planes: bound by reading the codes once, k * n bytes a call. Sixty-four columns are taken at a time; four rows of k of
// them are interleaved so that one dpbusd multiplies four k of sixteen columns, with the activations as its signed operand,
// broadcast from memory. The codes must be the unsigned operand: 128 is added to them and 128 * sum(x) taken off the sums.

#include "pallas_kernels/native.h"

namespace zccp {
namespace {

constexpr int64_t kColumns = 64;  // columns of a block: four vectors of sixteen sums
constexpr int64_t kBlocks = 8;    // most blocks that are read together
constexpr int kRows = 6;          // most rows of planes at a time: 24 of the 32 vector registers hold sums
constexpr int64_t kAhead = 8;     // rows of k that are fetched ahead
constexpr float kPlane = 254.0f;

struct Planes {
  int64_t rows, k, padded_k;
  std::vector<int8_t> values;    // [2 * rows, padded_k], first all high planes, then all low ones
  std::vector<int32_t> offsets;  // 128 * sum over k, per row of planes
  std::vector<float> steps;      // [rows]
};

Planes split(const float* x, int64_t rows, int64_t k) {
  Planes p{rows, k, (k + 3) / 4 * 4, {}, {}, {}};
  p.values.assign(2 * rows * p.padded_k, 0);
  p.offsets.resize(2 * rows);
  p.steps.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x + r * k;
    float largest = 1e-30f;
    for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::fabs(row[i]));
    const float inverse = 127.0f / largest;
    int8_t* high = p.values.data() + r * p.padded_k;
    int8_t* low = p.values.data() + (rows + r) * p.padded_k;
    int32_t high_sum = 0, low_sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      const float scaled = row[i] * inverse;
      const float rounded = std::nearbyint(scaled);
      high[i] = static_cast<int8_t>(rounded);
      low[i] = static_cast<int8_t>(std::nearbyint((scaled - rounded) * kPlane));
      high_sum += high[i];
      low_sum += low[i];
    }
    p.offsets[r] = 128 * high_sum;
    p.offsets[rows + r] = 128 * low_sum;
    p.steps[r] = largest / 127.0f;
  }
  return p;
}

// Interleaves four rows of 64 codes to four vectors of 16 columns x 4 k, and makes them unsigned. Lane 4 g + j of vector v
// belongs to column 16 g + 4 v + j, the order in which unpack leaves them; in_order undoes it.
inline void interleave(const int8_t* const rows[4], uint8_t* out) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm512_xor_si512(_mm512_loadu_si512(rows[i]), flip);
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi16(a, c));
  _mm512_storeu_si512(out + 64, _mm512_unpackhi_epi16(a, c));
  _mm512_storeu_si512(out + 128, _mm512_unpacklo_epi16(b, d));
  _mm512_storeu_si512(out + 192, _mm512_unpackhi_epi16(b, d));
}

// 64 sums from interleave's order to columns 0..63: a transposition of 4 x 4 groups of four lanes.
inline void in_order(int32_t* sums) {
  __m512i v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(sums + 16 * i);
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  _mm512_storeu_si512(sums, _mm512_shuffle_i32x4(a, c, 0x88));
  _mm512_storeu_si512(sums + 16, _mm512_shuffle_i32x4(b, d, 0x88));
  _mm512_storeu_si512(sums + 32, _mm512_shuffle_i32x4(a, c, 0xdd));
  _mm512_storeu_si512(sums + 48, _mm512_shuffle_i32x4(b, d, 0xdd));
}

struct Int8Ops {
  using Number = uint8_t;
  using Sum = __m512i;
  using Vector = __m512i;
  static constexpr int64_t kNumbers = 64;

  [[gnu::always_inline]] static Sum multiply_add(Sum sum, Vector columns, Vector row) {
    return _mm512_dpbusd_epi32(sum, columns, row);
  }
};

// Up to kBlocks blocks of 64 columns, each interleaved to [padded_k / 4, 256] bytes. Several blocks at a time make longer
// reads: rows lie a page or more apart, where the hardware does not foresee them.
void pack(const Planes& p, const int8_t* codes, int64_t n, int64_t width, uint8_t* packed) {
  alignas(64) int8_t edge[4][kColumns];
  for (int64_t i = 0; i < p.padded_k; i += 4)
    for (int64_t c = 0; c < width; c += kColumns) {
      const int8_t* rows[4];
      for (int64_t j = 0; j < 4; ++j) {
        rows[j] = codes + (i + j) * n + c;
        __builtin_prefetch(rows[j] + kAhead * n);
        if (width - c < kColumns || i + j >= p.k) {  // last columns or rows: read no further than the array
          std::memset(edge[j], 0, kColumns);
          if (i + j < p.k) std::memcpy(edge[j], rows[j], std::min(kColumns, width - c));
          rows[j] = edge[j];
        }
      }
      interleave(rows, packed + c * p.padded_k + i * kColumns);
    }
}

// Sums of kCount rows of planes over a packed block, to sums[kCount, 64].
template <int kCount>
void multiply(const Planes& p, int64_t first, const uint8_t* packed, int32_t* sums) {
  Tile<Int8Ops, kCount, 4> tile;
  const int8_t* x = p.values.data() + first * p.padded_k;
  for (int64_t i = 0; i < p.padded_k; i += 4)
    tile.multiply_add(packed + i * kColumns, [&](int row) {
      int32_t four;
      std::memcpy(&four, x + row * p.padded_k + i, 4);
      return _mm512_set1_epi32(four);
    });
  tile.each([&](int row, int v, __m512i sum) { _mm512_storeu_si512(sums + row * kColumns + v * 16, sum); });
  for (int row = 0; row < kCount; ++row) in_order(sums + row * kColumns);
}

using Multiply = void (*)(const Planes&, int64_t, const uint8_t*, int32_t*);
constexpr Multiply kMultiply[kRows + 1] = {nullptr,     multiply<1>, multiply<2>, multiply<3>,
                                           multiply<4>, multiply<5>, multiply<6>};

// Sums of a packed block to results: both planes together, times the row's step and the column's scale.
void finish(const Planes& p, const int32_t* sums, const float* scale, int64_t width, float* y, int64_t n) {
  alignas(64) float scales[kColumns] = {}, results[kColumns];
  std::memcpy(scales, scale, width * sizeof(float));
  for (int64_t r = 0; r < p.rows; ++r) {
    const int32_t* high = sums + r * kColumns;
    const int32_t* low = sums + (p.rows + r) * kColumns;
    const int32_t high_offset = p.offsets[r], low_offset = p.offsets[p.rows + r];
    const float step = p.steps[r];
    for (int64_t c = 0; c < kColumns; ++c) {
      const float whole = static_cast<float>(high[c] - high_offset);
      results[c] = (whole + static_cast<float>(low[c] - low_offset) * (1.0f / kPlane)) * step * scales[c];
    }
    std::memcpy(y + r * n, results, width * sizeof(float));
  }
}

// y[rows, width] for up to kBlocks blocks of columns.
void some_columns(const Planes& p, const int8_t* codes, int64_t n, int64_t width, const float* scale, float* y) {
  static thread_local std::vector<uint8_t> packed;
  static thread_local std::vector<int32_t> sums;
  packed.resize(p.padded_k * kColumns * kBlocks);
  sums.resize(2 * p.rows * kColumns);
  pack(p, codes, n, width, packed.data());
  for (int64_t c = 0; c < width; c += kColumns) {
    for (int64_t r = 0; r < 2 * p.rows; r += kRows) {
      const int64_t count = std::min<int64_t>(kRows, 2 * p.rows - r);
      kMultiply[count](p, r, packed.data() + c * p.padded_k, sums.data() + r * kColumns);
    }
    finish(p, sums.data(), scale + c, std::min(kColumns, width - c), y + c, n);
  }
}

ffi::Error LinearInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes,
                      ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = codes.dimensions();  // layers, k, n
  const int64_t rows = x.dimensions()[0], k = shape[1], n = shape[2], at = layer.typed_data()[0];
  if (at < 0 || at >= shape[0]) return ffi::Error::InvalidArgument("linear: layer is outside the stack");
  const Planes planes = split(x.typed_data(), rows, k);
  const int8_t* matrix = codes.typed_data() + at * k * n;
  const float* scales = scale.typed_data() + at * n;
  const int64_t blocks = (n + kColumns - 1) / kColumns, threads = pool.num_threads();
  const int64_t columns = kColumns * std::min(kBlocks, (blocks + threads - 1) / threads);
  parallel_for(pool, (n + columns - 1) / columns, [&](int64_t item) {
    const int64_t first = item * columns;
    some_columns(planes, matrix + first, n, std::min(columns, n - first), scales + first, y->typed_data() + first);
  });
  return ffi::Error::Success();
}

#ifdef __AVX512BF16__
// bf16. Bound by the products: 2 * rows * k * n operations. A block of 64 columns is widened to bf16 pairs along k, which
// stay in the second-level cache while rows pass, six at a time.
constexpr int64_t kStretch = 256;  // rows of a work item

// x as pairs along k, [rows up to a multiple of kRows, padded_k / 2].
std::vector<uint32_t> pack_pairs(const float* x, int64_t rows, int64_t k, int64_t pairs) {
  const int64_t padded = (rows + kRows - 1) / kRows * kRows, whole = k / 16 * 16;
  std::vector<uint32_t> packed(padded * pairs, 0);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float tail[16] = {};
    std::memcpy(tail, x + r * k + whole, (k - whole) * sizeof(float));
    Bf16Ops::pack_row(x + r * k, whole, 1.0f, packed.data() + r * pairs);
    if (whole < k) Bf16Ops::pack_row(tail, 16, 1.0f, packed.data() + r * pairs + whole / 2);
  }
  return packed;
}

// 64 columns of codes (fewer at the edge) to pairs of k, [pairs, 64].
void widen(const int8_t* codes, int64_t k, int64_t n, int64_t width, int64_t pairs, uint32_t* packed) {
  alignas(64) int8_t edge[2][kColumns];
  for (int64_t i = 0; i < pairs; ++i) {
    const int8_t* rows[2];
    for (int64_t j = 0; j < 2; ++j) {
      rows[j] = codes + (2 * i + j) * n;
      __builtin_prefetch(rows[j] + kAhead * n);
      if (width < kColumns || 2 * i + j >= k) {
        std::memset(edge[j], 0, kColumns);
        if (2 * i + j < k) std::memcpy(edge[j], rows[j], width);
        rows[j] = edge[j];
      }
    }
    for (int64_t c = 0; c < kColumns; c += 16) {
      const auto wide = [](const int8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
      };
      alignas(64) float pair[2][16];
      _mm512_store_ps(pair[0], wide(rows[0] + c));
      _mm512_store_ps(pair[1], wide(rows[1] + c));
      const float* const both[2] = {pair[0], pair[1]};
      Bf16Ops::pack_rows(both, 16, packed + i * kColumns + c);
    }
  }
}

ffi::Error LinearBf16(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes,
                      ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = codes.dimensions();  // layers, k, n
  const int64_t rows = x.dimensions()[0], k = shape[1], n = shape[2], at = layer.typed_data()[0];
  if (at < 0 || at >= shape[0]) return ffi::Error::InvalidArgument("linear: layer is outside the stack");
  const int64_t pairs = (k + 15) / 16 * 8, blocks = (n + kColumns - 1) / kColumns;
  const std::vector<uint32_t> packed_x = pack_pairs(x.typed_data(), rows, k, pairs);
  const int8_t* matrix = codes.typed_data() + at * k * n;
  const float* scales = scale.typed_data() + at * n;
  parallel_for(pool, blocks * ((rows + kStretch - 1) / kStretch), [&](int64_t item) {
    static thread_local std::vector<uint32_t> packed;
    packed.resize(pairs * kColumns);
    const int64_t first = item % blocks * kColumns, width = std::min(kColumns, n - first);
    const int64_t begin = item / blocks * kStretch, end = std::min(rows, begin + kStretch);
    widen(matrix + first, k, n, width, pairs, packed.data());
    alignas(64) float factors[kColumns] = {}, results[kRows * kColumns];
    std::memcpy(factors, scales + first, width * sizeof(float));
    for (int64_t r = begin; r < end; r += kRows) {
      Tile<Bf16Ops, kRows, 4> tile;
      const uint32_t* a = packed_x.data() + r * pairs;
      for (int64_t i = 0; i < pairs; ++i)
        tile.multiply_add(packed.data() + i * kColumns, [&](int row) { return Bf16Ops::broadcast(a[row * pairs + i]); });
      tile.each([&](int row, int v, v16 sum) { store(results + row * kColumns + v * 16, sum * load(factors + v * 16)); });
      for (int64_t m = 0; m < std::min<int64_t>(kRows, end - r); ++m)
        std::memcpy(y->typed_data() + (r + m) * n + first, results + m * kColumns, width * sizeof(float));
    }
  });
  return ffi::Error::Success();
}
#else
ffi::Error LinearBf16(ffi::ThreadPool, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::S8>, ffi::Buffer<ffi::F32>,
                      ffi::Buffer<ffi::S32>, ffi::ResultBuffer<ffi::F32>) {
  return ffi::Error::Unimplemented("linear: this library was compiled for a CPU without AVX512-BF16");
}
#endif

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_linear_bf16, zccp::LinearBf16,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_linear_int8, zccp::LinearInt8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
