// Endpoint: a process's end of all its connections. All groups of the process share it, so that
// descriptors grow with the number of peer processes and not with the number of groups.
//
// Thread contract: all public functions [any thread] unless marked. One lock, ioMutex(), guards the
// links and all mailboxes' matching; it is never held while anything blocks or calls back.
// Lock order: a group's queue, then the I/O lock, then the sleeper's.
// Lifetime: groups hold the endpoint by shared_ptr; the last one closes it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/fd.h"
#include "base/status.h"
#include "base/task.h"
#include "base/topology.h"
#include "transport/bell.h"
#include "transport/handshake.h"
#include "transport/link.h"
#include "transport/mailbox.h"
#include "transport/peer.h"
#include "transport/sleeper.h"

namespace mycoll {

// How a process that is no more is told of.
inline constexpr char kHasEnded[] =
    "has ended (killed, crashed or left without destroy_process_group)";
// ... where it may also have left in good order, without a connection to say so.
inline constexpr char kHasVanished[] =
    "has ended (killed, crashed or left while others still need it)";

// Something on its way out on a link.
struct OutItem {
  FrameHeader header;
  const char* payload = nullptr;
  std::string owned;            // the payload instead, where it is nobody else's
  size_t sent = 0;              // of header and payload together
  Transfer* request = nullptr;  // told when the payload has left; null: nobody
  // kData: the whole message; the item sends piece after piece, others in between.
  Span message;
  size_t messageSent = 0;
};

// The only thing that travels against a link's direction: its receiver leaves a group, and has no
// link to the sender to say so.
struct Farewell {
  uint64_t context = 0;
  int32_t source = 0;  // who leaves
  int32_t destination = 0;
};

struct OutLink {
  PeerAddress peer;
  std::unique_ptr<LinkSender> sender;  // null until connected
  Task connecting;
  std::deque<OutItem> queue;
  bool isLost = false;
  bool isShm = false;
  std::string problem;    // why the connection failed; given up at the next opportunity
  bool isSilent = false;  // ... as the network, or the whole process, gave no sign of life
  // Who vouches for the connection that is being made; and what that group is to the other side, if
  // it has said so: then another attempt follows.
  HandshakeGroup voucher;
  Standing standing = Standing::kMember;
  size_t notYet = 0;  // how many times it had not made the group
  int hangUps = 0;    // how many times it had no word for us
  Deadline nextAttempt = Deadline::never();
  bool isConnecting() const { return connecting.valid() || standing != Standing::kMember; }
  // What the receiver sends back on the socket, as far as it has come.
  Farewell farewell;
  size_t farewellGot = 0;
};

struct InLink {
  std::string peerUid;
  std::unique_ptr<LinkReceiver> receiver;
  bool isShm = false;
  FrameHeader header;
  size_t headerGot = 0;
  size_t payloadGot = 0;
  uint32_t payloadCheck = 0;   // of what was got of a checked frame
  Mailbox* mailbox = nullptr;  // of the frame being read; null: its payload is thrown away
  Mailbox::Target target;
  bool isOrphan = false;  // the frame is kept for a group that is not made yet
  std::string control;    // payload of a control frame, or of an orphan
  std::string problem;
  Deadline::Clock::time_point lastByte;  // that came while its sender was being lost
};

// A connection that has not proved anything yet.
struct Accepting {
  Fd socket;
  bool isUnix = false;
  Deadline deadline;
  bool hasNews = true;   // its socket has something to be looked at
  bool namesUs = false;  // it knows this process's uid, as members do; strangers do not
  Task task;
  std::unique_ptr<InLink> link;  // what the handshake ends with; null when it failed
};

struct EndpointOptions {
  TransportChoice transport = TransportChoice::kAuto;
  InterfaceFilter interfaces;
  std::string storeHost;  // empty: unknown
  size_t eagerBytes = 64 * 1024;
  bool isChecked = false;  // what is sent carries checksums
  DistanceChoice distance = DistanceChoice::kMeasured;
  int networkSeconds = 10;  // a peer beyond the network that is silent for so long is dead
  LinkTap* tap = nullptr;   // for tests; outlives the endpoint

  static Status fromEnv(EndpointOptions* result);
};

class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  static Status create(EndpointOptions options, std::shared_ptr<Endpoint>* result);
  ~Endpoint();

  const PeerAddress& address() const { return address_; }
  const EndpointOptions& options() const { return options_; }
  Sleeper& sleeper() { return sleeper_; }
  Bell bellOf(const PeerAddress& peer) const { return bell_.bellOf(peer.uid); }
  // Whether shared memory is to be tried with this peer: both sides judge alike.
  bool isLocal(const PeerAddress& peer) const { return peer.hostIdentity == address_.hostIdentity; }

  // Moves what can be moved, without blocking. True if anything did.
  bool progress();
  // True while something is queued, posted or being connected.
  bool hasPending() const { return pending_.load(std::memory_order_relaxed) > 0; }
  // Bracket sleep(): while asleep, peers ring.
  void setAsleep(bool asleep);

  // Processes of this host (watch.cpp). What can be seen of a peer's; kGone too when it never could
  // be seen: it is on another host, or in another pid namespace.
  ProcessLife lookAt(const PeerAddress& peer);
  // Whether it can be seen at all.
  bool isVisible(const PeerAddress& peer);
  // Whether it has been lost, by whatever sign.
  bool hasLost(const PeerAddress& peer);
  // Looks at all of them, at most every 50 ms: the kernel tells of a death only when it has taken
  // the process apart, which takes seconds where there is much memory. For whoever waits.
  void checkProcesses();

