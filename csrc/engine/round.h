// Round: one attempt to make a group of the ranks in a roster. Rank 0 makes the roster; the others
// receive it with an invitation.
//
//   down   kInvitation   the roster, from each rank to its children in the control tree. It opens
//                        the connection to a child, or uses one that exists
//   up     kJoined       the ranks of a subtree that have joined: when all have, or every 100 ms
//                        those that are new, or every second none: the answer is kGoodbye if the
//                        parent has left the round
//          kAbort        a report about a rank: it gives up, its process has ended, it cannot be
//                        reached. Each rank passes it on to rank 0
//   down   kFormed       all ranks have joined: the group is made
//          kAbort        the group cannot be made, and why
//
// Each rank is connected to its parent and its children, so it detects when one of them ends. A
// rank that does not answer its invitation is slow in the next round: rank 0 invites it itself, and
// it has no children, so it holds up no other rank.
//
// Thread contract: one thread owns it; events are handled under the I/O lock.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/status.h"
#include "engine/control_tree.h"
#include "engine/invitation.h"
#include "engine/roster.h"
#include "transport/event.h"
#include "transport/loss.h"
#include "transport/mailbox.h"

namespace mycoll {

class Round final : public EventHandler {
 public:
  // Information about a rank that reaches rank 0.
  struct Report {
    enum Kind : uint32_t {
      kGaveUp,  // why: in its own words
      kLate,    // its deadline has expired; why: after how many milliseconds
      kLost,    // loss: in which way. kLeft: its process has no such reception (any more), as the
                // handle is of an earlier time
    };
    int rank = -1;
    Kind kind = kGaveUp;
    Status why;
    LossReason loss = LossReason::kNone;
  };

  // Joins the round of this roster, and invites the children with the message. wakeup: notified
  // when the round is formed, fails, or has a report. isToJoin: false if the rank will only report
  // that it gives up.
  static Status open(std::shared_ptr<Mesh> mesh, const std::string& name, int rank,
                     InvitationMessage message, Roster roster, Wakeup& wakeup,
                     std::unique_ptr<Round>* result, bool isToJoin = true);
  ~Round();

  const Roster& roster() const { return roster_; }
  int rank() const { return mailbox_.rank(); }
  int parent() const { return parent_; }
  enum class Parent {
    kHere,
    kLeft,  // it has left the round: it is in a later one, or has failed
    kLost,  // its process has ended, or it cannot be reached
  };
  struct State {
    bool isFormed = false;  // all ranks have joined, and rank 0 has confirmed it
    Status failure;  // not ok: rank 0, or a rank that has lost its parent, has ended the round
    Parent parent = Parent::kHere;
    Report parentLoss;            // if it is lost
    std::vector<bool> joined;     // by rank: those that are known here
    std::vector<Report> reports;  // on rank 0: those since the last call
  };
  State state();

  // Sends up the ranks that have joined since the last time, and now and then an empty list. To be
  // called about every 100 ms.
  void forward();
  // Reports that this rank gives up or is late. Not on rank 0.
  void report(const Report& report);
  // Ends the round for this rank's subtree, which is all ranks if this is rank 0. Returns false if
  // the group is formed already.
  bool fail(const Status& why);
  // Ends the round without a report, as this rank is in another one, in which its children may not
  // be. Returns false like fail().
  bool end();
  // Leaves the group that the other ranks may have made: they receive a goodbye if they call it.
  void leave();
  // Whether everything has been passed to the links.
  bool isFlushed() { return mailbox_.isFlushed(); }

  // The address of the group that this round makes.
  Status result(GroupAddress* address) const;

 private:
  Round(std::shared_ptr<Mesh> mesh, GroupAddress address, InvitationMessage message, Roster roster,
        Wakeup& wakeup);

  void handle(const Event& event) override REQUIRES(ioRole);
  void onJoined(int child, const std::string& payload) REQUIRES(ioRole);
  void onAbort(int source, const std::string& payload) REQUIRES(ioRole);
  void onLeft(int rank) REQUIRES(ioRole);
  void onLost(int rank, LossReason loss, const std::string& why) REQUIRES(ioRole);
  void pass(const Report& report) REQUIRES(ioRole);
  void join() REQUIRES(ioRole);
  void sendUp(bool isWhole) REQUIRES(ioRole);
  void toChildren(FrameKind kind, const std::string& payload) REQUIRES(ioRole);
  Status inviteChildren();
  bool isChild(int rank) const {
    return std::find(children_.begin(), children_.end(), rank) != children_.end();
  }

  const std::shared_ptr<Mesh> mesh_;
  const InvitationMessage message_;  // the roster
  const Roster roster_;
  Mailbox mailbox_;
  std::vector<int> children_;
  int parent_ = -1;
  std::vector<std::unique_ptr<Invitation>> invitations_;
  Wakeup& wakeup_;

  State state_ GUARDED_BY(ioRole);
  std::vector<int> unsent_ GUARDED_BY(ioRole);  // have joined, not sent up yet
  Deadline nextAsk_ GUARDED_BY(ioRole);
  std::set<int> wholeChildren_ GUARDED_BY(ioRole);  // whose subtrees have joined
};

}  // namespace mycoll
