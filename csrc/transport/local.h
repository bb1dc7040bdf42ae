// Local: what all connections of this process share: its address, how it sleeps and is woken, the
// groups that it is in, and what the mesh counts over all of them.
//
// Thread contract: what the mesh's I/O lock guards says so; the rest is const, or locks itself
// (Sleeper, Bell, pending).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
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

namespace mycoll {

class Lobby;

struct MeshOptions {
  TransportChoice transport = TransportChoice::kAuto;
  InterfaceFilter interfaces;
  PortRange ports;
  AdvertisedAddress advertised;
  std::string storeHost;  // empty: unknown
  size_t eagerBytes = 64 * 1024;
  // Its receiver is about to ask for it, and would have room for it: asking first would only cost
  // the time to the other host and back.
  size_t eagerInCollectives = 1024 * 1024;
  bool isChecked = false;  // what is sent carries checksums
  DistanceChoice distance = DistanceChoice::kMeasured;
  int flows = 0;  // sockets for a peer on another host; 0: as many as its distance asks for
  int networkSeconds = 10;  // a peer beyond the network that is silent for so long is dead
  // For tests:
  std::shared_ptr<LinkTap> tap;
  std::string host;  // the host that this process pretends to be on; empty: none

  static Status fromEnv(MeshOptions* result);
};

struct Local {
  explicit Local(MeshOptions chosen) : options(std::move(chosen)) {}

  // Whether shared memory is to be tried with this peer: both sides judge alike.
  bool isOnThisHost(const PeerAddress& peer) const {
    return peer.hostIdentity == address.hostIdentity;
  }
  Bell bellOf(const PeerAddress& peer) const { return bell.bellOf(peer.uid); }
  // This process's end of a connection that both sides have agreed on. segment: of its rings; null
  // where no memory is shared.
  Link makeLink(const PeerAddress& peer, Fd socket, std::shared_ptr<Segment> segment,
                RingSide side) const;

  // For the group of this mailbox: see event.h.
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
  std::deque<std::pair<Mailbox*, Event>> events GUARDED_BY(ioRole);  // that no group has handled
  std::map<uint64_t, Lobby*> lobbies GUARDED_BY(ioRole);             // by number
  // Requests that are posted, connections that are being made, events.
  std::atomic<int> pending{0};
  int dialing GUARDED_BY(ioRole) = 0;   // of these, connections
  int tcpLinks GUARDED_BY(ioRole) = 0;  // connections over TCP that are open
  int readings GUARDED_BY(ioRole) = 0;  // messages that are read where they lie (mailbox.h)
  int asleep GUARDED_BY(ioRole) = 0;    // threads; while there is one, peers ring
};

}  // namespace mycoll
