#include "observe/document.h"

#include <bit>
#include <charconv>
#include <cstdio>
#include <vector>

namespace mycoll {
namespace {

// Pickle, protocol 2: a little program for a stack machine. Each opcode is a letter of the format.
class PickleDocument final : public Document {
 public:
  Document& key(std::string_view name) override {
    text(name);
    return *this;
  }
  void text(std::string_view value) override {
    bytes_ += 'X';  // BINUNICODE
    number(value.size(), 4);
    bytes_ += value;
  }
  void integer(int64_t value) override {
    bytes_ += "\x8a\x08";  // LONG1 of 8 bytes
    number(static_cast<uint64_t>(value), 8);
  }
  void real(double value) override {
    bytes_ += 'G';  // BINFLOAT, the highest byte first
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift);
  }
  void boolean(bool value) override { bytes_ += value ? '\x88' : '\x89'; }
  void null() override { bytes_ += 'N'; }
  void beginMap() override {
    bytes_ += "}(";  // EMPTY_DICT MARK
    open_.push_back('u');
  }
  void beginList() override {
    bytes_ += "](";
    open_.push_back('e');
  }
  void end() override {
    bytes_ += open_.back();  // SETITEMS or APPENDS
    open_.pop_back();
  }
  std::string finish() override {
    bytes_ += '.';
    return std::move(bytes_);
  }

 private:
  void number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i));
  }

  std::string bytes_ = "\x80\x02";
  std::vector<char> open_;
};

class JsonDocument final : public Document {
 public:
  Document& key(std::string_view name) override {
    separate();
    quoted(name);
    bytes_ += ':';
    isFirst_ = true;  // its value needs no comma
    return *this;
  }
  void text(std::string_view value) override {
    separate();
    quoted(value);
  }
  void integer(int64_t value) override { plain(std::to_string(value)); }
  void real(double value) override {
    char text[32];
    const auto result = std::to_chars(text, text + sizeof(text), value);
    plain({text, static_cast<size_t>(result.ptr - text)});
  }
  void boolean(bool value) override { plain(value ? "true" : "false"); }
  void null() override { plain("null"); }
  void beginMap() override { begin('{', '}'); }
  void beginList() override { begin('[', ']'); }
  void end() override {
    bytes_ += open_.back();
    open_.pop_back();
    isFirst_ = false;
  }
  std::string finish() override { return std::move(bytes_) + "\n"; }

 private:
  void separate() {
    if (!isFirst_) bytes_ += ',';
    isFirst_ = false;
  }
  void plain(std::string_view text) {
    separate();
    bytes_ += text;
  }
  void begin(char opening, char closing) {
    separate();
    bytes_ += opening;
    open_.push_back(closing);
    isFirst_ = true;
  }
  void quoted(std::string_view text) {
    bytes_ += '"';
    for (const char letter : text) {
      if (letter == '"' || letter == '\\') {
        bytes_ += '\\';
        bytes_ += letter;
      } else if (static_cast<unsigned char>(letter) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(letter));
        bytes_ += escaped;
      } else {
        bytes_ += letter;
      }
    }
    bytes_ += '"';
  }

  std::string bytes_;
  std::string open_;
  bool isFirst_ = true;
};

}  // namespace

std::unique_ptr<Document> Document::pickle() { return std::make_unique<PickleDocument>(); }
std::unique_ptr<Document> Document::json() { return std::make_unique<JsonDocument>(); }

}  // namespace mycoll
