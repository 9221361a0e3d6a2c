// paged_prefill on the CPU: a work item is (kv head, row, stretch of its queries); keys are taken a block at a time from
// pages or from the chunk itself, scores stay in cache, softmax is online.
//
// Bound by the products: 4 * head_dim operations a visible (query head, key) pair. They are in bf16 pairs where the CPU has
// AVX512-BF16 and the caller allows it, else in float32; sums and softmax are in float32.

#include "pallas_kernels/native.h"

namespace zccp {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

namespace {

constexpr int64_t kQueryRows = 192;  // (query head, token) rows of an item: a multiple of kMicroRows
constexpr int kMicroRows = 6;        // 6 rows x 4 vectors of sums fill 24 of the 32 vector registers
constexpr int64_t kKeys = 64;       // keys of a block: 4 vectors
constexpr int64_t kMaxHeadDim = 1024;
constexpr float kMasked = -1e30f;

// out[6, 16 * kVectors] (+)= rows[6, depth] * packed[depth, columns].
template <typename Ops, int kVectors, typename Number = typename Ops::Number>
void micro(const Number* rows, int64_t row_stride, const Number* packed, int64_t packed_stride, int64_t depth, float* out,
           int64_t out_stride, bool accumulate) {
  Tile<Ops, kMicroRows, kVectors> tile;
  if (accumulate) tile.each([&](int row, int v, v16& sum) { sum = load(out + row * out_stride + v * 16); });
  for (int64_t i = 0; i < depth; ++i)
    tile.multiply_add(packed + i * packed_stride, [&](int row) { return Ops::broadcast(rows[row * row_stride + i]); });
  tile.each([&](int row, int v, v16 sum) { store(out + row * out_stride + v * 16, sum); });
}

template <typename Ops, typename Number = typename Ops::Number>
void multiply(const Number* rows, int64_t num_rows, int64_t row_stride, const Number* packed, int64_t columns, int64_t depth,
              float* out, bool accumulate) {
  for (int64_t c = 0; c < columns; c += 64)
    for (int64_t r = 0; r < num_rows; r += kMicroRows) {
      const Number* a = rows + r * row_stride;
      float* o = out + r * columns + c;
      switch (std::min<int64_t>(64, columns - c) / 16) {
        case 4: micro<Ops, 4>(a, row_stride, packed + c, columns, depth, o, columns, accumulate); break;
        case 3: micro<Ops, 3>(a, row_stride, packed + c, columns, depth, o, columns, accumulate); break;
        case 2: micro<Ops, 2>(a, row_stride, packed + c, columns, depth, o, columns, accumulate); break;
        default: micro<Ops, 1>(a, row_stride, packed + c, columns, depth, o, columns, accumulate); break;
      }
    }
}

struct Problem {
  int64_t tokens, q_heads, kv_heads, group, head_dim, num_pages, page_size, width, window, per_item;
  float scale, softcap;
  const float *q, *k, *v, *pool;  // pool: the layer's pages
  const int32_t* table;
  float* out;
};

struct Item {
  int64_t row, head, start, offset, first, count;  // queries offset + first .. + count of a row that begins at start
};

template <typename Ops>
struct Scratch {
  std::vector<typename Ops::Number> queries, keys, values, weights, key_rows;
  std::vector<float> scores, sums, peak, total;

