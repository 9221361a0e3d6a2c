// linear, int8: y[r, n] = (x @ codes)[r, n] * scale[n] with x as two int8 planes, for few rows.
//
// Bound by reading the codes once: k * n bytes a call. Sixty-four columns are taken at a time; four rows of k of them are
// interleaved so that one dpbusd multiplies four k of sixteen columns, with the activations as its signed operand,
// broadcast from memory. The codes must be the unsigned operand: 128 is added to them and 128 * sum(x) taken off the sums.

#include "pallas_kernels/native.h"

namespace zccp {
namespace {

constexpr int64_t kColumns = 64;  // columns of a block: four vectors of sixteen sums
constexpr int64_t kRows = 6;      // rows of planes at a time: 24 of the 32 vector registers hold sums
constexpr float kPlane = 254.0f;

struct Planes {
  int64_t rows, padded_rows, k, padded_k;
  std::vector<int8_t> values;    // [padded_rows, padded_k], first all high planes, then all low ones
  std::vector<int32_t> offsets;  // 128 * sum over k, per row
  std::vector<float> steps;      // [rows]
};

Planes split(const float* x, int64_t rows, int64_t k) {
  Planes p{rows, (2 * rows + kRows - 1) / kRows * kRows, k, (k + 3) / 4 * 4, {}, {}, {}};
  p.values.assign(p.padded_rows * p.padded_k, 0);
  p.offsets.assign(p.padded_rows, 0);
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

// Interleaves four rows of 64 codes to four vectors of 16 columns x 4 k, and makes them unsigned. The columns of vector v
// are v * 4 + {0..3} of each 16-column group, in the order that unpack leaves them: see column_of.
inline void interleave(const int8_t* rows[4], uint8_t* out) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm512_xor_si512(_mm512_loadu_si512(rows[i]), flip);
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
  const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  _mm512_store_si512(out, _mm512_unpacklo_epi16(a, c));
  _mm512_store_si512(out + 64, _mm512_unpackhi_epi16(a, c));
  _mm512_store_si512(out + 128, _mm512_unpacklo_epi16(b, d));
  _mm512_store_si512(out + 192, _mm512_unpackhi_epi16(b, d));
}

// Column (0..63) that lane `lane` of vector `vector` sums.
inline int64_t column_of(int vector, int lane) { return (lane / 4) * 16 + vector * 4 + lane % 4; }

void one_block(const Planes& p, const int8_t* codes, int64_t n, int64_t width, const float* scale, float* y,
               int64_t y_stride) {
  static thread_local std::vector<uint8_t> scratch;
  scratch.resize(p.padded_k * kColumns + 64);
  uint8_t* packed = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t{63});
  alignas(64) int8_t edge[4][kColumns];
  for (int64_t i = 0; i < p.padded_k; i += 4) {
    const int8_t* rows[4];
    for (int64_t j = 0; j < 4; ++j) {
      rows[j] = codes + (i + j) * n;
      if (width < kColumns || i + j >= p.k) {  // the last columns or rows: read no further than the array
        std::memset(edge[j], 0, kColumns);
        if (i + j < p.k) std::memcpy(edge[j], rows[j], width);
        rows[j] = edge[j];
      }
    }
    interleave(rows, packed + i * kColumns);
  }
  static thread_local std::vector<int32_t> sums_store;
  sums_store.resize(p.padded_rows * kColumns);
  int32_t* sums = sums_store.data();
  for (int64_t r = 0; r < p.padded_rows; r += kRows) {
    __m512i acc[kRows][4];
    for (auto& row : acc)
      for (auto& v : row) v = _mm512_setzero_si512();
    const int8_t* x = p.values.data() + r * p.padded_k;
    for (int64_t i = 0; i < p.padded_k; i += 4) {
      __m512i w[4];
      for (int v = 0; v < 4; ++v) w[v] = _mm512_load_si512(packed + i * kColumns + v * 64);
      for (int64_t m = 0; m < kRows; ++m) {
        int32_t four;
        std::memcpy(&four, x + m * p.padded_k + i, 4);
        const __m512i broadcast = _mm512_set1_epi32(four);
        for (int v = 0; v < 4; ++v) acc[m][v] = _mm512_dpbusd_epi32(acc[m][v], w[v], broadcast);
      }
    }
    for (int64_t m = 0; m < kRows; ++m)
      for (int v = 0; v < 4; ++v) _mm512_storeu_si512(sums + (r + m) * kColumns + v * 16, acc[m][v]);
  }
  for (int64_t r = 0; r < p.rows; ++r) {
    const int32_t* high = sums + r * kColumns;
    const int32_t* low = sums + (p.rows + r) * kColumns;
    for (int v = 0; v < 4; ++v)
      for (int lane = 0; lane < 16; ++lane) {
        const int64_t column = column_of(v, lane);
        if (column >= width) continue;
        const float h = static_cast<float>(high[v * 16 + lane] - p.offsets[r]);
        const float l = static_cast<float>(low[v * 16 + lane] - p.offsets[p.rows + r]);
        y[r * y_stride + column] = (h + l / kPlane) * p.steps[r] * scale[column];
      }
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
  const int64_t blocks = (n + kColumns - 1) / kColumns;
  const int64_t per_item = std::max<int64_t>(1, blocks / (8 * static_cast<int64_t>(pool.num_threads())));
  parallel_for(pool, (blocks + per_item - 1) / per_item, [&](int64_t item) {
    for (int64_t b = item * per_item; b < std::min(blocks, (item + 1) * per_item); ++b) {
      const int64_t first = b * kColumns;
      one_block(planes, matrix + first, n, std::min(kColumns, n - first), scales + first, y->typed_data() + first, n);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_linear_int8, zccp::LinearInt8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
