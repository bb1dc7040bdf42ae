// The peer's end of a connection in the fuzz test of handshakes. It sends what the script contains,
// and calls the mesh at the other end, which is in the same thread.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "handshake_script.h"
#include "transport/mesh.h"
#include "transport/shm/link.h"
#include "transport/tcp/address.h"

namespace test {

using mycoll::Deadline;
using mycoll::Fd;
using mycoll::Mesh;

class Wire {
 public:
  Wire(Fd socket, std::shared_ptr<Mesh> other, const Script& script)
      : socket_(std::move(socket)), other_(std::move(other)), script_(script) {
    mycoll::tuneSocket(socket_.get(), 10);  // sends single bytes immediately
    if (!script.isTls) return;
    using State = mycoll::TlsSocket::State;
    tls_.emplace(other_->options().tls, socket_.get(), script.isConnector);
    ASSERT(turnUntil([&] { return tls_->shakeHands() == State::kOpen; }));
  }

  void turn(int times = 20) {
    for (int i = 0; i < times; ++i) other_->progress();
  }

  bool turnUntil(const std::function<bool()>& isOver) {
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(3000));
    while (!isOver() && !deadline.expired()) other_->progress();
    return isOver();
  }

  // Reads until the buffer is full. Returns false if the mesh sends less.
  bool read(void* data, size_t bytes) {
    auto* into = static_cast<char*>(data);
    for (int patience = 0; bytes > 0 && patience < kPatience; ++patience) {
      const ssize_t got = receive(into, bytes);
      if (got < 0) return false;
      if (got > 0) {
        into += got;
        bytes -= static_cast<size_t>(got);
        patience = 0;
      }
      other_->progress();
    }
    return bytes == 0;
  }

  // The descriptors of `memory` are sent with the first bytes.
  void write(const std::string& bytes, const Line& line, const std::vector<Fd>& memory = {}) {
    size_t done = 0;
    if (!memory.empty() && !bytes.empty()) {
      for (size_t i = 0; i < memory.size(); ++i) {
        if (i < bytes.size() &&
            mycoll::sendDescriptor(socket_.get(), memory[i].get(), bytes.data() + i, 1)) {
          ++done;
        }
        turn(2);
      }
    }
    while (done < bytes.size()) {
      const size_t piece = line.isSlow ? 1 : bytes.size() - done;
      const mycoll::Span part{const_cast<char*>(bytes.data()) + done, piece};
      const ssize_t wrote =
          tls_ ? tls_->write(&part, 1)
               : ::send(socket_.get(), part.data, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (wrote <= 0) break;  // the mesh has closed the connection, or its buffer is full
      done += static_cast<size_t>(wrote);
      turn(line.isSlow ? 1 : 2);
    }
    sent += bytes.substr(0, done);
  }

  // Sends what a line of noise contains. Returns false if the line is no noise.
  bool sendNoise(const Line& line) {
    std::string bytes;
    if (line.what == "noise") {
      std::mt19937 random(static_cast<unsigned>(line.numbers[1]));
      bytes.resize(std::min<uint64_t>(line.numbers[0], 100'000));
      for (char& byte : bytes) byte = static_cast<char>(random());
    } else if (line.what == "http") {
      bytes = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    } else if (line.what == "tls") {
      bytes =
          std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(506, 'r');
    } else if (line.what == "pause") {
      turn(200);
      return true;
    } else {
      return false;
    }
    line.change(bytes);
    write(bytes, line);
    return true;
  }

  void hangUp() {
    tls_.reset();
    socket_.reset();
  }

  std::string sent;  // all bytes so far
  // Long enough for a mesh without links to look at its listeners, which it does rarely.
  static constexpr int kPatience = 1200;

 protected:
  // Returns 0 if nothing has arrived, and -1 at the end of the connection.
  ssize_t receive(void* into, size_t bytes) {
    if (tls_) {
      tls_->onEvent(false);
      return tls_->read(into, bytes);
    }
    const ssize_t got = recv(socket_.get(), into, bytes, MSG_DONTWAIT);
    return got > 0 ? got : got < 0 && errno == EAGAIN ? 0 : -1;
  }

  Fd socket_;
  std::optional<mycoll::TlsSocket> tls_;
  std::shared_ptr<Mesh> other_;
  const Script& script_;
};

inline std::string bytesOf(const auto& message) {
  return std::string(reinterpret_cast<const char*>(&message), sizeof(message));
}

template <typename Message>
bool cutOut(const std::string& bytes, size_t at, Message* message) {
  if (bytes.size() < at + sizeof(Message)) return false;
  std::memcpy(message, bytes.data() + at, sizeof(Message));
  return true;
}

}  // namespace test