  explicit Scratch(int64_t d)
      : queries(kQueryRows * d), keys(kKeys * d), values(kKeys * d), weights(kQueryRows * kKeys), key_rows(kKeys * d),
        scores(kQueryRows * kKeys), sums(kQueryRows * d), peak(kQueryRows), total(kQueryRows) {}
};

const float* key_at(const Problem& z, const Item& item, int64_t position) {
  if (position >= item.start) return z.k + ((item.offset + position - item.start) * z.kv_heads + item.head) * z.head_dim;
  const int64_t listed = z.table[item.row * z.width + position / z.page_size];
  const int64_t id = std::clamp<int64_t>(listed, 0, z.num_pages - 1);
  return z.pool + ((id * z.kv_heads + item.head) * 2 * z.page_size + position % z.page_size) * z.head_dim;
}

const float* value_at(const Problem& z, const Item& item, int64_t position) {
  if (position >= item.start) return z.v + ((item.offset + position - item.start) * z.kv_heads + item.head) * z.head_dim;
  return key_at(z, item, position) + z.page_size * z.head_dim;
}

// [kKeys, depth] to [depth, kKeys] of four-byte numbers, sixteen columns at a time by gathers.
inline void transpose(const float* from, int64_t depth, float* to) {
  const __m512i index = _mm512_mullo_epi32(_mm512_set1_epi32(static_cast<int32_t>(depth)),
                                           _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int64_t j = 0; j < kKeys; j += 16)
    for (int64_t i = 0; i < depth; ++i)
      _mm512_storeu_ps(to + i * kKeys + j, _mm512_i32gather_ps(index, from + j * depth + i, 4));
}

// Packs n keys from `first` on to [head_dim / kPair, kKeys] and their values to [kKeys / kPair, head_dim]; what lies behind
// is zero.
template <typename Ops>
void pack_block(const Problem& z, const Item& item, int64_t first, int64_t n, Scratch<Ops>& s) {
  static const std::vector<float> zeros(kMaxHeadDim, 0.0f);
  const int64_t d = z.head_dim, depth = d / Ops::kPair;
  const float* values[kKeys];
  for (int64_t j = 0; j < kKeys; ++j) {
    Ops::pack_row(j < n ? key_at(z, item, first + j) : zeros.data(), d, 1.0f, s.key_rows.data() + j * depth);
    values[j] = j < n ? value_at(z, item, first + j) : zeros.data();
  }
  transpose(reinterpret_cast<const float*>(s.key_rows.data()), depth, reinterpret_cast<float*>(s.keys.data()));
  for (int64_t j = 0; j < kKeys / Ops::kPair; ++j) Ops::pack_rows(values + j * Ops::kPair, d, s.values.data() + j * d);
}

// Turns a row of scores to weights, given the visible keys [low, high) of the block, and keeps the online sums.
template <typename Ops>
void soften(const Problem& z, Scratch<Ops>& s, int64_t row, int64_t low, int64_t high) {
  float* scores = s.scores.data() + row * kKeys;
  low = std::clamp<int64_t>(low, 0, kKeys);
  high = std::clamp<int64_t>(high, low, kKeys);
  if (z.softcap > 0)
    for (int64_t j = low; j < high; ++j) scores[j] = z.softcap * std::tanh(scores[j] / z.softcap);
  std::fill(scores, scores + low, kMasked);
  std::fill(scores + high, scores + kKeys, kMasked);
  v16 x[kKeys / 16];
  for (int64_t j = 0; j < kKeys / 16; ++j) x[j] = load(scores + 16 * j);
  const __m512 most = _mm512_max_ps(_mm512_max_ps((__m512)x[0], (__m512)x[1]), _mm512_max_ps((__m512)x[2], (__m512)x[3]));
  const float before = s.peak[row], peak = std::max(before, _mm512_reduce_max_ps(most));
  // a row that has seen no key has a masked peak: masked keys must weigh 0 in it, not e^0
  const float base = std::max(peak, 0.5f * kMasked);
  for (int64_t j = 0; j < kKeys / 16; ++j) store(scores + 16 * j, x[j] = exp16(x[j] - base));
  const float total = sum((x[0] + x[1]) + (x[2] + x[3]));
  if (peak != before) {
    const float factor = std::exp(before - peak);
    float* sums = s.sums.data() + row * z.head_dim;
    for (int64_t j = 0; j < z.head_dim; j += 16) store(sums + j, load(sums + j) * factor);
    s.total[row] *= factor;
    s.peak[row] = peak;
  }
  s.total[row] += total;
  Ops::pack_row(scores, kKeys, 1.0f, s.weights.data() + row * (kKeys / Ops::kPair));
}

template <typename Ops>
void run_item(const Problem& z, const Item& item) {
  static thread_local std::unique_ptr<Scratch<Ops>> kept;
  static thread_local int64_t kept_dim = 0;
  if (kept_dim != z.head_dim) {
    kept = std::make_unique<Scratch<Ops>>(z.head_dim);
    kept_dim = z.head_dim;
  }
  Scratch<Ops>& s = *kept;
  const int64_t d = z.head_dim, depth = d / Ops::kPair, used = z.group * item.count;
  const int64_t rows = (used + kMicroRows - 1) / kMicroRows * kMicroRows;
  std::fill(s.sums.begin(), s.sums.begin() + rows * d, 0.0f);
  std::fill(s.peak.begin(), s.peak.end(), kMasked);
  std::fill(s.total.begin(), s.total.end(), 0.0f);
  for (int64_t r = 0; r < rows; ++r) {  // row r is query head r % group of token r / group
    if (r >= used) {
      std::fill(s.queries.begin() + r * depth, s.queries.begin() + (r + 1) * depth, 0);
      continue;
    }
    const int64_t token = item.offset + item.first + r / z.group;
    Ops::pack_row(z.q + (token * z.q_heads + item.head * z.group + r % z.group) * d, d, z.scale, s.queries.data() + r * depth);
  }
  const int64_t newest = item.start + item.first + item.count;  // one past the last query's position
  const int64_t oldest = z.window > 0 ? std::max<int64_t>(0, item.start + item.first - z.window + 1) : 0;
  for (int64_t block = oldest; block < newest; block += kKeys) {
    pack_block<Ops>(z, item, block, std::min(kKeys, newest - block), s);
    multiply<Ops>(s.queries.data(), rows, depth, s.keys.data(), kKeys, depth, s.scores.data(), false);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = item.start + item.first + std::min(r, used - 1) / z.group;
      const int64_t low = z.window > 0 ? std::max<int64_t>(0, position - z.window + 1 - block) : 0;
      soften<Ops>(z, s, r, low, std::min(kKeys, position + 1 - block));
    }
    multiply<Ops>(s.weights.data(), rows, kKeys / Ops::kPair, s.values.data(), d, kKeys / Ops::kPair, s.sums.data(), true);
  }
  for (int64_t r = 0; r < used; ++r) {
    const int64_t token = item.offset + item.first + r / z.group;
    float* out = z.out + (token * z.q_heads + item.head * z.group + r % z.group) * d;
    const float inverse = 1.0f / s.total[r];
    for (int64_t j = 0; j < d; j += 16) store(out + j, load(s.sums.data() + r * d + j) * inverse);
  }
}


ffi::Error PagedPrefill(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 pages, S32 layer, S32 table, S32 starts, S32 lengths,
                        S32 offsets, S32 window, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, bool bf16) {
  const auto qs = q.dimensions(), ps = pages.dimensions();  // tokens q_heads d; layers num_pages kv_heads 2 page_size d
  const int64_t at = layer.typed_data()[0], group = qs[1] / ps[2];
  if (at < 0 || at >= ps[0]) return ffi::Error::InvalidArgument("paged_prefill: layer is outside the pool");
  if (qs[2] % 16 || qs[2] > kMaxHeadDim) return ffi::Error::InvalidArgument("paged_prefill: head_dim must be a multiple of 16");
  if (group > kQueryRows) return ffi::Error::InvalidArgument("paged_prefill: too many query heads share a kv head");
  const Problem z{qs[0], qs[1], ps[2], group, qs[2], ps[1], ps[4], table.dimensions()[1], window.typed_data()[0],
                  kQueryRows / group, scale, softcap, q.typed_data(), k.typed_data(), v.typed_data(),
                  pages.typed_data() + at * ps[1] * ps[2] * 2 * ps[4] * ps[5], table.typed_data(), out->typed_data()};
  std::fill(z.out, z.out + z.tokens * z.q_heads * z.head_dim, 0.0f);
  std::vector<Item> items;
  for (int64_t row = 0; row < lengths.dimensions()[0]; ++row) {
    const int64_t length = lengths.typed_data()[row];
    for (int64_t first = (length - 1) / z.per_item * z.per_item; length > 0 && first >= 0; first -= z.per_item)
      for (int64_t head = 0; head < z.kv_heads; ++head)
        items.push_back({row, head, starts.typed_data()[row], offsets.typed_data()[row], first,
                         std::min(z.per_item, length - first)});
  }
  parallel_for(pool, static_cast<int64_t>(items.size()), [&](int64_t i) {
    bf16 ? run_item<Bf16Ops>(z, items[i]) : run_item<Float32Ops>(z, items[i]);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_prefill, zccp::PagedPrefill,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("bf16"));
