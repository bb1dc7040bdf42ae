// Mailbox: the messages of one rank of one group. It matches what arrives with what was posted, by
// class, source and tag, in order, and keeps senders from overrunning a receiver. It knows nothing
// of collectives, failures or departures: the group writes into it what it has decided about those,
// and what comes for the group is an event (event.h).
//
// Small messages are sent at once and buffered by the receiver when nothing is posted; larger ones
// wait at the sender until the receiver has posted memory for them, so nothing is ever read that
// has no place to go. A receiver that buffers more than kMaxBufferedBytes from one rank asks it to
// let the small ones wait, too.
//
// A rank that nothing has come from may not have made the group yet. Its process keeps what is sent
// to it meanwhile, but only so much (earlyRoom()): when that is used up, the sender waits. A rank
// that has received half of it and has nothing to send itself answers with kGoOn.
//
// Where a larger message lies in a shared tensor, and both ranks are on one host, the receiver
// reads it there, turn by turn, and says so when it has all of it. A sender that takes the message
// back meanwhile counts that in the tensor's region, where the receiver looks when it has read:
// then it believes nothing of it, and asks for it as for any other.
//
// Windows are memory that other ranks write to, without a receive. What comes for one is read to
// where it belongs, or is thrown away when the window has been closed; who writes beyond it, or to
// one that never was, has broken the protocol. Signals of a window are messages of its own class
// without contents; those that nobody has posted a receive for are counted, by window and source.
//
// Thread contract: functions may be called from any thread unless they REQUIRE the I/O lock; they
// take it themselves.
// Lifetime: a mailbox is registered at the mesh from open() to detach(), and its handler must live
// meanwhile. Requests must not outlive it. The memory of a posted request must live
// until it is done or destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
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
#include "base/task.h"
#include "transport/call_log.h"
#include "transport/event.h"
#include "transport/frame.h"
#include "transport/io_lock.h"
#include "transport/peer.h"
#include "transport/shm/shared_heap.h"

namespace mycoll {

class Connection;
class Mesh;
struct MeshOptions;
struct OutItem;
class Mailbox;

constexpr int kFromAnyone = -1;
// From one rank for one group. What is under way when the sender is asked to hold comes on top.
constexpr size_t kMaxBufferedBytes = 16 * 1024 * 1024;
// Messages of a collective of so many ranks do not ask first up to this size.
size_t eagerInCollectives(const MeshOptions& options, size_t ranks);

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

  // What was called, as it was posted.
  const Signature& signature() const { return signature_; }
  size_t bytes() const { return data_.bytes; }

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
  bool isPosted_ GUARDED_BY(ioRole) = false;  // known to the mailbox: queued, matched or waiting
  bool isReceive_ = false;
  int peer_ = -1;
  MessageClass messageClass_ = MessageClass::kCollective;
  uint64_t tag_ = 0;
  Signature signature_;
  Span data_;
  size_t transferred_ GUARDED_BY(ioRole) = 0;  // bytes that have come, or left
  size_t begun_ GUARDED_BY(ioRole) = 0;        // ... and those that are coming now
  uint64_t id_ GUARDED_BY(ioRole) = 0;
  Mailbox* mailbox_ = nullptr;
  Transfer* previous_ GUARDED_BY(ioRole) = nullptr;  // in the mailbox's list of open requests
  Transfer* next_ GUARDED_BY(ioRole) = nullptr;
  Status status_;
  // Sends: the receiver may read it where it lies, until it is ready.
  bool isOffered_ GUARDED_BY(ioRole) = false;
  bool isUnsent_ GUARDED_BY(ioRole) = false;  // NotSent, or PeerLost, was raised for it
  std::atomic<bool> done_{false};
};

class Mailbox {
 public:
  Mailbox(std::shared_ptr<Mesh> mesh, GroupAddress group, EventHandler* handler);
  ~Mailbox();
  // Registers it at the mesh: what has come for the group before is handed over now.
  void open();
  // Takes it off: its handler is not called any more.
  void detach();

  int rank() const { return group_.rank; }
  int ranks() const { return static_cast<int>(group_.peers.size()); }
  const GroupAddress& group() const { return group_; }
  Mesh& mesh() const { return *mesh_; }
  IoMutex& ioMutex() const;
  // "rank 3 (node1:4712)": for messages.
  std::string describeRank(int rank) const;

