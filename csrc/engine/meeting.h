// One rank's part in the making of a group, as bootstrap.h describes it: bootstrap.cpp has the
// protocol, meeting_failures.cpp what makes waiting pointless, and who is told of it.
//
// Thread contract: one thread, which blocks in run().
// Lifetime: made for one call of meet(); what it refers to outlives that.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/card.h"
#include "engine/engine.h"
#include "engine/store.h"
#include "transport/mailbox.h"

namespace mycoll {

class Meeting {
 public:
  // engine: null where there is none, and the rank only comes to say why: giveUp().
  Meeting(const GroupOptions& options, Store& store, Engine* engine);

  Status run();
  void giveUp(const Status& why);
  // After run() has ended well.
  Status result(GroupAddress* address) const;

 private:
  using Clock = std::chrono::steady_clock;

  bool isLeader() const { return options_.rank == 0; }
  static std::string key(const char* what, int rank) {
    return std::string(what) + "/" + std::to_string(rank);
  }
  // Empty: not there.
  Status get(const std::string& name, std::string* value);

  // ---- the protocol
  Status putCard();
  Status meetOthers();
  Status lead(bool* moved, bool* isOver);
  Status readCards(bool* moved);
  Status follow(bool* moved, bool* isOver);
  Status waitForTheOthers();

  // ---- failures
  Status lookAround();
  Status checkEarlierSelf();
  Status checkRefusal();
  Status checkOther(int rank, const std::string& text);
  Status checkLosses();
  Status takenBy(const Card& other);
  Status differentWorlds(int rank, const Card& other) const;
  Status hasGivenUp(int rank, const Card& card);
  Status tooLate();
  void tellOthers(const Status& status);
  void markCard(const Status& status);
  bool isAliveHere(const Card& card) const;
  // Whether its process can be looked at. Who shares no more than the host's name may be alive in
  // another pid namespace, or on a clone of this host.
  bool isVisible(const Card& card) const {
    return !mine_.address.pidSpace.empty() && card.address.pidSpace == mine_.address.pidSpace;
  }

  const GroupOptions& options_;
  Store& store_;
  Engine* const engine_;
  const Deadline deadline_;
  std::string fileSecret_;
  Card mine_;
  std::string cardText_;
  // Rank 0
  std::vector<std::string> cards_;
  int confirmations_ = 1;  // ranks before this one have confirmed the roster; rank 0 is not asked
  Clock::time_point cardsRead_;
  // Everybody
  std::string number_;  // of the roster that was confirmed last, by rank 0 as it makes it
  std::vector<std::string> roster_;
  Clock::time_point rosterRead_;
  // What is known of another rank's card.
  struct Life {
    std::string text;  // empty: there was none yet
    Card card;
    Clock::time_point since;  // the card was first seen
    bool isOfNow = false;     // its process takes part in this meeting, or did
    Clock::time_point lastAlive;
  };
  std::map<int, Life> lives_;
  std::vector<std::string> concerned_;  // numbers of cards whose owners should hear of a failure
  bool isToldByLeader_ = false;
  const bool isFirst_;
  Clock::time_point lastLook_ = Clock::now();
};

}  // namespace mycoll
