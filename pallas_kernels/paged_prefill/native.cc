// paged_prefill on the CPU: a work item is (kv head, row, stretch of its queries); keys are taken a block at a time from
// pages or from the chunk itself, scores stay in cache, softmax is online. Pages of few bits become floats on the way.
//
// Bound by the products: 4 * head_dim operations a visible (query head, key) pair. They are in bf16 pairs where the CPU has
// AVX512-BF16 and the caller allows it, else in float32; sums and softmax are in float32. Scores are held transposed, keys by
// queries: queries are the lanes, so that softmax needs no sum across lanes and keys no transposition. A peak is left as it
// is until a score passes it by kSlack (FlashAttention-4's lazy rescaling), which spares most passes over the sums.

#include "pallas_kernels/native.h"
#include "pallas_kernels/pages.h"

namespace zccp {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U16 = ffi::Buffer<ffi::U16>;

namespace {

constexpr int64_t kPanel = 48;       // query lanes that are multiplied together: 3 vectors
constexpr int64_t kQueries = 192;    // most (query head, token) pairs of an item
constexpr int64_t kKeys = 64;        // keys of a block
constexpr int64_t kUnpacked = kKeys + kQuarter;  // rows that hold a block, wherever in quarters of packed blocks it begins
constexpr int kRows = 8;             // keys, or channels, of a tile: 8 x 3 vectors fill 24 of the 32 vector registers
constexpr int64_t kMaxHeadDim = 1024;
constexpr float kMasked = -1e30f, kSlack = 8.0f;

struct Problem {
  int64_t tokens, q_heads, kv_heads, group, head_dim, num_pages, page_size, width, window, per_item;
  float scale, softcap;
  const float *q, *k, *v;
  const int32_t* table;
  float* out;

  int64_t page_of(int64_t row, int64_t position) const {
    return std::clamp<int64_t>(table[row * width + position / page_size], 0, num_pages - 1);
  }
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
  std::vector<float> unpacked;         // keys [kUnpacked, d], then values

  explicit Scratch(int64_t d)
      : queries(kQueries * d), keys(kKeys * d), values(kKeys * d), weights(kKeys * kPanel), scores(kKeys * kPanel),
        sums(kQueries * d), peaks(kQueries), totals(kQueries), positions(kQueries), unpacked(2 * kUnpacked * d) {}
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

// Where n keys of an item from position `first` on, all before the chunk, and their values lie; in formats of few bits the rows
// `to` of keys and those of values behind them, which it fills.
struct FloatPages {
  const float* data;  // of the layer, as below

  void find(const Problem& z, const Item& item, int64_t first, int64_t n, float*, const float** keys,
            const float** values) const {
    for (int64_t j = 0, run; j < n; j += run) {
      const int64_t position = first + j, in_page = position % z.page_size;
      const int64_t page = z.page_of(item.row, position) * z.kv_heads + item.head;
      const float* const key = data + (page * 2 * z.page_size + in_page) * z.head_dim;
      run = std::min(n - j, z.page_size - in_page);
      for (int64_t i = 0; i < run; ++i) {
        keys[j + i] = key + i * z.head_dim;
        values[j + i] = key + (z.page_size + i) * z.head_dim;
      }
    }
  }
};

struct Int8Pages {
  const int32_t* words;
  int64_t page_words;

  void find(const Problem& z, const Item& item, int64_t first, int64_t n, float* to, const float** keys,
            const float** values) const {
    const int64_t d = z.head_dim;
    for (int64_t j = 0, run; j < n; j += run) {
      const int64_t position = first + j, in_page = position % z.page_size;
      run = std::min(n - j, z.page_size - in_page);
      const int32_t* const page = words + (z.page_of(item.row, position) * z.kv_heads + item.head) * page_words;
      unpack_int8_page(page, z.page_size, d, in_page, run, to + j * d, to + (kUnpacked + j) * d);
    }
    for (int64_t j = 0; j < n; ++j) {
      keys[j] = to + j * d;
      values[j] = to + (kUnpacked + j) * d;
    }
  }
};

// All values of an item are turned: those beside pages here, the chunk's own before, and the output is turned back behind.
template <int kBits>
struct BitmaskPages {
  const int32_t* words;
  const uint16_t* recent;  // of the layer: [slots, kv_heads, 2, kRecent, d]
  const int32_t* slots;    // [rows]
  int64_t num_slots;
  const float* rotation;   // [d, d]

