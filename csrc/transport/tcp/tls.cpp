#include "transport/tcp/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/secret.h"
#include "base/sha256.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace mycoll {
namespace {

constexpr char kIdentity[] = "mycoll tls 1.3 psk v1";
constexpr const char* kAes = "TLS_AES_128_GCM_SHA256";
// In the lines of a key log (RFC 9850), before the client's random number and the secret.
constexpr std::string_view kSecretLabels[] = {"CLIENT_TRAFFIC_SECRET_0 ",
                                              "SERVER_TRAFFIC_SECRET_0 "};
constexpr char kKeyUpdate[] = {24, 0, 0, 1, 0};  // which requests none (RFC 8446, section 4.6.3)
constexpr const char* kAesFirst = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr const char* kChaChaFirst = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256";
// The bytes that are encrypted before they are sent, and read with one call; short records, also
// many of them, are read with a smaller buffer.
constexpr size_t kBatchBytes = 8 * RecordCipher::kMaxContent;
constexpr size_t kReadBytes = 8 * RecordCipher::kMaxRecord;
constexpr size_t kShortReadBytes = 4 * 1024;

// For what OpenSSL calls: it is loaded then.
const openssl::Library& loaded() {
  const openssl::Library* library = nullptr;
  (void)openssl::Library::load(&library);
  return *library;
}

}  // namespace

// ---- Tls ---------------------------------------------------------------------------------------

bool Tls::isAesFast() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kAes = 1 << 3, kPmull = 1 << 4;
  return (getauxval(AT_HWCAP) & (kAes | kPmull)) == (kAes | kPmull);
#else
  return false;
#endif
}

Tls::~Tls() {
  if (context_) library_->SSL_CTX_free(context_);
}

Status Tls::failure(const std::string& what) const {
  const char* reason = library_->ERR_reason_error_string(library_->ERR_peek_error());
  return Status(Code::kInvalidArgument, what + (reason ? std::string(": ") + reason : ""));
}

Status Tls::begin(bool isAesFirst) {
  MYCOLL_RETURN_IF_ERROR(openssl::Library::load(&library_));
  const openssl::Library& library = *library_;
  library.ERR_clear_error();
  context_ = library.SSL_CTX_new(library.TLS_method());
  if (!context_) throw std::bad_alloc();
  const char* const ciphers = isAesFirst ? kAesFirst : kChaChaFirst;
  if (library.SSL_CTX_ctrl(context_, openssl::kSetMinVersion, openssl::kTls13, nullptr) != 1 ||
      library.SSL_CTX_ctrl(context_, openssl::kSetMaxVersion, openssl::kTls13, nullptr) != 1 ||
      library.SSL_CTX_set_ciphersuites(context_, ciphers) != 1 ||
      library.SSL_CTX_set_num_tickets(context_, 0) != 1) {
    return failure("OpenSSL refuses TLS 1.3 on this host");
  }
  library.SSL_CTX_set_keylog_callback(context_, &keepSecret);
  // With a key, neither side has a certificate, so one that is shown is refused.
  library.SSL_CTX_set_verify(context_, openssl::kVerifyPeer | openssl::kFailIfNoPeerCertificate,
                             nullptr);
  return Status();
}

Status Tls::fromEnv(std::shared_ptr<const Tls>* result) {
  const Env& env = Env::process();
  if (env.tlsFiles.isWanted) return make(env.tlsFiles, result);
  result->reset();
  if (!env.encrypt) return Status();
  if (env.secretFile.empty()) {
    return Status(
        Code::kInvalidArgument,
        "MYCOLL_ENCRYPT=1 needs MYCOLL_SECRET_FILE, the same file on all ranks: a key that "
        "came through torch's store would cross the network unencrypted. Make one with "
        "`head -c 32 /dev/urandom > FILE; chmod 600 FILE`");
  }
  std::string secret;
  MYCOLL_RETURN_IF_ERROR(secretOf("mycoll tls", &secret));
  return make(secret, result);
}

Status Tls::make(const std::string& secret, std::shared_ptr<const Tls>* result,
                 uint64_t recordsPerKey, bool isAesFirst) {
  std::shared_ptr<Tls> tls(new Tls);
  tls->recordsPerKey_ = recordsPerKey;
  MYCOLL_RETURN_IF_ERROR(tls->begin(isAesFirst));
  static_assert(std::tuple_size_v<Digest> == kKeyBytes);
  tls->key_ = asText(hmacSha256(secret, kIdentity));
  tls->library_->SSL_CTX_set_psk_client_callback(tls->context_, &clientKey);
  tls->library_->SSL_CTX_set_psk_server_callback(tls->context_, &serverKey);
  *result = std::move(tls);
  return Status();
}

