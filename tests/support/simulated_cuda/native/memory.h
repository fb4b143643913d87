// Memory of the simulated device, and pinned memory of the host.
//
// Device pointers lie in a reservation without access rights, so host code that reads one gets SIGSEGV. Kernels reach the same
// bytes at a constant distance, in a second mapping, so there is never a moment in which other host code could read them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <set>

#include "streams.h"

namespace sim {

void randomise(void* p, size_t n) {
  thread_local uint64_t x = (uint64_t(std::random_device{}()) << 32) | std::random_device{}() | 1;
  auto* words = static_cast<uint64_t*>(p);
  for (size_t i = 0; i < n / 8; ++i) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    words[i] = x;
  }
  for (size_t i = n / 8 * 8; i < n; ++i) static_cast<char*>(p)[i] = char(x >> (i % 8 * 8));
}

struct Block {
  char* ptr;
  size_t size;
  Queue* home;
  std::set<Queue*> others;  // record_stream
};

struct SimAllocator final : c10::DeviceAllocator {
  std::mutex m;
  char *base = nullptr, *shadow_base = nullptr;
  size_t used[kDevices] = {};
  struct Stats {
    int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, count = 0;
  } stats[kDevices];
  std::multimap<size_t, char*> spare[kDevices];       // given back by empty_cache
  std::map<Queue*, std::multimap<size_t, char*>> free;  // stream-ordered
  std::map<Queue*, std::vector<std::pair<char*, size_t>>> intact;  // those of them that nothing has written to since
  std::vector<std::pair<Block*, std::vector<std::pair<Queue*, uint64_t>>>> pending;

