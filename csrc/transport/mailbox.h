// Mailbox: the messages of one rank of one group. It matches arriving messages with posted
// requests, by class, source and tag, in order, and keeps senders from overrunning a receiver. It
// knows nothing of collectives, failures or departures: the group writes its decisions about those
// into it, and receives what it must handle as events (event.h).
//
// Small messages are sent immediately, and the receiver buffers them if no receive is posted.
// Larger ones wait at the sender until the receiver has posted memory for them, so nothing is read
// without a place to put it. A receiver that buffers more than kMaxBufferedBytes from one rank asks
// it (kHold) to delay the small ones, too.
//
// A rank from which nothing was received may not have made the group yet. Its process keeps what is
// sent to it meanwhile, but only so much (earlyRoom()): after that, the sender waits. A rank that
// has received half of it and has nothing to send itself answers with kResume.
//
// Shared memory may be attached to a message between ranks of one host. Its descriptor is sent over
// the link's socket before the message's first frame, which says that there is one, and belongs to
// the message from then on.
//
// Two kinds of traffic have classes of their own: puts into windows (windows.h), and messages that
// the receiver reads in place (shared_reads.h).
//
// Thread contract: any thread may call functions that do not REQUIRE the I/O lock; they take it
// themselves.
// Lifetime: a mailbox is registered at the mesh from open() to detach(), and its handler must live
// for that time. Requests must not outlive the mailbox. The memory of a posted request must live
// until the request is done or destroyed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "transport/call_log.h"
#include "transport/event.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/peer.h"
#include "transport/shm/shared_heap.h"
#include "transport/transfer.h"
#include "transport/windows.h"

namespace mycoll {

class Mesh;
struct MeshOptions;
struct OutItem;

constexpr int kFromAnyone = -1;
// The limit for one rank and one group, without what is in flight when the sender is asked to hold.
constexpr size_t kMaxBufferedBytes = 16 * 1024 * 1024;
// The largest message of a collective of this many ranks that is sent without a kRequestToSend.
size_t eagerInCollectives(const MeshOptions& options, size_t ranks);

class Mailbox {
 public:
  Mailbox(std::shared_ptr<Mesh> mesh, GroupAddress group, EventHandler* handler);
  ~Mailbox();
  // Registers it at the mesh, which delivers the frames that arrived for the group before.
  void open();
  // Unregisters it: its handler is not called any more.
  void detach();

  int rank() const { return group_.rank; }
  int ranks() const { return static_cast<int>(group_.peers.size()); }
  const GroupAddress& group() const { return group_; }
  Mesh& mesh() const { return *mesh_; }
  IoMutex& ioMutex() const;
  // "rank 3 (node1:4712)", for error messages.
  std::string describeRank(int rank) const;
  // Whether this rank of the group may be that process.
  bool isOf(int rank, const std::string& uid) const;

  // Both post and return; the request is ready when the memory may be reused (send) or holds the
  // message (receive). A rank may send to itself: the message is matched here like any other,
  // without a connection. attached: the receiver gets its descriptor with the message, if the two
  // ranks are connected by shared memory.
  void send(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
            const Signature& signature, Span data,
            std::shared_ptr<const Segment> attached = nullptr);
  void receive(Transfer& request, int source, MessageClass messageClass, uint64_t tag,
               const Signature& signature, Span data);
  // Cancels it, unless it is ready.
  void cancel(Transfer& request);

  // The memory that other ranks may write to.
  Windows& windows() { return windows_; }

  // Sends a control frame to another rank and wakes it. Does nothing if the rank has left.
  void notify(int rank, FrameKind kind, const std::string& payload, uint64_t subject = 0);

  // Whether the other rank has not matched it: no message has arrived for this receive, or no
  // answer for this send.
  bool isUnmatched(const Transfer& request);
  // Whether everything queued has been passed to the links.
  bool isFlushed();
  bool isConnectedTo(int rank);
  // Whether a message between two ranks is being received; `orPosted`: or a receive for one is
  // posted.
  bool isReceiving(bool orPosted);
  // Visits the unfinished messages between two ranks; `visit` runs under the I/O lock.
  void forEachMessage(const std::function<void(Transfer&)>& visit);

