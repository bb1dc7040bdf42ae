#include "bindings/to_python.h"

#include <torch/csrc/autograd/python_variable.h>

namespace mycoll {

PyObject* toPython(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }

}  // namespace mycoll
