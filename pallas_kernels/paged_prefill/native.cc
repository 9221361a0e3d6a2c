// paged_prefill on the CPU: a work item is (kv head, row, stretch of its queries); keys are taken a block at a time from
// pages or from the chunk itself, scores stay in cache, softmax is online.
//
// Bound by the products: 4 * head_dim operations a visible (query head, key) pair. They are in bf16 pairs where the CPU has
// AVX512-BF16 and the caller allows it, else in float32; sums and softmax are in float32. Scores are held transposed, keys by
// queries: queries are the lanes, so that softmax needs no sum across lanes and keys no transposition. A peak is left as it
// is until a score passes it by kSlack (FlashAttention-4's lazy rescaling), which spares most passes over the sums.

#include "pallas_kernels/native.h"

namespace zccp {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

namespace {

constexpr int64_t kPanel = 48;       // query lanes that are multiplied together: 3 vectors
constexpr int64_t kQueries = 192;    // most (query head, token) pairs of an item
constexpr int64_t kKeys = 64;        // keys of a block
constexpr int kRows = 8;             // keys, or channels, of a tile: 8 x 3 vectors fill 24 of the 32 vector registers
constexpr int64_t kMaxHeadDim = 1024;
constexpr float kMasked = -1e30f, kSlack = 8.0f;

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

// What an item works on, d channels a head.
template <typename Ops>
struct Scratch {
  using Numbers = std::vector<typename Ops::Number>;
  Numbers queries;            // [panels, d / kPair, kPanel]
  Numbers keys;               // [kKeys, d / kPair]
  Numbers values;             // [kKeys / kPair, d]
  Numbers weights;            // [kKeys / kPair, kPanel]
  std::vector<float> scores;  // [kKeys, kPanel], in powers of two
  std::vector<float> sums;    // [panels, d, kPanel]
  std::vector<float> peaks, totals;    // [kQueries]
  std::vector<int32_t> positions;      // [kQueries]

  explicit Scratch(int64_t d)
      : queries(kQueries * d), keys(kKeys * d), values(kKeys * d), weights(kKeys * kPanel), scores(kKeys * kPanel),
        sums(kQueries * d), peaks(kQueries), totals(kQueries), positions(kQueries) {}
};

// sums[kRows, kPanel] (+)= rows x columns over `depth` numbers; row r of number i is rows[r * row_stride + i * stride].
template <typename Ops, typename Number = typename Ops::Number>
void multiply(const Number* rows, int64_t row_stride, int64_t stride, const Number* columns, int64_t depth, float* sums,
              bool accumulate) {
  Tile<Ops, kRows, kPanel / 16> tile;
  if (accumulate) tile.each([&](int row, int v, v16& sum) { sum = load(sums + row * kPanel + v * 16); });
  for (int64_t i = 0; i < depth; ++i)
    tile.multiply_add(columns + i * kPanel, [&](int row) { return Ops::broadcast(rows[row * row_stride + i * stride]); });
  tile.each([&](int row, int v, v16 sum) { store(sums + row * kPanel + v * 16, sum); });
}

// Where n keys from position `first` on and their values lie: in pages before the chunk, then in the chunk.
void find(const Problem& z, const Item& item, int64_t first, int64_t n, const float** keys, const float** values) {
  const int64_t d = z.head_dim;
  for (int64_t j = 0, run; j < n; j += run) {
    const int64_t position = first + j;
    const float *key, *value;
    int64_t stride;
    if (position >= item.start) {
      const int64_t at = ((item.offset + position - item.start) * z.kv_heads + item.head) * d;
      key = z.k + at;
      value = z.v + at;
      stride = z.kv_heads * d;
      run = n - j;
    } else {
      const int64_t in_page = position % z.page_size, listed = z.table[item.row * z.width + position / z.page_size];
      const int64_t id = std::clamp<int64_t>(listed, 0, z.num_pages - 1);
      key = z.pool + ((id * z.kv_heads + item.head) * 2 * z.page_size + in_page) * d;
      value = key + z.page_size * d;
      stride = d;
      run = std::min({n - j, z.page_size - in_page, item.start - position});
    }
    for (int64_t i = 0; i < run; ++i) {
      keys[j + i] = key + i * stride;
      values[j + i] = value + i * stride;
    }
  }
}

// Packs n keys from position `first` on and their values; what lies behind is zero.
template <typename Ops>
void pack_block(const Problem& z, const Item& item, int64_t first, int64_t n, Scratch<Ops>& s) {
  static const std::vector<float> zeros(kMaxHeadDim, 0.0f);
  const int64_t d = z.head_dim, depth = d / Ops::kPair;
  const float *keys[kKeys], *values[kKeys];
  find(z, item, first, n, keys, values);
  std::fill(keys + n, keys + kKeys, zeros.data());
  std::fill(values + n, values + kKeys, zeros.data());
  for (int64_t j = 0; j < kKeys; ++j) Ops::pack_row(keys[j], d, 1.0f, s.keys.data() + j * depth);
  for (int64_t j = 0; j < kKeys; j += Ops::kPair) Ops::pack_rows(values + j, d, s.values.data() + j / Ops::kPair * d);
}

// The visible keys of 16 queries in a block: [low, high) for each, as distances from the block's first key.
struct Visible {
  __m512i low, high;
  bool all;  // every key of the block, for every query

