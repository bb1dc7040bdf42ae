// torch's own objects in Python. Apart from module.cpp, as torch's header for it declares holders
// for pybind11 that module.cpp declares, too.
#pragma once

#include <Python.h>

namespace at {
class Tensor;
}

namespace mycoll {

// A new reference. [with the GIL]
PyObject* toPython(const at::Tensor& tensor);

}  // namespace mycoll
