// Streams of the simulated device: each is a thread with a queue of tasks. Also its settings, and what it counts.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" void omp_set_num_threads(int);  // of the OpenMP that torch brings

namespace py = pybind11;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream;

namespace sim {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr int kDevices = 2;
constexpr int kStreams = 32;  // for each device, then round robin, like CUDA's pool
constexpr size_t kAlign = 512, kPage = 4096, kSpan = size_t(16) << 30;  // kSpan: address space of a device
constexpr size_t kBacklog = 20000;  // a lazy stream runs its tasks unasked when it has more than that

struct Settings {
  std::atomic<int64_t> delay_min_us{0}, delay_max_us{200};
  std::atomic<int64_t> kernel_us{0};  // what each kernel takes by the clock of its stream, see Queue::clock_ns
  std::atomic<bool> lazy{false}, poison{true}, where{true};
  std::atomic<int64_t> limit{int64_t(kSpan)};
  std::atomic<int> sync_debug{0};  // as torch.cuda.set_sync_debug_mode: 1 warns, 2 raises
} settings;

struct Counters {
  std::mutex m;
  int64_t kernels = 0, syncs = 0, h2d = 0, d2h = 0, d2d = 0, not_async = 0;
  std::map<std::string, int64_t> sync_calls, ops, not_async_ops;
} counters;

std::atomic<bool> initialised{false}, bad_fork{false}, stopped{false};
std::mutex error_mutex;
std::string error;  // of a task, reported by the next synchronisation

// The Python line that runs, outside of torch and of this device, as folder/file.py:line, and the name of its thread.
std::string python_line() {
  if (!settings.where || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string found;
  while (frame != nullptr && found.empty()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = PyUnicode_AsUTF8(code->co_filename);
    bool is_ours = file.find("/torch/") != std::string::npos || file.find("simulated_cuda/device.py") != std::string::npos;
    if (!is_ours) {
      size_t name = file.rfind('/'), folder = name == std::string::npos ? name : file.rfind('/', name - 1);
      found = file.substr(folder == std::string::npos ? 0 : folder + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (found.empty()) return "";
  return found + " in " + py::module_::import("threading").attr("current_thread")().attr("name").cast<std::string>();
}

// Appends a synchronisation to the file that SIMULATED_CUDA_LOG names, for tests that look at other processes.
void log_sync(const std::string& text) {
  const char* path = std::getenv("SIMULATED_CUDA_LOG");
  if (path == nullptr || *path == 0) return;
  int file = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  std::string line = std::to_string(::getpid()) + " " + text + "\n";
  [[maybe_unused]] auto written = ::write(file, line.data(), line.size());
  ::close(file);
}

void count_sync(const std::string& what) {
  bool is_asked_for = what == "stream" || what == "device" || what == "event";  // CUDA's mode passes over these, too
  if (settings.sync_debug == 1 && !is_asked_for) TORCH_WARN("called a synchronizing operation: ", what);
  TORCH_CHECK(settings.sync_debug != 2 || is_asked_for, "called a synchronizing operation: ", what);
  std::string line = python_line(), text = line.empty() ? what : what + " @ " + line;
  log_sync(text);
  std::lock_guard lock(counters.m);
  ++counters.syncs;
  ++counters.sync_calls[text];
}

void raise_error() {
  std::lock_guard lock(error_mutex);
  if (error.empty()) return;
  std::string text = std::exchange(error, "");
  TORCH_CHECK(false, "CUDA error: a kernel failed before this synchronisation: ", text);
}

using Task = std::function<void()>;

// The host's clock. A host that has waited for a stream is where the stream's clock is, without having slept.
std::atomic<int64_t> skipped_ns{0};
int64_t host_ns() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() + skipped_ns;
}
void catch_up(int64_t ns) {
  if (int64_t behind = ns - host_ns(); behind > 0) skipped_ns += behind;
}

struct Queued {
  Task task;
  int64_t pushed_ns, cost_ns;
};

struct Queue {
  Queue(int device, int64_t id) : device(device), id(id), thread([this] { run(); }) {}
  const int device;
  const int64_t id;
  std::mutex m;
  std::condition_variable work, done;
  std::deque<Queued> tasks;
  uint64_t submitted = 0, completed = 0, demanded = 0;
  // When the device has done the task that runs: it begins when it was pushed or when the task before is done, and takes
  // what a setting says and not what the host's kernel takes. So what events measure does not depend on the machine.
  int64_t clock_ns = 0;
  int64_t completed_ns = 0;
  std::thread thread;

  uint64_t push(Task task, int64_t cost_ns = 0) {
    std::lock_guard lock(m);
    if (stopped) return submitted;
    tasks.push_back({std::move(task), host_ns(), cost_ns});
    work.notify_one();
    return ++submitted;
  }
  uint64_t last() {
    std::lock_guard lock(m);
    return submitted;
  }
  bool reached(uint64_t n, bool demand) {
    std::lock_guard lock(m);
    if (demand && n > demanded) demanded = n, work.notify_one();
    return completed >= n;
  }
  void wait(uint64_t n) {
    std::unique_lock lock(m);
    if (n > demanded) demanded = n, work.notify_one();
    done.wait(lock, [&] { return completed >= n || stopped; });
  }
  void wait_on_host(uint64_t n) {
    wait(n);
    std::lock_guard lock(m);
    catch_up(completed_ns);
  }
  void run() {
    // Some kernels of the host, such as LayerNorm's backward, sum up in an order that depends on the number of threads. A device
    // gives the same bits in each process.
    at::get_num_threads();  // initialises the number of this thread, once
    omp_set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      Queued next;
      {
        std::unique_lock lock(m);
        work.wait(lock, [&] {
          return stopped || (!tasks.empty() && (!settings.lazy || completed < demanded || tasks.size() > kBacklog));
        });
        if (stopped) return;
        next = std::move(tasks.front());
        tasks.pop_front();
      }
      clock_ns = std::max(clock_ns, next.pushed_ns) + next.cost_ns;
      try {
        next.task();
      } catch (const std::exception& e) {
        std::lock_guard lock(error_mutex);
        if (error.empty()) error = e.what();
      }
      next.task = nullptr;
      std::lock_guard lock(m);
      ++completed, completed_ns = clock_ns;
      done.notify_all();
    }
  }
};

struct Pool {
  std::mutex m;
  std::vector<Queue*> queues[kDevices];  // never deleted: tasks and blocks point to them
  int next[kDevices] = {};
} pool;

void initialise() {
  TORCH_CHECK(!bad_fork, "Cannot re-initialize CUDA in forked subprocess. Use the 'spawn' start method.");
  initialised = true;
}
Queue* queue(int device, int64_t id) {
  initialise();
  std::lock_guard lock(pool.m);
  auto& queues = pool.queues[device];
  while (int64_t(queues.size()) <= id) queues.push_back(new Queue(device, queues.size()));
  return queues[id];
}
std::vector<Queue*> all_queues(int device) {
  std::lock_guard lock(pool.m);
  return pool.queues[device];
}
thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
Queue* current(int device) { return queue(device, current_stream[device]); }
Queue* of(const Stream& s) { return queue(s.device_index(), s.id()); }
Stream as_stream(Queue* q) { return Stream(Stream::UNSAFE, Device(kType, q->device), q->id); }

void launch(Queue* q, const std::string& op, Task task, int64_t us = settings.kernel_us) {
  {
    std::lock_guard lock(counters.m);
    ++counters.kernels;
    ++counters.ops[op];
  }
  q->push([task = std::move(task)] {
    int64_t low = settings.delay_min_us, high = settings.delay_max_us;
    if (high > 0) {
      thread_local std::mt19937_64 rng{std::random_device{}()};
      int64_t us = low + int64_t(rng() % uint64_t(std::max<int64_t>(1, high - low + 1)));
      if (us > 0 && !settings.lazy) std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    task();
  }, 1000 * us);
}
void drain(Queue* q, const std::string& what) {
  count_sync(what);
  q->wait_on_host(q->last());
  raise_error();
}
void drain_device(int device, const std::string& what) {
  count_sync(what);
  for (Queue* q : all_queues(device)) q->wait_on_host(q->last());
  raise_error();
}

struct Mark {  // what an event recorded
  Queue* q = nullptr;
  uint64_t n = 0;
  int64_t at_ns = 0;
};
struct Event {
  std::mutex m;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Mark> get() {
    std::lock_guard lock(m);
    return mark;
  }
};
std::shared_ptr<Mark> mark(Queue* q) {
  auto mark = std::make_shared<Mark>();
  mark->q = q;
  mark->n = q->push([mark] { mark->at_ns = mark->q->clock_ns; });
  return mark;
}
void wait_in(Queue* q, std::shared_ptr<Mark> mark) {
  if (mark && mark->q != q)
    q->push([mark, q] {
      mark->q->wait(mark->n);
      q->clock_ns = std::max(q->clock_ns, mark->at_ns);
    });
}

}  // namespace sim
