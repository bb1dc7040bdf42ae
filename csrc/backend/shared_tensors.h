// Shared tensors: CPU tensors in memory that the other ranks of a host can read (SharedHeap), made
// by torch's own functions while a scope is open on the thread.
//
// torch has one CPU allocator. From the first scope on that is ours, which asks torch's former one
// for the memory of threads without a scope. It stays: what was allocated by it may be given back
// to it by name. A tensor keeps the way to free its memory, so it outlives the scope as any other.
//
// Thread contract: all [any thread]; a thread closes what it has opened.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mycoll {

// Throws where something else has taken torch's allocator for itself.
void openSharedTensors();
void closeSharedTensors();
// Whether that memory can be read by others.
bool isSharedMemory(uintptr_t address, size_t bytes);
// What frees a shared tensor's memory; it takes no lock but the heap's.
bool isSharedTensorDeleter(void (*deleter)(void*));

}  // namespace mycoll
