// Ops that the simulated device needs of its own: those that make, view, copy or read memory, and a few that CUDA fuses.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "hooks.h"

namespace sim {

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kType; }

Tensor host_view(const Tensor& t) {  // the host's tensor over the memory of a device's tensor; keeps nothing alive
  auto options = at::TensorOptions(t.scalar_type());
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  char* p = static_cast<char*>(const_cast<void*>(t.storage().data())) + t.storage_offset() * t.itemsize();
  Tensor view = at::from_blob(is_sim(t) ? shadow(p) : p, t.sizes(), t.strides(), options);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}
Tensor new_like(const Tensor& meta, int device) {
  return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {}, Device(kType, device), {});
}

void resize_storage(c10::StorageImpl* storage, size_t n) {
  c10::DeviceGuard guard(storage->device());
  at::DataPtr fresh = allocator().allocate(n);
  size_t kept = std::min(n, storage->nbytes());
  if (kept)
    launch(current(storage->device().index()), "resize", [a = shadow(fresh.get()), b = shadow(storage->data()), kept] {
      std::memcpy(a, b, kept);
    });
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(n);
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}
Tensor& set_(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  Tensor src = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  auto count = [&](int64_t Counters::* which) {
    std::lock_guard lock(counters.m);
    counters.*which += int64_t(dst.numel() * src.itemsize());
  };
  auto copy = [](const Tensor& to, const Tensor& from, std::shared_ptr<HostBlock> keep = nullptr) {
    return [to, from, keep] { to.copy_(from); };
  };
  if (is_sim(src) && is_sim(dst)) {
    Queue *from = current(src.device().index()), *to = current(dst.device().index());
    count(&Counters::d2d);
    if (from != to) wait_in(from, mark(to));
    launch(from, "copy", copy(host_view(dst), host_view(src)));
    if (from != to) wait_in(to, mark(from));
  } else if (is_sim(dst)) {
    Queue* q = current(dst.device().index());
    count(&Counters::h2d);
    auto block = pinned().find(src.const_data_ptr());
    if (block) launch(q, "copy", copy(host_view(dst), host_view(src), block));
    else launch(q, "copy", copy(host_view(dst), src.detach().clone()));  // pageable: staged before the call returns
    if (!non_blocking) Guard::py_free([&] { drain(q, "copy to the device"); });
  } else {
    Queue* q = current(src.device().index());
    count(&Counters::d2h);
    auto block = pinned().find(dst.const_data_ptr());
    launch(q, "copy", copy(host_view(dst), host_view(src), block));
    if (!non_blocking || !block)
      Guard::py_free([&] { drain(q, non_blocking ? "copy to pageable host memory" : "copy to the host"); });
  }
  return dst;
}
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) { return copy_from(src, self, non_blocking), self; }
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  Guard::py_free([&] { drain(current(self.device().index()), "item"); });
  return at::_local_scalar_dense(host_view(self));
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}
int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the one of plain ops
}
void record_stream(Tensor& self, Stream s) { allocator().recordStream(self.storage().data_ptr(), s); }

}  // namespace sim
