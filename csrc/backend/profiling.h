// What torch.profiler sees of an operation: a record_param_comms event around its submission, and
// an event "mycoll:<function>" from its start to its end.
#pragma once

#include <ATen/record_function.h>

namespace mycoll {

// Cheap enough for every call.
inline bool isProfiling() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

}  // namespace mycoll
