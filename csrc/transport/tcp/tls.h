// TLS 1.3 for the sockets between hosts (MYCOLL_ENCRYPT), by OpenSSL. docs/security.md describes
// the threats, keys and ciphers.
//
// A process has one Tls, and each encrypted socket a TlsSocket. Both sides first complete TLS's own
// handshake, in which they prove that they have the same key, or certificates of the same
// authority. Then the handshake of handshake.h follows, encrypted, and then the frames. OpenSSL
// does the handshake, tls_records.h the records that follow it.
//
// Thread contract: Tls is constant, but for describe(). A TlsSocket is used under the mesh's I/O
// lock. Nothing blocks.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/env.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/types.h"
#include "transport/tcp/link.h"
#include "transport/tcp/openssl.h"
#include "transport/tcp/tls_records.h"

namespace mycoll {

class Tls {
 public:
  // As the environment variables ask; null without encryption.
  static Status fromEnv(std::shared_ptr<const Tls>* result);
  // AES-GCM allows 2^24.5 full records with one key (RFC 8446, section 5.5).
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

  // Whether the processor has instructions for AES-GCM. Else ChaCha20-Poly1305 comes first.
  static bool isAesFast();

  // Both sides know this secret. The further parameters are for tests.
  static Status make(const std::string& secret, std::shared_ptr<const Tls>* result,
                     uint64_t recordsPerKey = kRecordsPerKey, bool isAesFirst = isAesFast());
  // Each side has a certificate by an authority that the other one trusts.
  static Status make(const TlsFiles& files, std::shared_ptr<const Tls>* result);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // The ranks prove their identity by certificates, not by a common secret.
  bool usesCertificates() const { return key_.empty(); }
  // [any thread] "TLS 1.3 PSK, AES-128-GCM"; without a cipher until a socket has been opened.
  std::string describe() const;

 private:
  friend class TlsSocket;
  static constexpr size_t kKeyBytes = 32;

  Tls() = default;
  Status begin(bool isAesFirst);
  Status failure(const std::string& what) const;
  static unsigned clientKey(openssl::Ssl* ssl, const char* hint, char* identity, unsigned room,
                            unsigned char* key, unsigned keyRoom);
  static unsigned serverKey(openssl::Ssl* ssl, const char* identity, unsigned char* key,
                            unsigned keyRoom);
  static void keepSecret(const openssl::Ssl* ssl, const char* line);

  const openssl::Library* library_ = nullptr;
  openssl::Context* context_ = nullptr;
  std::string key_;  // empty: certificates
  uint64_t recordsPerKey_ = kRecordsPerKey;
  mutable std::atomic<const char*> cipher_{nullptr};  // of the socket that was opened last
};

// One encrypted socket. write() and read() are those of a LinkSender and a LinkReceiver.
class TlsSocket {
 public:
  // The socket is non-blocking and outlives this.
  TlsSocket(std::shared_ptr<const Tls> tls, int socket, bool isConnector);
  ~TlsSocket();
  TlsSocket(const TlsSocket&) = delete;
  TlsSocket& operator=(const TlsSocket&) = delete;

  enum class State { kShakingHands, kOpen, kFailed };
  // Continues the handshake as far as bytes have arrived.
  State shakeHands();
  // kFailed: the reason; empty if the connection was closed.
  const std::string& failure() const { return failure_; }

  // Both only if open. If this takes a part of a frame, the rest of that frame follows in the next
  // calls: what is encrypted cannot be withdrawn.
  ssize_t write(const Span* parts, int count);
  // -1 with errno EBADMSG: what arrived is not what the peer has sent.
  ssize_t read(void* data, size_t bytes);
  bool maybeReadable() const { return hasMore_; }
  void onEvent(bool isClosed) {
    hasMore_ = isReadable_ = true;
    isClosed_ |= isClosed;
  }

 private:
  friend class Tls;

  // The bytes [begin, end) wait to be sent, or to be opened.
  struct Buffer {
    // For this many bytes in all, of which those that wait are the first.
    void makeRoom(size_t bytes);

    std::unique_ptr<char[]> data;
    size_t room = 0, begin = 0, end = 0;
  };

  static int sendCallback(openssl::Bio* bio, const char* data, int bytes);
  static int receiveCallback(openssl::Bio* bio, char* data, int bytes);
  static long controlCallback(openssl::Bio* bio, int command, long, void*);
  static openssl::BioMethod* bioMethod(const openssl::Library& library);
  bool finishHandshake();
  bool flush();
  ssize_t receive(char* data, size_t bytes);
  // Opens the next record. Its content goes to `data` if there is room for it, else to content_.
  // Returns the bytes written to `data`; or -1: there is no record yet, or receiveError_ is set.
  ssize_t openRecord(char* data, size_t bytes);

  const std::shared_ptr<const Tls> tls_;
  const openssl::Library& library_;
  const int socket_;
  const bool isConnector_;
  State state_ = State::kShakingHands;
  std::string failure_;
  // Until the handshake is over, and the secrets of the client's and of the server's records.
  openssl::Ssl* ssl_ = nullptr;
  std::optional<Digest> secrets_[2];
  // errno of a failure of the socket, or EBADMSG: what arrived is not what the peer has sent. After
  // a failure to send, what the peer has sent before can still be read.
  int sendError_ = 0, receiveError_ = 0;

  // Receiving.
  std::optional<RecordCipher> opener_;
  Buffer in_;
  std::string_view content_;  // the rest of the record before in_.begin
  bool hasMore_ = true;       // read() may find a record
  bool isReadable_ = true;  // recv() may find bytes; cleared by one that found less than asked for
  bool isClosed_ = false;   // the bytes there are followed by the end of the stream
  bool isAtEnd_ = false;    // recv() has found the end of the stream

  // Sending. If the socket has no room for all records, the last byte of what they contain is held
  // back: write() has not reported that it took it, so that the caller comes again.
  std::optional<RecordCipher> sealer_;
  Buffer out_;
  bool isHeldBack_ = false;
  uint64_t records_ = 0;  // since the latest change of the key
};

class TlsSender final : public TcpSender {
 public:
  TlsSender(Socket socket, std::shared_ptr<TlsSocket> tls)
      : TcpSender(std::move(socket)), tls_(std::move(tls)) {}
  ssize_t write(const Span* parts, int count) override { return tls_->write(parts, count); }

 private:
  std::shared_ptr<TlsSocket> tls_;
};

class TlsReceiver final : public LinkReceiver {
 public:
  TlsReceiver(Socket socket, std::shared_ptr<TlsSocket> tls)
      : socket_(std::move(socket)), tls_(std::move(tls)) {}
  ssize_t read(void* data, size_t bytes, bool) override { return tls_->read(data, bytes); }
  bool maybeReadable() const override { return tls_->maybeReadable(); }
  void lookAgain() override { tls_->onEvent(false); }
  void onEvent(bool isClosed) override { tls_->onEvent(isClosed); }
  void setAsleep(bool) override {}
  int fd() const override { return socket_->get(); }

 private:
  Socket socket_;
  std::shared_ptr<TlsSocket> tls_;
};

}  // namespace mycoll
