// paged_decode on the CPU: one work item a (slot, kv head, stretch of pages), online softmax in registers. float32 pages are
// read where they lie; those of other formats become floats a few positions at a time, in the first cache.
//
// Bound by reading the keys and values once: 2 * length * kv_heads * head_dim * 4 bytes a slot and layer for float32 pages; by
// their arithmetic in other formats.

#include "pallas_kernels/native.h"
#include "pallas_kernels/pages.h"

namespace zccp {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U16 = ffi::Buffer<ffi::U16>;

namespace {

constexpr int64_t kStretch = 512;  // positions of one work item, so that one long context keeps all cores busy
constexpr int64_t kTile = 64;      // positions whose scores are held at a time
constexpr int64_t kUnpacked = 32;  // positions that are unpacked at a time
constexpr float kMasked = -1e30f;

struct Problem {
  int64_t slots, q_heads, kv_heads, group, head_dim, num_pages, page_size, width, window;
  float scale, softcap;
  const float *q, *k, *v;
  const int32_t *table, *lengths;
  float* out;
};

struct Partial {  // of one (slot, kv head, stretch): group peaks, totals and weighted sums
  float* peak;
  float* total;
  float* weighted;
};

// weighted = weighted * factor + the sum of n rows of values times their weights, for 16 * kVectors channels.
template <int kVectors>
void add_values(const float* values, int64_t stride, const float* weights, int64_t n, float factor, float* weighted) {
  TileRow<Float32Ops, kVectors> sums;
  sums.each(0, 0, [&](int, int v, v16& sum) { sum = load(weighted + 16 * v) * factor; });
  for (int64_t i = 0; i < n; ++i) sums.multiply_add(values + i * stride, splat(weights[i]));
  sums.each(0, 0, [&](int, int v, v16 sum) { store(weighted + 16 * v, sum); });
}

// The same for d channels.
void add_rows(const float* values, int64_t d, const float* weights, int64_t n, float factor, float* to) {
  for (int64_t j = 0; j < d;) {  // four sums at a time hide each other's latency
    float* weighted = to + j;
    const int64_t vectors = std::min<int64_t>(4, (d - j) / 16);
    switch (vectors) {
      case 4: add_values<4>(values + j, d, weights, n, factor, weighted); break;
      case 3: add_values<3>(values + j, d, weights, n, factor, weighted); break;
      case 2: add_values<2>(values + j, d, weights, n, factor, weighted); break;
      default: add_values<1>(values + j, d, weights, n, factor, weighted); break;
    }
    j += vectors * 16;
  }
}

// Adds n <= kTile positions whose keys and values lie back to back.
void tile(const Problem& z, const float* q, const float* keys, const float* values, int64_t n, Partial out) {
  const int64_t d = z.head_dim;
  alignas(64) float scores[kTile];
  for (int64_t g = 0; g < z.group; ++g) {
    for (int64_t i = n; i < (n + 15) / 16 * 16; ++i) scores[i] = kMasked;
    float peak = out.peak[g];
    for (int64_t i = 0; i < n; ++i) {
      v16 dot = splat(0.0f);
      for (int64_t j = 0; j < d; j += 16) dot += load(q + g * d + j) * load(keys + i * d + j);
      float score = sum(dot) * z.scale;
      if (z.softcap > 0) score = z.softcap * std::tanh(score / z.softcap);
      scores[i] = score;
      peak = std::max(peak, score);
    }
    const float factor = std::exp(out.peak[g] - peak);
    v16 total = splat(0.0f);
    for (int64_t i = 0; i < n; i += 16) {
      v16 weight = exp16(load(scores + i) - peak);
      store(scores + i, weight);
    }
    for (int64_t i = n; i < (n + 15) / 16 * 16; ++i) scores[i] = 0.0f;
    for (int64_t i = 0; i < n; i += 16) total += load(scores + i);
    out.peak[g] = peak;
    out.total[g] = out.total[g] * factor + sum(total);
    add_rows(values, d, scores, n, factor, out.weighted + g * d);
  }
}

// Scratch of the calling thread.
float* scratch(int64_t floats) {
  static thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < floats + 16) kept.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64);
}

