#include "transport/tcp/tls_records.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

namespace mycoll {
namespace {

// HKDF-Expand-Label without a context (section 7.1), of which at most 32 bytes are needed.
Digest expand(const Digest& secret, std::string_view label, size_t bytes) {
  const std::string full = "tls13 " + std::string(label);
  const char lengths[] = {0, static_cast<char>(bytes), static_cast<char>(full.size())};
  return hmacSha256(asText(secret),
                    std::string(lengths, sizeof(lengths)) + full + std::string("\0\x01", 2));
}

void writeHeader(size_t contentBytes, char* header) {
  const size_t length = contentBytes + 1 + RecordCipher::kTagBytes;
  header[0] = RecordCipher::kData;
  header[1] = header[2] = 3;
  header[3] = static_cast<char>(length >> 8);
  header[4] = static_cast<char>(length);
}

}  // namespace

RecordCipher::RecordCipher(const openssl::Library& library, bool isAes, bool isSealing,
                           const Digest& secret)
    : library_(library),
      context_(library.EVP_CIPHER_CTX_new(), library.EVP_CIPHER_CTX_free),
      keyBytes_(isAes ? 16 : 32),
      secret_(secret) {
  const openssl::Algorithm* const algorithm =
      isAes ? library.EVP_aes_128_gcm() : library.EVP_chacha20_poly1305();
  if (!context_ || library.EVP_CipherInit_ex(context_.get(), algorithm, nullptr, nullptr, nullptr,
                                             isSealing) != 1) {
    throw std::bad_alloc();
  }
  setKey();
}

RecordCipher::~RecordCipher() { explicit_bzero(&secret_, sizeof(secret_)); }

void RecordCipher::setKey() {
  Digest key = expand(secret_, "key", keyBytes_);
  std::memcpy(iv_, expand(secret_, "iv", sizeof(iv_)).data(), sizeof(iv_));
  number_ = 0;
  const bool isSet =
      library_.EVP_CipherInit_ex(context_.get(), nullptr, nullptr, key.data(), nullptr, -1) == 1;
  explicit_bzero(&key, sizeof(key));
  if (!isSet) throw std::bad_alloc();
}

void RecordCipher::changeKey() {
  secret_ = expand(secret_, "traffic upd", secret_.size());
  setKey();
}

// Sets the nonce, and authenticates the header.
bool RecordCipher::begin(const char* header) {
  uint8_t nonce[sizeof(iv_)];
  std::memcpy(nonce, iv_, sizeof(nonce));
  for (size_t i = 0; i < sizeof(number_); ++i) nonce[11 - i] ^= uint8_t(number_ >> 8 * i);
  ++number_;
  return library_.EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce, -1) == 1 &&
         update(header, kHeaderBytes, nullptr);
}

bool RecordCipher::update(const char* in, size_t bytes, char* out) {
  int done = 0;
  return library_.EVP_CipherUpdate(context_.get(), reinterpret_cast<unsigned char*>(out), &done,
                                   reinterpret_cast<const unsigned char*>(in),
                                   static_cast<int>(bytes)) == 1 &&
         static_cast<size_t>(done) == bytes;
}

char* RecordCipher::seal(Type type, const Span* parts, size_t offset, size_t bytes, char* out) {
  writeHeader(bytes, out);
  bool isSealed = begin(out);
  out += kHeaderBytes;
  for (; bytes > 0 && isSealed; ++parts) {
    const size_t begin = std::min(offset, parts->bytes);
    const size_t taken = std::min(bytes, parts->bytes - begin);
    if (taken > 0) isSealed = update(parts->begin() + begin, taken, out);
    out += taken;
    offset -= begin;
    bytes -= taken;
  }
  const char last = static_cast<char>(type);
  unsigned char nothing[kTagBytes];
  int none = 0;
  isSealed =
      isSealed && update(&last, 1, out) &&
      library_.EVP_CipherFinal_ex(context_.get(), nothing, &none) == 1 &&
      library_.EVP_CIPHER_CTX_ctrl(context_.get(), openssl::kGetTag, kTagBytes, out + 1) == 1;
  return isSealed ? out + 1 + kTagBytes : nullptr;
}

size_t RecordCipher::sizeOf(const char* record, size_t bytes) {
  if (bytes < kHeaderBytes) return 0;
  const auto byte = [&](int i) { return static_cast<size_t>(static_cast<uint8_t>(record[i])); };
  const size_t length = byte(3) << 8 | byte(4);
  const bool isRecord = byte(0) == kData && byte(1) == 3 && byte(2) == 3 && length > kTagBytes &&
                        kHeaderBytes + length <= kMaxRecord;
  return isRecord ? kHeaderBytes + length : kTooLong;
}

// Without padding, the type is the last byte: neither side pads.
RecordCipher::Type RecordCipher::open(const char* record, size_t bytes, char* content) {
  const size_t contentBytes = bytes - kOverhead;
  const char* const tag = record + bytes - kTagBytes;
  char type = 0;
  unsigned char nothing[kTagBytes];
  int none = 0;
  const bool isOpen = begin(record) &&
                      library_.EVP_CIPHER_CTX_ctrl(context_.get(), openssl::kSetTag, kTagBytes,
                                                   const_cast<char*>(tag)) == 1 &&
                      (contentBytes == 0 || update(record + kHeaderBytes, contentBytes, content)) &&
                      update(tag - 1, 1, &type) &&
                      library_.EVP_CipherFinal_ex(context_.get(), nothing, &none) == 1;
  return isOpen ? static_cast<Type>(static_cast<uint8_t>(type)) : kInvalid;
}

}  // namespace mycoll