Status Tls::make(const TlsFiles& files, std::shared_ptr<const Tls>* result) {
  std::shared_ptr<Tls> tls(new Tls);
  MYCOLL_RETURN_IF_ERROR(tls->begin(isAesFast()));
  const openssl::Library& library = *tls->library_;
  const auto orNull = [](const std::string& path) { return path.empty() ? nullptr : path.c_str(); };
  const auto refuse = [&](const char* variable, const std::string& path) {
    return tls->failure("GLOO_DEVICE_TRANSPORT_TCP_TLS_" + std::string(variable) + ": '" + path +
                        "' cannot be used");
  };
  openssl::Context* const context = tls->context_;
  if (library.SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1) {
    return refuse("CERT", files.certificate);
  }
  if (library.SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), openssl::kPem) != 1 ||
      library.SSL_CTX_check_private_key(context) != 1) {
    return refuse("PKEY", files.key);
  }
  if (library.SSL_CTX_load_verify_locations(context, orNull(files.authorities),
                                            orNull(files.authoritiesFolder)) != 1) {
    return refuse(files.authorities.empty() ? "CA_PATH" : "CA_FILE",
                  files.authorities.empty() ? files.authoritiesFolder : files.authorities);
  }
  *result = std::move(tls);
  return Status();
}

std::string Tls::describe() const {
  const char* const cipher = cipher_.load(std::memory_order_relaxed);
  return std::string("TLS 1.3 ") + (usesCertificates() ? "certificates" : "PSK") +
         (cipher ? std::string(", ") + cipher : "");
}

unsigned Tls::clientKey(openssl::Ssl* ssl, const char*, char* identity, unsigned room,
                        unsigned char* key, unsigned keyRoom) {
  if (room < sizeof(kIdentity)) return 0;
  std::memcpy(identity, kIdentity, sizeof(kIdentity));
  return serverKey(ssl, kIdentity, key, keyRoom);
}

unsigned Tls::serverKey(openssl::Ssl* ssl, const char* identity, unsigned char* key,
                        unsigned keyRoom) {
  if (keyRoom < kKeyBytes || std::strcmp(identity, kIdentity) != 0) return 0;
  const auto* const socket = static_cast<const TlsSocket*>(loaded().SSL_get_ex_data(ssl, 0));
  std::memcpy(key, socket->tls_->key_.data(), kKeyBytes);
  return kKeyBytes;
}

void Tls::keepSecret(const openssl::Ssl* ssl, const char* line) {
  auto* const socket = static_cast<TlsSocket*>(loaded().SSL_get_ex_data(ssl, 0));
  for (const int side : {0, 1}) {
    if (std::string_view(line).substr(0, kSecretLabels[side].size()) != kSecretLabels[side])
      continue;
    const char* digits = std::strrchr(line, ' ') + 1;
    Digest& secret = socket->secrets_[side].emplace();
    if (std::strlen(digits) != 2 * secret.size()) return socket->secrets_[side].reset();
    for (uint8_t& byte : secret) {
      byte = static_cast<uint8_t>(std::strtoul(std::string(digits, 2).c_str(), nullptr, 16));
      digits += 2;
    }
  }
}

// ---- TlsSocket ---------------------------------------------------------------------------------

openssl::BioMethod* TlsSocket::bioMethod(const openssl::Library& library) {
  static openssl::BioMethod* const kMethod = [&] {
    openssl::BioMethod* method = library.BIO_meth_new(openssl::kBioSourceSink, "mycoll");
    if (!method) throw std::bad_alloc();
    library.BIO_meth_set_write(method, &sendCallback);
    library.BIO_meth_set_read(method, &receiveCallback);
    library.BIO_meth_set_ctrl(method, &controlCallback);
    return method;
  }();
  return kMethod;
}

TlsSocket::TlsSocket(std::shared_ptr<const Tls> tls, int socket, bool isConnector)
    : tls_(std::move(tls)), library_(*tls_->library_), socket_(socket), isConnector_(isConnector) {
  ssl_ = library_.SSL_new(tls_->context_);
  openssl::Bio* const bio = ssl_ ? library_.BIO_new(bioMethod(library_)) : nullptr;
  if (!bio) {
    if (ssl_) library_.SSL_free(ssl_);
    throw std::bad_alloc();
  }
  library_.BIO_set_data(bio, this);
  library_.BIO_set_init(bio, 1);
  library_.SSL_set_bio(ssl_, bio, bio);  // which owns it now
  library_.SSL_set_ex_data(ssl_, 0, this);
  if (isConnector) {
    library_.SSL_set_connect_state(ssl_);
  } else {
    library_.SSL_set_accept_state(ssl_);
    // OpenSSL refuses a key without one.
    library_.SSL_set_session_id_context(ssl_, reinterpret_cast<const unsigned char*>(kIdentity),
                                        sizeof(kIdentity) - 1);
  }
}

