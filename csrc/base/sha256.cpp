#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace mycoll {
namespace {

constexpr size_t kBlockBytes = 64;

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

void storeBigEndian(uint32_t value, uint8_t* bytes) {
  bytes[0] = static_cast<uint8_t>(value >> 24);
  bytes[1] = static_cast<uint8_t>(value >> 16);
  bytes[2] = static_cast<uint8_t>(value >> 8);
  bytes[3] = static_cast<uint8_t>(value);
}

}  // namespace

void Sha256::processBlock(const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = loadBigEndian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t x = w[i - 15];
    const uint32_t y = w[i - 2];
    const uint32_t s0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
    const uint32_t s1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
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
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += added[i];
}

void Sha256::update(const void* data, size_t bytes) {
  if (bytes == 0) return;
  const uint8_t* next = static_cast<const uint8_t*>(data);
  totalBytes_ += bytes;
  if (pendingBytes_ > 0) {
    const size_t taken = std::min(bytes, kBlockBytes - pendingBytes_);
    std::memcpy(pending_ + pendingBytes_, next, taken);
    pendingBytes_ += taken;
    next += taken;
    bytes -= taken;
    if (pendingBytes_ < kBlockBytes) return;
    processBlock(pending_);
    pendingBytes_ = 0;
  }
  for (; bytes >= kBlockBytes; bytes -= kBlockBytes, next += kBlockBytes) processBlock(next);
  if (bytes > 0) std::memcpy(pending_, next, bytes);
  pendingBytes_ = bytes;
}

Digest Sha256::finish() {
  const uint64_t bits = totalBytes_ * 8;
  // The padding: 0x80, zeros, and the length in bits, up to the end of a block.
  uint8_t padding[kBlockBytes + 8] = {0x80};
  const size_t zerosEnd = (pendingBytes_ < 56 ? 56 : 120) - pendingBytes_;
  storeBigEndian(static_cast<uint32_t>(bits >> 32), padding + zerosEnd);
  storeBigEndian(static_cast<uint32_t>(bits), padding + zerosEnd + 4);
  update(padding, zerosEnd + 8);
  Digest digest;
  for (int i = 0; i < 8; ++i) storeBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

Digest sha256(std::string_view message) {
  Sha256 hash;
  hash.update(message);
  return hash.finish();
}

Digest hmacSha256(std::string_view key, std::string_view message) {
  uint8_t block[kBlockBytes] = {};
  if (key.size() > kBlockBytes) {
    const Digest hashed = sha256(key);
    std::memcpy(block, hashed.data(), hashed.size());
  } else if (!key.empty()) {
    std::memcpy(block, key.data(), key.size());
  }
  uint8_t pad[kBlockBytes];
  for (size_t i = 0; i < kBlockBytes; ++i) pad[i] = block[i] ^ 0x36;
  Sha256 inner;
  inner.update(pad, kBlockBytes);
  inner.update(message);
  const Digest innerDigest = inner.finish();
  for (size_t i = 0; i < kBlockBytes; ++i) pad[i] = block[i] ^ 0x5c;
  Sha256 outer;
  outer.update(pad, kBlockBytes);
  outer.update(innerDigest.data(), innerDigest.size());
  return outer.finish();
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
