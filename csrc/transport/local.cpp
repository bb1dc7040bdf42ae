#include "transport/local.h"

#include <utility>

#include "base/log.h"
#include "transport/tcp/link.h"

namespace mycoll {

Status MeshOptions::fromEnv(MeshOptions* result) {
  MYCOLL_RETURN_IF_ERROR(Env::check());
  const Env& env = Env::process();
  result->transport = env.transport;
  result->interfaces = env.socketInterfaces;
  result->ports = env.ports;
  result->advertised = env.advertised;
  result->eagerBytes = env.eagerBytes;
  MYCOLL_RETURN_IF_ERROR(Tls::fromEnv(&result->tls));
  result->distance = env.distance;
  result->singleCopy = env.singleCopy;
  result->flows = env.flows;
  result->networkSeconds = env.networkSeconds;
  return Status();
}

Link Local::makeLink(const PeerAddress& peer, Fd socket, std::shared_ptr<Segment> segment,
                     RingSide side, std::shared_ptr<TlsSocket> tls) const {
  const auto shared = std::make_shared<const Fd>(std::move(socket));
  Link link;
  link.isShm = segment != nullptr;
  if (link.isShm) {
    const Bell bell = bellOf(peer);
    link.sender = std::make_unique<ShmSender>(segment, side, shared, bell);
    link.receiver = std::make_unique<ShmReceiver>(segment, side, shared, bell, options.distance);
  } else if (tls) {
    MYCOLL_LOG_DEBUG("the connection with %s is encrypted: %s", peer.describe().c_str(),
                     options.tls->describe().c_str());
    link.sender = std::make_unique<TlsSender>(shared, tls);
    link.receiver = std::make_unique<TlsReceiver>(shared, tls);
  } else {
    link.sender = std::make_unique<TcpSender>(shared);
    link.receiver = std::make_unique<TcpReceiver>(shared);
  }
  if (options.tap) {
    link.sender = options.tap->tap(std::move(link.sender));
    link.receiver = options.tap->tap(std::move(link.receiver));
  }
  return link;
}

}  // namespace mycoll
