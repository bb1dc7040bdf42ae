// Finds the user's line of Python that a call came from.
#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/python.h"
#include "observe/black_box.h"

namespace py = pybind11;

namespace mycoll {
namespace {

// A line of code. The code object is kept, so that no other one gets its address.
struct Site {
  py::object code;
  uint32_t number = 0;
};

struct Key {
  PyCodeObject* code;
  int line;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<void*>()(key.code) * 31 + static_cast<size_t>(key.line);
  }
};

// Names and paths need not be UTF-8; what is written must be.
std::string toText(PyObject* name) {
  const auto bytes = py::reinterpret_steal<py::object>(
      PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return {PyBytes_AS_STRING(bytes.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

// Guarded by the GIL. Never destroyed: the interpreter may be gone by then.
struct Known {
  std::vector<std::string> ownFolders;  // and files
  // torch's or mycoll's, or what stands between two of theirs: a batch ends in a context manager.
  std::unordered_map<PyCodeObject*, bool> isOwn;
  std::unordered_map<Key, Site, KeyHash> sites;
  const BlackBox* box = nullptr;  // whose numbers these are: a child of fork has another one
};
Known& known() {
  static Known* kept = nullptr;
  if (kept) return *kept;
  auto made = std::make_unique<Known>();
  for (const char* name : {"torch", "mycoll"}) {
    const std::string file = toText(py::object(py::module_::import(name).attr("__file__")).ptr());
    made->ownFolders.push_back(file.substr(0, file.rfind('/') + 1));
  }
  made->ownFolders.push_back(
      toText(py::object(py::module_::import("contextlib").attr("__file__")).ptr()));
  // An import may release the GIL, and another thread be first. That thread must not wait for the
  // guard of a static, as it would keep the GIL.
  if (!kept) kept = made.release();
  return *kept;
}

bool isOwn(Known& all, PyCodeObject* code) {
  const auto found = all.isOwn.find(code);
  if (found != all.isOwn.end()) return found->second;
  const std::string file = toText(code->co_filename);
  bool result = file.rfind("<frozen", 0) == 0;
  for (const std::string& folder : all.ownFolders) result |= file.rfind(folder, 0) == 0;
  py::handle(reinterpret_cast<PyObject*>(code)).inc_ref();
  all.isOwn.emplace(code, result);
  return result;
}

uint32_t numberOf(Known& all, PyFrameObject* frame, PyCodeObject* code) {
  const int line = PyFrame_GetLineNumber(frame);
  BlackBox& box = BlackBox::process();
  if (all.box != &box) all.sites.clear();
  all.box = &box;
  const auto found = all.sites.find({code, line});
  if (found != all.sites.end()) return found->second.number;
  const uint32_t number = box.intern(toText(code->co_name), toText(code->co_filename), line);
  Site site{py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)), number};
  all.sites.emplace(Key{code, line}, std::move(site));
  return number;
}

uint32_t siteOfCaller() {
  Known& all = known();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* current = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(current)));
    auto* codeObject = reinterpret_cast<PyCodeObject*>(code.ptr());
    if (!isOwn(all, codeObject)) return numberOf(all, current, codeObject);
    frame =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(current)));
  }
  return 0;
}

}  // namespace

uint32_t findCallSite() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return 0;
  const py::gil_scoped_acquire gil;
  // An exception may be set already; it is restored at the end.
  const py::error_scope saved;
  try {
    return siteOfCaller();
  } catch (const std::exception&) {
    return 0;  // out of memory, perhaps: the collective continues without its place
  }
}

}  // namespace mycoll
