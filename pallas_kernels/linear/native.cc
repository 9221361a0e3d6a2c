// linear over few rows: y[r, n] = (x @ codes)[r, n] * scale[n], with x as two int8 planes.
//
// Bound by reading the codes once, k * n bytes a call. Sixty-four columns are taken at a time; four rows of k of
// them are interleaved so that one dpbusd multiplies four k of sixteen columns, with the activations as its signed operand,
// broadcast from memory. The codes must be the unsigned operand: 128 is added to them and 128 * sum(x) taken off the sums.

#include "pallas_kernels/linear/codes.h"

namespace zccp {
namespace {

constexpr int64_t kBlocks = 8;    // most blocks that are read together
constexpr int kRows = 6;          // most rows of planes at a time: 24 of the 32 vector registers hold sums
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
    const float most = largest(row, k), inverse = 127.0f / most;
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
    p.steps[r] = most / 127.0f;
  }
  return p;
}

// Up to kBlocks blocks of 64 columns, each interleaved to [padded_k / 4, 256] bytes. Several blocks at a time make longer
// reads: rows lie a page or more apart, where the hardware does not foresee them.
void pack(const Planes& p, const int8_t* codes, int64_t n, int64_t width, uint32_t* packed) {
  alignas(64) int8_t edge[4][kColumns];
  for (int64_t i = 0; i < p.padded_k; i += 4)
    for (int64_t c = 0; c < width; c += kColumns) {
      const int8_t* rows[4];
      __m512i vectors[4];
      rows_of_codes<4>(codes + c, i, p.k, n, width - c, edge, rows);
      interleave(rows, vectors);
      std::memcpy(packed + (c * p.padded_k + i * kColumns) / 4, vectors, sizeof vectors);
    }
}

// Sums of kCount rows of planes over a packed block, to sums[kCount, 64].
template <int kCount>
void multiply(const Planes& p, int64_t first, const uint32_t* packed, int32_t* sums) {
  Tile<Int8Ops, kCount, 4> tile;
  const int8_t* x = p.values.data() + first * p.padded_k;
  for (int64_t i = 0; i < p.padded_k; i += 4)
    tile.multiply_add(packed + i * kColumns / 4, [&](int row) {
      uint32_t four;
      std::memcpy(&four, x + row * p.padded_k + i, 4);
      return Int8Ops::broadcast(four);
    });
  tile.each([&](int row, int v, __m512i sum) { _mm512_storeu_si512(sums + row * kColumns + v * 16, sum); });
  for (int row = 0; row < kCount; ++row) {
    __m512i vectors[4];
    std::memcpy(vectors, sums + row * kColumns, sizeof vectors);
    in_order(vectors);
    std::memcpy(sums + row * kColumns, vectors, sizeof vectors);
  }
}

using Multiply = void (*)(const Planes&, int64_t, const uint32_t*, int32_t*);
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
  static thread_local std::vector<uint32_t> packed;
  static thread_local std::vector<int32_t> sums;
  packed.resize(p.padded_k * kColumns * kBlocks / 4);
  sums.resize(2 * p.rows * kColumns);
  pack(p, codes, n, width, packed.data());
  for (int64_t c = 0; c < width; c += kColumns) {
    for (int64_t r = 0; r < 2 * p.rows; r += kRows) {
      const int64_t count = std::min<int64_t>(kRows, 2 * p.rows - r);
      kMultiply[count](p, r, packed.data() + c * p.padded_k / 4, sums.data() + r * kColumns);
    }
    finish(p, sums.data(), scale + c, std::min(kColumns, width - c), y + c, n);
  }
}

ffi::Error LinearPlanes(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes,
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

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_linear_planes, zccp::LinearPlanes,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