  // Both post and return; the request is ready when the memory may be reused (send) or holds the
  // message (receive). A rank may be its own peer: such a message meets its receive here, as if it
  // had come from elsewhere, and is on no connection.
  void send(Transfer& request, int destination, MessageClass messageClass, uint64_t tag,
            const Signature& signature, Span data);
  void receive(Transfer& request, int source, MessageClass messageClass, uint64_t tag,
               const Signature& signature, Span data);
  // Takes it back, unless it is ready.
  void cancel(Transfer& request);

  // From here on other ranks may write to this memory, and signal. Numbers only grow, and are the
  // same on all ranks; each rank has opened a window before another one can know of that.
  void openWindow(uint64_t window, Span memory);
  // Nobody writes to it any more, and nobody will. Ends what was posted for it with this status.
  void closeWindow(uint64_t window, const Status& status);
  // Posts, as send(): writes to a window of another rank, from this offset on. The caller has
  // checked that it belongs there.
  void put(Transfer& request, int destination, uint64_t window, uint64_t offset,
           const Signature& signature, Span data);

  // Sends a control frame to another rank, and wakes it. Nothing is sent to a rank that has left.
  void tell(int rank, FrameKind kind, const std::string& payload, uint64_t subject = 0);
  // Hands a descriptor to a rank of this host, beside the messages. False where the connection to
  // it is not by shared memory. Only after a message to it was sent.
  bool sendFd(int destination, int fd, const std::string& cookie);
  // What cookies of this group begin with: what nobody has taken when it ends is dropped by it.
  std::string fdPrefix() const {
    return std::string(reinterpret_cast<const char*>(&group_.context), sizeof(group_.context));
  }
  // What sendFd() at `source` sent with this cookie; closed when there is none.
  Fd takeFd(int source, const std::string& cookie);

  // Makes a region of this process's shared tensors known to a rank of this host, which can read it
  // when the next message comes. False: it cannot. As sendFd() otherwise.
  bool giveRegion(int destination, uint64_t region);
  // It could not: it is given again with a later message.
  void takeRegionBack(int destination, uint64_t region);
  // What giveRegion() at `source` gave. Null: it cannot be read here.
  std::shared_ptr<Segment> regionOf(int source, uint64_t region, size_t bytes);

  // Nothing has come for it from the other side: no message, or nobody who takes this one.
  bool isUnmatched(const Transfer& request);
  // True when all that was queued has been handed to the connections.
  bool isFlushed();
  bool isConnectedTo(int rank);
  // A message between two ranks is being received; `orPosted`: or may yet come for a receive whose
  // sender is still there.
  bool isReceiving(bool orPosted);
  // Visits the unfinished messages between two ranks; `visit` runs under the I/O lock.
  void forEachMessage(const std::function<void(Transfer&)>& visit);

  // ---- for the group
  // subject: a later frame of the same kind and subject says all that this one does, so that the
  // receiver keeps only the later one while it has not made the group.
  void sendControl(int destination, FrameKind kind, const std::string& payload,
                   uint64_t subject = 0) REQUIRES(ioRole);
  // As sendControl(), but no connection is made for it: it leaves with the first one that there is.
  void sendControlIfConnected(int destination, FrameKind kind, const std::string& payload)
      REQUIRES(ioRole);
  // Whether that rank has made a call that this one has got a message of.
  bool hasHeardOf(int rank) const REQUIRES(ioRole) { return flows_[rank].hasSpoken; }
  // Whether that rank is known to have made the group: its engine has sent something, perhaps for
  // other ranks.
  bool isThere(int rank) const REQUIRES(ioRole) { return flows_[rank].isThere; }
  // Whether a request to or from that rank is open.
  bool needs(int rank) const REQUIRES(ioRole);
  // The collective that begins now. Messages that have come for it, or will come, and differ raise
  // CallsDiffer.
  void beginCollective(uint64_t number, const Signature& signature) REQUIRES(ioRole);
  const CallLog& calls() const REQUIRES(ioRole) { return calls_; }
  // The group has failed: collectives from this number on and all messages between two ranks end
  // with this cause, those that are open and those to come.
  void failFrom(uint64_t number, const Status& cause) REQUIRES(ioRole);
  // The rank has left: requests that need it from now on end with this status. isFailure: they fail
  // the group, too.
  void setAbsent(int rank, Status status, bool isFailure) REQUIRES(ioRole);
  bool isPresent(int rank) const REQUIRES(ioRole) { return !absent_.contains(rank); }
  // Each ends all open requests of its kind with this status:
  void endSends(const Status& status) REQUIRES(ioRole);
  // Messages between the two that the rank has not met: sends, and receives that nothing came for.
  void endMessagesOf(int rank, const Status& status) REQUIRES(ioRole);
  // What NotSent or PeerLost, of this process, was raised for.
  void endUnsent(const std::string& uid, const std::string& how) REQUIRES(ioRole);
  // Receives that were met by a message of that rank, the rest of which will never come.
  void endReceivesFrom(int rank, const Status& status) REQUIRES(ioRole);