  void reserve() {
    if (base != nullptr) return;
    auto map = [] {
      void* p = mmap(nullptr, kSpan * kDevices, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(p != MAP_FAILED, "sim: no address space");
      return static_cast<char*>(p);
    };
    base = map(), shadow_base = map();
  }
  bool owns(const void* p) const { return base && p >= base && p < base + kSpan * kDevices; }
  char* shadow(const void* p) const {
    TORCH_CHECK(owns(p), "sim: not device memory");
    return shadow_base + (static_cast<const char*>(p) - base);
  }
  static char* take(std::multimap<size_t, char*>& from, size_t& size) {
    auto it = from.lower_bound(size);
    if (it == from.end() || it->first > size + size / 4) return nullptr;
    char* p = it->second;
    size = it->first;
    from.erase(it);
    return p;
  }
  void recycle(Block* b) {  // with m held
    intact[b->home].emplace_back(b->ptr, b->size);
    free[b->home].emplace(b->size, b->ptr);
    delete b;
  }
  void poison_free(Queue* q) {  // with m held, before an allocation, which might be given any of it
    auto blocks = std::exchange(intact[q], {});
    if (!settings.poison || blocks.empty()) return;
    for (auto& [p, n] : blocks) p = shadow(p);
    q->push([blocks = std::move(blocks)] { for (auto [p, n] : blocks) randomise(p, n); });
  }
  void process_pending() {  // with m held
    for (size_t i = 0; i < pending.size();) {
      bool over = true;
      for (auto& [q, n] : pending[i].second) over = over && q->reached(n, false);
      if (!over) { ++i; continue; }
      recycle(pending[i].first);
      pending.erase(pending.begin() + i);
    }
  }
  at::DataPtr allocate(size_t n) override {
    int device = current_device;
    if (n == 0) return {nullptr, nullptr, [](void*) {}, Device(kType, device)};
    Queue* q = current(device);
    size_t size = (n + kAlign - 1) / kAlign * kAlign;
    char* p = nullptr;
    for (int attempt = 0; p == nullptr; ++attempt) {
      {
        std::lock_guard lock(m);
        reserve();
        process_pending();
        poison_free(q);
        auto& s = stats[device];
        if ((p = take(free[q], size)) == nullptr && s.reserved + int64_t(size) <= settings.limit) {
          if ((p = take(spare[device], size)) == nullptr && used[device] + size + kPage <= kSpan) {
            char* start = base + device * kSpan + used[device];
            used[device] += size;
            char* from = shadow_base + ((start - base) / kPage * kPage);
            mprotect(from, shadow_base + (start - base) + size - from, PROT_READ | PROT_WRITE);
            p = start;
          }
          if (p) s.reserved += size, s.reserved_peak = std::max(s.reserved, s.reserved_peak);
        }
        if (p) s.allocated += size, s.peak = std::max(s.peak, s.allocated), ++s.count;
      }
      TORCH_CHECK_WITH(OutOfMemoryError, p || attempt == 0, "CUDA out of memory. Tried to allocate ", n, " bytes.");
      if (!p) emptyCache();
    }
    if (settings.poison) q->push([to = shadow(p), size] { randomise(to, size); });
    return {p, new Block{p, size, q, {}}, &release, Device(kType, device)};
  }
  static void release(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    auto* q = current(current_device);
    q->push([a = shadow(to), b = shadow(from), n] { std::memcpy(a, b, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int d = 0; d < kDevices; ++d)
      for (Queue* q : all_queues(d)) q->wait(q->last());
    std::lock_guard lock(m);
    process_pending();
    intact.clear();
    for (auto& [q, blocks] : free) {
      q->wait(q->last());  // work that was queued after the wait above, with memory that was freed since
      for (auto& [size, p] : blocks) spare[q->device].emplace(size, p), stats[q->device].reserved -= size;
      blocks.clear();
    }
  }
  void recordStream(const at::DataPtr& ptr, Stream s) override {
    if (ptr.get_deleter() != &release || ptr.get_context() == nullptr) return;
    auto* b = static_cast<Block*>(ptr.get_context());
    std::lock_guard lock(m);
    if (of(s) != b->home) b->others.insert(of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard lock(m);
    c10::CachingDeviceAllocator::DeviceStats out;
    auto set = [](auto& stat, int64_t current, int64_t peak) { stat[0].current = current, stat[0].peak = peak; };
    set(out.allocated_bytes, stats[d].allocated, stats[d].peak);
    set(out.active_bytes, stats[d].allocated, stats[d].peak);
    set(out.reserved_bytes, stats[d].reserved, stats[d].reserved_peak);
    return out;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard lock(m);
    stats[d].peak = stats[d].allocated, stats[d].reserved_peak = stats[d].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard lock(m);
    return {size_t(settings.limit - stats[d].reserved), size_t(settings.limit.load())};
  }
};
SimAllocator& allocator() {
  static auto* one = new SimAllocator;
  return *one;
}
void SimAllocator::release(void* context) {
  if (context == nullptr) return;
  auto* b = static_cast<Block*>(context);
  auto& self = allocator();
  std::lock_guard lock(self.m);
  self.stats[b->home->device].allocated -= b->size;
  if (b->others.empty() || stopped || bad_fork) return bad_fork ? void() : self.recycle(b);
  std::vector<std::pair<Queue*, uint64_t>> marks;
  for (Queue* q : b->others) marks.emplace_back(q, q->last());
  self.pending.emplace_back(b, std::move(marks));
}
char* shadow(const void* p) { return allocator().shadow(p); }

struct HostBlock {  // pinned memory; a copy in a queue keeps it, as CUDA's host allocator waits for its events
  HostBlock(size_t n) : n(n), p(static_cast<char*>(std::aligned_alloc(kPage, (n + kPage - 1) / kPage * kPage))) {
    if (settings.poison) randomise(p, n);
  }
  ~HostBlock() {
    if (settings.poison) randomise(p, n);
    std::free(p);
  }
  size_t n;
  char* p;
};
struct PinnedAllocator final : at::Allocator {
  std::mutex m;
  std::map<const char*, std::shared_ptr<HostBlock>> blocks;
  std::shared_ptr<HostBlock> find(const void* p) {
    std::lock_guard lock(m);
    auto it = blocks.upper_bound(static_cast<const char*>(p));
    if (it == blocks.begin()) return nullptr;
    auto& b = (--it)->second;
    return p < b->p + b->n ? b : nullptr;
  }
  at::DataPtr allocate(size_t n) override {
    auto b = std::make_shared<HostBlock>(std::max<size_t>(n, 1));
    std::lock_guard lock(m);
    blocks[b->p] = b;
    return {b->p, b->p, &release, Device(at::kCPU)};
  }
  static void release(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator;
  return *one;
}
void PinnedAllocator::release(void* p) {
  std::shared_ptr<HostBlock> last;
  std::lock_guard lock(pinned().m);
  auto it = pinned().blocks.find(static_cast<char*>(p));
  if (it != pinned().blocks.end()) last = it->second, pinned().blocks.erase(it);
}

}  // namespace sim
