// The knowledge that ranks have of each other before they are in a group. A rank publishes a Handle
// of itself in the rendezvous store; a Roster lists the ranks of a group that is being made.
//
// Plain values. Decoding checks the form of what other processes wrote, and trusts nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/peer.h"

namespace mycoll {

struct Handle {
  static Status freshNonce(std::string* nonce);
  // The settings that must be equal on all ranks: the versions of mycoll and of its protocol, and
  // environment variables that are set: "mycoll 0.1.0/6 MYCOLL_PARTIALS=rounded".
  static std::string settingsHere();

  std::string nonce;  // identifies this handle, and authenticates the ranks that invite it
  int rank = 0;
  int ranks = 0;
  std::string settings;
  std::string why;       // not empty: the rank has given up, for this reason
  bool hasLost = false;  // ... which is that a rank is lost
  PeerAddress address;

  std::string encode() const;
  static Status decode(const std::string& text, Handle* handle);
};

struct Roster {
  struct Member {
    std::string nonce;  // empty: the rank is absent
    // The rank has published the nonce, after it had opened its reception. Else the nonce is made
    // of the secret of another group.
    bool isPublished = false;
    // The rank has not answered its invitation in an earlier round. Rank 0 invites it, and it
    // invites no others.
    bool isSlow = false;

    bool isAbsent() const { return nonce.empty(); }
  };

  uint64_t round = 0;           // later rosters of one group have larger numbers
  std::string number;           // random: no two rosters are equal
  std::vector<Member> members;  // by rank
  PeerList peers;               // by rank

  // Whether no rank is absent.
  bool isComplete() const;
  std::string encode() const;
  static Status decode(const std::string& text, Roster* roster);
};

}  // namespace mycoll
