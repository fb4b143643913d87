// All other ops: each runs the host's kernel as a task of the current stream.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>

#include "kernels.h"

namespace sim {


template <class F>
IValue map_tensors(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return v;
}

std::string key_of(const c10::FunctionSchema& schema, const std::vector<IValue>& args) {
  std::ostringstream key;
  key.precision(17);
  key << schema.operator_name() << c10::get_default_dtype();
  for (const IValue& a : args) {
    bool has_tensors = false;
    map_tensors(a, [&](const Tensor& t) {
      has_tensors = true;
      if (!t.defined()) return key << "|none", t;
      key << '|' << t.sizes() << t.strides() << int(t.scalar_type()) << t.unsafeGetTensorImpl()->is_wrapped_number() << t.is_meta();
      return t;
    });
    if (!has_tensors) key << '|' << a;
  }
  return key.str();
}
bool takes_generator(const c10::TypePtr& t) {
  if (t->kind() == c10::TypeKind::OptionalType) return takes_generator(t->expectRef<c10::OptionalType>().getElementType());
  return t->kind() == c10::TypeKind::GeneratorType;
}
bool is_sim_value(const IValue& v) { return v.isTensor() && is_sim(v.toTensor()); }

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = handle.schema();
  const std::string name = schema.operator_name().name;
  const size_t n = schema.arguments().size();
  std::vector<IValue> args(stack->end() - n, stack->end());

  // Where it runs, and whether the arguments may meet there.
  int device = -1;
  bool indices_may_be_host = name.find("index") != std::string::npos;
  auto place = [&](Device d) {
    TORCH_CHECK(device < 0 || d.index() == device, "Expected all tensors to be on the same device, but found at least "
                "two devices, cuda:", device, " and ", d, "! (in ", name, ")");
    device = d.index();
  };
  for (const IValue& a : args) {
    map_tensors(a, [&](const Tensor& t) { return is_sim(t) ? (place(t.device()), t) : t; });
    if (a.isDevice() && a.toDevice().type() == kType) place(Device(kType, Guard::index(a.toDevice())));
  }
  if (device < 0) device = current_device;
  for (const IValue& a : args)
    map_tensors(a, [&](const Tensor& t) {
      TORCH_CHECK(!t.defined() || is_sim(t) || (t.is_cpu() && (t.dim() == 0 || indices_may_be_host)),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                  " and ", t.device(), "! (in ", name, ")");
      return t;
    });
  c10::DeviceGuard guard(Device(kType, device));
  Queue* q = current(device);

  // The kernel of the host. Ops that exist only for accelerators have another name there.
  auto op = handle;
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
    TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: ", name, " has no kernel for the host, so none for sim");
  bool is_random = false, is_plain = true;
  size_t generator_at = n;
  for (size_t i = 0; i < n; ++i)
    if (takes_generator(schema.arguments()[i].type())) generator_at = i, is_random = true;
  for (auto tag : op.getTags())
    TORCH_CHECK_NOT_IMPLEMENTED(tag != at::Tag::nondeterministic_seeded || is_random,
                                "sim: ", name, " is random without a generator");
  for (const auto& r : schema.returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!r.alias_info() || r.alias_info()->isWrite(), "sim: the view op ", name, " is missing");
    is_plain = is_plain && (r.type()->isSubtypeOf(*c10::TensorType::get()) ||
                            r.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  }

  // Shapes, dtypes and errors come from the meta kernel, in the caller.
  std::vector<std::pair<c10::TensorImpl*, Tensor>> metas;
  auto as_meta = [&](const Tensor& t) {
    if (!is_sim(t)) return t;
    for (auto& [impl, meta] : metas)
      if (impl == t.unsafeGetTensorImpl()) return meta;
    Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
    metas.emplace_back(t.unsafeGetTensorImpl(), meta);
    return meta;
  };
  torch::jit::Stack shapes;
  for (size_t i = 0; i < n; ++i)
    shapes.push_back(i == generator_at ? IValue() : args[i].isDevice() ? IValue(Device(at::kMeta)) : map_tensors(args[i], as_meta));
  std::vector<IValue> meta_args(shapes);
  bool has_shapes = is_plain;
  if (has_shapes) {
    // Many meta kernels are Python and take a millisecond, so their answers are kept. Errors are not.
    using Answer = std::pair<std::vector<IValue>, std::vector<IValue>>;
    static std::mutex known_mutex;
    static auto* known = new std::unordered_map<std::string, Answer>;
    std::string key = key_of(schema, shapes);
    bool is_known = false;
    {
      std::lock_guard lock(known_mutex);
      if (auto it = known->find(key); it != known->end()) is_known = true, std::tie(shapes, meta_args) = it->second;
    }
    try {
      if (!is_known) op.callBoxed(&shapes);
    } catch (const std::exception&) {
      has_shapes = false;
    }
    if (has_shapes && !is_known) {
      std::lock_guard lock(known_mutex);
      if (known->size() > 10000) known->clear();
      known->emplace(std::move(key), Answer(shapes, meta_args));
    }
  }
  bool only_writes = true;  // an in-place op needs no shapes
  for (const auto& r : schema.returns()) only_writes = only_writes && r.alias_info() != nullptr;
  only_writes = only_writes && schema.overload_name().find("out") == std::string::npos;
  bool is_async = has_shapes || (is_plain && only_writes && !schema.returns().empty());

