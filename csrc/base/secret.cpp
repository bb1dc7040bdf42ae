#include "base/secret.h"

#include <fstream>
#include <iterator>

#include "base/env.h"
#include "base/sha256.h"

namespace mycoll {

Status secretOf(const std::string& text, std::string* secret) {
  MYCOLL_RETURN_IF_ERROR(Env::check());
  const std::string& path = Env::process().secretFile;
  if (path.empty()) {
    *secret = asText(sha256(text));
    return Status();
  }
  std::ifstream file(path, std::ios::binary);
  const std::string key((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (key.size() < 16) {
    return Status(Code::kInvalidArgument,
                  "MYCOLL_SECRET_FILE: '" + path + "' cannot be read, or is shorter than 16 bytes");
  }
  *secret = asText(hmacSha256(key, text));
  return Status();
}

}  // namespace mycoll
