// The extension module: it registers the simulated device, and gives Python its settings, counters and memory.
#include <torch/csrc/Generator.h>

#include "dispatch.h"

PYBIND11_MODULE(_simulated_cuda, m) {
  using namespace sim;
  c10::SetAllocator(kType, &allocator());
  // `import torch` may have made PyTorch's own hooks ("no CUDA") already, and keeps them for good: change their class.
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  *reinterpret_cast<void**>(hooks) = *reinterpret_cast<void**>(new Hooks);
  // Ops with a kernel for the host and another one in plain ops: take the host's, so that the bits are the host's.
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(op_name);
    if (!op || !op->hasSchema() || op_name.name.compare(0, 6, "aten::") != 0) continue;
    bool is_plain = !op->hasKernelForDispatchKey(kKey) && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                    op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    for (const auto& r : op->schema().returns())
      is_plain = is_plain && r.type()->kind() == c10::TypeKind::TensorType && (!r.alias_info() || r.alias_info()->isWrite());
    if (is_plain)
      library.impl((op_name.name.substr(6) + (op_name.overload_name.empty() ? "" : "." + op_name.overload_name)).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  pthread_atfork(nullptr, nullptr, [] { bad_fork = initialised.load(); });
  m.def("is_in_bad_fork", [] { return bad_fork.load(); });
  m.def("is_initialized", [] { return initialised && !bad_fork; });
  m.def("default_generator", [](int d) { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(d))); });
  m.def("settings", [](std::optional<std::pair<int64_t, int64_t>> delay_us, std::optional<bool> lazy,
                       std::optional<bool> poison, std::optional<bool> where, std::optional<int64_t> limit,
                       std::optional<int> sync_debug, std::optional<int64_t> kernel_us) {
    if (kernel_us) settings.kernel_us = *kernel_us;
    if (sync_debug) settings.sync_debug = *sync_debug;
    if (delay_us) settings.delay_min_us = delay_us->first, settings.delay_max_us = delay_us->second;
    if (lazy) settings.lazy = *lazy;
    if (poison) settings.poison = *poison;
    if (where) settings.where = *where;
    if (limit) settings.limit = *limit;
    for (int d = 0; d < kDevices; ++d)
      for (Queue* q : all_queues(d)) q->work.notify_all();
  }, py::arg("delay_us") = py::none(), py::arg("lazy") = py::none(), py::arg("poison") = py::none(),
     py::arg("where") = py::none(), py::arg("limit") = py::none(), py::arg("sync_debug") = py::none(),
     py::arg("kernel_us") = py::none());
  m.def("sleep", [](int64_t us) {
    auto sleep = [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); };
    launch(current(current_device), "sleep", sleep, us);
  });
  // A kernel that was compiled for the host: run(grid, arguments), each argument a 64-bit word. Pointers must be `shadow`s.
  m.def("launch", [](const std::string& name, uintptr_t function, unsigned grid, std::vector<int64_t> arguments) {
    auto run = reinterpret_cast<void (*)(unsigned, const int64_t*)>(function);
    launch(current(current_device), name, [=] { run(grid, arguments.data()); });
  });
  m.def("shadow", [](uintptr_t p) { return reinterpret_cast<uintptr_t>(shadow(reinterpret_cast<void*>(p))); });
  m.def("counters", [] {
    std::lock_guard lock(counters.m);
    py::dict out;
    out["kernels"] = counters.kernels, out["syncs"] = counters.syncs, out["h2d"] = counters.h2d;
    out["d2h"] = counters.d2h, out["d2d"] = counters.d2d, out["not_async"] = counters.not_async;
    out["sync_calls"] = counters.sync_calls, out["ops"] = counters.ops, out["not_async_ops"] = counters.not_async_ops;
    return out;
  });
  m.def("reset_counters", [] {
    std::lock_guard lock(counters.m);
    counters.kernels = counters.syncs = counters.h2d = counters.d2h = counters.d2d = counters.not_async = 0;
    counters.sync_calls.clear(), counters.ops.clear(), counters.not_async_ops.clear();
  });
  m.def("memory", [](int d) {
    auto s = allocator().getDeviceStats(d);
    return std::make_tuple(s.allocated_bytes[0].current, s.allocated_bytes[0].peak, s.reserved_bytes[0].current);
  });
  m.def("reset_peak", [](int d) { allocator().resetPeakStats(d); });
  m.def("empty_cache", [] { Guard::py_free([] { allocator().emptyCache(); }); });
  m.def("shutdown", [] {
    stopped = true;
    if (bad_fork) return;
    py::gil_scoped_release no_gil;
    for (int d = 0; d < kDevices; ++d)
      for (Queue* q : all_queues(d)) {
        { std::lock_guard lock(q->m); }
        q->work.notify_all(), q->done.notify_all();
        if (q->thread.joinable()) q->thread.join();
      }
  });
}
