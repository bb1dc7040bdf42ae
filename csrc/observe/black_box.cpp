#include "observe/black_box.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/env.h"
#include "base/mutex.h"
#include "base/os.h"
#include "base/text.h"
#include "base/topology.h"
#include "base/types.h"

namespace mycoll {
namespace {

constexpr char kName[] = "mycoll.black_box";  // readers search for this name
constexpr char kMagic[8] = {'m', 'y', 'c', 'o', 'l', 'l', 'B', 'B'};
constexpr uint32_t kVersion = 1;
constexpr size_t kDescriptionRoom = 8192;
constexpr size_t kBoxRoom = 4096;
constexpr size_t kSiteBytes = 256;
constexpr size_t kFunctionBytes = 100;  // of these
constexpr uint32_t kSites = 512;
constexpr uint32_t kBeingWritten = 1;  // for GroupState::waitVersion
constexpr size_t kBoxAt = kDescriptionRoom;
constexpr size_t kSitesAt = kBoxAt + kBoxRoom;
// Each area is mapped separately.
size_t groupsAt() { return roundUp(kSitesAt + kSites * kSiteBytes, pageBytes()); }

// The character of Python's struct module for the type of a field.
template <typename T>
constexpr char letter() {
  if constexpr (requires { typename T::value_type; }) {
    return letter<typename T::value_type>();  // of an atomic
  } else if constexpr (std::is_same_v<T, Tally>) {
    return letter<decltype(Tally::done)>();
  } else if constexpr (std::is_same_v<T, char>) {
    return 's';
  } else {
    constexpr int kPower = std::countr_zero(sizeof(T));
    return std::is_signed_v<T> ? "bhiq"[kPower] : "BHIQ"[kPower];
  }
}

template <typename Field>
std::string format() {
  using Element = std::remove_extent_t<Field>;
  const size_t each = std::is_same_v<Element, Tally> ? sizeof(uint64_t) : sizeof(Element);
  const size_t count = sizeof(Field) / each;
  return (count == 1 ? "" : std::to_string(count)) + letter<Element>();
}

std::string field(const char* name, size_t offset, const std::string& format) {
  return std::string("\"") + name + "\":[" + std::to_string(offset) + ",\"" + format + "\"]";
}

// Describe a field of a structure, and a field of a Signature in it.
#define MYCOLL_FIELD(type, name) field(#name, offsetof(type, name), format<decltype(type::name)>())
#define MYCOLL_PART(type, signature, name)                            \
  field(#name, offsetof(type, signature) + offsetof(Signature, name), \
        format<decltype(Signature::name)>())

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

template <typename Enum>
std::string names(int count) {
  std::vector<std::string> parts;
  for (int i = 0; i < count; ++i) {
    std::string quoted = "\"";
    quoted += name(static_cast<Enum>(i));
    parts.push_back(quoted += '"');
  }
  std::string text = "[";
  text += joined(parts);
  return text += ']';
}

// Starts without a box: one is made at first use, not in every forked child.
struct Holder {
  std::atomic<BlackBox*> box{nullptr};
  Mutex making;
};

// Other threads may be writing: each word has the value of some moment.
void copyWords(const void* from, char* to, size_t bytes) {
  const auto* words = static_cast<const uint64_t*>(from);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    const uint64_t word = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
    std::memcpy(to + i * sizeof(word), &word, sizeof(word));
  }
}

}  // namespace

struct BlackBox::Box {
  int32_t pid;
  std::atomic<int32_t> rank;
  int64_t realtimeOffset;       // add to the steady clock to get the time of day, ns
  std::atomic<int64_t> copied;  // when snapshot() made this copy; steady clock, ns
  std::atomic<uint32_t> groups;
  std::atomic<uint32_t> sites;
  std::atomic<uint64_t> job;
  char host[128];
  char version[32];
  Tally ended[kOpKinds];  // of closed groups
};