// Adds the positions [first, end) of a block, whose values stay turned. Scores are held by positions: these are the lanes.
template <int kBits>
void block_tile(const Problem& z, const float* q, const BitmaskBlock<kBits>& block, int64_t first, int64_t end, Partial out) {
  constexpr int64_t kChannels = 16;
  const int64_t d = z.head_dim;
  float* const scores = scratch(z.group * (kBlock + 1) + std::max(kChannels * kBlock, kQuarter * d));
  float* const unpacked = scores + z.group * kBlock;
  float* const factors = unpacked + std::max(kChannels * kBlock, kQuarter * d);
  std::fill(scores, scores + z.group * kBlock, 0.0f);
  for (int64_t i = 0; i < d; i += kChannels) {
    for (int64_t j = 0; j < kChannels; ++j) block.channel_keys(i + j, unpacked + j * kBlock);
    for (int64_t g = 0; g < z.group; ++g) {
      TileRow<Float32Ops, kBlock / 16> sums;
      sums.each(0, 0, [&](int, int v, v16& sum) { sum = load(scores + g * kBlock + 16 * v); });
      for (int64_t j = 0; j < kChannels; ++j) sums.multiply_add(unpacked + j * kBlock, splat(q[g * d + i + j]));
      sums.each(0, 0, [&](int, int v, v16 sum) { store(scores + g * kBlock + 16 * v, sum); });
    }
  }
  for (int64_t g = 0; g < z.group; ++g) {
    float* const own = scores + g * kBlock;
    float peak = out.peak[g];
    for (int64_t i = first; i < end; ++i) {
      own[i] *= z.scale;
      if (z.softcap > 0) own[i] = z.softcap * std::tanh(own[i] / z.softcap);
      peak = std::max(peak, own[i]);
    }
    std::fill(own, own + first, kMasked);  // far below the peak, which some score has
    std::fill(own + end, own + kBlock, kMasked);
    factors[g] = std::exp(out.peak[g] - peak);
    v16 total = splat(0.0f);
    for (int64_t i = 0; i < kBlock; i += 16) {
      const v16 weight = exp16(load(own + i) - peak);
      store(own + i, weight);
      total += weight;
    }
    out.peak[g] = peak;
    out.total[g] = out.total[g] * factors[g] + sum(total);
  }
  for (int64_t quarter = first / kQuarter; quarter * kQuarter < end; ++quarter) {
    block.quarter_values(quarter, first, end, unpacked);
    for (int64_t g = 0; g < z.group; ++g) {
      add_rows(unpacked, d, scores + g * kBlock + quarter * kQuarter, kQuarter, factors[g], out.weighted + g * d);
      factors[g] = 1.0f;
    }
  }
}

// How an item reads a page of one kv head. `stored` says which positions of a history of some length lie in pages, `run` how
// many from one on are added at once; kBeside: others lie beside pages, and values in pages are turned.
struct FloatPages {
  static constexpr bool kBeside = false;
  const float* data;  // of the layer, as below

  static std::pair<int64_t, int64_t> stored(int64_t length) { return {0, length}; }
  static int64_t run(const Problem& z, int64_t in_page) { return std::min(z.page_size - in_page, kTile); }
  void add(const Problem& z, const float* q, int64_t page, int64_t in_page, int64_t n, Partial out) const {
    const int64_t head_floats = z.page_size * z.head_dim;
    const float* const keys = data + page * 2 * head_floats;
    tile(z, q, keys + in_page * z.head_dim, keys + head_floats + in_page * z.head_dim, n, out);
  }
};

struct Int8Pages {
  static constexpr bool kBeside = false;
  const int32_t* words;
  int64_t page_words;

  static std::pair<int64_t, int64_t> stored(int64_t length) { return {0, length}; }
  static int64_t run(const Problem& z, int64_t in_page) { return std::min(z.page_size - in_page, kUnpacked); }
  void add(const Problem& z, const float* q, int64_t page, int64_t in_page, int64_t n, Partial out) const {
    float* const keys = scratch(2 * kUnpacked * z.head_dim);
    float* const values = keys + kUnpacked * z.head_dim;
    unpack_int8_page(words + page * page_words, z.page_size, z.head_dim, in_page, n, keys, values);
    tile(z, q, keys, values, n, out);
  }
};

template <int kBits>
struct BitmaskPages {
  static constexpr bool kBeside = true;
  const int32_t* words;
  const uint16_t* recent;  // of the layer: [slots, kv_heads, 2, kRecent, d]
  const float* back;       // [d, d], which turns a row of values back

