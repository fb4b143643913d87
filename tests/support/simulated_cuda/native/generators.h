// Generators with a seed and an offset, which move as CUDA's Philox does. Equal states give equal bits, which are neither the CPU's
// nor CUDA's.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>

#include "streams.h"

namespace sim {

using at::Tensor;

struct SimGenerator final : at::GeneratorImpl {
  explicit SimGenerator(DeviceIndex d) : GeneratorImpl(Device(kType, d), c10::DispatchKeySet(kKey)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return set_current_seed(c10::detail::getNonDeterministicRandom()), seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "sim: not an RNG state");
    std::memcpy(&seed_, state.data(), 8), std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::detail::empty_cpu({16}, at::TensorOptions(at::kByte));  // no transform or mode sees it, as with CUDA
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  at::Generator take(uint64_t numel) {  // a generator of the host for one kernel, from (seed, offset)
    std::lock_guard lock(mutex_);
    uint64_t z = seed_ + 0x9e3779b97f4a7c15ull * (offset_ + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull, z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    offset_ += (numel + 3) / 4 * 4 + 4;
    return at::detail::createCPUGenerator(z ^ (z >> 31));
  }
};
const at::Generator& default_generator(DeviceIndex d) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i) v->push_back(at::make_generator<SimGenerator>(i));
    return v;
  }();
  return all->at(d < 0 ? current_device : d);
}
SimGenerator* generator(const IValue& given, int device) {
  const at::Generator& g = given.isGenerator() ? given.toGenerator() : default_generator(device);
  TORCH_CHECK(g.device() == Device(kType, device), "sim: the generator is of ", g.device(), ", not of cuda:", device);
  return static_cast<SimGenerator*>(g.unsafeGetGeneratorImpl());
}

}  // namespace sim
