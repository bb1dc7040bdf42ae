// Mailbox: the messages of one rank of one group. Matches what arrives with what was posted, by
// class, source and tag, in order; compares signatures before any payload is used.
//
// Small messages are sent at once and buffered by the receiver when nothing is posted; larger ones
// wait at the sender until the receiver has posted memory for them, so nothing is ever read that
// has no place to go. A receiver that buffers more than kMaxBufferedBytes from one rank asks it to
// let the small ones wait, too.
//
// Thread contract: functions may be called from any thread unless marked [I/O lock]; they take the
// endpoint's I/O lock themselves.
// Lifetime: a mailbox registers itself at the endpoint for as long as it lives; requests must not
// outlive it. The memory of a posted request must live until it is done or destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "base/task.h"
#include "transport/frame.h"
#include "transport/loss.h"
#include "transport/peer.h"

namespace mycoll {

class Connection;
class Mesh;
class Mailbox;
using Endpoint = Mesh;

constexpr int kFromAnyone = -1;
// From one rank for one group. What is under way when the sender is asked to hold comes on top.
constexpr size_t kMaxBufferedBytes = 16 * 1024 * 1024;

// One message to send or receive. A coroutine keeps it in its frame and awaits it; who needs to be
// told instead overrides deliver().
class Transfer : public Condition {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  virtual ~Transfer();  // takes an unfinished request back

  bool ready() final { return isDone(); }
  bool isDone() const { return done_.load(std::memory_order_acquire); }
  // Only when ready.
  const Status& status() const { return status_; }
  // The rank that the message came from (receive) or goes to. Receive: only when ready.
  int peer() const { return peer_; }

 protected:
  explicit Transfer(bool isDelivered) : isDelivered_(isDelivered) {}
  // For requests that are delivered: called once without locks instead of becoming ready under the
  // I/O lock. The implementation calls markDone(), and may drop its last reference in here.
  virtual void deliver() {}
  void markDone() { done_.store(true, std::memory_order_release); }

 private:
  friend class Mailbox;
  friend class Connection;
  friend class Mesh;

  const bool isDelivered_ = false;
  bool isPosted_ = false;  // [I/O lock] known to the mailbox: queued, matched or waiting
  bool isReceive_ = false;
  int peer_ = -1;
  MessageClass messageClass_ = MessageClass::kCollective;
  uint64_t tag_ = 0;
  Signature signature_;
  Span data_;
  size_t transferred_ = 0;
  uint64_t id_ = 0;
  Mailbox* mailbox_ = nullptr;
  Transfer* previous_ = nullptr;  // in the mailbox's list of open requests
  Transfer* next_ = nullptr;
  Status status_;
  std::atomic<bool> done_{false};
};

// Whether a rank whose process has ended had left the group before.
enum class Departure { kLeft, kStayed, kUnknown };

// Told about what befalls the group. [I/O lock]: must not block and not call back in.
class MailboxListener {
 public:
  // Collectives before this number may still end well: all ranks were called for them alike, and
  // what this rank needs for them may be on its way. Told again when the number falls.
  virtual void onFailure(const Status& cause, uint64_t from) = 0;
  // Not ok: the group has failed, as the listener knows by another road; that is then the story.
  virtual Status onGoodbye(int rank) = 0;
  // A process has ended: did this rank of it leave the group before, as another road than a goodbye
  // would tell? Unknown: there is none.
  virtual Departure departureOf(int rank) = 0;
  // What another rank's tell() has said.
  virtual void onWord(int, FrameKind, const std::string&) {}

 protected:
  ~MailboxListener() = default;
};

struct GroupAddress {
  uint64_t context = 0;  // the same number on all ranks, and no other group's
  std::string name;
  std::string secret;  // 32 bytes that only members know
  int rank = 0;
  std::vector<PeerAddress> peers;  // by rank
};

class Mailbox {
 public:
  Mailbox(std::shared_ptr<Endpoint> endpoint, GroupAddress group, MailboxListener* listener);
  ~Mailbox();
  // Takes it off the endpoint: its listener is not called any more. For a listener that goes first.
  void detach();