  static std::pair<int64_t, int64_t> stored(int64_t length) { return {kSinks, length / kBlock * kBlock}; }
  static int64_t run(const Problem&, int64_t in_page) { return kBlock - in_page % kBlock; }
  void add(const Problem& z, const float* q, int64_t page, int64_t in_page, int64_t n, Partial out) const {
    const int64_t d = z.head_dim, index = page * (z.page_size / kBlock) + in_page / kBlock;
    const BitmaskBlock<kBits> block(words + index * BitmaskBlock<kBits>::words(d), d);
    block_tile(z, q, block, in_page % kBlock, in_page % kBlock + n, out);
  }
  // Adds the positions of a slot from `oldest` on that lie beside pages.
  void add_beside(const Problem& z, const float* q, int64_t slot, int64_t head, int64_t oldest, Partial out) const {
    const int64_t d = z.head_dim, length = z.lengths[slot], opened = std::max(kSinks, length / kBlock * kBlock);
    const RecentRows rows{recent + (slot * z.kv_heads + head) * 2 * kRecent * d, d};
    float* const keys = scratch(2 * kUnpacked * d);
    float* const values = keys + kUnpacked * d;
    const std::pair<int64_t, int64_t> parts[] = {{0, std::min(kSinks, length)}, {opened, length}};
    for (const auto& [first, end] : parts)
      for (int64_t p = std::max(first, oldest), n; p < end; p += n) {
        n = std::min(kUnpacked, end - p);
        widen(rows.key(p), n * d, keys);
        widen(rows.value(p), n * d, values);
        tile(z, q, keys, values, n, out);
      }
  }
};

template <typename Pages>
void run_item(const Problem& z, const Pages& pages, int64_t slot, int64_t head, int64_t stretch, bool beside, Partial partial) {
  const int64_t length = z.lengths[slot], oldest = z.window > 0 ? std::max<int64_t>(0, length - z.window + 1) : 0;
  const float* const queries = z.q + (slot * z.q_heads + head * z.group) * z.head_dim;
  const auto [first, stored] = Pages::stored(length);
  const int64_t end = std::min(stored, (stretch + 1) * kStretch);
  for (int64_t p = std::max({first, oldest, stretch * kStretch}), n; p < end; p += n) {
    const int64_t in_page = p % z.page_size;
    n = std::min(end - p, Pages::run(z, in_page));
    const int64_t id = std::clamp<int64_t>(z.table[slot * z.width + p / z.page_size], 0, z.num_pages - 1);
    pages.add(z, queries, id * z.kv_heads + head, in_page, n, partial);
  }
  if (!beside) return;
  if constexpr (Pages::kBeside) pages.add_beside(z, queries, slot, head, oldest, partial);
  const int64_t own = (slot * z.kv_heads + head) * z.head_dim;  // the new token itself
  tile(z, queries, z.k + own, z.v + own, 1, partial);
}

template <typename Pages>
ffi::Error decode(ffi::ThreadPool& pool, const Problem& z, const Pages& pages) {
  const int64_t d = z.head_dim;
  int64_t longest = 0;
  for (int64_t s = 0; s < z.slots; ++s) longest = std::max<int64_t>(longest, z.lengths[s]);
  const int64_t stretches = std::max<int64_t>(1, (longest + kStretch - 1) / kStretch);
  const int64_t parts = stretches + Pages::kBeside;  // what is not turned gets sums of its own
  const int64_t items = z.slots * z.kv_heads * parts;
  std::vector<float> peaks(items * z.group, kMasked), totals(items * z.group, 0.0f), sums(items * z.group * d, 0.0f);

  parallel_for(pool, items, [&](int64_t item) {
    const int64_t stretch = item % parts, head = item / parts % z.kv_heads, s = item / parts / z.kv_heads;
    const Partial partial{peaks.data() + item * z.group, totals.data() + item * z.group, sums.data() + item * z.group * d};
    run_item(z, pages, s, head, stretch, stretch == (Pages::kBeside ? stretches : 0), partial);
  });

  std::vector<float> turned(Pages::kBeside ? d : 0);
  for (int64_t row = 0; row < z.slots * z.kv_heads; ++row)
    for (int64_t g = 0; g < z.group; ++g) {
      float peak = kMasked, total = 0.0f;
      for (int64_t t = 0; t < parts; ++t) peak = std::max(peak, peaks[(row * parts + t) * z.group + g]);
      float* result = z.out + (row * z.group + g) * d;
      std::fill(result, result + d, 0.0f);
      for (int64_t t = 0; t < parts; ++t) {
        if constexpr (Pages::kBeside)
          if (t == stretches) {
            std::copy(result, result + d, turned.data());
            turn(turned.data(), pages.back, d, result);
          }
        const int64_t part = (row * parts + t) * z.group + g;
        const float factor = std::exp(peaks[part] - peak);
        total += totals[part] * factor;
        for (int64_t j = 0; j < d; ++j) result[j] += sums[part * d + j] * factor;
      }
      for (int64_t j = 0; j < d; ++j) result[j] /= total;
    }
  return ffi::Error::Success();
}

