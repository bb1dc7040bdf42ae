// Shared tensors: CPU tensors in memory that the other ranks of a host can read (SharedHeap), made
// by torch's own functions while a scope is open on the thread.
//
// torch has one CPU allocator. The first scope installs ours, which passes requests of threads
// without a scope to the former one. It stays installed: memory that was allocated by it may be
// freed through it (raw_deleter()). A tensor holds the deleter of its memory, so it may outlive the
// scope.
//
// Thread contract: all [any thread]; a thread closes the scope that it opened.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mycoll {

// Throws if another library has replaced torch's allocator.
void openSharedTensors();
void closeSharedTensors();
// Whether other ranks can read that memory.
bool isSharedMemory(uintptr_t address, size_t bytes);
// Whether `deleter` frees the memory of shared tensors; it takes no lock but the heap's.
bool isSharedTensorDeleter(void (*deleter)(void*));

}  // namespace mycoll
