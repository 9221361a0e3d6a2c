// linear over many rows: y[r, n] = (x @ codes)[r, n] * scale[n], with x in int8 blocks or in bf16.
//
// Bound by the products, 2 * rows * k * n operations. Both operands are packed in the order in which the inner loop reads
// them: x in tiles of kRows rows, codes in panels of kPanel columns. Blocks: every kBlock neighbours of a row of x have a
// step of their own, so that their sums are int32-exact and meet in float32; the codes are the unsigned operand, as in
// native.cc. bf16: codes are exact in it.

#include "pallas_kernels/linear/codes.h"

namespace zccp {
namespace {

constexpr int64_t kPanel = 32;      // columns of a panel: 2 vectors
constexpr int64_t kBlock = 32;      // neighbours of a row that share a step: two vectors
constexpr int64_t kStretch = 260;   // rows of a work item, about
constexpr int64_t kHalves = kColumns / kPanel;

// A row of x as numbers along k, to every kRows-th place of its tile.
template <int kRows>
void spread(const uint32_t* row, int64_t depth, uint32_t* tile) {
  for (int64_t i = 0; i < depth; ++i) tile[i * kRows] = row[i];
}

struct Totals {  // a tile of sums that nothing is multiplied into
  using Number = float;
  using Sum = v16;
  using Vector = v16;
};

// x as int8 codes with a step a block.
struct Blocks {
  using Ops = Int8Ops;
  static constexpr int kRows = 7;  // 7 x 2 vectors of sums of a block, and as many of all blocks, fill 28 of the 32 registers
  int64_t k, blocks;
  std::vector<uint32_t> values;  // [tiles, depth, kRows]
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

  void pack_row(const float* x, int64_t tile, int64_t row, uint32_t* scratch) {
    for (int64_t b = 0; b < blocks; ++b) {
      alignas(64) float edge[kBlock] = {};
      const float* block = x + b * kBlock;
      if (k - b * kBlock < kBlock) {
        std::memcpy(edge, block, (k - b * kBlock) * sizeof(float));
        block = edge;
      }
      const float most = largest(block, kBlock);
      const __m512 inverse = _mm512_set1_ps(127.0f / most);
      const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(block), inverse));
      const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(block + 16), inverse));
      uint32_t* const codes = scratch + b * kBlock / Ops::kPair;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtsepi32_epi8(low));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 4), _mm512_cvtsepi32_epi8(high));
      const int64_t at = (tile * blocks + b) * kRows + row;
      steps[at] = most / 127.0f;
      offsets[at] = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
    spread<kRows>(scratch, depth(), values.data() + tile * depth() * kRows + row);
  }

  // 64 columns of codes to kHalves panels of [depth, kPanel].
  void pack_codes(const int8_t* codes, int64_t n, int64_t width, uint32_t* panels) const {
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
  void multiply(int64_t tile, const uint32_t* panel, const Result& result) const {
    const uint32_t* x = values.data() + tile * depth() * kRows;
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

// x as pairs of bf16 along k.
struct Halves {
  using Ops = Bf16Ops;
  static constexpr int kRows = 10;  // 10 x 2 vectors of sums leave registers for what comes in
  int64_t k, pairs;
  std::vector<uint32_t> values;  // [tiles, pairs, kRows]

  int64_t depth() const { return pairs; }

  void reset(int64_t tiles, int64_t inputs) {
    k = inputs;
    pairs = (k + 15) / 16 * 8;
    values.resize(tiles * pairs * kRows);
  }

#ifdef __AVX512BF16__
  void pack_row(const float* x, int64_t tile, int64_t row, uint32_t* scratch) {
    alignas(64) float tail[16] = {};
    const int64_t whole = k / 16 * 16;
    std::memcpy(tail, x + whole, (k - whole) * sizeof(float));
    Ops::pack_row(x, whole, 1.0f, scratch);
    if (whole < k) Ops::pack_row(tail, 16, 1.0f, scratch + whole / 2);
    spread<kRows>(scratch, pairs, values.data() + tile * pairs * kRows + row);
  }

  void pack_codes(const int8_t* codes, int64_t n, int64_t width, uint32_t* panels) const {
    alignas(64) int8_t edge[Ops::kPair][kColumns];
    // codes have at most eight significant bits, so that their upper halves as floats are exact
    const auto wide = [](const int8_t* from) {
      const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow)));
    };
    for (int64_t i = 0; i < pairs; ++i) {
      const int8_t* rows[Ops::kPair];
      rows_of_codes<Ops::kPair>(codes, i * Ops::kPair, k, n, width, edge, rows);
      for (int64_t v = 0; v < 4; ++v)
        _mm512_storeu_si512(panels + (v / 2 * pairs + i) * kPanel + v % 2 * 16,
                            _mm512_or_si512(_mm512_srli_epi32(wide(rows[0] + v * 16), 16), wide(rows[1] + v * 16)));
    }
  }

  template <typename Result>
  void multiply(int64_t tile, const uint32_t* panel, const Result& result) const {
    const uint32_t* x = values.data() + tile * pairs * kRows;
    Tile<Ops, kRows, kPanel / 16> sums;
    for (int64_t i = 0; i < pairs; ++i, x += kRows, panel += kPanel)
      sums.multiply_add(panel, [&](int row) { return Ops::broadcast(x[row]); });
    sums.each(result);
  }
