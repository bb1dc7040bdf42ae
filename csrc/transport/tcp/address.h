// Which of this host's addresses peers should connect to, and sockets on them.
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

// The interfaces that others should use, with their addresses, IPv4 first:
//   filter set: all that it names; the first that it admits, if it says what is not to be used;
//   else: the one that routes to storeHost (where the rendezvous store is; empty: unknown);
//   else: the first that is no loopback and no container bridge; else loopback.
Status chooseInterface(const InterfaceFilter& filter, const std::string& storeHost,
                       std::vector<InterfaceAddress>* chosen);

// A non-blocking listener on a free port of this address alone, never on all interfaces.
Status listenOn(const InterfaceAddress& address, const PortRange& ports, Fd* listener, int* port);

// Whether the numeric address is one of this interface's subnet.
bool isInSubnetOf(const InterfaceAddress& own, const std::string& address);

// Starts a non-blocking connection to a numeric address. Finished when writable. from: this host's
// address that it is to leave from; null: the system chooses.
Status startConnect(const std::string& address, int port, const InterfaceAddress* from, Fd* socket);
// How a connection that was started has failed. kPeerLost: nobody listens there.
Status connectFailure(const std::string& address, int port, int error);

// Small messages leave at once; a peer that has silently gone is noticed by the kernel.
void tuneSocket(int fd, int deadAfterSeconds);
// It takes little more than the network takes at the moment: what does not fit may leave by another
// socket of the same connection.
void shareLoad(int fd);

}  // namespace mycoll