  int rank() const { return group_.rank; }
  int ranks() const { return static_cast<int>(group_.peers.size()); }
  const GroupAddress& group() const { return group_; }
  Endpoint& endpoint() const { return *endpoint_; }

  // Both post and return; the request is ready when the memory may be reused (send) or holds the
  // message (receive). A rank may be its own peer: such a message meets its receive here, as if it
  // had come from elsewhere, and is on no link.
  void send(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
            const Signature& signature, Span data);
  void receive(Transfer& request, int source, MessageClass messageClass, uint64_t tag,
               const Signature& signature, Span data);
  // Takes it back, unless it is ready.
  void cancel(Transfer& request);

  // The collective that runs now: arriving messages of the same number but another signature are a
  // mismatch, whatever their tag. The number is the tag's upper part.
  static constexpr int kStepBits = 20;
  void beginCollective(uint64_t sequence, const Signature& signature);

  // This rank has waited long in the current collective: asks the others to compare. Those that are
  // in the same one, or were, or come to it, and were called differently, then say so.
  void probe();
  // Tells one rank what has begun here since the last time (as far as it is remembered).
  void compareWith(int rank);
  // The ranks that have not begun this collective, as far as they have been heard of.
  std::vector<int> behind(uint64_t sequence);

  // Says something to another rank's listener, and wakes it.
  void tell(int rank, FrameKind kind, const std::string& payload);
  // Nothing has come for it from the other side: no message, or nobody who takes this one.
  bool isUnmatched(const Transfer& request);

  // Kills the group on this rank, first cause wins, and tells the others if `tell`.
  void fail(const Status& cause, bool tell);
  // All members see a failure by another road: fail() need not tell.
  void setTellsOthers(bool tells);
  // Tells the ranks that this one has left: those that it has a connection with at once, others if
  // there ever is one. Who never has one may see the process end and not know; see onPeerLost().
  // What is still to be sent ends with `cause`: nothing of a message follows its sender's goodbye.
  void sayGoodbye(const Status& cause);
  // True when all that was queued has been handed to the links.
  bool isFlushed();

  // Those between two ranks that are not finished. Called with the I/O lock.
  void forEachMessage(const std::function<void(Transfer&)>& visit);
  // A message between two ranks is being received; `orPosted`: or may yet come for a receive whose
  // sender is still there.
  bool isReceiving(bool orPosted);

  // Hands a descriptor to a rank of this host, beside the messages. False where the connection to
  // it is not by shared memory. Only after a message to it was sent.
  bool sendFd(int destination, int fd, const std::string& cookie);
  // What cookies of this group begin with: what nobody has taken when it ends is dropped by it.
  std::string fdPrefix() const {
    return std::string(reinterpret_cast<const char*>(&group_.context), sizeof(group_.context));
  }
  // What sendFd() at `source` sent with this cookie; closed when there is none.
  Fd takeFd(int source, const std::string& cookie);

  // "0 and 3 (node1:4712)": for messages.
  std::string describeRank(int rank) const;

  // [I/O lock] From here on.
  void finish(Transfer& request, Status status);
  // As finish(), for a request that may still be known elsewhere.
  void abandon(Transfer& request, Status status);
  // Of a request that was posted here and may have been dropped since: is it still open?
  bool isOpen(const Transfer* request) const;
  // Which rank that process is, other than this one; -1: none, or it has left.
  int presentRank(const std::string& uid) const;
  void failLocked(const Status& cause, bool tell, uint64_t from = 0);
  // wasLinked: there was a connection, in one direction or the other.
  void onPeerLost(const std::string& uid, const Loss& loss, bool wasLinked);
  // Where the payload of this frame goes; null with skip: nowhere. May queue answers.
  struct Unexpected;
  struct Target {
    char* data = nullptr;
    Transfer* request = nullptr;
    Unexpected* unexpected = nullptr;
    bool isStreaming = false;
  };
  Target onFrame(const FrameHeader& header);
  void onPayload(const FrameHeader& header, const Target& target);
  void onClearToSend(const FrameHeader& header);
  void onControl(const FrameHeader& header, const std::string& payload);
  void onLeft(int rank);