  void find(const Problem& z, const Item& item, int64_t first, int64_t n, float* to, const float** keys,
            const float** values) const {
    const int64_t d = z.head_dim, base = first / kQuarter * kQuarter, stored = item.start / kBlock * kBlock;
    for (int64_t quarter = base; quarter < first + n; quarter += kQuarter) {
      float* const rows = to + (quarter - base) * d;
      int64_t beside = std::min(quarter + kQuarter, first + n);  // as far as rows are kept beside pages
      if (quarter < stored) {
        const int64_t page = z.page_of(item.row, quarter) * z.kv_heads + item.head;
        const int64_t index = page * (z.page_size / kBlock) + quarter % z.page_size / kBlock;
        const BitmaskBlock<kBits> block(words + index * BitmaskBlock<kBits>::words(d), d);
        block.quarter_keys(quarter % kBlock / kQuarter, rows);
        block.quarter_values(quarter % kBlock / kQuarter, 0, kBlock, rows + kUnpacked * d);
        beside = std::min(beside, kSinks);
      }
      for (int64_t p = std::max(quarter, first); p < beside; ++p) put_beside(z, item, p, rows + (p - quarter) * d);
    }
    for (int64_t j = 0; j < n; ++j) {
      keys[j] = to + (first - base + j) * d;
      values[j] = keys[j] + kUnpacked * d;
    }
  }

