#include "transport/lobby.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/handshake.h"
#include "transport/mesh.h"
#include "transport/tcp/address.h"

namespace mycoll {
namespace {

constexpr int kLookEveryMs = 50;

// One attempt to enter, over one socket.
class Visit {
 public:
  Visit(const Mesh& mesh, const PeerAddress& peer, const Lobby& like, Deadline deadline,
        const std::function<Status()>& look, bool waits)
      : mesh_(mesh), peer_(peer), like_(like), deadline_(deadline), look_(look), waits_(waits) {}

  Status connected(int fd, int* error) {
    Connected condition(fd, deadline_);
    MYCOLL_RETURN_IF_ERROR(until(condition, fd, POLLOUT));
    *error = condition.hasFailed() ? condition.error() : 0;
    return Status();
  }

  Status shakeHands(int fd, bool isUnix, Answer* answer, std::string* why) {
    using End = Handshake::End;
    Handshake handshake;
    handshake.socket = fd;
    handshake.secret = like_.secret();
    handshake.deadline = deadline_;
    Hello& hello = handshake.hello;
    hello.isShm = isUnix;
    hello.context = like_.number();
    hello.source = hello.destination = kNobody;
    hello.waits = waits_ ? 1 : 0;
    std::memcpy(hello.sourceUid, mesh_.address().uid.data(), sizeof(hello.sourceUid));
    std::memcpy(hello.destinationUid, peer_.uid.data(), sizeof(hello.destinationUid));
    Task task = mycoll::shakeHands(handshake);
    task.resume();
    while (!task.finished()) {
      MYCOLL_RETURN_IF_ERROR(until(*task.waitingFor(), fd, POLLIN));
      task.resume();
    }
    MYCOLL_RETURN_IF_ERROR(task.result());
    switch (handshake.end) {
      case End::kAccepted: *answer = Answer::kIn; break;
      case End::kNotYet:
      case End::kGone:
        *answer = Answer::kNobody;
        *why = "takes part in no such meeting";
        break;
      case End::kDistrusted:
        *answer = Answer::kDistrusted;
        *why = "could not prove that it is a member of this group";
        break;
      case End::kHungUp:
      case End::kRefused:
      case End::kAskAgain:
        *answer = Answer::kHungUp;
        *why = "did not answer the handshake";
        break;
    }
    return Status();
  }

 private:
  Status until(Condition& condition, int fd, short events) {
    while (!condition.ready()) {
      pollfd entry{fd, events, 0};
      (void)poll(&entry, 1, kLookEveryMs);
      MYCOLL_RETURN_IF_ERROR(look_());
    }
    return Status();
  }

  const Mesh& mesh_;
  const PeerAddress& peer_;
  const Lobby& like_;
  const Deadline deadline_;
  const std::function<Status()>& look_;
  const bool waits_;
};

}  // namespace

Status Lobby::open() {
  news_ = Fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (news_.isOpen()) return Status();
  return Status(Code::kNetwork, std::string("cannot make an eventfd: ") + strerror(errno));
}

void Lobby::enter(Fd socket) {
  const MutexLock lock(mutex_);
  sockets_.push_back(std::move(socket));
  const uint64_t one = 1;
  (void)!write(news_.get(), &one, sizeof(one));
}

std::vector<Fd> Lobby::takeAll() {
  uint64_t count;
  (void)!read(news_.get(), &count, sizeof(count));
  const MutexLock lock(mutex_);
  return std::exchange(sockets_, {});
}

Status knock(const Mesh& mesh, const PeerAddress& peer, const Lobby& like, Deadline deadline,
             const std::function<Status()>& look, Answer* answer, Fd* result, std::string* why,
             bool waits) {
  Visit visit(mesh, peer, like, deadline, look, waits);
  *answer = Answer::kUnreachable;
  *why = "it has no address in common";
  bool isGone = true;
  const auto note = [&](const Status& failure) {
    isGone &= failure.code() == Code::kPeerLost;
    *answer = isGone ? Answer::kNobody : Answer::kUnreachable;
    *why = failure.message();
  };
  if (mesh.isLocal(peer)) {
    Fd socket;
    bool isFull = false;
    const Status status = connectUnix(peer.uid, &socket, &isFull);
    if (isFull) {
      *answer = Answer::kHungUp;
      *why = status.message();
      return Status();
    }
    if (status.ok()) {
      MYCOLL_RETURN_IF_ERROR(visit.shakeHands(socket.get(), true, answer, why));
      *result = std::move(socket);
      return Status();
    }
    note(status);
  }
  for (const TcpAddress& entry : peer.tcp) {
    Fd socket;
    Status status = startConnect(entry.address, entry.port, nullptr, &socket);
    if (status.ok()) {
      int error = 0;
      MYCOLL_RETURN_IF_ERROR(visit.connected(socket.get(), &error));
      if (error == 0) {
        tuneSocket(socket.get(), mesh.options().networkSeconds);
        MYCOLL_RETURN_IF_ERROR(visit.shakeHands(socket.get(), false, answer, why));
        *result = std::move(socket);
        return Status();
      }
      status = connectFailure(entry.address, entry.port, error);
    }
    note(status);
  }
  return Status();
}

}  // namespace mycoll