  // Results: arguments that are written, or new tensors.
  std::vector<IValue> results;
  std::vector<Tensor> fresh;
  auto written = [&](size_t i) -> size_t {
    for (size_t j = 0; j < n; ++j)
      if (schema.arguments()[j].alias_info() && schema.returns()[i].alias_info() &&
          schema.arguments()[j].alias_info()->beforeSets() == schema.returns()[i].alias_info()->beforeSets()) return j;
    return n;
  };
  if (has_shapes)
    for (size_t i = 0; i < n; ++i)
      if (schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite() && is_sim_value(args[i])) {
        const Tensor &have = args[i].toTensor(), &want = meta_args[i].toTensor();
        if (have.sizes() == want.sizes()) continue;
        resize_(have, want.sizes(), {});
        have.unsafeGetTensorImpl()->set_sizes_and_strides(want.sizes(), want.strides());
      }
  for (size_t i = 0; is_async && i < schema.returns().size(); ++i) {
    size_t j = written(i);
    if (j < n) results.push_back(args[j]);
    else
      results.push_back(map_tensors(shapes[i], [&](const Tensor& meta) {
        if (!meta.defined()) return meta;
        fresh.push_back(new_like(meta, device));
        return fresh.back();
      }));
  }

  // What the kernel gets: the host's views of the memory, and copies of what the host may change after the call.
  std::vector<std::pair<c10::TensorImpl*, Tensor>> views;
  auto as_host = [&](const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [impl, view] : views)
      if (impl == t.unsafeGetTensorImpl()) return view;
    bool is_number = t.unsafeGetTensorImpl()->is_wrapped_number();
    Tensor view = is_sim(t) ? host_view(t) : t.detach().clone();
    if (is_number) view.unsafeGetTensorImpl()->set_wrapped_number(true);
    views.emplace_back(t.unsafeGetTensorImpl(), view);
    return view;
  };
  torch::jit::Stack call;
  uint64_t numel = 0;
  for (size_t i = 0; i < n; ++i) {
    call.push_back(args[i].isDevice() ? IValue(Device(at::kCPU)) : map_tensors(args[i], as_host));
    map_tensors(args[i], [&](const Tensor& t) { return numel = std::max<uint64_t>(numel, t.defined() ? t.numel() : 0), t; });
  }
  for (const Tensor& t : fresh) numel = std::max<uint64_t>(numel, t.numel());
  if (is_random) call[generator_at] = generator(args[generator_at], device)->take(numel);

  std::vector<bool> is_new;
  for (size_t i = 0; i < schema.returns().size(); ++i) is_new.push_back(written(i) == n);
  if (is_async) {
    std::vector<Tensor> into;
    for (const Tensor& t : fresh) into.push_back(host_view(t));
    launch(q, name, [op, call, into, is_new]() mutable {
      op.callBoxed(&call);
      size_t k = 0;
      for (size_t i = 0; i < call.size(); ++i)
        if (is_new[i])
          map_tensors(call[i], [&](const Tensor& t) {
            if (!t.defined()) return t;
            TORCH_CHECK(k < into.size() && into[k].sizes() == t.sizes(), op.schema().name(), ": shape is not meta's");
            into[k++].copy_(t);
            return t;
          });
    });
  } else {  // the result's shape depends on data, or the result is a number: the host has to wait, as with CUDA
    Guard::py_free([&] { drain(q, name); });
    {
      std::lock_guard lock(counters.m);
      ++counters.kernels, ++counters.not_async, ++counters.not_async_ops[name];
    }
    op.callBoxed(&call);
    for (size_t i = 0; i < call.size(); ++i)
      results.push_back(!is_new[i] ? args[written(i)] : map_tensors(call[i], [&](const Tensor& t) {
        if (!t.defined()) return t;
        Tensor out = new_like(t, device);
        if (t.numel()) q->push([to = host_view(out), t] { to.copy_(t); });
        return out;
      }));
  }
  stack->erase(stack->end() - n, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

// The convolutions of an accelerator that is not in PyTorch go to ops of their own.
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
                   int64_t groups) {
  auto run = [=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec()](
                 const Tensor& x, const Tensor& w, const std::optional<Tensor>& b) {
    return at::convolution(x, w, b, s, p, d, transposed, o, groups);
  };
  auto meta = [](const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)); };
  bool has = b && b->defined();
  Tensor out = new_like(run(meta(x), meta(w), has ? std::optional<Tensor>(meta(*b)) : std::nullopt), x.device().index());
  launch(current(x.device().index()), "convolution",
         [run, x = host_view(x), w = host_view(w), b = has ? std::optional<Tensor>(host_view(*b)) : std::nullopt,
          out = host_view(out)] { out.copy_(run(x, w, b)); });
  return out;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  int device = x.device().index();
  Tensor gx, gw, gb;
  if (mask[0]) gx = at::empty_like(x);
  if (mask[1]) gw = at::empty_like(w);
  if (mask[2]) gb = at::empty({g.size(1)}, g.options());
  auto host = [](const Tensor& t) { return t.defined() ? host_view(t) : t; };
  launch(current(device), "convolution_backward",
         [=, s = stride.vec(), p = padding.vec(), d = dilation.vec(), o = output_padding.vec(), g = host(g), x = host(x),
          w = host(w), a = std::array<Tensor, 3>{host(gx), host(gw), host(gb)}] {
           int64_t channels[] = {g.size(1)};
           at::IntArrayRef bias(channels, 1);
           auto r = at::convolution_backward(g, x, w, bias, s, p, d, transposed, o, groups, mask);
           if (mask[0]) a[0].copy_(std::get<0>(r));
           if (mask[1]) a[1].copy_(std::get<1>(r));
           if (mask[2]) a[2].copy_(std::get<2>(r));
         });
  return {gx, gw, gb};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Storage", [](Tensor& self, c10::Storage s) -> Tensor& { return at::native::set_(self, s); });
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("copy_", &copy_);  // PyTorch's own expects CUDA's copy kernel
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("native_dropout", &native_dropout);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}
}  // namespace sim

