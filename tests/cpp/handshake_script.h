// A script of what a peer sends in a handshake. It consists of lines of text, so that an input of
// the fuzz test can be read and kept:
//
//   as connector over unix knowing      the peer connects to us, and knows the secret
//   hello flip:803                      a good Hello with bit 803 turned
//   proof memory:short slow             a good Proof, byte by byte, with memory of a wrong size
//
// First line: "as connector" or "as acceptor", "over tcp", "over tls" or "over
//             unix", "knowing" or "guessing".
// Lines: hello, challenge, proof, verdict: a good message, as far as the peer knows the secret;
//        recorded-hello, recorded-proof:   of a good handshake in the past;
//        reflected:                        a Proof with the HMAC that the mesh has just sent;
//        noise:BYTES:SEED, http, tls, pause.
// Changes: flip:BIT, set:BYTE:VALUE (32 bits), cut:BYTES (all but so many), grow:BYTES, slow,
//          memory:good|none|short|open|file|stale|two.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "transport/handshake.h"

namespace test {

struct Line {
  std::string what;
  std::vector<uint64_t> numbers;  // of noise
  struct Change {
    std::string what;
    uint64_t first = 0, second = 0;
  };
  std::vector<Change> changes;
  std::string memory = "good";
  bool isSlow = false;

  void change(std::string& bytes) const {
    for (const Change& each : changes) {
      if (each.what == "flip" && !bytes.empty()) {
        bytes[each.first / 8 % bytes.size()] ^= static_cast<char>(1 << each.first % 8);
      } else if (each.what == "set" && bytes.size() >= 4) {
        const auto value = static_cast<uint32_t>(each.second);
        std::memcpy(bytes.data() + each.first % (bytes.size() - 3), &value, sizeof(value));
      } else if (each.what == "cut") {
        bytes.resize(std::min<size_t>(bytes.size(), each.first));
      } else if (each.what == "grow") {
        bytes.append(std::min<uint64_t>(each.first, 100'000), 'g');
      }
    }
  }
};

struct Script {
  bool isConnector = true;
  bool isUnix = false;
  bool isTls = false;  // all lines are sent inside an encrypted connection
  bool isKnowing = false;
  std::vector<Line> lines;

  static std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, at);) {
      if (!part.empty()) parts.push_back(part);
    }
    return parts;
  }

  static Script parse(const std::string& text) {
    auto number = [](const std::string& digits) {
      return std::strtoull(digits.c_str(), nullptr, 10);
    };
    Script result;
    for (const std::string& each : split(text, '\n')) {
      if (each[0] == '#') continue;
      const std::vector<std::string> words = split(each, ' ');
      if (words[0] == "as") {
        for (const std::string& word : words) {
          if (word == "acceptor") result.isConnector = false;
          if (word == "unix") result.isUnix = true;
          if (word == "tls") result.isTls = true;
          if (word == "knowing") result.isKnowing = true;
        }
        continue;
      }
      Line line;
      for (size_t i = 0; i < words.size(); ++i) {
        const std::vector<std::string> parts = split(words[i], ':');
        const uint64_t first = parts.size() > 1 ? number(parts[1]) : 0;
        const uint64_t second = parts.size() > 2 ? number(parts[2]) : 0;
        if (i == 0) {
          line.what = parts[0];
          line.numbers = {first, second};
        } else if (parts[0] == "slow") {
          line.isSlow = true;
        } else if (parts[0] == "memory") {
          line.memory = parts.size() > 1 ? parts[1] : "none";
        } else {
          line.changes.push_back({parts[0], first, second});
        }
      }
      result.lines.push_back(line);
    }
    return result;
  }
};

// Generates a good handshake and changes parts of it at random, sometimes none.
inline std::string inventScript(std::mt19937& random) {
  auto any = [&](auto... choices) {
    const std::string list[] = {choices...};
    return list[random() % sizeof...(choices)];
  };
  auto number = [&](uint64_t below) { return std::to_string(random() % below); };
  const bool isConnector = random() % 3 != 0, isUnix = random() % 2 == 0;
  const bool isTls = !isUnix && random() % 2 == 0;
  std::vector<std::string> lines;
  if (isConnector) {
    lines = {any("hello", "hello", "hello", "recorded-hello"),
             any("proof", "proof", "proof", "recorded-proof", "reflected")};
    if (isUnix && random() % 2) {
      lines[1] += " memory:" + any("none", "short", "open", "file", "stale", "two");
    }
  } else {
    lines = {"challenge", "verdict"};
  }
  const size_t bytesOf[2] = {isConnector ? sizeof(mycoll::Hello) : sizeof(mycoll::Challenge),
                             isConnector ? sizeof(mycoll::Proof) : sizeof(mycoll::Verdict)};
  for (size_t i = 0; i < 2; ++i) {
    for (unsigned changes = random() % 3 ? 0 : 1 + random() % 2; changes > 0; --changes) {
      switch (random() % 4) {
        case 0: lines[i] += " flip:" + number(8 * bytesOf[i]); break;
        case 1:
          // Fields begin at multiples of four; small values are other ranks, versions and lengths.
          lines[i] += " set:" + std::to_string(random() % (bytesOf[i] / 4) * 4) + ":" +
                      (random() % 2 ? number(4) : std::to_string(random()));
          break;
        case 2: lines[i] += " cut:" + number(bytesOf[i] + 1); break;
        default: lines[i] += " grow:" + (random() % 8 ? number(200) : number(60'000));
      }
    }
    if (random() % 6 == 0) lines[i] += " slow";
  }
  switch (random() % 10) {
    case 0: std::swap(lines[0], lines[1]); break;
    case 1: lines.pop_back(); break;
    case 2: lines.insert(lines.begin() + random() % 3, lines[random() % 2]); break;
    case 3:
      lines.insert(lines.begin() + random() % 3, "noise:" + number(300) + ":" + number(1000));
      break;
    case 4: lines.insert(lines.begin() + random() % 2, any("http", "tls", "pause")); break;
    default: break;
  }
  std::string text = std::string("as ") + (isConnector ? "connector" : "acceptor") + " over " +
                     (isUnix  ? "unix"
                      : isTls ? "tls"
                              : "tcp") +
                     (random() % 2 ? " knowing" : " guessing");
  for (const std::string& line : lines) text += "\n" + line;
  return text + "\n";
}

}  // namespace test