  // ---- for the group
  // subject: a later frame of the same kind and subject replaces this one, so a receiver that has
  // not made the group keeps only the later one.
  void sendControl(int destination, FrameKind kind, const std::string& payload,
                   uint64_t subject = 0) REQUIRES(ioRole);
  // As sendControl(), but makes no connection: the frame is sent on the first one that exists.
  void sendControlIfConnected(int destination, FrameKind kind, const std::string& payload)
      REQUIRES(ioRole);
  // Whether this rank has received a message of one of that rank's calls.
  bool hasReceivedFrom(int rank) const REQUIRES(ioRole) { return flows_[rank].hasReceived; }
  // Whether a request to or from that rank is open.
  bool needs(int rank) const REQUIRES(ioRole);
  // The collective that begins now. Messages for it that differ raise CallsDiffer, whether they
  // have already arrived or not.
  void beginCollective(uint64_t number, const Signature& signature) REQUIRES(ioRole);
  const CallLog& calls() const REQUIRES(ioRole) { return calls_; }
  // The group has failed: collectives from this number on and all messages between two ranks end
  // with this cause, both open and future ones.
  void failFrom(uint64_t number, const Status& cause) REQUIRES(ioRole);
  // The rank has left: from now on, requests that need it end with this status. isFailure: they
  // also fail the group.
  void setAbsent(int rank, Status status, bool isFailure) REQUIRES(ioRole);
  bool isPresent(int rank) const REQUIRES(ioRole) { return !absent_.contains(rank); }
  // Each ends all open requests of one kind with this status:
  void endSends(const Status& status) REQUIRES(ioRole);
  // Messages with that rank that it has not matched: sends, and receives for which nothing has
  // arrived. If no other rank is left, also receives from any rank.
  void endMessagesOf(int rank, const Status& status) REQUIRES(ioRole);
  // Requests to this process for which NotSent or PeerLost was raised.
  void endUnsent(const std::string& uid, const std::string& how) REQUIRES(ioRole);
  // Receives that were matched with a message of that rank whose rest will never arrive.
  void endReceivesFrom(int rank, const Status& status) REQUIRES(ioRole);

  // ---- for the mesh
  EventHandler& handler() const { return *handler_; }
  // The rank of that process, other than this one; -1: none, or it has left.
  int presentRank(const std::string& uid) const REQUIRES(ioRole);
  // Where the payload of this frame goes. May queue answers.
  FrameTarget onFrame(const FrameHeader& header, Fd descriptor = Fd(),
                      const SharedPlace& place = {}) REQUIRES(ioRole);
  void onPayload(const FrameHeader& header, const FrameTarget& target) REQUIRES(ioRole);
  // kClearToSend, kTaken.
  void onAnswer(const FrameHeader& header) REQUIRES(ioRole);
  void onControl(const FrameHeader& header, const std::string& payload) REQUIRES(ioRole);
  void finish(Transfer& request, Status status) REQUIRES(ioRole);

  // ---- for windows and shared reads
  // Posts a send. Returns false if it has ended immediately.
  bool postSend(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
                const Signature& signature, Span data) REQUIRES(ioRole);
  // Returns true if a failure has been raised that ends such messages: nothing of them is sent or
  // received any more. Requests for them stay open until the group has handled the failure.
  bool isEnding(MessageClass messageClass, uint64_t tag) const REQUIRES(ioRole);
  FrameHeader header(FrameKind kind, int destination) const;
  // Returns the header of a frame that describes this send.
  FrameHeader header(FrameKind kind, const Transfer& request) const;
  void enqueue(int destination, OutItem item) REQUIRES(ioRole);
  // Removes and returns the first posted receive for this message, or null.
  Transfer* matchPosted(const FrameHeader& header) REQUIRES(ioRole);
  // The peer has broken the protocol: fails the group.
  void failBy(const std::string& what) REQUIRES(ioRole);
  // Ends all such requests.
  void endAll(const Status& status, const std::function<bool(const Transfer&)>& isMeant)
      REQUIRES(ioRole);
  // The request has read its message, which has this header, in place. isValid: the sender has not
  // taken it back meanwhile.
  void onRead(Transfer& request, const FrameHeader& header, bool isValid) REQUIRES(ioRole);

