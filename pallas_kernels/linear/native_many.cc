// linear over many rows: y[r, n] = (x @ codes)[r, n] * scale[n], with x in int8 blocks or in bf16; and gated, where column j of
// the result is gate(y[r, j]) * y[r, n / 2 + j].
//
// Bound by the products, 2 * rows * k * n operations. Both operands are packed in the order in which the inner loop reads
// them: x in tiles of kRows rows, codes in panels of kPanel columns. Blocks: every kBlock neighbours of a row of x have a
// step of their own, so that their sums are int32-exact and meet in float32; the codes are the unsigned operand, as in
// native.cc. bf16: codes are exact in it.

#include "pallas_kernels/linear/codes.h"

namespace zccp {
namespace {

constexpr int64_t kPanel = 32;      // columns of a panel: 2 vectors
constexpr int64_t kStretch = 260;   // rows of a work item, about

// A row of x as numbers along k, to every kRows-th place of its tile.
template <int kRows, typename Number>
void spread(const Number* row, int64_t depth, Number* tile) {
  for (int64_t i = 0; i < depth; ++i) tile[i * kRows] = row[i];
}

struct Totals {  // a tile of sums that nothing is multiplied into
  using Number = float;
  using Sum = v16;
  using Vector = v16;
};

// x as int8 codes with a step for every kBlock neighbours.
template <int64_t kBlock>
struct Blocks {
  static_assert(kBlock % 16 == 0);
  using Ops = Int8Ops;
  using Number = Ops::Number;
  static constexpr int kRows = 7;  // 7 x 2 vectors of sums of a block, and as many of all blocks, fill 28 of the 32 registers
  int64_t k, blocks;
  std::vector<Number> values;    // [tiles, depth, kRows]
  std::vector<float> steps;      // [tiles, blocks, kRows]
  std::vector<int32_t> offsets;  // the same: -128 * the sum of a block's codes

  int64_t depth() const { return blocks * kBlock / Ops::kPair; }

  void reset(int64_t tiles, int64_t inputs) {
    k = inputs;
    blocks = (k + kBlock - 1) / kBlock;
    values.resize(tiles * depth() * kRows);
    steps.resize(tiles * blocks * kRows);
    offsets.resize(tiles * blocks * kRows);
  }

  void pack_row(const float* x, int64_t tile, int64_t row, Number* scratch) {
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float edge[kBlock] = {};
      const float* block = x + b * kBlock;
      if (k - b * kBlock < kBlock) {
        std::memcpy(edge, block, (k - b * kBlock) * sizeof(float));
        block = edge;
      }
      const float most = largest(block, kBlock);
      const __m512 inverse = _mm512_set1_ps(127.0f / most);
      __m512i sums = _mm512_setzero_si512();
      for (int64_t i = 0; i < kBlock; i += 16) {
        const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(block + i), inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(scratch + (b * kBlock + i) / Ops::kPair), _mm512_cvtsepi32_epi8(codes));
        sums = _mm512_add_epi32(sums, codes);
      }
      const int64_t at = (tile * blocks + b) * kRows + row;
      steps[at] = most / 127.0f;
      offsets[at] = -128 * _mm512_reduce_add_epi32(sums);
    }
    spread<kRows>(scratch, depth(), values.data() + tile * depth() * kRows + row);
  }

  // 64 columns of codes to two panels of [depth, kPanel].
  void pack_codes(const int8_t* codes, int64_t n, int64_t width, Number* panels) const {
    alignas(64) int8_t edge[Ops::kPair][kColumns];
    for (int64_t i = 0; i < depth(); ++i) {
      const int8_t* rows[Ops::kPair];
      __m512i vectors[4];
      rows_of_codes<Ops::kPair>(codes, i * Ops::kPair, k, n, width, edge, rows);
      interleave(rows, vectors);
      in_order(vectors);
      for (int64_t v = 0; v < 4; ++v) _mm512_storeu_si512(panels + (v / 2 * depth() + i) * kPanel + v % 2 * 16, vectors[v]);
    }
  }

