// torch.ops.mycoll: collectives as operators, for the inference path. Python and torch.compile call
// them with the name of a group, and get the result, not a Work; no Python runs on the way, and no
// graph breaks. They are synchronous, take CPU tensors, and have no gradient; in all else they are
// the group's collectives.
//
//   all_reduce_(Tensor(a!) x, str group) -> ()
//   all_reduce(Tensor x, str group) -> Tensor
//   all_gather(Tensor x, str group) -> Tensor             along the first dimension
//   reduce_scatter(Tensor x, str group) -> Tensor         along the first dimension
#pragma once

namespace mycoll {

// Makes them known to torch, for the life of the process. Idempotent.
void defineOperators();

}  // namespace mycoll
