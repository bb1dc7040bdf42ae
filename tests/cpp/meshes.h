// Several meshes in one thread, for tests of what happens between processes below the engine. A
// mesh makes progress only when the test calls it. All meshes belong to this process, so they do
// not see each other's processes end; here a process "ends" when its mesh is destroyed.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "listener.h"
#include "test.h"
#include "transport/mailbox.h"
#include "transport/mesh.h"

namespace test {

struct Member {
  Listener listener;
  std::unique_ptr<mycoll::Mailbox> mailbox;
};

class Meshes {
 public:
  Meshes(int count, mycoll::TransportChoice transport,
         const std::map<int, std::shared_ptr<mycoll::LinkTap>>& taps = {},
         const std::function<void(mycoll::MeshOptions&)>& adjust = {}) {
    for (int i = 0; i < count; ++i) {
      mycoll::MeshOptions options;
      options.transport = transport;
      options.storeHost = "127.0.0.1";
      if (taps.count(i)) options.tap = taps.at(i);
      if (adjust) adjust(options);
      ASSERT_OK(mycoll::Mesh::create(options, &all.emplace_back()));
      addresses.push_back(all.back()->address());
    }
  }

  // Makes `process` a member of the group of these processes.
  Member& join(int process, uint64_t context, const std::vector<int>& processes,
               const std::string& secret = "") {
    mycoll::GroupAddress group;
    group.context = context;
    group.name = "g";
    group.name += std::to_string(context);
    group.secret = secret;
    if (secret.empty()) group.secret.assign(32, static_cast<char>('a' + context % 26));
    std::vector<mycoll::PeerAddress> peers;
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      if (processes[rank] == process) group.rank = static_cast<int>(rank);
      peers.push_back(addresses[processes[rank]]);
    }
    group.peers = std::move(peers);
    auto& member = members[{process, context}];
    member = std::make_unique<Member>();
    member->mailbox = member->listener.join(all[process], group);
    return *member;
  }
  Member& at(int process, uint64_t context) { return *members.at({process, context}); }

  void leave(int process, uint64_t context) {
    at(process, context)
        .listener.membership()
        .sendGoodbye(mycoll::Status(mycoll::Code::kAborted, "left"), "");
    members.erase({process, context});
  }
  // Ends the process without a goodbye.
  void end(int process) {
    std::erase_if(members, [&](const auto& entry) { return entry.first.first == process; });
    all[process].reset();
  }

  void turn(int times = 2000) {
    for (int i = 0; i < times; ++i) {
      for (auto& mesh : all) {
        if (mesh) mesh->progress();
      }
    }
  }
  bool turnUntil(const std::function<bool()>& isOver, int milliseconds = 10'000) {
    const auto deadline = mycoll::Deadline::after(std::chrono::milliseconds(milliseconds));
    for (int turns = 0; !isOver() && !deadline.expired(); ++turns) {
      turn(1);
      // After so many turns, the condition needs time.
      if (turns > 2000) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return isOver();
  }

  // Sends a few bytes from one process to another in this group. Returns true if they arrive.
  bool talk(int from, int to, uint64_t context, int rankFrom, int rankTo,
            int milliseconds = 10'000) {
    int value = 7, got = 0;
    mycoll::Transfer sending, receiving;
    at(to, context)
        .mailbox->receive(receiving, rankFrom, mycoll::MessageClass::kPointToPoint, 77, word(4),
                          {&got, 4});
    at(from, context)
        .mailbox->send(sending, rankTo, mycoll::MessageClass::kPointToPoint, 77, word(4),
                       {&value, 4});
    return turnUntil([&] { return receiving.isDone(); }, milliseconds) && receiving.status().ok() &&
           got == 7;
  }

  // Whether the two processes are connected by shared memory.
  bool isShm(int from, int to) {
    const mycoll::IoLock lock(all[from]->ioMutex());
    return all[from]->linkTo(addresses[to]).isShm();
  }

  static mycoll::Signature word(size_t bytes) {
    mycoll::Signature result;
    result.kind = mycoll::OpKind::kSend;
    result.bytes = bytes;
    return result;
  }

  std::vector<std::shared_ptr<mycoll::Mesh>> all;
  std::vector<mycoll::PeerAddress> addresses;
  std::map<std::pair<int, uint64_t>, std::unique_ptr<Member>> members;
};

// Runs the body with each kind of link.
inline void forBothLinks(const std::function<void(mycoll::TransportChoice)>& body) {
  body(mycoll::TransportChoice::kAuto);
  body(mycoll::TransportChoice::kTcp);
}

}  // namespace test