#endif
};

template <typename Form>
ffi::Error many_rows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes, ffi::Buffer<ffi::F32> scale,
                     ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = codes.dimensions();  // layers, k, n
  const int64_t rows = x.dimensions()[0], k = shape[1], n = shape[2], at = layer.typed_data()[0];
  if (at < 0 || at >= shape[0]) return ffi::Error::InvalidArgument("linear: layer is outside the stack");
  constexpr int64_t kRows = Form::kRows, kTiles = kStretch / kRows;  // tiles of a work item
  const int64_t tiles = (rows + kRows - 1) / kRows, blocks = (n + kColumns - 1) / kColumns;
  static thread_local Form kept;  // its memory serves the next call too
  Form& form = kept;
  form.reset(tiles, k);
  parallel_for(pool, tiles, [&](int64_t tile) {
    static thread_local std::vector<uint32_t> scratch;
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
    static thread_local std::vector<uint32_t> panels;
    panels.resize(form.depth() * kColumns);
    const int64_t first = item % blocks * kColumns, width = std::min(kColumns, n - first);
    const int64_t begin = item / blocks * kTiles, end = std::min(tiles, begin + kTiles);
    form.pack_codes(matrix + first, n, width, panels.data());
    alignas(64) float factors[kColumns] = {};
    std::memcpy(factors, scales + first, width * sizeof(float));
    for (int64_t half = 0; half * kPanel < width; ++half)
      for (int64_t tile = begin; tile < end; ++tile)
        form.multiply(tile, panels.data() + half * form.depth() * kPanel, [&](int row, int v, v16 sum) {
          const int64_t r = tile * kRows + row, column = half * kPanel + v * 16, left = width - column;
          if (r >= rows || left <= 0) return;
          const __mmask16 inside = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
          _mm512_mask_storeu_ps(y->typed_data() + r * n + first + column, inside, (__m512)(sum * load(factors + column)));
        });
  });
  return ffi::Error::Success();
}

ffi::Error LinearBlocks(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes,
                        ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
  return many_rows<Blocks>(pool, x, codes, scale, layer, y);
}

ffi::Error LinearBf16(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> codes, ffi::Buffer<ffi::F32> scale,
                      ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
#ifdef __AVX512BF16__
  return many_rows<Halves>(pool, x, codes, scale, layer, y);
#else
  return ffi::Error::Unimplemented("linear: this library was compiled for a CPU without AVX512-BF16");
#endif
}

}  // namespace
}  // namespace zccp

#define ZCCP_LINEAR(name, function)                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                            \
                                xla::ffi::Ffi::Bind()                      \
                                    .Ctx<xla::ffi::ThreadPool>()           \
                                    .Arg<xla::ffi::Buffer<xla::ffi::F32>>() \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S8>>()  \
                                    .Arg<xla::ffi::Buffer<xla::ffi::F32>>() \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S32>>() \
                                    .Ret<xla::ffi::Buffer<xla::ffi::F32>>())

ZCCP_LINEAR(zccp_linear_blocks, zccp::LinearBlocks);
ZCCP_LINEAR(zccp_linear_bf16, zccp::LinearBf16);
