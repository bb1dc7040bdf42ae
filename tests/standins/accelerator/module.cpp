// Functions for __init__.py in this folder that torch's device-generic ones do not cover.
#include <c10/core/CPUAllocator.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/version.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "accelerator.h"

namespace py = pybind11;

namespace {

// The handle of the stream with these ids, which a torch.Stream has.
void* handle(int64_t id, int64_t device) {
  return standin::handleOf(c10::Stream(
      c10::Stream::UNSAFE, c10::Device(standin::kDevice, static_cast<int8_t>(device)), id));
}

py::dict counts() {
  mycoll_standin_counts all;
  mycoll_standin_count(&all);
  py::dict found;
  found["recorded_uses"] = all.recordedUses;
  found["live_bytes"] = all.liveBytes;
  found["pinned_bytes"] = all.pinnedBytes;
  return found;
}

// Forwards to the allocator before it, as an allocator of another library would.
class WrappingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return inner_->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const inner_ = c10::GetCPUAllocator();
};

#if TORCH_VERSION_MINOR >= 15
// Returns a function that returns how often each Work (by its key) has completed so far, and how
// many of these completions had a duration.
py::cpp_function countCompletions(const c10::intrusive_ptr<c10d::Backend>& backend, int64_t id) {
  struct Counts {
    std::mutex mutex;
    std::map<uint64_t, int> byKey;
    int timed = 0;
  };
  auto counts = std::make_shared<Counts>();
  backend->registerCompletionHook(id, [counts](const c10d::CompletionHookArgs& over) {
    const std::lock_guard<std::mutex> lock(counts->mutex);
    ++counts->byKey[over.completionKey];
    counts->timed += over.duration_ms.has_value();
  });
  return py::cpp_function([counts] {
    const std::lock_guard<std::mutex> lock(counts->mutex);
    return std::make_pair(counts->byKey, counts->timed);
  });
}
#endif

// Two threads write the same number without synchronization.
int race() {
  volatile int number = 0;
  std::thread other([&number] { number = 1; });
  number = 2;
  other.join();
  return number;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const py::call_guard<py::gil_scoped_release> noGil;
  m.def("sleep", [](int64_t id, int64_t device, int64_t us) {
    mycoll_standin_stream_sleep(handle(id, device), us);
  });
  m.def("gate_close", [](int64_t id, int64_t device) {
    return reinterpret_cast<uintptr_t>(mycoll_standin_gate_close(handle(id, device)));
  });
  m.def("gate_open",
        [](uintptr_t gate) { mycoll_standin_gate_open(reinterpret_cast<void*>(gate)); });
  m.def("set_delay", &mycoll_standin_set_delay);
  m.def("priority", [](int64_t id, int64_t device) {
    return mycoll_standin_stream_priority(handle(id, device));
  });
  m.def("capture_begin", [](int64_t id, int64_t device) {
    standin::check(mycoll_standin_capture_begin(handle(id, device), 0));
  });
  m.def(
      "capture_end",
      [](int64_t id, int64_t device) {
        void* graph = nullptr;
        standin::check(mycoll_standin_capture_end(handle(id, device), &graph));
        return reinterpret_cast<uintptr_t>(graph);
      },
      noGil);
  m.def("is_capturing", [](int64_t id, int64_t device) {
    return mycoll_standin_is_capturing(handle(id, device)) != 0;
  });
  m.def("graph_launch", [](uintptr_t graph, int64_t id, int64_t device) {
    mycoll_standin_graph_launch(reinterpret_cast<void*>(graph), handle(id, device));
  });
  m.def(
      "graph_destroy",
      [](uintptr_t graph) { mycoll_standin_graph_destroy(reinterpret_cast<void*>(graph)); }, noGil);
  m.def(
      "synchronize", [](int device) { standin::check(mycoll_standin_device_synchronize(device)); },
      noGil);
  m.def("device_count", &mycoll_standin_device_count);
  m.def("current_device", [] { return static_cast<int>(standin::currentDevice()); });
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(
        c10::Device(standin::kDevice, static_cast<int8_t>(device)));
  });
  m.def("verify", &mycoll_standin_verify, noGil);
  m.def("counts", &counts);
  m.def("race", &race, noGil);
  // Functions of torch that it does not bind to Python.
  m.def("abort_work", [](const c10::intrusive_ptr<c10d::Work>& work) { work->abort(); }, noGil);
  m.def("wrap_cpu_allocator", [] { c10::SetCPUAllocator(new WrappingAllocator); });
  m.def(
      "throw_after",
      [](const c10::intrusive_ptr<c10d::Work>& work) {
        work->getFuture()->addCallback(
            [](c10::ivalue::Future&) { throw std::runtime_error("a callback in C++ is wrong"); });
      },
      noGil);
#if TORCH_VERSION_MINOR >= 15
  m.def("completion_key",
        [](const c10::intrusive_ptr<c10d::Work>& work) { return work->getCompletionKey(); });
  m.def("count_completions", &countCompletions);
#endif
  m.def("sequence_of",
        [](const c10::intrusive_ptr<c10d::Work>& work) { return work->getSequencenumber(); });
}
