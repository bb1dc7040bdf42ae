// Encrypted sockets: they deliver the bytes that were sent, or an error.
#include "transport/tcp/tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/sha256.h"
#include "test.h"

using namespace mycoll;

namespace {

constexpr char kSecret[] = "a secret of the job";

// The library that is loaded as OpenSSL.
const char* insteadOfOpenSsl = "libssl.so.3";
int loads = 0;

std::shared_ptr<const Tls> tlsOf(const std::string& secret) {
  std::shared_ptr<const Tls> tls;
  ASSERT_OK(Tls::make(secret, &tls));
  return tls;
}

void makePair(Fd* one, Fd* other) {
  int sockets[2];
  ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sockets) == 0);
  *one = Fd(sockets[0]);
  *other = Fd(sockets[1]);
}

// Two encrypted sockets, and an attacker between them that can read and change all bytes.
struct Line {
  explicit Line(const std::string& secret = kSecret, const std::string& otherSecret = kSecret) {
    makePair(&socket[0], &middle[0]);
    makePair(&socket[1], &middle[1]);
    for (const int side : {0, 1}) {
      tls[side] = tlsOf(side == 0 ? secret : otherSecret);
      end[side] = std::make_unique<TlsSocket>(tls[side], socket[side].get(),
                                              /*isConnector=*/side == 0);
    }
  }

