// Ranks as threads of one process, each with an engine of its own, for tests of the engine without
// torch or Python. All threads use one mapping of a shared segment, so TSan sees one memory.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "engine/engine.h"
#include "test.h"

namespace test {

class MemoryStore final : public mycoll::Store {
 public:
  mycoll::Status set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    return mycoll::Status();
  }
  mycoll::Status tryGet(const std::string& key, bool* found, std::string* value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = values_.find(key);
    *found = entry != values_.end();
    if (*found) *value = entry->second;
    return mycoll::Status();
  }
  mycoll::Status compareSet(const std::string& key, const std::string& expected,
                            const std::string& value, std::string* now) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = values_.find(key);
    *now = entry == values_.end() ? "" : entry->second;
    if (*now == expected) values_[key] = *now = value;
    return mycoll::Status();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// How the ranks of a world are connected. kMixed: even ranks share memory, odd ones use TCP.
enum class Links { kShm, kTcp, kMixed };

inline mycoll::MeshOptions meshWith(Links links, int rank) {
  const bool isTcp = links == Links::kTcp || (links == Links::kMixed && rank % 2 == 1);
  mycoll::MeshOptions mesh;
  mesh.transport = isTcp ? mycoll::TransportChoice::kTcp : mycoll::TransportChoice::kAuto;
  return mesh;
}

using RankBody = std::function<void(mycoll::Communicator& group)>;

inline std::shared_ptr<mycoll::Engine> makeEngine(mycoll::MeshOptions mesh = {}) {
  mesh.storeHost = "127.0.0.1";
  std::shared_ptr<mycoll::Engine> engine;
  ASSERT_OK(mycoll::Engine::create(mesh, &engine));
  return engine;
}

inline mycoll::GroupOptions groupOptions(int rank, int ranks, int timeoutMs = 60'000,
                                         const std::string& name = "test") {
  mycoll::GroupOptions options;
  options.name = name;
  options.rank = rank;
  options.ranks = ranks;
  options.timeout = std::chrono::milliseconds(timeoutMs);
  return options;
}

// One rank of a group, on an engine of its own. The caller may keep the engine as well.
inline std::shared_ptr<mycoll::Communicator> makeRank(
    int rank, int ranks, const mycoll::MeshOptions& mesh, std::shared_ptr<mycoll::Store> store,
    int timeoutMs = 60'000, std::shared_ptr<mycoll::Engine>* engine = nullptr) {
  std::shared_ptr<mycoll::Engine> own = makeEngine(mesh);
  std::shared_ptr<mycoll::Communicator> group;
  ASSERT_OK(mycoll::Communicator::create(groupOptions(rank, ranks, timeoutMs), std::move(store),
                                         own, &group));
  if (engine != nullptr) *engine = std::move(own);
  return group;
}

// Runs the body on one rank of a group.
inline void runRank(int rank, int ranks, const mycoll::MeshOptions& mesh,
                    std::shared_ptr<mycoll::Store> store, const RankBody& body,
                    int timeoutMs = 60'000) {
  std::shared_ptr<mycoll::Engine> engine;
  const std::shared_ptr<mycoll::Communicator> group =
      makeRank(rank, ranks, mesh, std::move(store), timeoutMs, &engine);
  body(*group);
  group->close(mycoll::Deadline::after(std::chrono::milliseconds(2000)));
}

// Makes a group and runs the body on each of its ranks. meshOf(rank): the options of its mesh.
inline void runMeshes(int ranks, const std::function<mycoll::MeshOptions(int)>& meshOf,
                      const RankBody& body, int timeoutMs = 60'000) {
  auto store = std::make_shared<MemoryStore>();
  Threads(ranks, [&](int rank) { runRank(rank, ranks, meshOf(rank), store, body, timeoutMs); });
}

// As runMeshes(), with ranks that pretend to be on several hosts: hostOf[rank]. All connections go
// through the tap.
inline void runHosts(const std::vector<int>& hostOf, const RankBody& body, int timeoutMs = 60'000,
                     const std::shared_ptr<mycoll::LinkTap>& tap = nullptr) {
  auto meshOf = [&](int rank) {
    mycoll::MeshOptions mesh;
    mesh.host = " host " + std::to_string(hostOf[rank]);
    mesh.tap = tap;
    return mesh;
  };
  runMeshes(static_cast<int>(hostOf.size()), meshOf, body, timeoutMs);
}

inline void runWorld(int ranks, Links links, const RankBody& body, int timeoutMs = 60'000,
                     bool isExternal = false) {
  auto meshOf = [&](int rank) { return meshWith(links, rank); };
  auto external = [&](mycoll::Communicator& group) {
    const std::shared_ptr<mycoll::Communicator> derived =
        mycoll::Communicator::derive(group, " elsewhere", true);
    ASSERT_OK(derived->meetNeighbours());
    body(*derived);
    derived->close(mycoll::Deadline::after(std::chrono::milliseconds(2000)));
  };
  runMeshes(ranks, meshOf, isExternal ? RankBody(external) : body, timeoutMs);
}

}  // namespace test