  // For Mailbox. [I/O lock] from here on, but for ioMutex().
  std::mutex& ioMutex() { return io_; }
  void addMailbox(Mailbox* mailbox);
  void removeMailbox(Mailbox* mailbox);
  OutLink& linkTo(const PeerAddress& peer);
  void enqueue(OutLink& link, OutItem item);
  void forget(Transfer* request);  // out of all queues
  void addPending(int delta) { pending_.fetch_add(delta, std::memory_order_relaxed); }
  void finishDelivered(Transfer* request) { delivered_.push_back(request); }
  bool hasLinkTo(const PeerAddress& peer) const { return outLinks_.count(peer.uid) > 0; }
  // By a connection that there is, or by the first one.
  void sendFarewell(const PeerAddress& peer, const Farewell& farewell);
  bool hasQueued(uint64_t context, int rank) const;
  bool sendFd(const std::string& uid, int fd, const std::string& cookie);
  Fd takeFd(const std::string& uid, const std::string& cookie);

 private:
  struct Process {
    pid_t pid = 0;
    uint64_t startTicks = 0;
    bool isLocal = false;
    Fd fd;  // becomes readable at the end; closed where the kernel has none
    int64_t endingSince = 0;
    bool isLost = false;
  };

  // A peer that has gone, and may not have said all yet.
  struct Losing {
    std::string how;
    Deadline::Clock::time_point since;
  };

  // A frame that came before its group was made here, whole.
  struct Orphan {
    std::string peerUid;
    FrameHeader header;
    std::string payload;
  };

  explicit Endpoint(EndpointOptions options);
  Status open();
  void handleEvents(const epoll_event* events, int count);
  void onEvent(const epoll_event& event);
  void onSenderEvent(OutLink& link);
  void pollEvents();
  bool moveBytes();
  void loseBroken();
  // After so many bytes in one direction the others get their turn: what is under way between two
  // processes then stays within the caches, and both directions flow at once.
  static constexpr size_t kTurnBytes = 512 * 1024;
  bool flush(OutLink& link, size_t turnBytes);
  bool drain(InLink& link, size_t turnBytes);
  bool beginFrame(InLink& link);
  bool makeRoomForOrphan(const std::pair<uint64_t, int>& group, size_t bytes);
  void endFrame(InLink& link);
  void deliverWhole(Mailbox& mailbox, const Orphan& orphan);
  void acceptFrom(int listener, bool isUnix);
  void acceptAll();
  bool dropStranger();
  void goOnAccepting();
  void goOnConnecting();
  void runHandshakes() {
    goOnConnecting();
    goOnAccepting();
  }
  Mailbox* find(uint64_t context, int rank);
  // Reports when this process ends, if it can be seen.
  void watchProcess(const PeerAddress& peer);
  void sayUnsaid(InLink& link);
  // Now, or as soon as all has come that it had sent: loseBroken() goes on with it.
  void peerLost(const std::string& uid, const std::string& how);
  bool hasSaidAll(const std::string& uid, const std::string& how);
  bool isEnding(const std::string& uid) const;
  bool loseIfEnding(const std::string& uid, Process& process, bool hasEnded = false);

  bool connect(OutLink& link);
  void refuse(OutLink& link, Standing standing);
  void connectAgain();
  void drop(OutLink& link);
  Task connectTask(OutLink* link);
  Task connectOver(OutLink* link, Fd socket, bool isShm);
  Task acceptTask(Accepting* accepting);
  void finishConnecting(OutLink& link);

  const EndpointOptions options_;
  PeerAddress address_;
  Sleeper sleeper_;
  BellSocket bell_;
  Fd unixListener_;
  std::vector<Fd> tcpListeners_;

  std::mutex io_;
  std::map<std::pair<uint64_t, int>, Mailbox*> mailboxes_;  // by context and rank
  std::vector<Mailbox*> byAge_;                             // the same, the oldest first
  std::unordered_map<std::string, std::unique_ptr<OutLink>> outLinks_;
  std::vector<std::unique_ptr<InLink>> inLinks_;
  std::vector<std::unique_ptr<Accepting>> accepting_;  // the oldest first
  Deadline acceptAgain_;  // descriptors were used up; listeners do not report twice
  // By uid: in how many mailboxes' groups it is. Who is in none any more is forgotten.
  std::unordered_map<std::string, int> memberships_;
  std::map<std::string, Process> processes_;  // of these, by uid: those that can be seen from here
  std::map<std::string, Losing> losing_;
  std::atomic<int64_t> processesChecked_{0};  // when, in ms of the steady clock
  std::vector<Transfer*> delivered_;
  std::vector<Orphan> orphans_;  // in order of arrival
  size_t orphanBytes_ = 0;
  // Groups some of whose frames found no room: they fail when they are made.
  std::set<std::pair<uint64_t, int>> overflown_;
  std::set<std::pair<uint64_t, int>> closed_;  // groups that this process has left
  // By uid: farewells to those that there is no connection with.
  std::unordered_map<std::string, std::vector<Farewell>> unsaid_;
  std::vector<std::string> connected_;  // uids of new links: may have a farewell already
  int tcpLinks_ = 0;
  int connecting_ = 0;
  int asleep_ = 0;
  bool hasRung_ = false;  // the bell was drained, and nobody woken for it yet
  uint32_t pollCount_ = 0;
  std::atomic<int> pending_{0};
};

}  // namespace mycoll
