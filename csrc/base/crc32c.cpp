#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace mycoll {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<uint32_t, 256>, 8>;

// kTable[k][b]: the contribution of byte b to the CRC when k more bytes follow it.
constexpr Table makeTable() {
  Table table{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    table[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (size_t k = 1; k < 8; ++k) {
      const uint32_t before = table[k - 1][b];
      table[k][b] = (before >> 8) ^ table[0][before & 0xff];
    }
  }
  return table;
}

constexpr Table kTable = makeTable();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc32cHardware(const void* data, size_t bytes,
                                                          uint32_t crc) {
  const uint8_t* next = static_cast<const uint8_t*>(data);
  uint64_t state = ~crc;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    std::memcpy(&word, next, 8);
    state = _mm_crc32_u64(state, word);
  }
  uint32_t tail = static_cast<uint32_t>(state);
  for (; bytes > 0; --bytes, ++next) tail = _mm_crc32_u8(tail, *next);
  return ~tail;
}
#endif

}  // namespace

uint32_t detail::crc32cTable(const void* data, size_t bytes, uint32_t crc) {
  static_assert(std::endian::native == std::endian::little);
  const uint8_t* next = static_cast<const uint8_t*>(data);
  uint32_t state = ~crc;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    std::memcpy(&word, next, 8);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kTable[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes > 0; --bytes, ++next) state = (state >> 8) ^ kTable[0][(state ^ *next) & 0xff];
  return ~state;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool kHasInstruction = __builtin_cpu_supports("sse4.2");
  if (kHasInstruction) return crc32cHardware(data, bytes, crc);
#endif
  return detail::crc32cTable(data, bytes, crc);
}

}  // namespace mycoll
