// page_write on the CPU: copies of head_dim floats, or codes of them, layers side by side. Bound by memory.

#include "pallas_kernels/native.h"
#include "pallas_kernels/pages.h"

namespace zccp {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

namespace {

// Runs body(layer, token, page, offset) for every token that has a place, layers side by side.
template <typename Body>
void each_place(ffi::ThreadPool& pool, int64_t layers, int64_t num_pages, int64_t page_size, const S32& page_ids,
                const S32& offsets, const Body& body) {
  parallel_for(pool, layers, [&](int64_t layer) {
    for (int64_t t = 0; t < static_cast<int64_t>(page_ids.element_count()); ++t) {
      const int64_t id = page_ids.typed_data()[t], offset = offsets.typed_data()[t];
      if (id < 0 || id >= num_pages || offset < 0 || offset >= page_size) continue;
      body(layer, t, id, offset);
    }
  });
}

ffi::Error Floats(ffi::ThreadPool pool, F32 pages, F32 k, F32 v, S32 page_ids, S32 offsets, ffi::ResultBuffer<ffi::F32> out) {
  const auto ps = pages.dimensions();  // layers num_pages kv_heads 2 page_size head_dim
  const int64_t num_pages = ps[1], heads = ps[2], page_size = ps[4], d = ps[5], tokens = page_ids.dimensions()[0];
  float* const to = out->typed_data();
  if (to != pages.typed_data()) std::memcpy(to, pages.typed_data(), pages.size_bytes());  // the caller kept its pool
  each_place(pool, ps[0], num_pages, page_size, page_ids, offsets, [&](int64_t layer, int64_t t, int64_t id, int64_t offset) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = ((layer * tokens + t) * heads + h) * d;
      float* const keys = to + ((((layer * num_pages + id) * heads + h) * 2) * page_size + offset) * d;
      std::memcpy(keys, k.typed_data() + from, d * sizeof(float));
      std::memcpy(keys + page_size * d, v.typed_data() + from, d * sizeof(float));
    }
  });
  return ffi::Error::Success();
}

// The code words of d channels, and the bits of their scale; kv_int8 has the rounding.
uint32_t round_int8(const float* x, int64_t d, int32_t* words) {
  v16 most = splat(0.0f);
  for (int64_t i = 0; i < d; i += 16)
    most = (v16)_mm512_max_ps((__m512)most, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(d - i), x + i)));
  const float exact = std::max(_mm512_reduce_max_ps((__m512)most) / 127.0f, 1e-30f);
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to bf16, ties to even
  const v16 scale = splat(bf16_low(static_cast<int32_t>(bits)));
  const int64_t quarter = d / 4;
  for (int64_t j = 0; j < quarter; j += 16) {
    const __mmask16 here = first_lanes(quarter - j);
    const auto codes = [&](int64_t part) {
      const v16 share = (v16)_mm512_maskz_loadu_ps(here, x + part * quarter + j) / scale + 0.5f;
      const __m512 whole = _mm512_roundscale_ps((__m512)share, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
      const __m512 cut = _mm512_min_ps(_mm512_max_ps(whole, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f));
      return _mm512_and_si512(_mm512_cvtps_epi32(cut), _mm512_set1_epi32(0xff));
    };
    const __m512i low = _mm512_or_si512(codes(0), _mm512_slli_epi32(codes(1), 8));
    const __m512i high = _mm512_or_si512(_mm512_slli_epi32(codes(2), 16), _mm512_slli_epi32(codes(3), 24));
    _mm512_mask_storeu_epi32(words + j, here, _mm512_or_si512(low, high));
  }
  return bits;
}

ffi::Error Int8(ffi::ThreadPool pool, S32 words, F32 k, F32 v, S32 page_ids, S32 offsets, ffi::ResultBuffer<ffi::S32> out) {
  const auto ps = words.dimensions(), ks = k.dimensions();  // layers num_pages kv_heads page_words; layers tokens kv_heads d
  const int64_t num_pages = ps[1], heads = ps[2], page_words = ps[3], tokens = ks[1], d = ks[3];
  const int64_t page_size = page_words / (d / 2 + 1);
  int32_t* const to = out->typed_data();
  if (to != words.typed_data()) std::memcpy(to, words.typed_data(), words.size_bytes());
  each_place(pool, ps[0], num_pages, page_size, page_ids, offsets, [&](int64_t layer, int64_t t, int64_t id, int64_t offset) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = ((layer * tokens + t) * heads + h) * d;
      int32_t* const page = to + ((layer * num_pages + id) * heads + h) * page_words;
      const uint32_t key_scale = round_int8(k.typed_data() + from, d, page + offset * (d / 4));
      const uint32_t value_scale = round_int8(v.typed_data() + from, d, page + (page_size + offset) * (d / 4));
      page[page_size * (d / 2) + offset] = static_cast<int32_t>(key_scale | value_scale << 16);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_page_write, zccp::Floats,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Ret<zccp::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_page_write_int8, zccp::Int8,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::F32>()
                                  .Arg<zccp::S32>()
                                  .Arg<zccp::S32>()
                                  .Ret<zccp::S32>());