 private:
  // Not ok: a message of this class and tag ends with this status, as the group has failed.
  Status failureOf(MessageClass messageClass, uint64_t tag) const REQUIRES(ioRole);
  // Not ok: a request that needs the rank, or any rank, ends with this status.
  Status absenceOf(int rank) REQUIRES(ioRole);
  // All other ranks have left.
  bool isAlone() const REQUIRES(ioRole) {
    return !absent_.empty() && absent_.size() + 1 == group_.peers.size();
  }
  // Returns true if `refusal` is ok. If not, ends the request with it.
  bool admit(Transfer& request, Status refusal) REQUIRES(ioRole);
  void raise(Event event) REQUIRES(ioRole);
  // Raises an event that fails the group, from this collective on.
  void raiseFailure(uint64_t from, Event event) REQUIRES(ioRole);
  bool agrees(const Transfer& request, const FrameHeader& came) REQUIRES(ioRole);
  bool agreesEarly(const FrameHeader& came) REQUIRES(ioRole);
  void dispatch(Transfer& request) REQUIRES(ioRole);
  void sendToSelf(Transfer& request, const FrameHeader& message) REQUIRES(ioRole);
  size_t earlyRoom() const;
  void noteReceived(int source) REQUIRES(ioRole);
  void noteHasGroup(int source) REQUIRES(ioRole);
  void noteUnanswered(const FrameHeader& header) REQUIRES(ioRole);
  void post(Transfer& request, MessageClass messageClass, uint64_t tag, const Signature& signature,
            Span data) REQUIRES(ioRole);
  bool isWaiting(const Transfer& request) const REQUIRES(ioRole);
  template <typename Wanted>
  bool isAnyOpen(Wanted isWanted) const REQUIRES(ioRole);
  // As finish(), for a request that may still be known elsewhere.
  void abandon(Transfer& request, Status status) REQUIRES(ioRole);
  void acceptUnexpected(Transfer& request, std::list<UnexpectedMessage>::iterator message)
      REQUIRES(ioRole);
  // Frees these messages. A socket that is reading into one of them discards the rest of the frame.
  template <typename Wanted>
  void eraseUnexpected(Wanted isWanted) REQUIRES(ioRole);
  void countBuffered(const FrameHeader& header, bool isMore) REQUIRES(ioRole);
  void onHold(const FrameHeader& header) REQUIRES(ioRole);
  FrameTarget targetOfPiece(const FrameHeader& header) REQUIRES(ioRole);
  FrameTarget targetIn(Transfer& request, const FrameHeader& header) REQUIRES(ioRole);
  void putInFlight(Transfer& request) REQUIRES(ioRole);
  void clearToSend(Transfer& request, const FrameHeader& header, SharedPlace place)
      REQUIRES(ioRole);
  OutItem controlItem(int destination, FrameKind kind, const std::string& payload,
                      uint64_t subject = 0) const;

  const std::shared_ptr<Mesh> mesh_;
  const GroupAddress group_;
  EventHandler* const handler_;
  const size_t eagerInCollectives_;
  bool isOpen_ GUARDED_BY(ioRole) = false;

  // The decisions of the group.
  CallLog calls_ GUARDED_BY(ioRole);
  Status failure_ GUARDED_BY(ioRole);  // ok: it has not failed
  uint64_t failedFrom_ GUARDED_BY(ioRole) = ~uint64_t{0};
  uint64_t endsFrom_ GUARDED_BY(ioRole) = ~uint64_t{0};  // failures that are raised only, too
  struct Absence {
    Status status;
    bool isFailure = false;
  };
  std::map<int, Absence> absent_ GUARDED_BY(ioRole);  // by rank

  // All unfinished requests.
  Transfer* open_ GUARDED_BY(ioRole) = nullptr;
  // In order of posting, and in order of arrival. Both are short: linear search is the fastest.
  std::vector<Transfer*> posted_ GUARDED_BY(ioRole);
  std::list<UnexpectedMessage> unexpected_ GUARDED_BY(ioRole);
  // Flow control with one rank.
  struct Flow {
    size_t bufferedBytes = 0;      // of its messages, in unexpected_
    bool isHeld = false;           // this rank has asked it to hold
    bool holdsUs = false;          // it has asked this rank to hold
    bool hasReceived = false;      // a message or an answer was received from it
    bool hasGroup = false;         // it has made the group, as its engine has sent something
    bool isAnswered = false;       // something was sent to it
    size_t early = 0;              // bytes sent to it before hasGroup
    size_t unanswered = 0;         // bytes received from it before isAnswered
    std::list<Transfer*> waiting;  // sends that wait for hasGroup, in order
  };
  std::vector<Flow> flows_ GUARDED_BY(ioRole);  // by rank
  // A message that a kEager frame without payload has begun, and where its payload goes.
  struct Assembly {
    uint64_t request = 0;                  // by id; or
    UnexpectedMessage* message = nullptr;  // memory of this mailbox
    size_t left = 0;                       // bytes that have not begun to arrive
  };
  std::map<std::pair<int, uint64_t>, Assembly> assemblies_ GUARDED_BY(ioRole);  // source, number
  // Matched, or waiting for clear-to-send, by id.
  std::unordered_map<uint64_t, Transfer*> inFlight_ GUARDED_BY(ioRole);
  uint64_t nextId_ GUARDED_BY(ioRole) = 1;

  Windows windows_{*this};
};

// A message that arrived before its receive was posted.
struct UnexpectedMessage {
  FrameHeader header;
  SharedPlace place;
  Fd descriptor;
  std::unique_ptr<char[]> payload;
  size_t got = 0;  // bytes received
  bool isComplete = false;
  Transfer* claimedBy = nullptr;  // matched while its payload was still arriving
};

}  // namespace mycoll