TlsSocket::~TlsSocket() { library_.SSL_free(ssl_); }

TlsSocket::State TlsSocket::shakeHands() {
  if (state_ != State::kShakingHands) return state_;
  onEvent(false);
  library_.ERR_clear_error();
  const int result = library_.SSL_do_handshake(ssl_);
  const bool isSent = flush();
  if (result == 1 && isSent) return state_ = finishHandshake() ? State::kOpen : State::kFailed;
  const bool isWaiting = !isSent || library_.SSL_get_error(ssl_, result) == openssl::kErrorWantRead;
  const bool isBroken = sendError_ != 0 || receiveError_ != 0;
  if (isWaiting && !isBroken) return state_;
  const char* reason = library_.ERR_reason_error_string(library_.ERR_peek_error());
  if (!reason) reason = "the handshake failed";
  if (!isAtEnd_ && !isBroken) failure_ = std::string("TLS: ") + reason;
  return state_ = State::kFailed;
}

bool TlsSocket::finishHandshake() {
  // A peer that shows a certificate instead of the key has not proved its identity.
  if (!tls_->usesCertificates() && library_.SSL_session_reused(ssl_) != 1) {
    failure_ = "it has not proved that it knows the key";
    return false;
  }
  // Without read-ahead, OpenSSL has taken nothing of the records that follow.
  if (!secrets_[0] || !secrets_[1] || library_.SSL_has_pending(ssl_) != 0) {
    failure_ = "TLS: this OpenSSL does not give the keys of its handshake";
    return false;
  }
  const openssl::Cipher* const cipher = library_.SSL_get_current_cipher(ssl_);
  const bool isAes = std::strcmp(library_.SSL_CIPHER_get_name(cipher), kAes) == 0;
  tls_->cipher_.store(isAes ? "AES-128-GCM" : "ChaCha20-Poly1305", std::memory_order_relaxed);
  sealer_.emplace(library_, isAes, /*isSealing=*/true, *secrets_[isConnector_ ? 0 : 1]);
  opener_.emplace(library_, isAes, /*isSealing=*/false, *secrets_[isConnector_ ? 1 : 0]);
  for (std::optional<Digest>& secret : secrets_) explicit_bzero(&*secret, sizeof(*secret));
  library_.SSL_free(std::exchange(ssl_, nullptr));
  onEvent(false);
  return true;
}

void TlsSocket::Buffer::makeRoom(size_t bytes) {
  const size_t waiting = end - begin;
  if (bytes > room) {
    std::unique_ptr<char[]> larger(new char[bytes]);
    if (waiting > 0) std::memcpy(larger.get(), data.get() + begin, waiting);
    data = std::move(larger);
    room = bytes;
  } else if (begin > 0) {
    std::memmove(data.get(), data.get() + begin, waiting);
  }
  begin = 0;
  end = waiting;
}

// Returns false if there are bytes left, as the socket has no room or is broken.
bool TlsSocket::flush() {
  while (out_.begin < out_.end) {
    const ssize_t sent = ::send(socket_, out_.data.get() + out_.begin, out_.end - out_.begin,
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      out_.begin += static_cast<size_t>(sent);
    } else if (errno != EINTR) {
      if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM) sendError_ = errno;
      return false;
    }
  }
  return true;
}

ssize_t TlsSocket::write(const Span* parts, int count) {
  if (sendError_ != 0) return errno = sendError_, -1;
  if (!flush()) return sendError_ == 0 ? 0 : (errno = sendError_, -1);
  size_t total = 0;
  for (int i = 0; i < count; ++i) total += parts[i].bytes;
  const size_t end = std::min(total, kBatchBytes);
  size_t taken = isHeldBack_ ? 1 : 0;
  // One more record may be cut short, and one may change the key.
  const size_t most = (end - taken) / RecordCipher::kMaxContent + 2;
  out_.makeRoom(end + most * RecordCipher::kOverhead + sizeof(kKeyUpdate));
  isHeldBack_ = false;
  char* sealed = out_.data.get();
  while (taken < end && sealed) {
    if (++records_ == tls_->recordsPerKey_) {
      records_ = 0;
      const Span update{const_cast<char*>(kKeyUpdate), sizeof(kKeyUpdate)};
      sealed = sealer_->seal(RecordCipher::kHandshake, &update, 0, sizeof(kKeyUpdate), sealed);
      if (!sealed) break;
      sealer_->changeKey();
    }
    const size_t bytes = std::min(RecordCipher::kMaxContent, end - taken);
    sealed = sealer_->seal(RecordCipher::kData, parts, taken, bytes, sealed);
    taken += bytes;
  }
  if (!sealed) return errno = sendError_ = EBADMSG, -1;
  out_.end = static_cast<size_t>(sealed - out_.data.get());
  if (flush()) return static_cast<ssize_t>(taken);
  if (sendError_ != 0) return errno = sendError_, -1;
  isHeldBack_ = true;
  return static_cast<ssize_t>(taken) - 1;
}

