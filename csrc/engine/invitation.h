// Invitations: how a process reaches a rank that is in no group yet. A rank that wants to be in a
// group opens a Reception, whose number and secret are made of a nonce, and then publishes the
// nonce and its address. A process that knows them sends it an Invitation. Both are ends of a group
// of two (GroupAddress::isInvitation). The connection between the two processes, which is made if
// there is none, later carries the data of their groups. An invitation carries a MAC, as the
// connection may have been authenticated by another group.
//
// Thread contract: [any thread]; events are handled under the I/O lock.
// Lifetime: both hold the engine's mesh.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/text.h"
#include "transport/event.h"
#include "transport/mailbox.h"

namespace mycoll {

// Sets the group's number, which is made of its secret and its name. It does not reveal the secret.
void setContext(GroupAddress* address);

// The content of an invitation.
struct InvitationMessage {
  enum class Content : char {
    kRoster,  // the text is a roster, encoded
    kError,   // the receiver's group cannot be made; the text is the reason, encoded
    kText,    // a text for the receiver's caller: Endpoint::send()
    kProbe,   // nothing: the sender wants to know whether the reception is open
  };

  InvitationMessage(Content what, std::string_view words)
      : content(what), text(words), digest(sha256(text)) {}
  explicit InvitationMessage(const Status& error)
      : InvitationMessage(Content::kError, encode(error)) {}

  Content content;
  std::string text;
  Digest digest;  // of the text, which may be long and have many receivers
};

class Reception final : public EventHandler {
 public:
  // isOnce: it is not opened again with this nonce, so later invitations are refused. Fails if
  // MYCOLL_SECRET_FILE cannot be used.
  static Status open(std::shared_ptr<Mesh> mesh, const std::string& nonce, Wakeup& wakeup,
                     std::unique_ptr<Reception>* result, bool isOnce = false);
  ~Reception();

  // The rosters or texts that came since the last call, each sender's in order: another sender's
  // roster may be of an earlier round.
  std::vector<InvitationMessage> takeMessages();
  // Not ok: another rank has sent it.
  Status error();
  // The processes that this one has lost, or had lost before.
  std::vector<PeerLost> losses();

 private:
  Reception(std::shared_ptr<Mesh> mesh, GroupAddress address, Wakeup& wakeup);
  void handle(const Event& event) override REQUIRES(ioRole);

  Mailbox mailbox_;
  std::vector<InvitationMessage> messages_ GUARDED_BY(ioRole);
  Status error_ GUARDED_BY(ioRole);
  std::vector<PeerLost> losses_ GUARDED_BY(ioRole);
  Wakeup& wakeup_;
};

// A sender's end. It sends one message when it is made, and may send more.
class Invitation final : public EventHandler {
 public:
  struct Receiver {
    PeerAddress address;
    std::string nonce;
    // The reception was opened before the nonce could be known; else it may be opened later.
    bool isOpened = true;
  };

  // refused: called under the I/O lock if the process has no such reception any more; may be empty.
  // A process refuses what it sends to itself: the nonce is of an earlier reception.
  static Status open(std::shared_ptr<Mesh> mesh, const Receiver& receiver,
                     std::function<void()> refused, std::unique_ptr<Invitation>* result);
  // Opens one and sends the message.
  static Status send(std::shared_ptr<Mesh> mesh, const Receiver& receiver,
                     const InvitationMessage& message, std::function<void()> refused,
                     std::unique_ptr<Invitation>* result);
  ~Invitation();

  void send(const InvitationMessage& message);

  // Whether the process has no such reception any more, or cannot be reached.
  bool hasFailed() { return !failure().empty(); }
  // Why, after "rank 3 (node1:4712) "; empty if it has not failed.
  std::string failure();
  // Whether it has been passed to the link, or never will be.
  bool isFlushed() { return hasFailed() || mailbox_.isFlushed(); }

 private:
  Invitation(std::shared_ptr<Mesh> mesh, GroupAddress address, std::function<void()> refused);
  void handle(const Event& event) override REQUIRES(ioRole);
  void fail(bool isRefused, const std::string& why) REQUIRES(ioRole);

  Mailbox mailbox_;
  const std::function<void()> refused_;
  std::string failure_ GUARDED_BY(ioRole);
};

}  // namespace mycoll
