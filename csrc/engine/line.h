// Line: a connection between two ranks that make a group: whole notes, over a socket that both have
// proved themselves on (transport/lobby.h).
//
// Thread contract: one thread, which polls fd(). Nothing blocks.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/fd.h"

namespace mycoll {

// See rendezvous.h for what they mean. rank: whom it is about.
struct Note {
  enum Kind : uint32_t {
    // up
    kCard = 1,
    kHere,
    kMoved,
    kStuck,
    kConfirm,
    kGone,
    kLoss,
    kLate,
    // down
    kRoot,
    kStay,
    kGoTo,
    kRoster,
    kCommit,
    kFailed,
  };
  uint32_t kind = 0;
  int32_t rank = -1;
  std::string contents;
};

class Line {
 public:
  explicit Line(Fd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  void send(const Note& note);
  // Writes what there is room for.
  void flush();
  bool isFlushed() const { return written_ == out_.size(); }
  // Reads what has come.
  void read();
  // The next whole note. False: there is none (yet).
  bool take(Note* note);
  // Nothing comes any more: the other side has closed it, or talks nonsense.
  bool hasEnded() const { return hasEnded_; }
  // Nothing more will be sent.
  void sayNoMore();

  int rank = -1;  // at the other end, once known

 private:
  const Fd socket_;
  std::string in_, out_;
  size_t taken_ = 0, written_ = 0;
  bool hasEnded_ = false;
};

}  // namespace mycoll
