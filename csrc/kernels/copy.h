// Copies. Source and destination do not overlap, unless they are the same. [any thread]
#pragma once

#include <cstddef>

namespace mycoll {

// For a destination that will be read again soon.
void copy(void* to, const void* from, size_t bytes);

// Bypasses the caches: for large destinations that this core will not read soon. No line of the
// destination is fetched first, and nothing is evicted from the cache for it. Any alignment. The
// stores are fenced: a flag stored after the call becomes visible after them.
void copyStreaming(void* to, const void* from, size_t bytes);

// Either of the two, for callers that choose by size or distance.
void copy(void* to, const void* from, size_t bytes, bool isStreaming);

// Copies one source, read from memory once, to two destinations.
void copyToBoth(void* to, bool isStreaming, void* also, bool isAlsoStreaming, const void* from,
                size_t bytes);

// copyStreaming() in pieces: call streamingFence() before another thread is notified.
void copyStreamingUnfenced(void* to, const void* from, size_t bytes);
void streamingFence();

}  // namespace mycoll
