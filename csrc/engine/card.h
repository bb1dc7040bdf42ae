// What ranks say of themselves when a group is made: see rendezvous.h. Plain values; who reads them
// believes nothing yet.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "transport/peer.h"

namespace mycoll {

struct Card {
  static Status freshNonce(std::string* nonce);
  static std::string settingsHere();

  std::string nonce;  // names this card; rank 0's names the meeting, too
  int rank = 0;
  int ranks = 0;
  // What must be alike on all ranks: mycoll's version and its protocol's, and variables that are
  // set: "mycoll 0.1.0/6 MYCOLL_PARTIALS=rounded".
  std::string settings;
  std::string why;       // it has given up, and this is why; empty: it takes part
  bool hasLost = false;  // because a rank was lost, which the others raise, too
  PeerAddress address;

  std::string encode() const;
  static Status decode(const std::string& text, Card* card);
};

// The roster: its number, then each rank's encoded address with its length.
std::string encodeRoster(const std::string& number, const std::vector<std::string>& addresses);
Status decodeRoster(const std::string& text, size_t ranks, std::string* number,
                    std::vector<PeerAddress>* peers);

}  // namespace mycoll
