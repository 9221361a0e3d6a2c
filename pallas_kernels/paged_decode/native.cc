// paged_decode on the CPU: one work item a (slot, kv head, stretch of pages), online softmax in registers, no copy of a page.
//
// Bound by reading the keys and values once: 2 * length * kv_heads * head_dim * 4 bytes a slot and layer.

#include "pallas_kernels/native.h"

namespace zccp {
namespace {

constexpr int64_t kStretch = 512;  // positions of one work item, so that one long context keeps all cores busy
constexpr int64_t kTile = 64;      // positions whose scores are held at a time
constexpr float kMasked = -1e30f;

struct Sizes {
  int64_t slots, q_heads, kv_heads, group, head_dim, num_pages, page_size, width;
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

// Adds n <= kTile positions whose keys and values lie back to back.
void tile(const Sizes& z, const float* q, const float* keys, const float* values, int64_t n, float scale, float softcap,
          Partial out) {
  const int64_t d = z.head_dim;
  alignas(64) float scores[kTile];
  for (int64_t g = 0; g < z.group; ++g) {
    for (int64_t i = n; i < (n + 15) / 16 * 16; ++i) scores[i] = kMasked;
    float peak = out.peak[g];
    for (int64_t i = 0; i < n; ++i) {
      v16 dot = splat(0.0f);
      for (int64_t j = 0; j < d; j += 16) dot += load(q + g * d + j) * load(keys + i * d + j);
      float score = sum(dot) * scale;
      if (softcap > 0) score = softcap * std::tanh(score / softcap);
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
    for (int64_t j = 0; j < d;) {  // four sums at a time hide each other's latency
      float* weighted = out.weighted + g * d + j;
      const int64_t vectors = std::min<int64_t>(4, (d - j) / 16);
      switch (vectors) {
        case 4: add_values<4>(values + j, d, scores, n, factor, weighted); break;
        case 3: add_values<3>(values + j, d, scores, n, factor, weighted); break;
        case 2: add_values<2>(values + j, d, scores, n, factor, weighted); break;
        default: add_values<1>(values + j, d, scores, n, factor, weighted); break;
      }
      j += vectors * 16;
    }
  }
}

ffi::Error PagedDecode(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                       ffi::Buffer<ffi::F32> pages, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> table,
                       ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> window, ffi::ResultBuffer<ffi::F32> out,
                       float scale, float softcap) {
  const auto qs = q.dimensions(), ps = pages.dimensions();  // slots q_heads head_dim; layers num_pages kv_heads 2 page_size d
  const Sizes z{qs[0], qs[1], ps[2], qs[1] / ps[2], qs[2], ps[1], ps[4], table.dimensions()[1]};
  const int64_t at = layer.typed_data()[0], reach = window.typed_data()[0];
  if (at < 0 || at >= ps[0]) return ffi::Error::InvalidArgument("paged_decode: layer is outside the pool");
  if (z.head_dim % 16) return ffi::Error::InvalidArgument("paged_decode: head_dim must be a multiple of 16");
  const int64_t d = z.head_dim, head_floats = z.page_size * d;
  const float* pool_data = pages.typed_data() + at * z.num_pages * z.kv_heads * 2 * head_floats;

  int64_t longest = 0;
  for (int64_t s = 0; s < z.slots; ++s) longest = std::max<int64_t>(longest, lengths.typed_data()[s]);
  const int64_t stretches = std::max<int64_t>(1, (longest + kStretch - 1) / kStretch);
  const int64_t items = z.slots * z.kv_heads * stretches;
  std::vector<float> peaks(items * z.group, kMasked), totals(items * z.group, 0.0f), sums(items * z.group * d, 0.0f);

  parallel_for(pool, items, [&](int64_t item) {
    const int64_t stretch = item % stretches, head = item / stretches % z.kv_heads, s = item / stretches / z.kv_heads;
    const int64_t length = lengths.typed_data()[s];
    const int64_t oldest = reach > 0 ? std::max<int64_t>(0, length - reach + 1) : 0;
    const int64_t end = std::min(length, (stretch + 1) * kStretch);
    const float* queries = q.typed_data() + (s * z.q_heads + head * z.group) * d;
    const Partial partial{peaks.data() + item * z.group, totals.data() + item * z.group, sums.data() + item * z.group * d};
    for (int64_t p = std::max(oldest, stretch * kStretch); p < end;) {
      const int64_t in_page = p % z.page_size;
      const int64_t n = std::min({end - p, z.page_size - in_page, kTile});
      const int64_t id = std::clamp<int64_t>(table.typed_data()[s * z.width + p / z.page_size], 0, z.num_pages - 1);
      const float* keys = pool_data + (id * z.kv_heads + head) * 2 * head_floats;
      tile(z, queries, keys + in_page * d, keys + head_floats + in_page * d, n, scale, softcap, partial);
      p += n;
    }
    if (stretch == 0)  // the new token itself
      tile(z, queries, k.typed_data() + (s * z.kv_heads + head) * d, v.typed_data() + (s * z.kv_heads + head) * d, 1, scale,
           softcap, partial);
  });

  for (int64_t row = 0; row < z.slots * z.kv_heads; ++row)
    for (int64_t g = 0; g < z.group; ++g) {
      float peak = kMasked, total = 0.0f;
      for (int64_t t = 0; t < stretches; ++t) peak = std::max(peak, peaks[(row * stretches + t) * z.group + g]);
      float* result = out->typed_data() + (row * z.group + g) * d;
      std::fill(result, result + d, 0.0f);
      for (int64_t t = 0; t < stretches; ++t) {
        const int64_t part = (row * stretches + t) * z.group + g;
        const float factor = std::exp(peaks[part] - peak);
        total += totals[part] * factor;
        for (int64_t j = 0; j < d; ++j) result[j] += sums[part * d + j] * factor;
      }
      for (int64_t j = 0; j < d; ++j) result[j] /= total;
    }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_paged_decode, zccp::PagedDecode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));
