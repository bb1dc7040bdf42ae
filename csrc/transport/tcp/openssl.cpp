#include "transport/tcp/openssl.h"

#include <dlfcn.h>

#include <string>

namespace mycoll::openssl {
namespace {

constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1"};
constexpr unsigned long kOldest = 0x10101000;

Status open(Library* library) {
  void* handle = nullptr;
  std::string reason;
  for (const char* name : kNames) {
    if ((handle = dlopen(name, RTLD_NOW | RTLD_LOCAL))) break;
    if (const char* error = dlerror()) reason += (reason.empty() ? "" : "; ") + std::string(error);
  }
  if (!handle) {
    return Status(Code::kUnsupported,
                  "encryption needs OpenSSL 3 or 1.1.1, which is not installed (Debian, Ubuntu: "
                  "apt install libssl3; Fedora, RHEL: dnf install openssl-libs): " +
                      reason);
  }
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) missing = name;
  };
#define FIND(name) find(library->name, #name)
  FIND(OpenSSL_version_num);
  FIND(OpenSSL_version);
  FIND(OPENSSL_init_ssl);
  FIND(ERR_clear_error);
  FIND(ERR_peek_error);
  FIND(ERR_reason_error_string);
  FIND(BIO_meth_new);
  FIND(BIO_meth_set_write);
  FIND(BIO_meth_set_read);
  FIND(BIO_meth_set_ctrl);
  FIND(BIO_new);
  FIND(BIO_set_init);
  FIND(BIO_set_data);
  FIND(BIO_get_data);
  FIND(BIO_set_flags);
  FIND(BIO_clear_flags);
  FIND(TLS_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_free);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_set_ciphersuites);
  FIND(SSL_CTX_set_num_tickets);
  FIND(SSL_CTX_set_default_read_buffer_len);
  FIND(SSL_CTX_set_psk_client_callback);
  FIND(SSL_CTX_set_psk_server_callback);
  FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_use_PrivateKey_file);
  FIND(SSL_CTX_use_certificate_chain_file);
  FIND(SSL_CTX_check_private_key);
  FIND(SSL_CTX_load_verify_locations);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_set_ex_data);
  FIND(SSL_get_ex_data);
  FIND(SSL_set_bio);
  FIND(SSL_set_session_id_context);
  FIND(SSL_set_connect_state);
  FIND(SSL_set_accept_state);
  FIND(SSL_do_handshake);
  FIND(SSL_session_reused);
  FIND(SSL_read);
  FIND(SSL_write);
  FIND(SSL_get_error);
  FIND(SSL_key_update);
  FIND(SSL_get_current_cipher);
  FIND(SSL_CIPHER_get_name);
#undef FIND
  const bool isOld = missing || library->OpenSSL_version_num() < kOldest;
  if (isOld) {
    return Status(Code::kUnsupported,
                  std::string("encryption needs OpenSSL 3 or 1.1.1; the library found ") +
                      (missing ? std::string("lacks ") + missing
                               : std::string("is ") + library->OpenSSL_version(0)));
  }
  // Threads of the engine may use it until the process ends.
  if (library->OPENSSL_init_ssl(kNoAtExit, nullptr) != 1) {
    return Status(Code::kUnsupported, "OpenSSL could not be initialized");
  }
  return Status();
}

}  // namespace

Status Library::load(const Library** result) {
  struct Loaded {
    Library library;
    Status status = open(&library);
  };
  static const Loaded* const kLoaded = new Loaded;
  *result = &kLoaded->library;
  return kLoaded->status;
}

}  // namespace mycoll::openssl
