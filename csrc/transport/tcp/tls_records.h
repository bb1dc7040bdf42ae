// The protection of TLS 1.3 records with application data, RFC 8446, section 5.2. The keys come
// from a handshake that OpenSSL has completed; OpenSSL's ciphers do the cryptography. OpenSSL's own
// SSL_write() and SSL_read() would do the same, but take 1 us for a short record and copy each byte
// two more times.
//
// Thread contract: a RecordCipher is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/sha256.h"
#include "base/types.h"
#include "transport/tcp/openssl.h"

namespace mycoll {

// One direction of a connection: its key, and the number of the next record.
class RecordCipher {
 public:
  static constexpr size_t kMaxContent = 16 * 1024;
  static constexpr size_t kHeaderBytes = 5;
  static constexpr size_t kTagBytes = 16;
  static constexpr size_t kOverhead = kHeaderBytes + 1 + kTagBytes;  // and the type
  static constexpr size_t kMaxRecord = kMaxContent + kOverhead;
  enum Type : uint8_t { kInvalid = 0, kAlert = 21, kHandshake = 22, kData = 23 };

  // AES-128-GCM or ChaCha20-Poly1305. secret: the traffic secret of this direction (section 7.1).
  // Throws std::bad_alloc.
  RecordCipher(const openssl::Library& library, bool isAes, bool isSealing, const Digest& secret);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // Writes a record to `out`, which has room for kOverhead more than the content. The content is
  // `bytes` of the parts from this offset on. Returns its end, or null after a failure.
  char* seal(Type type, const Span* parts, size_t offset, size_t bytes, char* out);
  // The size of the record that begins here, of which `bytes` are there; 0: not known yet.
  // kTooLong: this is no record.
  static constexpr size_t kTooLong = ~size_t{0};
  static size_t sizeOf(const char* record, size_t bytes);
  // Decrypts a whole record, whose content may replace it. kInvalid: it is not what the peer has
  // sent; `content` then holds garbage.
  Type open(const char* record, size_t bytes, char* content);
  // Section 7.2. The next record is the first one with a new key. Throws std::bad_alloc.
  void changeKey();

 private:
  void setKey();
  bool begin(const char* header);
  bool update(const char* in, size_t bytes, char* out);

  const openssl::Library& library_;
  const std::unique_ptr<openssl::CipherContext, void (*)(openssl::CipherContext*)> context_;
  const size_t keyBytes_;
  Digest secret_;
  uint8_t iv_[12];
  uint64_t number_ = 0;
};

}  // namespace mycoll
