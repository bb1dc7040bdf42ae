// Local: the state that all connections of this process share: its address, its sleeper and bell,
// the groups that it is in, and the mesh's counters.
//
// Thread contract: members under the mesh's I/O lock are annotated; the others are const, or lock
// themselves (Sleeper, Bell, pending).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "transport/bell.h"
#include "transport/event.h"
#include "transport/group_table.h"
#include "transport/io_lock.h"
#include "transport/link.h"
#include "transport/peer.h"
#include "transport/shm/link.h"
#include "transport/sleeper.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tls.h"

namespace mycoll {

struct MeshOptions {
  TransportChoice transport = TransportChoice::kAuto;
  InterfaceFilter interfaces;
  PortRange ports;
  AdvertisedAddress advertised;
  std::string storeHost;  // empty: unknown
  size_t eagerBytes = 64 * 1024;
  // Larger than eagerBytes: the receiver is about to ask for the message and would have room for
  // it, so asking first would only cost a round trip.
  size_t eagerInCollectives = 1024 * 1024;
  std::shared_ptr<const Tls> tls;  // null: sockets between hosts are not encrypted
  DistanceChoice distance = DistanceChoice::kMeasured;
  SingleCopyUse singleCopy = SingleCopyUse::kOff;  // for messages between two ranks
  int flows = 0;  // sockets for a peer on another host; 0: as many as its distance asks for
  int networkSeconds = 10;  // a peer over TCP that is silent for this long is dead
  // For tests:
  std::shared_ptr<LinkTap> tap;
  std::string host;  // the host that this process pretends to be on; empty: none

  static Status fromEnv(MeshOptions* result);
};

struct Local {
  explicit Local(MeshOptions chosen) : options(std::move(chosen)) {}

  // Whether to try shared memory with this peer. Both sides decide alike.
  bool isOnThisHost(const PeerAddress& peer) const {
    return peer.hostIdentity == address.hostIdentity;
  }
  Bell bellOf(const PeerAddress& peer) const { return Bell(bell.fd(), peer.uid); }
  // Makes this process's end of a connection that both sides have agreed on. segment: the memory of
  // its rings; null over TCP. tls: null if the socket is not encrypted.
  Link makeLink(const PeerAddress& peer, Fd socket, std::shared_ptr<Segment> segment, RingSide side,
                std::shared_ptr<TlsSocket> tls) const;

  // Queues an event for the group of this mailbox: see event.h.
  void raise(Mailbox* mailbox, Event event) REQUIRES(ioRole) {
    events.emplace_back(mailbox, std::move(event));
    pending.fetch_add(1, std::memory_order_relaxed);
  }

  const MeshOptions options;
  PeerAddress address;                       // const once the mesh is open
  std::vector<InterfaceAddress> interfaces;  // that it listens on; const then, too
  // Addresses of peers that could not be reached: they are tried last from then on.
  std::set<std::string> unreachable GUARDED_BY(ioRole);
  Sleeper sleeper;
  BellSocket bell;
  GroupTable groups GUARDED_BY(ioRole);
  std::deque<std::pair<Mailbox*, Event>> events GUARDED_BY(ioRole);  // not handled yet
  // The number of posted requests, of connections that are being made or have frames queued, and
  // of events.
  std::atomic<int> pending{0};
  int dialing GUARDED_BY(ioRole) = 0;   // dials in progress, of these
  int tcpLinks GUARDED_BY(ioRole) = 0;  // open TCP sockets of connections
  int asleep GUARDED_BY(ioRole) = 0;    // threads asleep; if there is one, peers ring
};

}  // namespace mycoll