ssize_t TlsSocket::read(void* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes && hasMore_) {
    char* const into = static_cast<char*>(data) + done;
    if (!content_.empty()) {
      const size_t taken = content_.copy(into, bytes - done);
      content_.remove_prefix(taken);
      done += taken;
    } else if (const ssize_t opened = openRecord(into, bytes - done); opened >= 0) {
      done += static_cast<size_t>(opened);
    } else if (isAtEnd_ || receiveError_ != 0) {
      if (done > 0) break;  // the next call reports it
      errno = receiveError_;
      return -1;
    } else {
      hasMore_ = false;
    }
  }
  return static_cast<ssize_t>(done);
}

ssize_t TlsSocket::openRecord(char* data, size_t bytes) {
  size_t record = 0;
  for (;;) {
    if (receiveError_ != 0) return -1;
    const size_t there = in_.end - in_.begin;
    record = RecordCipher::sizeOf(in_.data.get() + in_.begin, there);
    if (record == RecordCipher::kTooLong) return receiveError_ = EBADMSG, -1;
    if (record != 0 && record <= there) break;
    in_.makeRoom(record <= kShortReadBytes ? kShortReadBytes : kReadBytes);
    const ssize_t got = receive(in_.data.get() + in_.end, in_.room - in_.end);
    if (got <= 0) return -1;
    in_.end += static_cast<size_t>(got);
  }
  char* const begin = in_.data.get() + in_.begin;
  in_.begin += record;
  const size_t contentBytes = record - RecordCipher::kOverhead;
  char* const content = contentBytes <= bytes ? data : begin + RecordCipher::kHeaderBytes;
  const RecordCipher::Type type = opener_->open(begin, record, content);
  if (type == RecordCipher::kData) {
    if (content == data) return static_cast<ssize_t>(contentBytes);
    content_ = {content, contentBytes};
    return 0;
  }
  const bool isKeyUpdate = type == RecordCipher::kHandshake && contentBytes == sizeof(kKeyUpdate) &&
                           std::memcmp(content, kKeyUpdate, sizeof(kKeyUpdate)) == 0;
  if (type == RecordCipher::kAlert && contentBytes == 2) {
    // A server checks a client's certificate when the client has its keys already.
    const auto alert = static_cast<unsigned char>(content[1]);
    failure_ = std::string("TLS: the peer reports: ") + library_.SSL_alert_desc_string_long(alert);
  }
  if (!isKeyUpdate) return receiveError_ = EBADMSG, -1;
  opener_->changeKey();
  return 0;
}

// As recv(), but remembers what it finds: 0 and -1 with isAtEnd_ or receiveError_, else there is
// nothing.
ssize_t TlsSocket::receive(char* data, size_t bytes) {
  while (isReadable_) {
    const ssize_t got = recv(socket_, data, bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got < 0) receiveError_ = errno;
    if (got == 0) isAtEnd_ = true;
    // The next byte raises a new event.
    if (got > 0 && static_cast<size_t>(got) < bytes && !isClosed_) isReadable_ = false;
    return got;
  }
  isReadable_ = false;
  return -1;
}

// ---- what OpenSSL calls

int TlsSocket::sendCallback(openssl::Bio* bio, const char* data, int bytes) {
  Buffer& out = static_cast<TlsSocket*>(loaded().BIO_get_data(bio))->out_;
  try {
    out.makeRoom(out.end - out.begin + static_cast<size_t>(bytes));
  } catch (const std::bad_alloc&) {
    return -1;
  }
  std::memcpy(out.data.get() + out.end, data, static_cast<size_t>(bytes));
  out.end += static_cast<size_t>(bytes);
  return bytes;
}

int TlsSocket::receiveCallback(openssl::Bio* bio, char* data, int bytes) {
  const openssl::Library& library = loaded();
  auto* const self = static_cast<TlsSocket*>(library.BIO_get_data(bio));
  library.BIO_clear_flags(bio, openssl::kBioRetryFlags);
  const ssize_t got = self->receive(data, static_cast<size_t>(bytes));
  if (got < 0 && self->receiveError_ == 0) library.BIO_set_flags(bio, openssl::kBioRetryRead);
  return static_cast<int>(got);
}

long TlsSocket::controlCallback(openssl::Bio*, int command, long, void*) {
  return command == openssl::kBioFlush ? 1 : 0;
}

}  // namespace mycoll