  void put_beside(const Problem& z, const Item& item, int64_t position, float* key) const {
    const int64_t d = z.head_dim, slot = std::clamp<int64_t>(slots[item.row], 0, num_slots - 1);
    const RecentRows rows{recent + (slot * z.kv_heads + item.head) * 2 * kRecent * d, d};
    float value[kMaxHeadDim];
    widen(rows.key(position), d, key);
    widen(rows.value(position), d, value);
    turn(value, rotation, d, key + kUnpacked * d);
  }
};

// Packs n keys from position `first` on and their values; what lies behind is zero.
template <typename Ops, typename Pages>
void pack_block(const Problem& z, const Pages& pages, const Item& item, int64_t first, int64_t n, Scratch<Ops>& s) {
  static const std::vector<float> zeros(kMaxHeadDim, 0.0f);
  const int64_t d = z.head_dim, depth = d / Ops::kPair;
  const float *keys[kKeys], *values[kKeys];
  const int64_t before = std::clamp<int64_t>(item.start - first, 0, n);
  pages.find(z, item, first, before, s.unpacked.data(), keys, values);
  for (int64_t j = before; j < n; ++j) {
    const int64_t at = ((item.offset + first + j - item.start) * z.kv_heads + item.head) * d;
    keys[j] = z.k + at;
    values[j] = z.v + at;
  }
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

template <typename Ops, typename Pages>
void run_item(const Problem& z, const Pages& pages, const Item& item) {
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
    pack_block(z, pages, item, block, n, s);
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

struct Given {  // what is an argument in every format
  F32 q, k, v;
  S32 layer, table, starts, lengths, offsets, window;
  ffi::ResultBuffer<ffi::F32> out;
  float scale, softcap;
  bool bf16;

  int64_t at() const { return layer.typed_data()[0]; }
  ffi::Error fault(int64_t layers, int64_t kv_heads) const {
    const int64_t d = q.dimensions()[2];
    if (at() < 0 || at() >= layers) return ffi::Error::InvalidArgument("paged_prefill: layer is outside the pool");
    if (d % 16 || d > kMaxHeadDim) return ffi::Error::InvalidArgument("paged_prefill: head_dim must be a multiple of 16");
    if (q.dimensions()[1] / kv_heads > kQueries)
      return ffi::Error::InvalidArgument("paged_prefill: too many query heads share a kv head");
    return ffi::Error::Success();
  }
};

template <typename Pages>
ffi::Error prefill(ffi::ThreadPool& pool, Given& given, int64_t num_pages, int64_t kv_heads, int64_t page_size,
                   const Pages& pages) {
  const auto qs = given.q.dimensions();  // tokens q_heads d
  const int64_t group = qs[1] / kv_heads;
  const Problem z{qs[0], qs[1], kv_heads, group, qs[2], num_pages, page_size, given.table.dimensions()[1],
                  given.window.typed_data()[0], kQueries / group, given.scale, given.softcap, given.q.typed_data(),
                  given.k.typed_data(), given.v.typed_data(), given.table.typed_data(), given.out->typed_data()};
  std::fill(z.out, z.out + z.tokens * z.q_heads * z.head_dim, 0.0f);
  std::vector<Item> items;
  for (int64_t row = 0; row < given.lengths.dimensions()[0]; ++row) {
    const int64_t length = given.lengths.typed_data()[row];
    for (int64_t first = (length - 1) / z.per_item * z.per_item; length > 0 && first >= 0; first -= z.per_item)
      for (int64_t head = 0; head < z.kv_heads; ++head)
        items.push_back({row, head, given.starts.typed_data()[row], given.offsets.typed_data()[row], first,
                         std::min(z.per_item, length - first)});
  }
  parallel_for(pool, static_cast<int64_t>(items.size()), [&](int64_t i) {
    given.bf16 ? run_item<Bf16Ops>(z, pages, items[i]) : run_item<Float32Ops>(z, pages, items[i]);
  });
  return ffi::Error::Success();
}

ffi::Error OverFloats(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 starts, S32 lengths, S32 offsets,
                      S32 window, F32 pages, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, bool bf16) {
  Given given{q, k, v, layer, table, starts, lengths, offsets, window, out, scale, softcap, bf16};
  const auto ps = pages.dimensions();  // layers num_pages kv_heads 2 page_size d
  if (ffi::Error fault = given.fault(ps[0], ps[2]); fault.failure()) return fault;
  const FloatPages own{pages.typed_data() + given.at() * ps[1] * ps[2] * 2 * ps[4] * ps[5]};
  return prefill(pool, given, ps[1], ps[2], ps[4], own);
}

ffi::Error OverInt8(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 starts, S32 lengths, S32 offsets,
                    S32 window, S32 words, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap, bool bf16) {
  Given given{q, k, v, layer, table, starts, lengths, offsets, window, out, scale, softcap, bf16};
  const auto ps = words.dimensions();  // layers num_pages kv_heads page_words
  if (ffi::Error fault = given.fault(ps[0], ps[2]); fault.failure()) return fault;
  const Int8Pages own{words.typed_data() + given.at() * ps[1] * ps[2] * ps[3], ps[3]};
  return prefill(pool, given, ps[1], ps[2], ps[3] / (q.dimensions()[2] / 2 + 1), own);
}

ffi::Error OverBitmask(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 starts, S32 lengths, S32 offsets,
                       S32 window, S32 words, U16 recent, S32 slots, F32 rotation, ffi::ResultBuffer<ffi::F32> out, float scale,
                       float softcap, bool bf16) {
  Given given{q, k, v, layer, table, starts, lengths, offsets, window, out, scale, softcap, bf16};
  const auto ps = words.dimensions(), rs = recent.dimensions();  // layers num_pages kv_heads blocks words; layers slots ..
  const int64_t d = q.dimensions()[2];
  if (ffi::Error fault = given.fault(ps[0], ps[2]); fault.failure()) return fault;
  const int32_t* const own = words.typed_data() + given.at() * ps[1] * ps[2] * ps[3] * ps[4];
  const uint16_t* const rows = recent.typed_data() + given.at() * rs[1] * rs[2] * 2 * kRecent * d;
  const int32_t* const of_rows = slots.typed_data();
  const float* const matrix = rotation.typed_data();
  const auto run = [&](const auto& pages) { return prefill(pool, given, ps[1], ps[2], ps[3] * kBlock, pages); };
  if (ps[4] == BitmaskBlock<4>::words(d)) return run(BitmaskPages<4>{own, rows, of_rows, rs[1], matrix});
  if (ps[4] == BitmaskBlock<2>::words(d)) return run(BitmaskPages<2>{own, rows, of_rows, rs[1], matrix});
  return ffi::Error::InvalidArgument("paged_prefill: blocks of no format have that many words");
}

auto bound() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<F32>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<S32>()
      .Arg<S32>();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_prefill, zccp::OverFloats,
                              zccp::bound()
                                  .Arg<zccp::F32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("bf16"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_prefill_int8, zccp::OverInt8,
                              zccp::bound()
                                  .Arg<zccp::S32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("bf16"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_prefill_bitmask, zccp::OverBitmask,
                              zccp::bound()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::U16>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::F32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("bf16"));