 private:
  bool needs(int rank) const;
  void refuse(Transfer& request, int rank);
  bool checkRank(Transfer& request, int rank, const char* what);
  void sendToSelf(Transfer& request, const FrameHeader& message);
  void post(Transfer& request, MessageClass messageClass, uint64_t tag, const Signature& signature,
            Span data);
  Transfer* matchPosted(const FrameHeader& header);
  bool signaturesAgree(const Signature& mine, const FrameHeader& header);
  bool agrees(const Transfer& request, const FrameHeader& header);
  void checkAgainstCollectives(int source, uint64_t sequence, const Signature& theirs);
  void onProbe(int source, const std::string& payload);
  std::string notesSince(uint64_t first) const;
  void reportMismatch(const Signature& mine, int source, const Signature& theirs,
                      const std::string& where, uint64_t from);
  bool isOver(MessageClass messageClass, uint64_t tag) const;
  template <typename Wanted>  // a predicate, of open requests
  void abandonAll(const Status& status, Wanted isWanted);
  void endOpen();
  void endReceivesFrom(int rank);
  Status departed(int rank) const;
  std::string abortPayload() const;
  void acceptUnexpected(Transfer& request, std::list<Unexpected>::iterator message);
  void countBuffered(const FrameHeader& header, bool isMore);
  void onFlow(const FrameHeader& header);
  void clearToSend(Transfer& request, const FrameHeader& header);
  void queueControl(int destination, FrameKind kind, const std::string& payload);
  FrameHeader header(FrameKind kind, int destination) const;

  std::shared_ptr<Endpoint> endpoint_;
  GroupAddress group_;
  MailboxListener* listener_;
  Status failure_;            // of the group; first cause
  uint64_t failedFrom_ = ~0;  // the first collective that it ends
  std::vector<bool> left_;
  // Of those that count as having left because nobody needed them when they ended without a word:
  // what to say if somebody does.
  std::map<int, Status> vanished_;
  bool tellsOthers_ = true;
  bool isDetached_ = false;

  Transfer* open_ = nullptr;  // every request that is not finished, whatever it waits for
  // In the order posted, and in the order of arrival. Short: linear search is the fastest.
  std::vector<Transfer*> posted_;
  std::list<Unexpected> unexpected_;
  struct Flow {
    size_t bufferedBytes = 0;  // of its messages, in unexpected_
    bool isHeld = false;       // it was asked to hold
    bool holdsUs = false;      // it has asked for that
  };
  std::vector<Flow> flows_;  // by rank
  std::unordered_map<uint64_t, Transfer*>
      inFlight_;  // matched, or waiting for clear-to-send, by id
  uint64_t nextId_ = 1;

  // Signatures of the latest collectives, to judge what arrives late or early.
  static constexpr uint64_t kRemembered = 256;
  uint64_t currentSequence_ = 0;
  bool hasBegun_ = false;
  std::vector<Signature> remembered_;
  struct Probe {
    int rank;
    uint64_t sequence;
    Signature signature;
  };
  std::vector<Probe> probes_;      // for collectives that this rank has not come to yet
  uint64_t told_ = 0;              // compareWith() has told of all before this one
  std::vector<uint64_t> reached_;  // by rank: how many collectives it is known to have begun
};

// A message that came before its receive was posted.
struct Mailbox::Unexpected {
  FrameHeader header;
  std::unique_ptr<char[]> payload;
  bool isComplete = false;
  Transfer* claimedBy = nullptr;  // matched while its payload was still arriving
};

}  // namespace mycoll