  // ---- for the mesh
  EventHandler& handler() const { return *handler_; }
  void finish(Transfer& request, Status status) REQUIRES(ioRole);
  // As finish(), for a request that may still be known elsewhere.
  void abandon(Transfer& request, Status status) REQUIRES(ioRole);
  // Which rank that process is, other than this one; -1: none, or it has left.
  int presentRank(const std::string& uid) const REQUIRES(ioRole);
  // Where the payload of this frame goes; no `data`: it is thrown away. May queue answers.
  struct Unexpected;
  struct Target {
    char* data = nullptr;
    Transfer* request = nullptr;
    Unexpected* unexpected = nullptr;
    uint64_t window = 0;  // 0: none
    bool isStreaming = false;
  };
  Target onFrame(const FrameHeader& header, const SharedPlace& place = {}) REQUIRES(ioRole);
  void onRequestToSend(const FrameHeader& header, const std::string& payload) REQUIRES(ioRole);
  void onPayload(const FrameHeader& header, const Target& target) REQUIRES(ioRole);
  void onClearToSend(const FrameHeader& header) REQUIRES(ioRole);
  void onTaken(const FrameHeader& header) REQUIRES(ioRole);
  // Up to so many bytes of a message that lies in another rank's shared tensor. True if there was
  // one.
  bool readShared(size_t turnBytes) REQUIRES(ioRole);
  void onControl(const FrameHeader& header, const std::string& payload) REQUIRES(ioRole);

 private:
  bool checkRank(Transfer& request, int rank, const char* what);
  // Not ok: a message of this class and tag ends with it, as the group has failed.
  Status failureOf(MessageClass messageClass, uint64_t tag) const REQUIRES(ioRole);
  // Not ok: what needs the rank ends with it.
  Status absenceOf(int rank) REQUIRES(ioRole);
  // False: the request has ended with this status.
  bool admit(Transfer& request, Status refusal) REQUIRES(ioRole);
  void raise(Event event) REQUIRES(ioRole);
  void failBy(const std::string& what) REQUIRES(ioRole);
  bool agrees(const Transfer& request, const FrameHeader& came) REQUIRES(ioRole);
  bool agreesEarly(const FrameHeader& came) REQUIRES(ioRole);
  Target intoWindow(const FrameHeader& header) REQUIRES(ioRole);
  Target onSignal(const FrameHeader& header) REQUIRES(ioRole);
  void dispatch(Transfer& request) REQUIRES(ioRole);
  void enqueue(int destination, OutItem item) REQUIRES(ioRole);
  void sendToSelf(Transfer& request, const FrameHeader& message) REQUIRES(ioRole);
  size_t earlyRoom() const;
  void noteSpoken(int source) REQUIRES(ioRole);
  void noteThere(int source) REQUIRES(ioRole);
  void noteUnanswered(const FrameHeader& header) REQUIRES(ioRole);
  void post(Transfer& request, MessageClass messageClass, uint64_t tag, const Signature& signature,
            Span data) REQUIRES(ioRole);
  Transfer* matchPosted(const FrameHeader& header) REQUIRES(ioRole);
  bool isWaiting(const Transfer& request) const REQUIRES(ioRole);
  template <typename Wanted>  // a predicate, of open requests
  void abandonAll(const Status& status, Wanted isWanted) REQUIRES(ioRole);
  void acceptUnexpected(Transfer& request, std::list<Unexpected>::iterator message)
      REQUIRES(ioRole);
  // Frees these messages. A socket that is reading into one of them discards the rest of the frame.
  template <typename Wanted>
  void eraseUnexpected(Wanted isWanted) REQUIRES(ioRole);
  void countBuffered(const FrameHeader& header, bool isMore) REQUIRES(ioRole);
  void onFlow(const FrameHeader& header) REQUIRES(ioRole);
  Target targetOfPiece(const FrameHeader& header) REQUIRES(ioRole);
  Target targetIn(Transfer& request, const FrameHeader& header) REQUIRES(ioRole);
  void clearToSend(Transfer& request, const FrameHeader& header, const SharedPlace& place)
      REQUIRES(ioRole);
  void offer(Transfer& request, Connection& connection, OutItem* item) REQUIRES(ioRole);
  bool beginReading(Transfer& request, const FrameHeader& header, const SharedPlace& place)
      REQUIRES(ioRole);
  bool isBeingRead(const Transfer& request) const REQUIRES(ioRole);
  FrameHeader header(FrameKind kind, int destination) const;
  OutItem controlItem(int destination, FrameKind kind, const std::string& payload,
                      uint64_t subject = 0) const;

