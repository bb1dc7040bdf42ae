// The functions of OpenSSL that encryption uses, found at run time: mycoll is built without
// OpenSSL, and needs it only with MYCOLL_ENCRYPT=1. The prototypes are those of versions 1.1.1
// and 3.
//
// Thread contract: load() [any thread]. OpenSSL's objects are used by one thread at a time.
// Lifetime: loaded once and kept for the process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace mycoll::openssl {

// Defined by OpenSSL only.
struct Algorithm;
struct Bio;
struct BioMethod;
struct Cipher;
struct CipherContext;
struct Context;
struct Method;
struct Ssl;

using PskClient = unsigned (*)(Ssl*, const char* hint, char* identity, unsigned identityRoom,
                               unsigned char* key, unsigned keyRoom);
using PskServer = unsigned (*)(Ssl*, const char* identity, unsigned char* key, unsigned keyRoom);
using KeyLog = void (*)(const Ssl*, const char* line);

// Values of OpenSSL's headers.
constexpr int kTls13 = 0x0304;
constexpr int kSetMinVersion = 123, kSetMaxVersion = 124;
constexpr int kPem = 1;
constexpr int kVerifyPeer = 1, kFailIfNoPeerCertificate = 2;
constexpr int kErrorWantRead = 2;
constexpr int kGetTag = 0x10, kSetTag = 0x11;
constexpr int kBioFlush = 11;
constexpr int kBioRetryRead = 1 | 8, kBioRetryFlags = 15;
constexpr int kBioSourceSink = 0x0400;
constexpr uint64_t kNoAtExit = 0x00080000;

// The result, name and parameters of each function. Version 1.1.1 is the first that has all.
#define MYCOLL_OPENSSL_FUNCTIONS(FUNCTION)                                                 \
  FUNCTION(int, OPENSSL_init_ssl, (uint64_t, const void*))                                 \
  FUNCTION(void, ERR_clear_error, ())                                                      \
  FUNCTION(unsigned long, ERR_peek_error, ())                                              \
  FUNCTION(const char*, ERR_reason_error_string, (unsigned long))                          \
  FUNCTION(BioMethod*, BIO_meth_new, (int, const char*))                                   \
  FUNCTION(int, BIO_meth_set_write, (BioMethod*, int (*)(Bio*, const char*, int)))         \
  FUNCTION(int, BIO_meth_set_read, (BioMethod*, int (*)(Bio*, char*, int)))                \
  FUNCTION(int, BIO_meth_set_ctrl, (BioMethod*, long (*)(Bio*, int, long, void*)))         \
  FUNCTION(Bio*, BIO_new, (const BioMethod*))                                              \
  FUNCTION(void, BIO_set_init, (Bio*, int))                                                \
  FUNCTION(void, BIO_set_data, (Bio*, void*))                                              \
  FUNCTION(void*, BIO_get_data, (Bio*))                                                    \
  FUNCTION(void, BIO_set_flags, (Bio*, int))                                               \
  FUNCTION(void, BIO_clear_flags, (Bio*, int))                                             \
  FUNCTION(const Method*, TLS_method, ())                                                  \
  FUNCTION(Context*, SSL_CTX_new, (const Method*))                                         \
  FUNCTION(void, SSL_CTX_free, (Context*))                                                 \
  FUNCTION(long, SSL_CTX_ctrl, (Context*, int, long, void*))                               \
  FUNCTION(int, SSL_CTX_set_ciphersuites, (Context*, const char*))                         \
  FUNCTION(int, SSL_CTX_set_num_tickets, (Context*, size_t))                               \
  FUNCTION(void, SSL_CTX_set_psk_client_callback, (Context*, PskClient))                   \
  FUNCTION(void, SSL_CTX_set_psk_server_callback, (Context*, PskServer))                   \
  FUNCTION(void, SSL_CTX_set_keylog_callback, (Context*, KeyLog))                          \
  FUNCTION(void, SSL_CTX_set_verify, (Context*, int, void*))                               \
  FUNCTION(int, SSL_CTX_use_PrivateKey_file, (Context*, const char*, int))                 \
  FUNCTION(int, SSL_CTX_use_certificate_chain_file, (Context*, const char*))               \
  FUNCTION(int, SSL_CTX_check_private_key, (const Context*))                               \
  FUNCTION(int, SSL_CTX_load_verify_locations, (Context*, const char*, const char*))       \
  FUNCTION(Ssl*, SSL_new, (Context*))                                                      \
  FUNCTION(void, SSL_free, (Ssl*))                                                         \
  FUNCTION(int, SSL_set_ex_data, (Ssl*, int, void*))                                       \
  FUNCTION(void*, SSL_get_ex_data, (const Ssl*, int))                                      \
  FUNCTION(void, SSL_set_bio, (Ssl*, Bio*, Bio*))                                          \
  FUNCTION(int, SSL_set_session_id_context, (Ssl*, const unsigned char*, unsigned))        \
  FUNCTION(void, SSL_set_connect_state, (Ssl*))                                            \
  FUNCTION(void, SSL_set_accept_state, (Ssl*))                                             \
  FUNCTION(int, SSL_do_handshake, (Ssl*))                                                  \
  FUNCTION(const char*, SSL_alert_desc_string_long, (int))                                 \
  FUNCTION(int, SSL_session_reused, (const Ssl*))                                          \
  FUNCTION(int, SSL_get_error, (const Ssl*, int))                                          \
  FUNCTION(int, SSL_has_pending, (const Ssl*))                                             \
  FUNCTION(const Cipher*, SSL_get_current_cipher, (const Ssl*))                            \
  FUNCTION(const char*, SSL_CIPHER_get_name, (const Cipher*))                              \
  FUNCTION(const Algorithm*, EVP_aes_128_gcm, ())                                          \
  FUNCTION(const Algorithm*, EVP_chacha20_poly1305, ())                                    \
  FUNCTION(CipherContext*, EVP_CIPHER_CTX_new, ())                                         \
  FUNCTION(void, EVP_CIPHER_CTX_free, (CipherContext*))                                    \
  FUNCTION(int, EVP_CIPHER_CTX_ctrl, (CipherContext*, int, int, void*))                    \
  FUNCTION(int, EVP_CipherInit_ex,                                                         \
           (CipherContext*, const Algorithm*, void*, const unsigned char* key,             \
            const unsigned char* nonce, int isEncrypting))                                 \
  FUNCTION(int, EVP_CipherUpdate,                                                          \
           (CipherContext*, unsigned char* out, int* outBytes, const unsigned char*, int)) \
  FUNCTION(int, EVP_CipherFinal_ex, (CipherContext*, unsigned char* out, int* outBytes))

struct Library {
  static Status load(const Library** result);

#define FUNCTION(Result, name, parameters) Result(*name) parameters = nullptr;
  MYCOLL_OPENSSL_FUNCTIONS(FUNCTION)
#undef FUNCTION
};

}  // namespace mycoll::openssl