BlackBox& BlackBox::process() {
  Holder& holder = perProcess<Holder>();
  BlackBox* box = holder.box.load(std::memory_order_acquire);
  if (box) return *box;
  MutexLock lock(holder.making);
  if (!holder.box.load()) holder.box.store(new BlackBox, std::memory_order_release);
  return *holder.box.load();
}

BlackBox::BlackBox() {
  const size_t wanted = Env::process().traceEntries;
  capacity_ = wanted == 0 ? 0 : std::bit_ceil(static_cast<uint32_t>(wanted));
  stateBytes_ = roundUp(sizeof(GroupState), pageBytes());
  areaBytes_ = stateBytes_ + roundUp(capacity_ * sizeof(Entry), pageBytes());
  open();
}

// The next part of the file, zeroed. If it cannot be had, this part and the later ones are ordinary
// memory, as readers require contiguous areas.
char* BlackBox::map(size_t offset, size_t bytes) {
  void* memory = MAP_FAILED;
  // Pages are reserved: a write cannot raise SIGBUS when the machine runs out of memory.
  if (fd_.isOpen() && reservePages(fd_.get(), offset, bytes)) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(),
                  static_cast<off_t>(offset));
  }
  if (memory == MAP_FAILED) {
    fd_.reset();
    memory = std::aligned_alloc(pageBytes(), bytes);
    if (!memory) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
  } else {
    (void)madvise(memory, bytes, MADV_DONTFORK);
  }
  return static_cast<char*>(memory);
}

void BlackBox::open() {
  if (isOn()) fd_.reset(memfd_create(kName, MFD_CLOEXEC));
  if (fd_.isOpen() && fchmod(fd_.get(), 0600) != 0) fd_.reset();
  head_ = map(0, groupsAt());
  box_ = new (head_ + kBoxAt) Box{};
  box_->pid = processId();
  box_->rank.store(-1);
  const std::chrono::nanoseconds realtime = std::chrono::system_clock::now().time_since_epoch();
  box_->realtimeOffset = realtime.count() - steadyNanos();
  std::strncpy(box_->host, hostName().c_str(), sizeof(box_->host) - 1);
  std::strncpy(box_->version, version(), sizeof(box_->version) - 1);
  describe();
}