  // x @ codes of a tile and a panel; `result` takes each vector of sums.
  template <typename Result>
  void multiply(int64_t tile, const Number* panel, const Result& result) const {
    const Number* x = values.data() + tile * depth() * kRows;
    const float* step = steps.data() + tile * blocks * kRows;
    const int32_t* offset = offsets.data() + tile * blocks * kRows;
    Tile<Totals, kRows, kPanel / 16> totals;
    for (int64_t b = 0; b < blocks; ++b, step += kRows, offset += kRows) {
      Tile<Ops, kRows, kPanel / 16> sums;
      sums.each([&](int row, int, __m512i& sum) { sum = _mm512_set1_epi32(offset[row]); });
#pragma GCC unroll 8
      for (int64_t i = 0; i < kBlock / Ops::kPair; ++i, x += kRows, panel += kPanel)
        sums.multiply_add(panel, [&](int row) { return Ops::broadcast(x[row]); });
      totals.merge(sums, [&](int row, v16& total, __m512i sum) { total += (v16)_mm512_cvtepi32_ps(sum) * step[row]; });
    }
    totals.each(result);
  }
};

// x as pairs of bf16 along k, or as single floats on a CPU without products of bf16.
struct Floats {
  using Ops = Bf16Ops;
  using Number = Ops::Number;
  static constexpr int kRows = 10;  // 10 x 2 vectors of sums leave registers for what comes in
  int64_t k, padded_k;
  std::vector<Number> values;  // [tiles, depth, kRows]

  int64_t depth() const { return padded_k / Ops::kPair; }

  void reset(int64_t tiles, int64_t inputs) {
    k = inputs;
    padded_k = (k + 15) / 16 * 16;
    values.resize(tiles * depth() * kRows);
  }

  void pack_row(const float* x, int64_t tile, int64_t row, Number* scratch) {
    alignas(64) float tail[16] = {};
    const int64_t whole = k / 16 * 16;
    std::memcpy(tail, x + whole, (k - whole) * sizeof(float));
    Ops::pack_row(x, whole, 1.0f, scratch);
    if (whole < k) Ops::pack_row(tail, 16, 1.0f, scratch + whole / Ops::kPair);
    spread<kRows>(scratch, depth(), values.data() + tile * depth() * kRows + row);
  }

  void pack_codes(const int8_t* codes, int64_t n, int64_t width, Number* panels) const {
    alignas(64) int8_t edge[Ops::kPair][kColumns];
    const auto wide = [](const int8_t* from) {
      const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow)));
    };
    for (int64_t i = 0; i < depth(); ++i) {
      const int8_t* rows[Ops::kPair];
      rows_of_codes<Ops::kPair>(codes, i * Ops::kPair, k, n, width, edge, rows);
      for (int64_t v = 0; v < 4; ++v) {
        __m512i column = wide(rows[0] + v * 16);
        // codes have at most eight significant bits, so that their upper halves as floats are exact
        if constexpr (Ops::kPair == 2) column = _mm512_or_si512(_mm512_srli_epi32(column, 16), wide(rows[1] + v * 16));
        _mm512_storeu_si512(panels + (v / 2 * depth() + i) * kPanel + v % 2 * 16, column);
      }
    }
  }

  template <typename Result>
  void multiply(int64_t tile, const Number* panel, const Result& result) const {
    const Number* x = values.data() + tile * depth() * kRows;
    Tile<Ops, kRows, kPanel / 16> sums;
    for (int64_t i = 0; i < depth(); ++i, x += kRows, panel += kPanel)
      sums.multiply_add(panel, [&](int row) { return Ops::broadcast(x[row]); });
    sums.each(result);
  }
};

// What becomes of a product's columns: each is a result, or the first half gates the second by `of`.
struct Plain {
  static constexpr int64_t kParts = 1;
};
struct Silu {
  static constexpr int64_t kParts = 2;
  static v16 of(v16 x) { return x / (1.0f + Float32Ops::exp2(x * -kLog2E)); }
};
struct Gelu {  // by tanh: 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  static constexpr int64_t kParts = 2;
  static v16 of(v16 x) { return x / (1.0f + Float32Ops::exp2((x + 0.044715f * x * x * x) * (-2.0f * 0.7978845608f * kLog2E))); }
};

using F32 = ffi::Buffer<ffi::F32>;
using S8 = ffi::Buffer<ffi::S8>;
using S32 = ffi::Buffer<ffi::S32>;
using Out = ffi::ResultBuffer<ffi::F32>;