  // Takes the bytes that this side has sent.
  std::string take(int side) const {
    std::string bytes(1 << 20, '\0');
    const ssize_t got = recv(middle[side].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return bytes;
  }
  // Delivers bytes to this side.
  void give(int side, const std::string& bytes) const {
    ASSERT(::send(middle[side].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size()));
  }
  void pass() {
    for (const int side : {0, 1}) {
      std::string& bytes = waiting[side];
      bytes += take(1 - side);
      const ssize_t sent = ::send(middle[side].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes.erase(0, static_cast<size_t>(sent));
    }
  }
  void shakeHands() {
    for (int turn = 0; turn < 10; ++turn) {
      end[0]->shakeHands();
      end[1]->shakeHands();
      pass();
    }
  }
  // Returns the records of a message from side 0.
  std::string sealed(const std::string& text) const {
    const Span part{const_cast<char*>(text.data()), text.size()};
    ASSERT(end[0]->write(&part, 1) == static_cast<ssize_t>(text.size()));
    return take(0);
  }
  ssize_t read(int side, std::string* text) const {
    text->assign(1 << 16, '\0');
    end[side]->onEvent(false);
    errno = 0;
    const ssize_t got = end[side]->read(text->data(), text->size());
    text->resize(got > 0 ? static_cast<size_t>(got) : 0);
    return got;
  }
  // Whether side 1 reads an error and no data from these bytes. The beginning of a record is an
  // error when the connection ends.
  bool refuses(const std::string& bytes) {
    std::string text;
    give(1, bytes);
    ssize_t got = read(1, &text);
    if (got == 0) {
      ASSERT(shutdown(middle[1].get(), SHUT_WR) == 0);
      got = read(1, &text);
    }
    return got == -1 && text.empty();
  }

  Fd socket[2], middle[2];
  std::string waiting[2];  // bytes that the sockets had no room for
  std::shared_ptr<const Tls> tls[2];
  std::unique_ptr<TlsSocket> end[2];
};

}  // namespace

extern "C" void* dlopen(const char* name, int flags) {
  static const auto next = reinterpret_cast<decltype(&dlopen)>(dlsym(RTLD_NEXT, "dlopen"));
  const bool isOpenSsl = name && std::strstr(name, "libssl");
  loads += isOpenSsl;
  return next(isOpenSsl ? insteadOfOpenSsl : name, flags);
}

// This is the first test, because a process loads OpenSSL once.
TEST(Tls, theErrorNamesThePackage) {
  ASSERT(loads == 0);
  for (const std::string library : {"libnone.so.3", "libm.so.6"}) {
    test::endProcess(test::startProcess([&] {
      insteadOfOpenSsl = library.c_str();
      std::shared_ptr<const Tls> tls;
      const Status status = Tls::make(kSecret, &tls);
      EXPECT_EQ(status.code(), Code::kUnsupported);
      const std::string why =
          library == "libm.so.6" ? "lacks OPENSSL_init_ssl" : library + ": cannot";
      for (const std::string& part : {std::string("apt install libssl3"), why}) {
        if (status.message().find(part) == std::string::npos) EXPECT_EQ(status.message(), part);
      }
    }));
  }
}

TEST(Tls, bytesArriveInOrder) {
  Line line;
  line.shakeHands();
  ASSERT(line.end[0]->shakeHands() == TlsSocket::State::kOpen);
  ASSERT(line.end[1]->shakeHands() == TlsSocket::State::kOpen);
  EXPECT(line.tls[0]->describe().find("TLS 1.3 PSK, ") == 0);
  EXPECT_EQ(line.tls[0]->describe(), line.tls[1]->describe());
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    // Both directions at the same time, in parts of any size, of which the socket takes some bytes.
    std::string sent[2], got[2];
    size_t done[2] = {0, 0};
    for (std::string& text : sent) {
      text.resize(round % 3 == 0 ? random() % 2'000'000 : 1 + random() % 40'000);
      for (char& byte : text) byte = static_cast<char>(random());
    }
    bool isSplit = false;
    while (done[0] < sent[0].size() || done[1] < sent[1].size() || got[0].size() < sent[0].size() ||
           got[1].size() < sent[1].size()) {
      for (const int side : {0, 1}) {
        // As a sender of frames does, this offers the remaining bytes again, in other parts.
        const size_t left = sent[side].size() - done[side];
        const size_t first = left == 0 ? 0 : random() % (left + 1);
        const Span parts[2] = {{sent[side].data() + done[side], first},
                               {sent[side].data() + done[side] + first, left - first}};
        const ssize_t wrote = left == 0 ? 0 : line.end[side]->write(parts, 2);
        ASSERT(wrote >= 0 && static_cast<size_t>(wrote) <= left);
        isSplit |= static_cast<size_t>(wrote) < left;
        done[side] += static_cast<size_t>(wrote);
        std::string text;
        ASSERT(line.read(1 - side, &text) >= 0);
        got[side] += text;
      }
      line.pass();
    }
    EXPECT(got[0] == sent[0] && got[1] == sent[1]);
    EXPECT(isSplit || round % 3 != 0 || sent[0].size() + sent[1].size() < 500'000);
  }
}

TEST(Tls, theSecretMustBeTheSame) {
  Line line(kSecret, "another secret of a job");
  line.shakeHands();
  EXPECT(line.end[0]->shakeHands() == TlsSocket::State::kFailed);
  EXPECT(line.end[1]->shakeHands() == TlsSocket::State::kFailed);
  EXPECT(line.end[0]->failure().find("TLS: ") == 0);
}

TEST(Tls, noDowngrade) {
  // A client that does not encrypt, one that offers only TLS 1.2, and noise.
  std::string old;
  {
    Line line;
    line.end[0]->shakeHands();
    old = line.take(0);
    const size_t versions = old.find(std::string("\x00\x2b\x00\x03\x02\x03\x04", 7));
    ASSERT(versions != std::string::npos);
    old[versions + 6] = 3;  // supported_versions: TLS 1.2
  }
  for (const std::string& hello :
       {std::string("MYSCOLL1") + std::string(136, 'a'), old, std::string(300, '\x16')}) {
    Line line;
    line.give(1, hello);
    EXPECT(line.end[1]->shakeHands() == TlsSocket::State::kFailed);
  }
  // A server that does not encrypt.
  Line line;
  line.end[0]->shakeHands();
  line.give(0, std::string(80, 'a'));
  EXPECT(line.end[0]->shakeHands() == TlsSocket::State::kFailed);
}

TEST(Tls, everyFlippedBitIsFound) {
  const std::string text = "forty-two";
  size_t bits = 8;
  for (size_t bit = 0; bit < bits; ++bit) {
    Line line;
    line.shakeHands();
    std::string record = line.sealed(text);
    bits = 8 * record.size();
    record[bit / 8] ^= static_cast<char>(1 << bit % 8);
    if (!line.refuses(record)) EXPECT_EQ(bit, ~size_t{0});
  }
  EXPECT(bits >= 8 * (text.size() + 5 + 16));
  // The unchanged record is read.
  Line line;
  line.shakeHands();
  line.give(1, line.sealed(text));
  std::string got;
  EXPECT_EQ(line.read(1, &got), static_cast<ssize_t>(text.size()));
  EXPECT_EQ(got, text);
}

TEST(Tls, everyFlippedBitOfTheHandshakeIsFound) {
  // The bits of the client's first flight, of the server's flight, and of the client's answer.
  size_t bits[3] = {8, 8, 8};
  for (const int flight : {0, 1, 2}) {
    for (size_t bit = 0; bit < bits[flight]; bit += flight == 0 ? 7 : 3) {
      Line line;
      for (int turn = 0; turn <= flight; ++turn) {
        const int side = turn % 2;
        line.end[side]->shakeHands();
        std::string bytes = line.take(side);
        bits[turn] = 8 * bytes.size();
        if (turn == flight && bit < 8 * bytes.size()) {
          bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
        }
        line.give(1 - side, bytes);
      }
      line.shakeHands();
      // The handshake fails, unless the bit has no meaning (RFC 8446, 5.1: the version in the
      // header of a record). Then both sides still agree.
      const bool isOpen = line.end[0]->shakeHands() == TlsSocket::State::kOpen &&
                          line.end[1]->shakeHands() == TlsSocket::State::kOpen;
      if (!isOpen) continue;
      line.give(1, line.sealed("hello"));
      std::string got;
      EXPECT_EQ(line.read(1, &got), 5);
      EXPECT_EQ(got, "hello");
    }
  }
}

TEST(Tls, misplacedRecordsAreRefused) {
  const auto with =
      [](const std::function<std::string(Line&, const std::string&, const std::string&)>& change) {
        Line line;
        line.shakeHands();
        const std::string first = line.sealed("first"), second = line.sealed("second");
        return line.refuses(change(line, first, second));
      };
  // A record is dropped, and two are swapped.
  EXPECT(with([](Line&, const std::string&, const std::string& second) { return second; }));
  EXPECT(with(
      [](Line&, const std::string& first, const std::string& second) { return second + first; }));
  // A record is repeated.
  Line line;
  line.shakeHands();
  const std::string record = line.sealed("first");
  line.give(1, record);
  std::string got;
  EXPECT_EQ(line.read(1, &got), 5);
  EXPECT(line.refuses(record));
  // A record is from another connection with the same key, or from the other direction.
  Line other;
  other.shakeHands();
  EXPECT(
      with([&](Line&, const std::string&, const std::string&) { return other.sealed("first"); }));
  Line reflected;
  reflected.shakeHands();
  const Span part{const_cast<char*>("first"), 5};
  EXPECT_EQ(reflected.end[1]->write(&part, 1), 5);
  EXPECT(reflected.refuses(reflected.take(1)));
  // The beginning of a recorded session is replayed.
  Line recorded, now;
  recorded.end[0]->shakeHands();
  const std::string hello = recorded.take(0);
  recorded.give(1, hello);
  recorded.end[1]->shakeHands();
  recorded.give(0, recorded.take(1));
  recorded.end[0]->shakeHands();
  const std::string rest = recorded.take(0) + recorded.sealed("first");
  now.give(1, hello);
  EXPECT(now.end[1]->shakeHands() == TlsSocket::State::kShakingHands);
  now.give(1, rest);
  EXPECT(now.end[1]->shakeHands() == TlsSocket::State::kFailed);
}

TEST(Tls, theKeyIsChangedPeriodically) {
  Line line;
  ASSERT_OK(Tls::make(kSecret, &line.tls[0], /*recordsPerKey=*/10));
  line.end[0] =
      std::make_unique<TlsSocket>(line.tls[0], line.socket[0].get(), /*isConnector=*/true);
  line.shakeHands();
  size_t usual = 0, changes = 0;
  for (int i = 1; i <= 100; ++i) {
    const std::string record = line.sealed("word");
    if (i == 1) usual = record.size();
    changes += record.size() > usual;  // it follows the message that changes the key
    line.give(1, record);
    std::string got;
    ASSERT(line.read(1, &got) == 4);
    ASSERT(got == "word");
  }
  EXPECT_EQ(changes, size_t{10});
}

// A peer of a TlsSocket that uses OpenSSL.
class OpenSslPeer {
 public:
  OpenSslPeer(int socket, bool isConnector, bool isAesFirst) {
    ASSERT_OK(openssl::Library::load(&library_));
    openssl::Context* const context = library_->SSL_CTX_new(library_->TLS_method());
    library_->SSL_CTX_ctrl(context, openssl::kSetMinVersion, openssl::kTls13, nullptr);
    library_->SSL_CTX_set_ciphersuites(
        context, isAesFirst ? "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"
                            : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256");
    library_->SSL_CTX_set_num_tickets(context, 0);
    library_->SSL_CTX_set_psk_client_callback(
        context, [](openssl::Ssl*, const char*, char* identity, unsigned, unsigned char* key,
                    unsigned) { return std::strcpy(identity, kIdentity), keyTo(key); });
    library_->SSL_CTX_set_psk_server_callback(
        context,
        [](openssl::Ssl*, const char*, unsigned char* key, unsigned) { return keyTo(key); });
    ssl_ = library_->SSL_new(context);
    library_->SSL_CTX_free(context);
    call<int(openssl::Ssl*, int)>("SSL_set_fd")(ssl_, socket);
    if (isConnector) {
      library_->SSL_set_connect_state(ssl_);
    } else {
      library_->SSL_set_accept_state(ssl_);
      library_->SSL_set_session_id_context(ssl_, reinterpret_cast<const unsigned char*>("peer"), 4);
    }
  }
  ~OpenSslPeer() { library_->SSL_free(ssl_); }

  bool shakeHands() { return library_->SSL_do_handshake(ssl_) == 1; }
  void write(const std::string& text) {
    const auto function = call<int(openssl::Ssl*, const void*, int)>("SSL_write");
    ASSERT(function(ssl_, text.data(), static_cast<int>(text.size())) ==
           static_cast<int>(text.size()));
  }
  std::string read() {
    const auto function = call<int(openssl::Ssl*, void*, int)>("SSL_read");
    std::string text(1 << 14, '\0');
    const int got = function(ssl_, text.data(), static_cast<int>(text.size()));
    text.resize(got > 0 ? static_cast<size_t>(got) : 0);
    return text;
  }
  void changeKey() { ASSERT(call<int(openssl::Ssl*, int)>("SSL_key_update")(ssl_, 0) == 1); }

 private:
  static constexpr char kIdentity[] = "mycoll tls 1.3 psk v1";
  static unsigned keyTo(unsigned char* key) {
    const Digest digest = hmacSha256(kSecret, kIdentity);
    std::memcpy(key, digest.data(), digest.size());
    return static_cast<unsigned>(digest.size());
  }
  template <typename Function>
  static Function* call(const char* name) {
    return reinterpret_cast<Function*>(dlsym(dlopen("libssl.so", RTLD_NOW), name));
  }

  const openssl::Library* library_ = nullptr;
  openssl::Ssl* ssl_ = nullptr;
};

TEST(Tls, openSslReadsAndWritesTheSameRecords) {
  std::mt19937 random(11);
  for (const int round : {0, 1, 2, 3}) {
    const bool isAes = round % 2 == 0, isConnector = round < 2;
    Fd socket, peerSocket;
    makePair(&socket, &peerSocket);
    std::shared_ptr<const Tls> tls;
    ASSERT_OK(Tls::make(kSecret, &tls, /*recordsPerKey=*/7, isAes));
    TlsSocket end(tls, socket.get(), isConnector);
    OpenSslPeer peer(peerSocket.get(), !isConnector, isAes);
    bool isOpen = false;
    for (int turn = 0; turn < 10; ++turn) {
      isOpen = end.shakeHands() == TlsSocket::State::kOpen;
      isOpen &= peer.shakeHands();
    }
    ASSERT(isOpen);
    EXPECT_EQ(tls->describe(),
              isAes ? "TLS 1.3 PSK, AES-128-GCM" : "TLS 1.3 PSK, ChaCha20-Poly1305");
    for (int message = 0; message < 200; ++message) {
      std::string text(1 + (message % 4 == 0 ? random() % 60'000 : random() % 40), '\0');
      for (char& byte : text) byte = static_cast<char>(random());
      // Several parts, one of them empty.
      const size_t first = random() % (text.size() + 1);
      const Span parts[3] = {{text.data(), first},
                             {text.data() + first, 0},
                             {text.data() + first, text.size() - first}};
      ASSERT(end.write(parts, 3) == static_cast<ssize_t>(text.size()));
      std::string got;
      while (got.size() < text.size()) got += peer.read();
      EXPECT(got == text);
      if (message % 5 == 0) peer.changeKey();
      peer.write(text);
      got.clear();
      while (got.size() < text.size()) {
        std::string part(1 + random() % 50'000, '\0');
        end.onEvent(false);
        const ssize_t bytes = end.read(part.data(), part.size());
        ASSERT(bytes >= 0);
        got += part.substr(0, static_cast<size_t>(bytes));
      }
      EXPECT(got == text);
    }
  }
}

TEST(Tls, bytesBeforeTheEndAreReadAfterAFailureToSend) {
  Line line;
  line.shakeHands();
  line.give(1, line.sealed("last"));
  ASSERT(shutdown(line.middle[1].get(), SHUT_RDWR) == 0);
  char byte = 0;
  const Span part{&byte, 1};
  EXPECT_EQ(line.end[1]->write(&part, 1), -1);
  EXPECT_EQ(errno, EPIPE);
  std::string got;
  EXPECT_EQ(line.read(1, &got), 4);
  EXPECT_EQ(got, "last");
  EXPECT_EQ(line.read(1, &got), -1);
}

TEST(Tls, theEndOfTheStreamIsReported) {
  Line line;
  line.shakeHands();
  line.give(1, line.sealed("last"));
  ASSERT(shutdown(line.middle[1].get(), SHUT_WR) == 0);
  std::string got;
  EXPECT_EQ(line.read(1, &got), 4);
  EXPECT_EQ(line.read(1, &got), -1);
  EXPECT_EQ(errno, 0);
}
