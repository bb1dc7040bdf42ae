// The addresses of this host that peers should connect to, and sockets on them.
// Thread contract: [any thread]; nothing here keeps state.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/status.h"

namespace mycoll {

struct InterfaceAddress {
  std::string interfaceName;
  std::string address;  // "10.0.0.3", "fe80::1%eth0"
  bool isIpv6 = false;
  bool isLoopback = false;
  int prefixBits = 0;  // of its subnet
};

// The addresses of all interfaces that are up.
std::vector<InterfaceAddress> interfaceAddresses();

// The interfaces that peers should use, with their addresses, IPv4 first:
//   filter set: all that it names; or, if it is an exclusion, the first that it admits;
//   else: the one that routes to storeHost (the host of the rendezvous store; empty: unknown);
//   else: the first that is neither loopback nor a container bridge; else loopback.
Status chooseInterface(const InterfaceFilter& filter, const std::string& storeHost,
                       std::vector<InterfaceAddress>* chosen);

// A non-blocking listener on a free port of this address alone, never on all interfaces.
Status listenOn(const InterfaceAddress& address, const PortRange& ports, Fd* listener, int* port);

// Whether the numeric address is in this interface's subnet.
bool isInSubnetOf(const InterfaceAddress& own, const std::string& address);

// Starts a non-blocking connection to a numeric address. Finished when writable. from: the local
// address to use; null: the system chooses.
Status startConnect(const std::string& address, int port, const InterfaceAddress* from, Fd* socket);
// The status of a connection attempt that failed with this errno. kPeerLost: nothing listens there.
Status connectFailure(const std::string& address, int port, int error);

// Small messages are sent without delay, and the kernel detects a peer that is silently gone.
void tuneSocket(int fd, int deadAfterSeconds);
// Makes the socket take little more than the network takes at the moment: the rest may be sent on
// another socket of the same connection.
void shareLoad(int fd);

}  // namespace mycoll
