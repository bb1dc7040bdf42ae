// Ranks as threads of one process, each with an engine of its own, for tests of the engine without
// torch or Python. They map shared segments once, so that TSan sees one memory.
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
    operations_ += 1;
    bytes_ += value.size();
    return mycoll::Status();
  }
  mycoll::Status tryGet(const std::string& key, bool* found, std::string* value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = values_.find(key);
    *found = entry != values_.end();
    if (*found) *value = entry->second;
    operations_ += 1;
    bytes_ += *found ? value->size() : 0;
    return mycoll::Status();
  }
  mycoll::Status compareSet(const std::string& key, const std::string& expected,
                            const std::string& value, std::string* now) override {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_ += 1;
    bytes_ += value.size();
    const auto entry = values_.find(key);
    *now = entry == values_.end() ? "" : entry->second;
    if (*now == expected) values_[key] = *now = value;
    return mycoll::Status();
  }

  size_t operations() const { return operations_; }
  size_t bytes() const { return bytes_; }  // of values, there and back

 private:
  std::mutex mutex_;
  std::atomic<size_t> operations_{0}, bytes_{0};
  std::map<std::string, std::string> values_;
};

// By what the ranks of a world are connected; mixed: even ranks share memory, odd ones use tcp.
enum class Links { kShm, kTcp, kMixed };

inline mycoll::MeshOptions meshWith(Links links, int rank) {
  const bool isTcp = links == Links::kTcp || (links == Links::kMixed && rank % 2 == 1);
  mycoll::MeshOptions mesh;
  mesh.transport = isTcp ? mycoll::TransportChoice::kTcp : mycoll::TransportChoice::kAuto;
  return mesh;
}

using RankBody = std::function<void(mycoll::Communicator& group)>;

// One rank of a group, on an engine of its own, which the caller may keep as well.
inline std::shared_ptr<mycoll::Communicator> makeRank(
    int rank, int ranks, mycoll::MeshOptions mesh, std::shared_ptr<mycoll::Store> store,
    int timeoutMs = 60'000, std::shared_ptr<mycoll::Engine>* engine = nullptr) {
  mesh.storeHost = "127.0.0.1";
  std::shared_ptr<mycoll::Engine> own;
  if (engine == nullptr) engine = &own;
  ASSERT_OK(mycoll::Engine::create(mesh, engine));
  mycoll::GroupOptions options;
  options.name = "test";
  options.rank = rank;
  options.ranks = ranks;
  options.timeout = std::chrono::milliseconds(timeoutMs);
  std::shared_ptr<mycoll::Communicator> group;
  ASSERT_OK(mycoll::Communicator::create(options, std::move(store), *engine, &group));
  return group;
}

// The body on one rank of a group.
inline void runRank(int rank, int ranks, const mycoll::MeshOptions& mesh,
                    std::shared_ptr<mycoll::Store> store, const RankBody& body,
                    int timeoutMs = 60'000) {
  std::shared_ptr<mycoll::Engine> engine;
  const std::shared_ptr<mycoll::Communicator> group =
      makeRank(rank, ranks, mesh, std::move(store), timeoutMs, &engine);
  body(*group);
  group->close(mycoll::Deadline::after(std::chrono::milliseconds(2000)));
}

// Runs the body on every rank, with a group of its own each time. meshOf(rank): its options.
inline void runMeshes(int ranks, const std::function<mycoll::MeshOptions(int)>& meshOf,
                      const RankBody& body, int timeoutMs = 60'000) {
  auto store = std::make_shared<MemoryStore>();
  Threads(ranks, [&](int rank) { runRank(rank, ranks, meshOf(rank), store, body, timeoutMs); });
}

// On hosts that they pretend to be on: hostOf[rank]. tap: of all ranks' connections.
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
