#include "base/sha256.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "base/types.h"

namespace mycoll {
namespace {

constexpr size_t kBlockBytes = 64;

using State = std::array<uint32_t, 8>;

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t loadBigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void processBlock(const char* bytes, State* state) {
  const auto* const block = reinterpret_cast<const uint8_t*>(bytes);
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = loadBigEndian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t x = w[i - 15];
    const uint32_t y = w[i - 2];
    const uint32_t s0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
    const uint32_t s1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = *state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < added.size(); ++i) (*state)[i] += added[i];
}

}  // namespace

Digest sha256(std::string_view message) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = uint64_t{message.size()} * 8;
  const size_t whole = message.size() / kBlockBytes * kBlockBytes;
  // The padding: 0x80, zeros, and the length in bits, up to the end of a block.
  std::string end(message.substr(whole));
  end += '\x80';
  end.resize(roundUp(end.size() + sizeof(bits), kBlockBytes));
  for (size_t i = 0; i < sizeof(bits); ++i) {
    end[end.size() - 1 - i] = static_cast<char>(bits >> (8 * i));
  }
  for (size_t at = 0; at < whole; at += kBlockBytes) processBlock(&message[at], &state);
  for (size_t at = 0; at < end.size(); at += kBlockBytes) processBlock(&end[at], &state);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest hmacSha256(std::string_view key, std::string_view message) {
  std::string block(key.size() > kBlockBytes ? asText(sha256(key)) : key);
  block.resize(kBlockBytes);
  const auto padded = [&block](char pad) {
    std::string text = block;
    for (char& byte : text) byte ^= pad;
    return text;
  };
  return sha256(padded(0x5c) + asText(sha256(padded(0x36).append(message))));
}

bool constantTimeEqual(const void* a, const void* b, size_t bytes) {
  const volatile uint8_t* x = static_cast<const volatile uint8_t*>(a);
  const volatile uint8_t* y = static_cast<const volatile uint8_t*>(b);
  uint8_t difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference = difference | (x[i] ^ y[i]);
  return difference == 0;
}

Status randomBytes(void* data, size_t bytes) {
  uint8_t* next = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t n = ::getrandom(next, bytes, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      return Status(Code::kInternal, std::string("getrandom() failed: ") + std::strerror(errno));
    }
    next += n;
    bytes -= static_cast<size_t>(n);
  }
  return Status();
}

std::string toHex(const void* data, size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  const uint8_t* next = static_cast<const uint8_t*>(data);
  std::string text;
  text.reserve(2 * bytes);
  for (size_t i = 0; i < bytes; ++i) {
    text += kDigits[next[i] >> 4];
    text += kDigits[next[i] & 15];
  }
  return text;
}

}  // namespace mycoll
