// Mesh: which processes this one knows, and its connections with them. All groups of the process
// share it, so that descriptors grow with the number of peer processes and not with the number of
// groups. It knows who is where; how a connection is made is the business of Dial and Doorkeeper,
// what travels on it of Connection, whether a process lives of ProcessWatch, which groups there are
// of GroupTable.
//
// Thread contract: all public functions [any thread] unless marked. One lock, ioMutex(), guards the
// connections and all mailboxes' matching; it is never held while anything blocks or calls back.
// Lock order: a group's queue, then the I/O lock, then the sleeper's.
// Lifetime: groups hold the mesh by shared_ptr; the last one closes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "base/topology.h"
#include "transport/connection.h"
#include "transport/doorkeeper.h"
#include "transport/io_lock.h"
#include "transport/local.h"
#include "transport/mailbox.h"
#include "transport/process_watch.h"

namespace mycoll {

class Mesh {
 public:
  static Status create(MeshOptions options, std::shared_ptr<Mesh>* result);
  ~Mesh();

  const PeerAddress& address() const { return local_.address; }
  const MeshOptions& options() const { return local_.options; }
  Sleeper& sleeper() { return local_.sleeper; }
  Bell bellOf(const PeerAddress& peer) const { return local_.bellOf(peer); }
  // Whether shared memory is to be tried with this peer: both sides judge alike.
  bool isLocal(const PeerAddress& peer) const { return local_.isOnThisHost(peer); }

  // One turn: moves what can be moved, without blocking, then hands the groups their events. True
  // if anything moved; *inHost: also between processes of this host, which are waiting at this
  // moment for what was moved.
  bool progress(bool* inHost = nullptr);
  // True while something is queued, posted or being connected.
  bool hasPending() const { return local_.pending.load(std::memory_order_relaxed) > 0; }
  // Bracket sleep(): while asleep, peers ring.
  void setAsleep(bool asleep);

  // What can be seen of a peer's process; kGone too when it never could be seen: it is on another
  // host, or in another pid namespace.
  ProcessLife lookAt(const PeerAddress& peer);
  // Whether it can be seen at all.
  bool isVisible(const PeerAddress& peer);
  // Whether it has been lost, by whatever sign.
  bool hasLost(const PeerAddress& peer);
  // Looks at all processes, at most every 50 ms: the kernel tells of a death only when it has taken
  // the process apart, which takes seconds where there is much memory. For threads that wait.
  void checkProcesses();

  // Who knocks there is let in until it is closed.
  void openLobby(Lobby* lobby);
  void closeLobby(const Lobby& lobby);

  // For Mailbox, from here on.
  IoMutex& ioMutex() { return io_; }
  void addMailbox(Mailbox* mailbox) REQUIRES(ioRole);
  void removeMailbox(Mailbox* mailbox) REQUIRES(ioRole);  // throws nothing
  Connection& linkTo(const PeerAddress& peer) REQUIRES(ioRole);
  void enqueue(Connection& connection, OutItem item) REQUIRES(ioRole) {
    connection.enqueue(std::move(item));
  }
  void forget(Transfer* request) REQUIRES(ioRole);  // out of all queues
  void forget(const Mailbox::Unexpected* message) REQUIRES(ioRole);
  // What is being read into this window goes nowhere.
  void forget(Mailbox* mailbox, uint64_t window) REQUIRES(ioRole);
  void raise(Mailbox* mailbox, Event event) REQUIRES(ioRole) {
    local_.raise(mailbox, std::move(event));
  }
  void addPending(int delta) { local_.pending.fetch_add(delta, std::memory_order_relaxed); }
  void addReadings(int delta) REQUIRES(ioRole) { local_.readings += delta; }
  void finishDelivered(Transfer* request) REQUIRES(ioRole) { delivered_.push_back(request); }
  bool hasLinkTo(const PeerAddress& peer) const REQUIRES(ioRole);
  // It leaves with the connection that there is, or will be: none is made for it.
  void enqueueQuietly(const PeerAddress& peer, OutItem item) REQUIRES(ioRole);
  // What would leave if its receiver only took it.
  bool hasQueued(uint64_t context, int rank) const REQUIRES(ioRole);
  bool sendFd(const std::string& uid, int fd, const std::string& cookie) REQUIRES(ioRole);
  Fd takeFd(const std::string& uid, const std::string& cookie) REQUIRES(ioRole);

 private:
  explicit Mesh(MeshOptions options);
  Status open();
  // Of a thread that waits in the sleeper.
  void onReady(const epoll_event* events, int count);
  template <class Work>
  bool turn(const Work& work) REQUIRES(ioRole);
  void handleEvents() REQUIRES(ioRole);
  bool lookAndMove(bool* inHost) REQUIRES(ioRole);
  // Calls work(); where memory runs out in it, all groups fail.
  template <class Work>
  bool workWithin(const Work& work) REQUIRES(ioRole);
  void giveUp() REQUIRES(ioRole);
  void onEvent(const epoll_event& event) REQUIRES(ioRole);
  void pollEvents() REQUIRES(ioRole);
  void goOnWithHandshakes() REQUIRES(ioRole);
  bool moveBytes(bool* inHost = nullptr) REQUIRES(ioRole);
  void dialAgain() REQUIRES(ioRole);
  Doorkeeper::Admission admit(const std::string& uid, uint64_t joins) const REQUIRES(ioRole);
  Connection* find(const std::string& uid) const REQUIRES(ioRole);
  Connection& connectionWith(const PeerAddress& peer) REQUIRES(ioRole);
  void erase(const Connection& connection) REQUIRES(ioRole);
  // Now, or as soon as all has come that it had sent: loseEnding() goes on with it.
  void processEnded(const std::string& uid) REQUIRES(ioRole);
  void loseEnding() REQUIRES(ioRole);
  void lose(Connection& connection) REQUIRES(ioRole);
  void raiseLost(const PeerLost& lost) REQUIRES(ioRole);  // for all groups

  Local local_;
  IoMutex io_;
  Doorkeeper doorkeeper_;
  ProcessWatch watch_;
  std::vector<std::unique_ptr<Connection>> connections_ GUARDED_BY(ioRole);
  std::unordered_map<std::string, Connection*> byUid_ GUARDED_BY(ioRole);  // the same
  // By uid: what waits for a connection that nobody has needed so far, group by group. Not a
  // Connection, as all of those are looked at all the time, and there may be a thousand peers that
  // none is needed with. Only of the latest groups: Connection answers for the others.
  std::unordered_map<std::string, std::list<std::vector<OutItem>>> unconnected_ GUARDED_BY(ioRole);
  std::vector<Transfer*> delivered_ GUARDED_BY(ioRole);
  std::atomic<int64_t> processesChecked_{0};   // when, in ms of the steady clock
  bool hasRunOut_ GUARDED_BY(ioRole) = false;  // of memory, and the groups do not know it yet
  bool hasRung_ GUARDED_BY(ioRole) = false;    // the bell was drained, and nobody woken for it yet
  uint32_t pollCount_ GUARDED_BY(ioRole) = 0;
};

}  // namespace mycoll
