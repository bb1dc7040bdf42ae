// mycoll._C: what Python sees. No logic: translation between Python and backend/.
//
// GIL: released while anything blocks.
#include <Python.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/endpoint.h"
#include "backend/errors.h"
#include "backend/mycoll_backend.h"
#include "backend/operators.h"
#include "backend/options.h"
#include "backend/shared_tensors.h"
#include "backend/torch_version.h"
#include "backend/window.h"
#include "base/env.h"
#include "base/log.h"
#include "base/wait.h"
#include "bindings/docstrings.h"
#include "collectives/plan/shape.h"
#include "device/device_group.h"
#include "device/nccl_memory.h"
#include "device/watchdog.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "observe/trace_file.h"
#include "transport/local.h"
#include "transport/mailbox.h"
#include "transport/shm/shared_heap.h"
#include "transport/shm/single_copy.h"
#include "transport/tcp/address.h"

namespace py = pybind11;
namespace doc = mycoll::doc;

namespace {

using mycoll::MycollBackend;
using mycoll::MycollEndpoint;
using mycoll::MycollOptions;
using mycoll::MycollWindow;
using BackendPtr = c10::intrusive_ptr<MycollBackend>;
using WindowPtr = c10::intrusive_ptr<MycollWindow>;
using Milliseconds = std::chrono::milliseconds;
// Their destructors wait for other ranks, or for the engine's thread.
using DropWithoutGil = py::release_gil_before_calling_cpp_dtor;
using NoGil = py::call_guard<py::gil_scoped_release>;

void closeAll(const std::string& reason) {
  const bool hasOthers = mycoll::countPythonThreads() > 1;
  const py::gil_scoped_release release;
  mycoll::Watchdog::get().beginExit();
  MycollBackend::closeAll(std::chrono::seconds(2), reason);
  mycoll::Watchdog::get().stop();  // the driver may be unloaded at any time
  // Daemon threads whose wait has ended just before are still to take the GIL: see beginExit().
  if (hasOthers) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

BackendPtr createBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         Milliseconds timeout, std::string groupId,
                         std::vector<int64_t> globalRanks, const MycollOptions* options,
                         bool hasDevice, bool isOfJob,
                         c10::intrusive_ptr<c10d::Backend::Options> shown, bool enableReconfigure) {
  // A copy: the user may use one object for several groups, and every group changes its own.
  auto own = options != nullptr ? c10::make_intrusive<MycollOptions>(*options)
                                : c10::make_intrusive<MycollOptions>();
  own->timeout = timeout;
#if MYCOLL_TORCH_HAS_RECONFIGURE
  own->enable_reconfigure |= enableReconfigure;
#else
  (void)enableReconfigure;
#endif
  own->group_name = groupId;
  own->global_ranks_in_group.assign(globalRanks.begin(), globalRanks.end());
  const py::gil_scoped_release release;
  return MycollBackend::create(
      store, rank, size, {std::move(groupId), std::move(globalRanks), isOfJob, std::move(shown)},
      std::move(own), hasDevice ? &mycoll::DeviceGroup::create : mycoll::DeviceFactory());
}

std::string describeOptions(const MycollOptions& options) {
  const auto seconds = [](Milliseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  return py::str(
             "mycoll.Options(timeout={:g} s, shutdown_timeout={:g} s, warn_after={:g} s, "
             "cpu={!r})")
      .format(seconds(options.timeout), seconds(options.shutdownTimeout),
              seconds(options.warnAfter), options.cpu);
}

void checkCpu(const std::string& cpu) {
  if (cpu.empty() || cpu == "engine" || cpu == "gloo") return;
  throw py::value_error("cpu must be 'engine', 'gloo' or '' (as MYCOLL_CPU says), not '" + cpu +
                        "'");
}

Milliseconds checkNotNegative(const char* name, Milliseconds time) {
  if (time.count() >= 0) return time;
  throw py::value_error(std::string(name) + " must not be negative");
}

[[noreturn]] void refuseField(const std::string& name) {
  const py::object similar = py::module_::import("difflib").attr("get_close_matches");
  const std::vector<std::string> known = {"timeout", "shutdown_timeout", "warn_after", "cpu",
                                          "nccl"};
  const auto close = similar(name, known).cast<std::vector<std::string>>();
  const std::string nearest = close.empty() ? "" : close.front();
  throw py::type_error(
      "mycoll.Options() has no field '" + name + "'" +
      (nearest == "nccl" ? "; what is for NCCL is set afterwards, as in options.nccl.min_ctas = 4"
       : nearest.empty()
           ? "; it has timeout, shutdown_timeout, warn_after and cpu, and options.nccl for NCCL"
           : "; did you mean '" + nearest + "'?"));
}

py::list environment() {
  py::list entries;
  for (const mycoll::EnvEntry& entry : mycoll::describeEnv()) {
    py::dict row;
    row["name"] = entry.name;
    row["default"] = entry.defaultValue;
    row["value"] = entry.value;
    row["help"] = entry.help;
    row["is_set"] = entry.isSet;
    row["source"] = entry.source;
    entries.append(row);
  }
  return entries;
}

py::list chooseInterface(const std::string& storeHost) {
  std::vector<mycoll::InterfaceAddress> chosen;
  mycoll::throwIfFailed(
      mycoll::chooseInterface(mycoll::Env::process().socketInterfaces, storeHost, &chosen));
  py::list addresses;
  for (const mycoll::InterfaceAddress& each : chosen) {
    addresses.append(py::make_tuple(each.interfaceName, each.address));
  }
  return addresses;
}

void logTo(const std::string& file, int level) {
  mycoll::setLogFile(file.c_str());
  mycoll::setLogLevel(static_cast<mycoll::LogLevel>(level));
}

std::string dumpTrace(const std::string& path) {
  std::string written;
  mycoll::throwIfFailed(mycoll::TraceFile::write(path, &written));
  return written;
}

void copyStreaming(uintptr_t destination, uintptr_t source, size_t bytes) {
  mycoll::copyStreaming(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
                        bytes);
}

// mycoll.ArgumentError: what is wrong with an argument is a ValueError; programs that are written
// for torch's own backends look for a RuntimeError.
void registerArgumentError(py::module_& module) {
  static PyObject* type = nullptr;  // for the life of the process
  const py::tuple bases =
      py::make_tuple(py::handle(PyExc_ValueError), py::handle(PyExc_RuntimeError));
  type =
      PyErr_NewExceptionWithDoc("mycoll.ArgumentError", doc::kArgumentError, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.attr("ArgumentError") = py::reinterpret_borrow<py::object>(type);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(std::move(thrown));
    } catch (const mycoll::ArgumentError& error) {
      PyErr_SetString(type, error.what_without_backtrace());
    }
  });
}

