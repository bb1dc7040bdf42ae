// torch.ops.mycoll: collectives as operators, for the inference path. Python and torch.compile call
// them with the name of a group, and get the result, not a Work; no Python code runs in between,
// and the graph does not break. They are synchronous, take CPU tensors, and have no gradient;
// otherwise they are the group's collectives.
//
//   all_reduce_(Tensor(a!) x, str group) -> ()
//   all_reduce(Tensor x, str group) -> Tensor
//   all_gather(Tensor x, str group) -> Tensor             along the first dimension
//   reduce_scatter(Tensor x, str group) -> Tensor         along the first dimension
#pragma once

namespace mycoll {

// Registers them with torch, for the life of the process. Idempotent.
void defineOperators();

}  // namespace mycoll