struct Given {  // what is an argument in every format
  F32 q, k, v;
  S32 layer, table, lengths, window;
  ffi::ResultBuffer<ffi::F32> out;
  float scale, softcap;

  Problem problem(int64_t num_pages, int64_t kv_heads, int64_t page_size) {
    const auto qs = q.dimensions();  // slots q_heads head_dim
    return {qs[0], qs[1], kv_heads, qs[1] / kv_heads, qs[2], num_pages, page_size, table.dimensions()[1],
            window.typed_data()[0], scale, softcap, q.typed_data(), k.typed_data(), v.typed_data(), table.typed_data(),
            lengths.typed_data(), out->typed_data()};
  }
  int64_t at() const { return layer.typed_data()[0]; }
  ffi::Error fault(int64_t layers) const {
    if (at() < 0 || at() >= layers) return ffi::Error::InvalidArgument("paged_decode: layer is outside the pool");
    if (q.dimensions()[2] % 16) return ffi::Error::InvalidArgument("paged_decode: head_dim must be a multiple of 16");
    return ffi::Error::Success();
  }
};

ffi::Error OverFloats(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 lengths, S32 window, F32 pages,
                      ffi::ResultBuffer<ffi::F32> out, float scale, float softcap) {
  Given given{q, k, v, layer, table, lengths, window, out, scale, softcap};
  const auto ps = pages.dimensions();  // layers num_pages kv_heads 2 page_size head_dim
  if (ffi::Error fault = given.fault(ps[0]); fault.failure()) return fault;
  const Problem z = given.problem(ps[1], ps[2], ps[4]);
  return decode(pool, z, FloatPages{pages.typed_data() + given.at() * ps[1] * ps[2] * 2 * ps[4] * ps[5]});
}

ffi::Error OverInt8(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 lengths, S32 window, S32 words,
                    ffi::ResultBuffer<ffi::F32> out, float scale, float softcap) {
  Given given{q, k, v, layer, table, lengths, window, out, scale, softcap};
  const auto ps = words.dimensions();  // layers num_pages kv_heads page_words
  if (ffi::Error fault = given.fault(ps[0]); fault.failure()) return fault;
  const Problem z = given.problem(ps[1], ps[2], ps[3] / (q.dimensions()[2] / 2 + 1));
  return decode(pool, z, Int8Pages{words.typed_data() + given.at() * ps[1] * ps[2] * ps[3], ps[3]});
}

ffi::Error OverBitmask(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 layer, S32 table, S32 lengths, S32 window, S32 words,
                       U16 recent, F32 back, ffi::ResultBuffer<ffi::F32> out, float scale, float softcap) {
  Given given{q, k, v, layer, table, lengths, window, out, scale, softcap};
  const auto ps = words.dimensions(), rs = recent.dimensions();  // layers num_pages kv_heads blocks words; layers slots ..
  if (ffi::Error fault = given.fault(ps[0]); fault.failure()) return fault;
  if (rs[1] < q.dimensions()[0]) return ffi::Error::InvalidArgument("paged_decode: more slots than rows beside pages");
  const Problem z = given.problem(ps[1], ps[2], ps[3] * kBlock);
  const int32_t* const own = words.typed_data() + given.at() * ps[1] * ps[2] * ps[3] * ps[4];
  const uint16_t* const rows = recent.typed_data() + given.at() * rs[1] * rs[2] * 2 * kRecent * z.head_dim;
  if (ps[4] == BitmaskBlock<4>::words(z.head_dim)) return decode(pool, z, BitmaskPages<4>{own, rows, back.typed_data()});
  if (ps[4] == BitmaskBlock<2>::words(z.head_dim)) return decode(pool, z, BitmaskPages<2>{own, rows, back.typed_data()});
  return ffi::Error::InvalidArgument("paged_decode: blocks of no format have that many words");
}

auto bound() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Arg<S32>().Arg<S32>();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_decode, zccp::OverFloats,
                              zccp::bound()
                                  .Arg<zccp::F32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_decode_int8, zccp::OverInt8,
                              zccp::bound()
                                  .Arg<zccp::S32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_decode_bitmask, zccp::OverBitmask,
                              zccp::bound()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::U16>()
                                  .Arg<zccp::F32>()
                                  .Ret<zccp::F32>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));