// Under the names that torch has for them from 2.14 on, where they are torch's own.
void defineWindowTypes(py::module_& module) {
#if MYCOLL_TORCH_HAS_WINDOW
  const py::module_ theirs = py::module_::import("torch._C._distributed_c10d");
  for (const char* name :
       {"PutOptions", "SignalOptions", "WaitSignalOptions", "WindowAccessType", "WindowAttr"}) {
    module.attr(name) = theirs.attr(name);
  }
#else
  const auto options =
      py::class_<mycoll::PutOptions>(module, "PutOptions", doc::kWindowOptions)
          .def(py::init<>(), doc::kWindowOptionsInit)
          .def_readwrite("timeout", &mycoll::PutOptions::timeout, doc::kWindowOptionsTimeout)
          .def_readwrite("hints", &mycoll::PutOptions::hints, doc::kWindowOptionsHints);
  for (const char* same : {"SignalOptions", "WaitSignalOptions"}) module.attr(same) = options;
  py::enum_<mycoll::WindowAccessType>(module, "WindowAccessType", doc::kWindowAccessType)
      .value("UNIFIED", mycoll::WindowAccessType::UNIFIED)
      .value("SEPARATE", mycoll::WindowAccessType::SEPARATE);
  py::class_<mycoll::WindowAttr>(module, "WindowAttr", doc::kWindowAttr)
      .def_readonly("access_type", &mycoll::WindowAttr::access_type, doc::kWindowAttrAccessType);
#endif
}

