// Copies. Source and destination do not overlap, unless they are the same. [any thread]
#pragma once

#include <cstddef>

namespace mycoll {

// What will be read again soon.
void copy(void* to, const void* from, size_t bytes);

// Past the caches: for large destinations that this core will not read soon. No line of the
// destination is fetched first, and nothing is driven out of the cache for it. Any alignment.
// The stores are fenced: a flag stored after the call is seen after them.
void copyStreaming(void* to, const void* from, size_t bytes);

// Either of the two: for whoever decides it by size or distance.
void copy(void* to, const void* from, size_t bytes, bool isStreaming);

// One source, read from memory once, to two places.
void copyToBoth(void* to, bool isStreaming, void* also, bool isAlsoStreaming, const void* from,
                size_t bytes);

// Past the caches in pieces: call streamingFence() before anybody is told.
void copyStreamingUnfenced(void* to, const void* from, size_t bytes);
void streamingFence();

}  // namespace mycoll
