// page_write on the CPU: copies of head_dim floats, layers side by side. Bound by memory.

#include "pallas_kernels/native.h"

namespace zccp {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

ffi::Error PageWrite(ffi::ThreadPool pool, F32 pages, F32 k, F32 v, S32 page_ids, S32 offsets,
                     ffi::ResultBuffer<ffi::F32> out) {
  const auto ps = pages.dimensions();  // layers num_pages kv_heads 2 page_size head_dim
  const int64_t num_pages = ps[1], heads = ps[2], page_size = ps[4], d = ps[5], tokens = page_ids.dimensions()[0];
  float* const to = out->typed_data();
  if (to != pages.typed_data()) std::memcpy(to, pages.typed_data(), pages.size_bytes());  // the caller kept its pool
  parallel_for(pool, ps[0], [&](int64_t layer) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t id = page_ids.typed_data()[t], offset = offsets.typed_data()[t];
      if (id < 0 || id >= num_pages || offset < 0 || offset >= page_size) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = ((layer * tokens + t) * heads + h) * d;
        float* const keys = to + ((((layer * num_pages + id) * heads + h) * 2) * page_size + offset) * d;
        std::memcpy(keys, k.typed_data() + from, d * sizeof(float));
        std::memcpy(keys + page_size * d, v.typed_data() + from, d * sizeof(float));
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace zccp

XLA_FFI_DEFINE_HANDLER_SYMBOL(zccp_page_write, zccp::PageWrite,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