void defineWindow(py::module_& module) {
  defineWindowTypes(module);
#if MYCOLL_TORCH_HAS_WINDOW
  using Class = py::class_<MycollWindow, WindowPtr, c10d::Window>;
#else
  using Class = py::class_<MycollWindow, WindowPtr>;
#endif
  Class(module, "Window", DropWithoutGil(), doc::kWindow)
      .def("tensor_register", &MycollWindow::tensor_register, py::arg("tensor"),
           py::arg("owning") = true, NoGil(), doc::kWindowTensorRegister)
      .def("tensor_deregister", &MycollWindow::tensor_deregister, NoGil(),
           doc::kWindowTensorDeregister)
      .def("put", &MycollWindow::put, py::arg("tensor"), py::arg("dst_rank"),
           py::arg("target_offset_nelems"), py::arg("async_op"),
           py::arg("opts") = mycoll::PutOptions(), NoGil(), doc::kWindowPut)
      .def("map_remote_tensor", &MycollWindow::map_remote_tensor, py::arg("rank"), NoGil(),
           doc::kWindowMapRemoteTensor)
      .def("signal", &MycollWindow::signal, py::arg("peer_rank"), py::arg("async_op"),
           py::arg("opts") = mycoll::SignalOptions(), NoGil(), doc::kWindowSignal)
      .def("wait_signal", &MycollWindow::wait_signal, py::arg("peer_rank"), py::arg("async_op"),
           py::arg("opts") = mycoll::WaitSignalOptions(), NoGil(), doc::kWindowWaitSignal)
      .def("get_attr", &MycollWindow::get_attr, py::arg("peer_rank"), NoGil(), doc::kWindowGetAttr);
}

// hosts: how many ranks each has, in order.
std::vector<int> hostsOfRanks(const std::vector<int>& hosts) {
  std::vector<int> hostOf;
  for (size_t host = 0; host < hosts.size(); ++host) {
    hostOf.insert(hostOf.end(), hosts[host], static_cast<int>(host));
  }
  return hostOf;
}

std::vector<std::tuple<std::string, int, size_t, double, double, bool>> singleCopies() {
  std::vector<std::tuple<std::string, int, size_t, double, double, bool>> rows;
  for (const auto& [which, result] : mycoll::SingleCopy::process().measured()) {
    rows.emplace_back(mycoll::name(which.kind), which.ranks, size_t{1} << which.logBytes,
                      result.stagedMicros, result.directMicros,
                      result.choice == mycoll::SingleCopy::Choice::kDirect);
  }
  return rows;
}

}  // namespace

#ifdef MYCOLL_COVERAGE
extern "C" void __gcov_dump();
extern "C" void __gcov_reset();
#endif

