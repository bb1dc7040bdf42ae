// Quantized CPU tensors in torch.distributed. Torch has no c10d operators for them, for any
// backend, though moving one is moving its bytes.
#pragma once

namespace mycoll {

// Lets the dispatcher treat quantized CPU tensors as it treats other CPU tensors, in the operators
// that move data and where torch does not do so itself. Call once.
void registerQuantizedMoves();

}  // namespace mycoll