void BlackBox::describe() {
  const std::string entry =
      joined({MYCOLL_FIELD(Entry, id), MYCOLL_FIELD(Entry, sequence), MYCOLL_FIELD(Entry, enqueued),
              MYCOLL_FIELD(Entry, started), MYCOLL_FIELD(Entry, ended),
              MYCOLL_FIELD(Entry, inBytes), MYCOLL_FIELD(Entry, outBytes), MYCOLL_FIELD(Entry, tag),
              MYCOLL_FIELD(Entry, peer), MYCOLL_FIELD(Entry, site), MYCOLL_FIELD(Entry, state),
              MYCOLL_FIELD(Entry, flags), MYCOLL_PART(Entry, signature, kind),
              MYCOLL_PART(Entry, signature, dtype), MYCOLL_PART(Entry, signature, opaqueType),
              MYCOLL_PART(Entry, signature, reduceOp), MYCOLL_PART(Entry, signature, root),
              MYCOLL_PART(Entry, signature, bytes), MYCOLL_PART(Entry, signature, layout)});
  const std::string group =
      joined({MYCOLL_FIELD(GroupState, phase), MYCOLL_FIELD(GroupState, capacity),
              MYCOLL_FIELD(GroupState, rank), MYCOLL_FIELD(GroupState, ranks),
              MYCOLL_FIELD(GroupState, context), MYCOLL_FIELD(GroupState, isPart),
              MYCOLL_FIELD(GroupState, submitted), MYCOLL_FIELD(GroupState, finished),
              MYCOLL_FIELD(GroupState, waitVersion), MYCOLL_FIELD(GroupState, waitCount),
              MYCOLL_FIELD(GroupState, waitSequence), MYCOLL_FIELD(GroupState, waitRanks),
              MYCOLL_FIELD(GroupState, globalRanks), MYCOLL_FIELD(GroupState, tallies),
              MYCOLL_FIELD(GroupState, name), MYCOLL_FIELD(GroupState, description),
              MYCOLL_FIELD(GroupState, transport), MYCOLL_FIELD(GroupState, encryption),
              MYCOLL_FIELD(GroupState, failure)});
  const std::string box =
      joined({MYCOLL_FIELD(Box, pid), MYCOLL_FIELD(Box, rank), MYCOLL_FIELD(Box, realtimeOffset),
              MYCOLL_FIELD(Box, copied), MYCOLL_FIELD(Box, groups), MYCOLL_FIELD(Box, job),
              MYCOLL_FIELD(Box, host), MYCOLL_FIELD(Box, version), MYCOLL_FIELD(Box, ended)});
  std::vector<std::string> elementBytes;
  for (int i = 0; i < static_cast<int>(DType::kCount); ++i) {
    elementBytes.push_back(std::to_string(elementSize(static_cast<DType>(i))));
  }
  auto number = [](size_t value) { return std::to_string(value); };
  const std::string text =
      "{\"box\":{\"at\":" + number(kBoxAt) + ",\"fields\":{" + box + "}}" +
      ",\"sites\":{\"at\":" + number(kSitesAt) + ",\"bytes\":" + number(kSiteBytes) + "}" +
      ",\"groups\":{\"at\":" + number(groupsAt()) + ",\"bytes\":" + number(areaBytes_) +
      ",\"fields\":{" + group + "}}" + ",\"entries\":{\"at\":" + number(stateBytes_) +
      ",\"bytes\":" + number(sizeof(Entry)) + ",\"fields\":{" + entry + "}}" +
      ",\"operations\":" + names<OpKind>(kOpKinds) +
      ",\"dtypes\":" + names<DType>(static_cast<int>(DType::kCount)) + ",\"element_bytes\":[" +
      joined(elementBytes) +
      "],\"reduce_ops\":" + names<ReduceOp>(static_cast<int>(ReduceOp::kCount)) +
      ",\"states\":[\"queued\",\"started\",\"done\",\"failed\"]"
      ",\"phases\":[\"unused\",\"open\",\"failed\",\"closed\"]"
      ",\"flags\":[\"composite\",\"device\"]}";
  const uint32_t versionAndBytes[] = {kVersion, static_cast<uint32_t>(text.size())};
  constexpr size_t kTextAt = sizeof(kMagic) + sizeof(versionAndBytes);
  if (kTextAt + text.size() > kDescriptionRoom) std::abort();  // any test would fail
  std::memcpy(head_ + sizeof(kMagic), versionAndBytes, sizeof(versionAndBytes));
  std::memcpy(head_ + kTextAt, text.data(), text.size());
  // Last: readers accept the box from here on.
  __atomic_store_n(reinterpret_cast<uint64_t*>(head_), std::bit_cast<uint64_t>(kMagic),
                   __ATOMIC_RELEASE);
}

GroupState* BlackBox::take() {
  MutexLock lock(mutex_);
  GroupState* area = nullptr;
  if (returned_.empty()) {
    area = reinterpret_cast<GroupState*>(map(groupsAt() + areas_.size() * areaBytes_, areaBytes_));
    areas_.push_back(area);
  } else {
    area = returned_.front();
    returned_.pop_front();
    put(area->phase, GroupPhase::kUnused);
    for (uint32_t i = 0; i < capacity_; ++i) put(entriesOf(area)[i].id, uint64_t{0});
  }
  new (area) GroupState{};
  put(area->capacity, capacity_);
  box_->groups.store(static_cast<uint32_t>(areas_.size()), std::memory_order_release);
  return area;
}

