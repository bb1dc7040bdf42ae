// Defines the functions that backend/python.h declares.
#include "backend/python.h"

#include <Python.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <exception>
#include <memory>
#include <utility>

#include "backend/errors.h"

namespace py = pybind11;

namespace mycoll {
namespace {

// The exception that a signal handler raised while this thread waited without the GIL.
thread_local std::exception_ptr pendingInterrupt;

// As of the last count, which the main thread makes while it waits. 0: it has made none.
std::atomic<int> pythonThreads{0};

// [main thread, with the GIL]
int callPending(void* argument) {
  const std::unique_ptr<std::function<void()>> fn(static_cast<std::function<void()>*>(argument));
  try {
    const py::cpp_function call(*fn);  // turns what it throws into Python's
    call();
    return 0;
  } catch (py::error_already_set& error) {
    error.restore();
    return -1;
  }
}

}  // namespace

int countPythonThreads() {
  int count = 0;
  for (PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
       thread != nullptr; thread = PyThreadState_Next(thread)) {
    ++count;
  }
  pythonThreads.store(count, std::memory_order_relaxed);
  return count;
}

bool mayHaveOtherThreads() { return pythonThreads.load(std::memory_order_relaxed) != 1; }

// Python handles signals in its main thread only; all others wait on.
bool isInterruptPending() {
  if (!isMainThread() || !Py_IsInitialized()) return false;
  const py::gil_scoped_acquire gil;
  countPythonThreads();
  if (PyErr_CheckSignals() == 0) return false;
  pendingInterrupt = std::make_exception_ptr(py::error_already_set());
  return true;
}

void raiseInterrupt() {
  if (pendingInterrupt) std::rethrow_exception(std::exchange(pendingInterrupt, nullptr));
}

// A group is often destroyed in a `finally`, on the way out after an exception.
std::string reasonToLeave() {
  if (!Py_IsInitialized()) return {};
  const py::gil_scoped_acquire gil;
  // Most often there is none. Then no Python is run: it might raise here what callInMainThread()
  // has for the program.
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_GetExcInfo(&type, &value, &trace);
  const bool isHandling = value != nullptr && value != Py_None;
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  if (!isHandling) return {};
  try {
    return py::module_::import("mycoll._leaving").attr("reason_to_destroy")().cast<std::string>();
  } catch (const std::exception&) {
    return {};
  }
}

bool callInMainThread(std::function<void()> fn) {
  auto kept = std::make_unique<std::function<void()>>(std::move(fn));
  if (!Py_IsInitialized() || Py_AddPendingCall(&callPending, kept.get()) != 0) return false;
  (void)kept.release();  // callPending's
  return true;
}

bool isCalledByPython() { return PyGILState_Check() != 0; }

}  // namespace mycoll