template <typename Form, typename Gate>
ffi::Error many_rows(ffi::ThreadPool pool, F32 x, S8 codes, F32 scale, S32 layer, Out y) {
  using Number = typename Form::Number;
  const auto shape = codes.dimensions();  // layers, k, n
  const int64_t rows = x.dimensions()[0], k = shape[1], n = shape[2], columns = n / Gate::kParts, at = layer.typed_data()[0];
  if (at < 0 || at >= shape[0]) return ffi::Error::InvalidArgument("linear: layer is outside the stack");
  constexpr int64_t kRows = Form::kRows, kTiles = kStretch / kRows;  // tiles of a work item
  const int64_t tiles = (rows + kRows - 1) / kRows, blocks = (columns + kColumns - 1) / kColumns;
  static thread_local Form kept;  // its memory serves the next call too
  Form& form = kept;
  form.reset(tiles, k);
  parallel_for(pool, tiles, [&](int64_t tile) {
    static thread_local std::vector<Number> scratch;
    static thread_local std::vector<float> zeros;
    scratch.resize(form.depth());
    zeros.resize(k);
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t r = tile * kRows + row;
      form.pack_row(r < rows ? x.typed_data() + r * k : zeros.data(), tile, row, scratch.data());
    }
  });
  const int8_t* matrix = codes.typed_data() + at * k * n;
  const float* scales = scale.typed_data() + at * n;
  parallel_for(pool, blocks * ((tiles + kTiles - 1) / kTiles), [&](int64_t item) {
    static thread_local std::vector<Number> panels;
    const int64_t first = item % blocks * kColumns, width = std::min(kColumns, columns - first);
    const int64_t begin = item / blocks * kTiles, end = std::min(tiles, begin + kTiles), size = form.depth() * kColumns;
    panels.resize(Gate::kParts * size);
    alignas(64) float factors[Gate::kParts][kColumns] = {}, gates[kRows][kPanel];
    for (int64_t part = 0; part < Gate::kParts; ++part) {
      form.pack_codes(matrix + part * columns + first, n, width, panels.data() + part * size);
      std::memcpy(factors[part], scales + part * columns + first, width * sizeof(float));
    }
    for (int64_t half = 0; half * kPanel < width; ++half)
      for (int64_t tile = begin; tile < end; ++tile) {
        const Number* panel = panels.data() + half * form.depth() * kPanel;
        const float* factor = factors[0] + half * kPanel;
        if constexpr (Gate::kParts == 2) {
          form.multiply(tile, panel, [&](int row, int v, v16 sum) {
            store(gates[row] + v * 16, Gate::of(sum * load(factor + v * 16)));
          });
          panel += size;
          factor += kColumns;
        }
        form.multiply(tile, panel, [&](int row, int v, v16 sum) {
          const int64_t r = tile * kRows + row, column = half * kPanel + v * 16, left = width - column;
          if (r >= rows || left <= 0) return;
          v16 result = sum * load(factor + v * 16);
          if constexpr (Gate::kParts == 2) result *= load(gates[row] + v * 16);
          const __mmask16 inside = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
          _mm512_mask_storeu_ps(y->typed_data() + r * columns + first + column, inside, (__m512)result);
        });
      }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

#define ZCCP_LINEAR(name, ...)                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (__VA_ARGS__),                      \
                                xla::ffi::Ffi::Bind()                     \
                                    .Ctx<xla::ffi::ThreadPool>()          \
                                    .Arg<zccp::F32>()                     \
                                    .Arg<zccp::S8>()                      \
                                    .Arg<zccp::F32>()                     \
                                    .Arg<zccp::S32>()                     \
                                    .Ret<xla::ffi::Buffer<xla::ffi::F32>>())
#define ZCCP_LINEARS(name, form)                                          \
  ZCCP_LINEAR(name, zccp::many_rows<form, zccp::Plain>);                  \
  ZCCP_LINEAR(name##_silu, zccp::many_rows<form, zccp::Silu>);            \
  ZCCP_LINEAR(name##_gelu, zccp::many_rows<form, zccp::Gelu>)

ZCCP_LINEARS(zccp_linear_blocks16, zccp::Blocks<16>);
ZCCP_LINEARS(zccp_linear_blocks32, zccp::Blocks<32>);
ZCCP_LINEARS(zccp_linear_bf16, zccp::Floats);
