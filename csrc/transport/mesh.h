// Mesh: the processes that this one knows, and its connections with them. All groups of the process
// share it, so the number of descriptors grows with the number of peer processes, not with the
// number of groups. Dial and Acceptor make connections, Connection sends and receives on them,
// ProcessWatch detects processes that end, and GroupTable holds the groups.
//
// Thread contract: all public functions [any thread] unless marked. One lock, ioMutex(), guards the
// connections and the matching of all mailboxes; it is never held while a thread blocks or calls
// back. Lock order: a group's queue, then the I/O lock, then the sleeper's.
// Lifetime: groups hold the mesh by shared_ptr; the last one closes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "base/topology.h"
#include "transport/acceptor.h"
#include "transport/connection.h"
#include "transport/io_lock.h"
#include "transport/local.h"
#include "transport/mailbox.h"
#include "transport/process_watch.h"
#include "transport/shared_reads.h"

namespace mycoll {

class Mesh {
 public:
  static Status create(MeshOptions options, std::shared_ptr<Mesh>* result);
  ~Mesh();

  const PeerAddress& address() const { return local_.address; }
  const MeshOptions& options() const { return local_.options; }
  Sleeper& sleeper() { return local_.sleeper; }
  Bell bellOf(const PeerAddress& peer) const { return local_.bellOf(peer); }
  bool isLocal(const PeerAddress& peer) const { return local_.isOnThisHost(peer); }

  // One turn: moves what can be moved without blocking, then passes the groups their events.
  // Returns true if anything moved. *inHost is set to true if it moved between processes of this
  // host, which wait for it at this moment. polls: also checks for new connections and for
  // processes that have ended, which is otherwise done rarely while this process has no sockets.
  bool progress(bool* inHost = nullptr, bool polls = false);
  // True while something is queued, posted or being connected.
  bool hasPending() const { return local_.pending.load(std::memory_order_relaxed) > 0; }
  // Called before and after sleep(): while a thread is asleep, peers ring.
  void setAsleep(bool asleep);

  // Whether the peer is lost, for any reason.
  bool hasLost(const PeerAddress& peer);
  // See ProcessWatch.
  std::shared_ptr<const Fd> descriptorOf(const PeerAddress& peer);
  // Checks the processes, at most every 50 ms, and up to 16 at a time: the kernel reports a death
  // only when it has torn down the process, which takes seconds if it has much memory. For threads
  // that wait.
  void checkProcesses();

  // For Mailbox, from here on.
  IoMutex& ioMutex() { return io_; }
  void addMailbox(Mailbox* mailbox) REQUIRES(ioRole);
  void removeMailbox(Mailbox* mailbox) REQUIRES(ioRole);  // does not throw
  Connection& linkTo(const PeerAddress& peer) REQUIRES(ioRole);
  // Removes it from all queues, and discards what is being received into it.
  void forget(Transfer* request) REQUIRES(ioRole);
  // Discards what is being received into such targets.
  void discard(const std::function<bool(const FrameTarget&)>& isMeant) REQUIRES(ioRole);
  SharedReads& sharedReads() REQUIRES(ioRole) { return sharedReads_; }
  void raise(Mailbox* mailbox, Event event) REQUIRES(ioRole) {
    local_.raise(mailbox, std::move(event));
  }
  // Memory has run out in work that cannot be repeated: the next turn fails all groups.
  void runOut() REQUIRES(ioRole) { hasRunOut_ = true; }
  void addPending(int delta) { local_.pending.fetch_add(delta, std::memory_order_relaxed); }
  // Delivers the request after this turn. Does not allocate: a request must end in any case.
  void finishDelivered(Transfer* request) REQUIRES(ioRole) {
    request->next_ = nullptr;
    *lastDelivered_ = request;
    lastDelivered_ = &request->next_;
  }
  bool hasLinkTo(const PeerAddress& peer) const REQUIRES(ioRole);
  // Sends it on the existing connection, or on the next one that is made; makes none itself.
  void enqueueQuietly(const PeerAddress& peer, OutItem item) REQUIRES(ioRole);
  // Whether frames of this rank are still queued on any connection.
  bool hasQueued(uint64_t context, int rank) const REQUIRES(ioRole);

 private:
  explicit Mesh(MeshOptions options);
  Status open();
  // Called by a thread that waits in the sleeper.
  void onReady(const epoll_event* events, int count);
  void handleEvents() REQUIRES(ioRole);
  bool lookAndMove(bool* inHost, bool polls) REQUIRES(ioRole);
  // Calls work(), and passes the groups their events. If memory runs out, all groups fail.
  template <class Work>
  bool turn(const Work& work) REQUIRES(ioRole);
  void giveUp() REQUIRES(ioRole);
  void onEvent(const epoll_event& event) REQUIRES(ioRole);
  void pollEvents() REQUIRES(ioRole);
  void advanceHandshakes() REQUIRES(ioRole);
  bool moveBytes(bool* inHost = nullptr) REQUIRES(ioRole);
  Outcome admit(const Acceptor::AcceptedPeer& accepted) const REQUIRES(ioRole);
  Connection* find(const std::string& uid) const REQUIRES(ioRole);
  Connection& connectionWith(const PeerAddress& peer) REQUIRES(ioRole);
  void erase(const Connection& connection) REQUIRES(ioRole);
  // Declares the process lost now or, in loseEnding(), once everything that it sent has arrived.
  void processEnded(const std::string& uid) REQUIRES(ioRole);
  void loseEnding() REQUIRES(ioRole);
  void lose(Connection& connection) REQUIRES(ioRole);
  void raiseLost(const PeerLost& lost) REQUIRES(ioRole);  // for all groups
  Transfer* takeDelivered() REQUIRES(ioRole);
  // Delivers the requests of such a list, which no other thread knows.
  void deliver(Transfer* first);

  Local local_;
  IoMutex io_;
  Acceptor acceptor_;
  ProcessWatch watch_;
  std::vector<std::unique_ptr<Connection>> connections_ GUARDED_BY(ioRole);
  std::unordered_map<std::string, Connection*> byUid_ GUARDED_BY(ioRole);  // the same
  // By uid: frames for peers without a connection, group by group. They need no Connection, as
  // every Connection is polled all the time, and there may be a thousand peers that need none. Only
  // frames of the latest groups are kept; Connection answers for the other groups.
  std::unordered_map<std::string, std::list<std::vector<OutItem>>> unconnected_ GUARDED_BY(ioRole);
  SharedReads sharedReads_ GUARDED_BY(ioRole){local_, watch_};
  // Requests that have ended and are to be delivered: a list by Transfer::next_, and its end.
  Transfer* delivered_ GUARDED_BY(ioRole) = nullptr;
  Transfer** lastDelivered_ GUARDED_BY(ioRole) = &delivered_;
  std::atomic<int64_t> processesChecked_{0};   // when, in ms of the steady clock
  bool hasRunOut_ GUARDED_BY(ioRole) = false;  // of memory, and the groups were not notified yet
  bool hasRung_ GUARDED_BY(ioRole) = false;    // the bell was drained, and no thread woken yet
  uint32_t pollCount_ GUARDED_BY(ioRole) = 0;
};

}  // namespace mycoll
