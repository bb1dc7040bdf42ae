// Writes nested data as a pickle (what torch's flight-recorder tools read) or as JSON, in one pass:
//
//   document->beginMap();
//   document->key("version").text("2.10");
//   document->key("entries").beginList(); ... document->end();
//   document->end();
//   std::string bytes = document->finish();
//
// Thread contract: one thread. Lifetime: a plain object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace mycoll {

class Document {
 public:
  static std::unique_ptr<Document> pickle();
  static std::unique_ptr<Document> json();
  virtual ~Document() = default;

  virtual Document& key(std::string_view name) = 0;
  virtual void text(std::string_view value) = 0;
  virtual void integer(int64_t value) = 0;
  virtual void real(double value) = 0;
  virtual void boolean(bool value) = 0;
  virtual void null() = 0;
  virtual void beginMap() = 0;
  virtual void beginList() = 0;
  virtual void end() = 0;  // of the innermost map or list
  virtual std::string finish() = 0;
};

}  // namespace mycoll