void BlackBox::giveBack(GroupState* area) {
  MutexLock lock(mutex_);
  for (int kind = 0; kind < kOpKinds; ++kind) {
    const Tally& from = area->tallies[kind];
    Tally& to = box_->ended[kind];
    to.done.fetch_add(get(from.done), std::memory_order_relaxed);
    to.failed.fetch_add(get(from.failed), std::memory_order_relaxed);
    to.bytes.fetch_add(get(from.bytes), std::memory_order_relaxed);
    to.nanos.fetch_add(get(from.nanos), std::memory_order_relaxed);
  }
  returned_.push_back(area);
}

Tally& BlackBox::ended(OpKind kind) { return box_->ended[static_cast<int>(kind)]; }

Entry* BlackBox::entriesOf(GroupState* area) const {
  return reinterpret_cast<Entry*>(reinterpret_cast<char*>(area) + stateBytes_);
}

uint32_t BlackBox::intern(std::string_view function, std::string_view file, int line) {
  std::string site(beginning(function, kFunctionBytes));
  std::string end("\n");
  end += std::to_string(line);
  // The end of a long path is more useful than its beginning.
  file = ending(file, kSiteBytes - 1 - site.size() - 1 - end.size());
  site.append("\n").append(file).append(end);
  MutexLock lock(mutex_);
  const auto found = sites_.find(site);
  if (found != sites_.end()) return found->second;
  const uint32_t number = box_->sites.load(std::memory_order_relaxed) + 1;
  if (number >= kSites) return 0;
  std::memcpy(head_ + kSitesAt + number * kSiteBytes, site.data(), site.size());
  box_->sites.store(number, std::memory_order_release);
  sites_.emplace(std::move(site), number);
  return number;
}

std::string BlackBox::placeOf(uint32_t site) const {
  if (site == 0 || site > box_->sites.load(std::memory_order_acquire)) return {};
  const std::string text = head_ + kSitesAt + site * kSiteBytes;  // as intern() has written it
  const size_t first = text.find('\n'), second = text.rfind('\n');
  const std::string file = text.substr(first + 1, second - first - 1);
  if (file.empty()) return {};
  return file.substr(file.rfind('/') + 1) + ":" + text.substr(second + 1) + " in " +
         text.substr(0, first);
}

void BlackBox::join(uint64_t context, int rank) {
  MutexLock lock(mutex_);
  if (get(box_->rank) >= 0 && areas_.size() - returned_.size() > 1) return;
  put(box_->job, context);
  put(box_->rank, static_cast<int32_t>(rank));
}

int BlackBox::rank() const { return get(box_->rank); }

std::string BlackBox::job() const { return toContext(get(box_->job)); }

std::string toContext(uint64_t context) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(context));
  return text;
}

std::string BlackBox::snapshot() const {
  MutexLock lock(mutex_);  // no area is reassigned meanwhile
  put(box_->copied, steadyNanos());
  std::string bytes(groupsAt() + areas_.size() * areaBytes_, '\0');
  copyWords(head_, bytes.data(), groupsAt());
  char* copy = bytes.data() + groupsAt();
  for (GroupState* area : areas_) {
    copyWords(area, copy, areaBytes_);
    // As Entry::id, of the ranks that the group waits for: odd if they have changed meanwhile.
    const uint32_t version = get(area->waitVersion);
    char* const copiedVersion = copy + offsetof(GroupState, waitVersion);
    if (std::memcmp(copiedVersion, &version, sizeof(version)) != 0) {
      std::memcpy(copiedVersion, &kBeingWritten, sizeof(kBeingWritten));
    }
    const Entry* entries = entriesOf(area);
    for (uint32_t i = 0; i < capacity_; ++i) {
      const uint64_t id = get(entries[i].id);
      char* copiedId = copy + stateBytes_ + i * sizeof(Entry) + offsetof(Entry, id);
      // Otherwise the entry was overwritten meanwhile.
      if (std::memcmp(copiedId, &id, sizeof(id)) != 0) std::memset(copiedId, 0, sizeof(id));
    }
    copy += areaBytes_;
  }
  return bytes;
}

}  // namespace mycoll
