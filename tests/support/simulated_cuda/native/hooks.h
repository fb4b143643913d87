// What torch asks a CUDA device for: the current device, streams, events, allocators and generators.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generators.h"
#include "memory.h"

namespace sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    return setDevice(d), old;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "sim: invalid device ordinal ", int(d.index()));
    if (d.index() >= 0) current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < kDevices) current_device = d.index();
  }
  static int index(Device d) { return d.index() < 0 ? current_device : d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kType, index(d)), current_stream[index(d)]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kType, index(d)), 0); }
  Stream getNewStream(Device d, int = 0) const override {
    int n;
    {
      std::lock_guard lock(pool.m);
      n = pool.next[index(d)]++;
    }
    return as_stream(queue(index(d), 1 + n % kStreams));
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return of(s); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (*e == nullptr) *e = new Event;
    auto* event = static_cast<Event*>(*e);
    auto m = mark(of(s));
    std::lock_guard lock(event->m);
    event->mark = m;
  }
  void block(void* e, const Stream& s) const override {
    if (e) wait_in(of(s), static_cast<Event*>(e)->get());
  }
  bool queryEvent(void* e) const override {
    auto m = e ? static_cast<Event*>(e)->get() : nullptr;
    return !m || m->q->reached(m->n, true);
  }
  void synchronizeEvent(void* e) const override {
    auto m = e ? static_cast<Event*>(e)->get() : nullptr;
    if (!m) return;
    count_sync("event");
    py_free([&] { m->q->wait_on_host(m->n); });
    raise_error();
  }
  bool queryStream(const Stream& s) const override { return of(s)->reached(of(s)->last(), true); }
  void synchronizeStream(const Stream& s) const override {
    py_free([&] { drain(of(s), "stream"); });
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    py_free([&] { drain_device(d < 0 ? current_device : d, "device"); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator().recordStream(p, s); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto x = static_cast<Event*>(a)->get(), y = static_cast<Event*>(b)->get();
    TORCH_CHECK(x && y && queryEvent(a) && queryEvent(b), "sim: both events must be recorded and over");
    return 1e-6 * double(y->at_ns - x->at_ns);
  }
  template <class F>
  static void py_free(F f) {
    if (Py_IsInitialized() && PyGILState_Check()) {
      py::gil_scoped_release no_gil;
      f();
    } else {
      f();
    }
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs = {}) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  DeviceIndex current_device() const override { return sim::current_device; }
  int getNumGPUs() const override { return kDevices; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
  bool isAvailable() const override { return true; }
  void init() const override { initialise(); }
  bool hasPrimaryContext(DeviceIndex d) const override { return initialised; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(kType, d)); }
  DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice(Device(kType, d)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned().find(p) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(allocator().owns(p), "sim: not device memory");
    return Device(kType, (static_cast<char*>(p) - allocator().base) / kSpan);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d = -1) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d = -1) const override {
    return at::make_generator<SimGenerator>(d < 0 ? sim::current_device : d);
  }
};

}  // namespace sim