  Visible(const Problem& z, const int32_t* positions, int64_t block, int64_t keys) {
    const __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(positions), _mm512_set1_epi32(static_cast<int32_t>(block)));
    high = _mm512_add_epi32(at, _mm512_set1_epi32(1));
    low = z.window > 0 ? _mm512_sub_epi32(high, _mm512_set1_epi32(static_cast<int32_t>(z.window))) : _mm512_setzero_si512();
    all = _mm512_reduce_max_epi32(low) <= 0 && _mm512_reduce_min_epi32(high) >= keys;
  }
  __mmask16 operator()(int64_t key) const {
    const __m512i k = _mm512_set1_epi32(static_cast<int32_t>(key));
    return _mm512_cmple_epi32_mask(low, k) & _mm512_cmplt_epi32_mask(k, high);
  }
};

// Turns the scores of 16 queries over a block to weights, and keeps their online sums. `query` is the first one's place.
template <typename Ops, bool kAll>
void soften(const Problem& z, Scratch<Ops>& s, int64_t query, int64_t keys, const Visible& visible) {
  const int64_t d = z.head_dim, lane = query % kPanel;
  float* const scores = s.scores.data() + lane;
  v16 most = splat(kMasked);
  for (int64_t j = 0; j < keys; ++j) {
    v16 score = load(scores + j * kPanel);
    if constexpr (!kAll) {
      score = (v16)_mm512_mask_blend_ps(visible(j), _mm512_set1_ps(kMasked), (__m512)score);
      store(scores + j * kPanel, score);
    }
    most = (v16)_mm512_max_ps((__m512)most, (__m512)score);
  }
  v16 peak = load(s.peaks.data() + query), total = load(s.totals.data() + query);
  const __mmask16 passed = _mm512_cmp_ps_mask((__m512)most, (__m512)(peak + kSlack), _CMP_GT_OQ);
  if (passed) {
    const v16 raised = (v16)_mm512_mask_mov_ps((__m512)peak, passed, (__m512)most);
    const v16 factor = Ops::exp2(peak - raised);
    float* const sums = s.sums.data() + query / kPanel * d * kPanel + lane;
    for (int64_t i = 0; i < d; ++i) store(sums + i * kPanel, load(sums + i * kPanel) * factor);
    total *= factor;
    peak = raised;
    store(s.peaks.data() + query, peak);
  }
  // a query that has seen no key has a masked peak: masked keys must weigh 0 in it, not 2^0
  const v16 base = (v16)_mm512_max_ps((__m512)peak, _mm512_set1_ps(0.5f * kMasked));
  for (int64_t j = 0; j < keys; j += Ops::kPair) {
    v16 weights[Ops::kPair];
    for (int64_t i = 0; i < Ops::kPair; ++i) total += weights[i] = Ops::exp2(load(scores + (j + i) * kPanel) - base);
    Ops::pack_pair(weights, s.weights.data() + j / Ops::kPair * kPanel + lane);
  }
  store(s.totals.data() + query, total);
}

// One panel of queries over the packed block of `n` keys that begins at position `block`.
template <typename Ops>
void run_panel(const Problem& z, Scratch<Ops>& s, int64_t panel, int64_t block, int64_t n) {
  const int64_t d = z.head_dim, depth = d / Ops::kPair;
  const int32_t* positions = s.positions.data() + panel * kPanel;
  const int64_t newest = positions[kPanel - 1], oldest = z.window > 0 ? positions[0] - z.window + 1 : 0;
  const int64_t seen = std::min(n, newest + 1 - block);
  if (seen <= 0 || block + n <= oldest) return;
  const int64_t keys = (seen + kRows - 1) / kRows * kRows;
  float* const scores = s.scores.data();
  for (int64_t j = 0; j < keys; j += kRows)
    multiply<Ops>(s.keys.data() + j * depth, depth, 1, s.queries.data() + panel * depth * kPanel, depth, scores + j * kPanel, false);
  if (z.softcap > 0)
    for (int64_t i = 0; i < keys * kPanel; ++i) scores[i] = z.softcap * kLog2E * std::tanh(scores[i]);
  for (int64_t lane = 0; lane < kPanel; lane += 16) {
    const Visible visible(z, positions + lane, block, keys);
    const int64_t query = panel * kPanel + lane;
    visible.all ? soften<Ops, true>(z, s, query, keys, visible) : soften<Ops, false>(z, s, query, keys, visible);
  }
  float* const sums = s.sums.data() + panel * d * kPanel;
  for (int64_t i = 0; i < d; i += kRows)
    multiply<Ops>(s.values.data() + i, 1, d, s.weights.data(), keys / Ops::kPair, sums + i * kPanel, true);
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
  const int64_t panels = (used + kPanel - 1) / kPanel;
  std::fill(s.sums.begin(), s.sums.begin() + panels * d * kPanel, 0.0f);
  std::fill(s.peaks.begin(), s.peaks.end(), kMasked);
  std::fill(s.totals.begin(), s.totals.end(), 0.0f);
  const auto token_of = [&](int64_t query) { return item.first + std::min(query, used - 1) / z.group; };
  const auto head_of = [&](int64_t query) { return item.head * z.group + std::min(query, used - 1) % z.group; };
  const float factor = z.softcap > 0 ? z.scale / z.softcap : z.scale * kLog2E;
  for (int64_t first = 0; first < panels * kPanel; first += 16) {  // query i is head i % group of token i / group
    const float* queries[16];
    for (int64_t i = 0; i < 16; ++i) {
      s.positions[first + i] = static_cast<int32_t>(item.start + token_of(first + i));
      queries[i] = z.q + ((item.offset + token_of(first + i)) * z.q_heads + head_of(first + i)) * d;
    }
    pack_lanes<Ops>(queries, d, factor, s.queries.data() + first / kPanel * depth * kPanel + first % kPanel, kPanel);
  }
  const int64_t newest = item.start + item.first + item.count;  // one past the last query's position
  const int64_t oldest = z.window > 0 ? std::max<int64_t>(0, item.start + item.first - z.window + 1) : 0;
  for (int64_t block = oldest; block < newest; block += kKeys) {
    const int64_t n = std::min(kKeys, newest - block);
    pack_block<Ops>(z, item, block, n, s);
    for (int64_t panel = 0; panel < panels; ++panel) run_panel<Ops>(z, s, panel, block, n);
  }
  for (int64_t first = 0; first < used; first += 16) {
    const v16 inverse = 1.0f / load(s.totals.data() + first);
    const float* const sums = s.sums.data() + first / kPanel * d * kPanel + first % kPanel;
    for (int64_t i = 0; i < d; i += 16) {
      v16 lanes[16];
      for (int64_t j = 0; j < 16; ++j) lanes[j] = load(sums + (i + j) * kPanel) * inverse;
      transpose16(lanes);
      for (int64_t j = 0; j < std::min<int64_t>(16, used - first); ++j)
        store(z.out + ((item.offset + token_of(first + j)) * z.q_heads + head_of(first + j)) * d + i, lanes[j]);
    }
  }
}

ffi::Error PagedPrefill(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 pages, S32 layer, S32 table, S32 starts, S32 lengths,
                        S32 offsets, S32 window, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, bool bf16) {
  const auto qs = q.dimensions(), ps = pages.dimensions();  // tokens q_heads d; layers num_pages kv_heads 2 page_size d
  const int64_t at = layer.typed_data()[0], group = qs[1] / ps[2];
  if (at < 0 || at >= ps[0]) return ffi::Error::InvalidArgument("paged_prefill: layer is outside the pool");
  if (qs[2] % 16 || qs[2] > kMaxHeadDim) return ffi::Error::InvalidArgument("paged_prefill: head_dim must be a multiple of 16");
  if (group > kQueries) return ffi::Error::InvalidArgument("paged_prefill: too many query heads share a kv head");
  const Problem z{qs[0], qs[1], ps[2], group, qs[2], ps[1], ps[4], table.dimensions()[1], window.typed_data()[0],
                  kQueries / group, scale, softcap, q.typed_data(), k.typed_data(), v.typed_data(),
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
