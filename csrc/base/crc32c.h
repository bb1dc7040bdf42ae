// CRC-32C (Castagnoli): detects damage by bugs and bad memory, not by an attacker. [any thread]
#pragma once

#include <cstddef>
#include <cstdint>

namespace mycoll {

// Continues from `crc`: crc32c(b, n, crc32c(a, m)) is the CRC of a followed by b.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);

namespace detail {

// The implementation without the processor's instruction: for machines that lack it, and for tests.
uint32_t crc32cTable(const void* data, size_t bytes, uint32_t crc);

}  // namespace detail
}  // namespace mycoll
