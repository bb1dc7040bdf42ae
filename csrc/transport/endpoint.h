// The mesh under its former name, for callers that still use it.
#pragma once

#include "transport/mesh.h"

namespace mycoll {

using EndpointOptions = MeshOptions;

}  // namespace mycoll