  const std::shared_ptr<Mesh> mesh_;
  const GroupAddress group_;
  EventHandler* const handler_;
  const size_t eagerInCollectives_;
  bool isOpen_ GUARDED_BY(ioRole) = false;

  // What the group has decided.
  CallLog calls_ GUARDED_BY(ioRole);
  Status failure_ GUARDED_BY(ioRole);  // ok: it has not failed
  uint64_t failedFrom_ GUARDED_BY(ioRole) = ~uint64_t{0};
  struct Absence {
    Status status;
    bool isFailure = false;
  };
  std::map<int, Absence> absent_ GUARDED_BY(ioRole);  // by rank

  // Every request that is not finished, whatever it waits for.
  Transfer* open_ GUARDED_BY(ioRole) = nullptr;
  // In the order posted, and in the order of arrival. Short: linear search is the fastest.
  std::vector<Transfer*> posted_ GUARDED_BY(ioRole);
  std::list<Unexpected> unexpected_ GUARDED_BY(ioRole);
  struct Flow {
    size_t bufferedBytes = 0;      // of its messages, in unexpected_
    bool isHeld = false;           // it was asked to hold
    bool holdsUs = false;          // it has asked for that
    bool hasSpoken = false;        // a message has come from it, or an answer to one
    bool isThere = false;          // anything has come from it
    bool isAnswered = false;       // something was sent to it
    size_t early = 0;              // bytes sent to it until it is there
    size_t unanswered = 0;         // bytes that came from it until something is sent to it
    std::list<Transfer*> waiting;  // sends that wait until it is there, in order
  };
  std::vector<Flow> flows_ GUARDED_BY(ioRole);  // by rank
  // What an kEager frame without its payload has begun; where the payload is to go.
  struct Assembly {
    uint64_t request = 0;              // by id; or
    Unexpected* unexpected = nullptr;  // memory of our own
    size_t left = 0;                   // bytes that have not begun to come
  };
  std::map<std::pair<int, uint64_t>, Assembly> assemblies_ GUARDED_BY(ioRole);  // source, number
  // Matched, or waiting for clear-to-send, by id.
  std::unordered_map<uint64_t, Transfer*> inFlight_ GUARDED_BY(ioRole);
  uint64_t nextId_ GUARDED_BY(ioRole) = 1;

  // Messages that are read where they lie, in turn. All are counted in the mesh.
  struct Reading {
    Transfer* request;
    FrameHeader header;
    SharedPlace place;
    std::shared_ptr<Segment> segment;
    const char* from;
    size_t got = 0;
  };
  std::deque<Reading> readings_ GUARDED_BY(ioRole);

  struct OpenWindow {
    Span memory;
    std::vector<uint64_t> signals;  // by source: those that nobody has waited for
  };
  std::map<uint64_t, OpenWindow> windows_ GUARDED_BY(ioRole);
  uint64_t lastWindow_ GUARDED_BY(ioRole) = 0;
};

// A message that came before its receive was posted.
struct Mailbox::Unexpected {
  FrameHeader header;
  SharedPlace place;
  std::unique_ptr<char[]> payload;
  size_t got = 0;  // bytes of it
  bool isComplete = false;
  Transfer* claimedBy = nullptr;  // matched while its payload was still arriving
};

}  // namespace mycoll