PYBIND11_MODULE(_C, module) {
#ifdef MYCOLL_COVERAGE
  // For processes that end without exit(), or are killed: the tests' workers. Adds to the files.
  module.def(
      "_write_coverage",
      [] {
        __gcov_dump();
        __gcov_reset();
      },
      doc::kWriteCoverage);
#endif
  // The types that ours derive from must be known first.
  py::module_::import("torch.distributed");

  using mycoll::NcclOptions;
  py::class_<NcclOptions>(module, "NcclOptions", doc::kNcclOptions)
      .def_readwrite("is_blocking", &NcclOptions::isBlocking, doc::kIsBlocking)
      .def_readwrite("min_ctas", &NcclOptions::minCtas, doc::kMinCtas)
      .def_readwrite("max_ctas", &NcclOptions::maxCtas, doc::kMaxCtas)
      .def_readwrite("cga_cluster_size", &NcclOptions::cgaClusterSize, doc::kCgaClusterSize)
      .def_readwrite("nvls_ctas", &NcclOptions::nvlsCtas, doc::kNvlsCtas)
      .def_readwrite("cta_policy", &NcclOptions::ctaPolicy, doc::kCtaPolicy)
      .def_readwrite("traffic_class", &NcclOptions::trafficClass, doc::kTrafficClass)
      .def_readwrite("net_name", &NcclOptions::netName, doc::kNetName);

  py::class_<MycollOptions, c10::intrusive_ptr<MycollOptions>, c10d::Backend::Options> options(
      module, "Options", doc::kOptions);
  const auto addTime = [&](const char* name, Milliseconds MycollOptions::* time, const char* text) {
    options.def_property(
        name, [time](const MycollOptions& self) { return self.*time; },
        [name, time](MycollOptions& self, Milliseconds value) {
          self.*time = checkNotNegative(name, value);
        },
        text);
  };
  addTime("shutdown_timeout", &MycollOptions::shutdownTimeout, doc::kOptionsShutdownTimeout);
  addTime("warn_after", &MycollOptions::warnAfter, doc::kOptionsWarnAfter);
  options
      .def(py::init([](Milliseconds timeout, std::string cpu, Milliseconds shutdownTimeout,
                       Milliseconds warnAfter, const py::kwargs& others) {
             for (const auto& each : others) refuseField(py::cast<std::string>(each.first));
             checkCpu(cpu);
             auto options = c10::make_intrusive<MycollOptions>(timeout);
             options->cpu = std::move(cpu);
             options->shutdownTimeout = checkNotNegative("shutdown_timeout", shutdownTimeout);
             options->warnAfter = checkNotNegative("warn_after", warnAfter);
             return options;
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("cpu") = "",
           py::arg("shutdown_timeout") = MycollOptions().shutdownTimeout,
           py::arg("warn_after") = MycollOptions().warnAfter, doc::kOptionsInit)
      .def_property(
          "cpu", [](const MycollOptions& self) { return self.cpu; },
          [](MycollOptions& self, std::string cpu) {
            checkCpu(cpu);
            self.cpu = std::move(cpu);
          },
          doc::kOptionsCpu)
      .def_readwrite("timeout", &MycollOptions::timeout, doc::kOptionsTimeout)
      .def_property_readonly(
          "nccl", [](MycollOptions& self) -> mycoll::NcclOptions& { return self.nccl; },
          py::return_value_policy::reference_internal, doc::kOptionsNccl)
      .def(
          "__copy__",
          [](const MycollOptions& self) { return c10::make_intrusive<MycollOptions>(self); },
          doc::kOptionsCopy)
      .def(
          "__deepcopy__",
          [](const MycollOptions& self, const py::dict&) {
            return c10::make_intrusive<MycollOptions>(self);
          },
          py::arg("memo"), doc::kOptionsDeepCopy)
      .def("__repr__", &describeOptions);

  py::class_<MycollEndpoint>(module, "_Endpoint", DropWithoutGil(), doc::kEndpoint)
      .def(py::init<const std::string&, Milliseconds, const std::string&>(), py::arg("name"),
           py::arg("timeout"), py::arg("store_host"), NoGil(), doc::kEndpointInit)
      .def_property_readonly("handle", &MycollEndpoint::handle, doc::kEndpointHandle)
      .def("mismatch", &MycollEndpoint::mismatch, py::arg("handle"), doc::kEndpointMismatch)
      .def(
          "form",
          [](MycollEndpoint& self, int64_t uuid, const std::vector<std::string>& handles,
             Milliseconds formTimeout, const MycollOptions& options, bool hasDevice) {
            auto own = c10::make_intrusive<MycollOptions>(options);
            const py::gil_scoped_release release;
            return self.form(uuid, handles, formTimeout, std::move(own),
                             hasDevice ? &mycoll::DeviceGroup::create : mycoll::DeviceFactory());
          },
          py::arg("uuid"), py::arg("handles"), py::arg("timeout"), py::arg("options"),
          py::arg("has_device"), doc::kEndpointForm)
      .def("send", &MycollEndpoint::send, py::arg("handle"), py::arg("text"), NoGil(),
           doc::kEndpointSend)
      .def("receive", &MycollEndpoint::receive, py::arg("timeout"), NoGil(), doc::kEndpointReceive)
      .def("watch", &MycollEndpoint::watch, py::arg("handles"), NoGil(), doc::kEndpointWatch)
      .def("loss_of", &MycollEndpoint::lossOf, py::arg("handle"), NoGil(), doc::kEndpointLossOf);

  py::class_<MycollBackend, BackendPtr, c10d::Backend> backend(module, "MycollBackend",
                                                               DropWithoutGil(), doc::kBackend);
  backend
      .def(py::init(&createBackend), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"), py::arg("group_id"), py::arg("global_ranks"),
           py::arg("options").none(true) = nullptr, py::arg("has_device") = false,
           py::arg("of_job") = true, py::arg("shown").none(true) = nullptr,
           py::arg("enable_reconfigure") = false, doc::kBackendInit)
      .def_property_readonly(
          "options", [](const MycollBackend& self) { return self.options(); }, doc::kBackendOptions)
      .def("transport", &MycollBackend::transport, NoGil(), doc::kBackendTransport)
      .def("encryption", &MycollBackend::encryption, NoGil(), doc::kBackendEncryption)
      .def(
          "device_transport",
          [](const MycollBackend& self) {
            const auto device = self.device("device_transport");
            return device ? device->path() : "";
          },
          NoGil(), doc::kBackendDeviceTransport)
      .def("_discard", &MycollBackend::discard, NoGil(), doc::kBackendDiscard)
      .def(
          "_register_memory",
          [](MycollBackend& self, const std::string& device, uintptr_t address, size_t bytes,
             bool isSymmetric) {
            if (const auto support = self.device("register_mem_pool")) {
              support->registerMemory(at::Device(device), reinterpret_cast<void*>(address), bytes,
                                      isSymmetric);
            }
          },
          py::arg("device"), py::arg("address"), py::arg("bytes"), py::arg("symmetric"), NoGil(),
          doc::kBackendRegisterMemory)
      .def(
          "_deregister_memory",
          [](MycollBackend& self, uintptr_t address) {
            if (const auto support = self.device("deregister_mem_pool")) {
              support->deregisterMemory(reinterpret_cast<void*>(address));
            }
          },
          py::arg("address"), NoGil(), doc::kBackendDeregisterMemory)
      .def("_comm_ptr", &MycollBackend::ncclComm, NoGil(), doc::kBackendCommPtr)
      .def_property_readonly("supports_window", &MycollBackend::supportsWindow,
                             doc::kBackendSupportsWindow)
      .def(
          "new_window",
          [](MycollBackend& self, const std::optional<at::Tensor>& tensor) {
            return c10::static_intrusive_pointer_cast<MycollWindow>(self.new_window(tensor));
          },
          py::arg("tensor") = std::nullopt, NoGil(), doc::kBackendNewWindow)
      .def("_split_devices", &MycollBackend::splitDevices, py::arg("child").none(true),
           py::arg("willing"), NoGil(), doc::kBackendSplitDevices)
      .def_property_readonly("_name", &MycollBackend::nameOfRanks, doc::kBackendName)
      .def("_drop_coalescing", &MycollBackend::dropCoalescing, NoGil(), doc::kBackendDropCoalescing)
      .def("_set_default_timeout", &MycollBackend::setTimeout, py::arg("timeout"), NoGil(),
           doc::kBackendSetDefaultTimeout)
      .def(
          "perform_nocolor_split", [](MycollBackend&, const py::object&) {}, py::arg("device"),
          doc::kBackendPerformNocolorSplit);

  // Methods that are Python's, as torch's pools of memory are.
  const py::object inPython = py::module_::import("mycoll.memory").attr("BackendMemory");
  for (const char* name : {"mem_allocator", "register_mem_pool", "deregister_mem_pool",
                           "supports_tensor_alloc", "allocate_tensor"}) {
    backend.attr(name) = inPython.attr(name);
  }

  defineWindow(module);

  module.def("set_nccl_wheel", &mycoll::setNcclWheelFile, py::arg("path"), doc::kSetNcclWheel);
  module.def("set_why_no_devices", &mycoll::setWhyNoDevices, py::arg("why"), doc::kSetWhyNoDevices);
  module.def("_require_nccl_memory", &mycoll::requireNcclMemory, doc::kRequireNcclMemory);
  module.def("_use_nccl", &mycoll::useNccl, py::arg("path"), doc::kUseNccl);
  module.def("environment", &environment, doc::kEnvironment);
  module.def("choose_interface", &chooseInterface, py::arg("store_host"), doc::kChooseInterface);
  module.def("usable_cores", &mycoll::usableCores, doc::kUsableCores);
  module.def("_log_to", &logTo, py::arg("file"), py::arg("level"), doc::kLogTo);
  module.def("dump_trace", &dumpTrace, py::arg("path"), NoGil(), doc::kDumpTrace);
  module.def(
      "_better_sum_block",
      [](const std::vector<int>& hosts) {
        return mycoll::betterSumBlock(hostsOfRanks(hosts), mycoll::sumTree());
      },
      py::arg("hosts"), doc::kBetterSumBlock);
  module.def("_single_copies", &singleCopies, doc::kSingleCopies);
  module.def("copy_streaming", &copyStreaming, py::arg("destination"), py::arg("source"),
             py::arg("bytes"), NoGil(), doc::kCopyStreaming);
  module.def("_open_shared_tensors", &mycoll::openSharedTensors, doc::kOpenSharedTensors);
  module.def("_close_shared_tensors", &mycoll::closeSharedTensors, doc::kCloseSharedTensors);
  module.def("_is_shared_memory", &mycoll::isSharedMemory, py::arg("address"), py::arg("bytes"),
             doc::kIsSharedMemory);
  module.def(
      "_shared_memory_usage",
      [] {
        const mycoll::SharedHeap::Usage usage = mycoll::SharedHeap::process().usageForTest();
        return std::make_pair(usage.regionBytes, usage.blockBytes);
      },
      doc::kSharedMemoryUsage);
  module.def("_close_all", &closeAll, py::arg("reason"), doc::kCloseAll);
  module.attr("torch_version") = TORCH_VERSION;

  registerArgumentError(module);
  mycoll::defineOperators();
}
