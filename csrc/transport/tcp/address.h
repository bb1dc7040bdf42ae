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
};

// The addresses of all interfaces that are up.
std::vector<InterfaceAddress> interfaceAddresses();

// The interface that others should use, with its addresses, IPv4 first:
//   filter set: the first that it admits;
//   else: the one that routes to storeHost (where the rendezvous store is; empty: unknown);
//   else: the first that is no loopback and no container bridge; else loopback.
Status chooseInterface(const InterfaceFilter& filter, const std::string& storeHost,
                       std::vector<InterfaceAddress>* chosen);

// A non-blocking listener on a free port of this address alone, never on all interfaces.
Status listenOn(const InterfaceAddress& address, const PortRange& ports, Fd* listener, int* port);

// Starts a non-blocking connection to a numeric address. Finished when writable.
Status startConnect(const std::string& address, int port, Fd* socket);
// How a connection that was started has failed. kPeerLost: nobody listens there.
Status connectFailure(const std::string& address, int port, int error);

// Small messages leave at once; a peer that has silently gone is noticed by the kernel.
void tuneSocket(int fd, int deadAfterSeconds);

}  // namespace mycoll
