// Ranks as processes of their own, forked from the test's. They map each other's memory, which
// ranks that are threads (world.h) do not, as they have one address space.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "test.h"
#include "world.h"

namespace test {

// A store for several processes, in the files of a folder.
class FolderStore final : public mycoll::Store {
 public:
  explicit FolderStore(std::string path) : path_(std::move(path)) {}
  mycoll::Status set(const std::string& key, const std::string& value) override {
    const std::string made = placeOf(key) + "." + std::to_string(getpid());
    std::ofstream(made, std::ios::binary) << value;
    std::filesystem::rename(made, placeOf(key));
    return mycoll::Status();
  }
  mycoll::Status tryGet(const std::string& key, bool* found, std::string* value) override {
    std::ifstream file(placeOf(key), std::ios::binary);
    *found = file.is_open();
    if (*found) value->assign(std::istreambuf_iterator<char>(file), {});
    return mycoll::Status();
  }

 private:
  std::string placeOf(const std::string& key) const {
    return path_ + "/" + std::to_string(std::hash<std::string>()(key));
  }

  const std::string path_;
};

// As runWorld(), with processes of one host.
inline void runProcesses(int ranks, const RankBody& body, const mycoll::MeshOptions& mesh = {}) {
  const ScopedFolder folder;
  const auto store = std::make_shared<FolderStore>(folder.path());
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    children.push_back(startProcess([&] { runRank(rank, ranks, mesh, store, body); }));
  }
  for (const pid_t child : children) endProcess(child);
}

// A line of /proc/self/maps.
struct Mapping {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::string access;  // "rw-s"
  std::string name;

  size_t bytes() const { return end - begin; }
};

inline std::vector<Mapping> mappings() {
  std::vector<Mapping> all;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Mapping mapping;
    std::istringstream words(line);
    char dash = 0;
    std::string offset, device, inode;
    words >> std::hex >> mapping.begin >> dash >> mapping.end >> mapping.access >> offset >>
        device >> inode >> mapping.name;
    all.push_back(mapping);
  }
  return all;
}

// The mapping that contains the address; one of no bytes if there is none.
inline Mapping mappingAt(const void* address) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  for (const Mapping& mapping : mappings()) {
    if (place >= mapping.begin && place < mapping.end) return mapping;
  }
  return {};
}

// Whether this process may write there. The kernel does the access, so it fails without a signal.
inline bool canWrite(char* place) {
  int ends[2];
  ASSERT(pipe(ends) == 0);
  const bool isRead = write(ends[1], place, 1) == 1;
  const bool isWritten = read(ends[0], place, 1) == 1;
  for (const int end : ends) close(end);
  EXPECT(isRead);
  return isWritten;
}

}  // namespace test
