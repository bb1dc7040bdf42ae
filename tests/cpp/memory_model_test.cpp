// Tries the lock-free protocols of csrc/memory_model.md in every order that a weakly ordered
// machine allows. x86-64 hides a missing acquire, release or fence, so other tests cannot find it.
//
// A protocol is modelled as a few accesses for each thread, and an outcome that must not occur. The
// machine performs the accesses of a thread one at a time, in any order that their memory orders
// permit, and memory is the same for all threads, as on 64-bit Arm. It has the reorderings that C++
// allows and no more: a seq_cst access orders only seq_cst accesses around it, so an acquire load
// may pass an earlier seq_cst store, and the store of a read-modify-write. A load may take the
// value of an earlier store of its thread that is not performed yet, and may be performed before a
// branch that it depends on.
//
// Each protocol has mutants with a weaker order at one place. The checker must find the outcome for
// each of them.
#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "test.h"

namespace {

enum class Kind { kLoad, kStore, kAdd, kFence };
enum class Order { kRelaxed, kAcquire, kRelease, kSeqCst };
constexpr Order kRelaxed = Order::kRelaxed, kAcquire = Order::kAcquire;
constexpr Order kRelease = Order::kRelease, kSeqCst = Order::kSeqCst;

// Variables and results of loads, by number.
constexpr int kPlaces = 6;
constexpr int kNone = -1;

struct Access {
  Kind kind;
  Order order;
  int place = 0;
  int value = 0;       // stored, or added
  int result = kNone;  // the number of the result of a load
  // A store that follows a branch: it is performed only if that result has that value.
  int condition = kNone, needed = 0;
};

Access load(int place, int result, Order order) {
  return {.kind = Kind::kLoad, .order = order, .place = place, .result = result};
}
Access store(int place, int value, Order order) {
  return {.kind = Kind::kStore, .order = order, .place = place, .value = value};
}
Access storeIf(int result, int needed, int place, int value, Order order) {
  Access access = store(place, value, order);
  access.condition = result;
  access.needed = needed;
  return access;
}
Access add(int place, int value, int result = kNone) {
  return {.kind = Kind::kAdd, .order = kSeqCst, .place = place, .value = value, .result = result};
}
Access fence(Order order) { return {.kind = Kind::kFence, .order = order}; }
Access noFence() { return fence(kRelaxed); }  // one that is missing

using Thread = std::vector<Access>;
using Results = std::array<int, kPlaces>;

struct Protocol {
  std::vector<Thread> threads;
  std::function<bool(const Results&)> isBad;
  std::array<int, kPlaces> initial{};
};

// Tries all orders from a state, and visits each state once.
class Machine {
 public:
  explicit Machine(const Protocol& protocol) : protocol_(protocol) {}

  bool canFail() {
    State state;
    for (const Thread& each : protocol_.threads) state.progress.emplace_back(each.size());
    state.memory = protocol_.initial;
    state.results.fill(kNone);
    return canFail(state);
  }

 private:
  // kLoaded: a read-modify-write has loaded and not yet stored.
  enum class Progress : char { kNone, kLoaded, kDone };
  struct State {
    std::vector<std::vector<Progress>> progress;  // by thread and access
    std::array<int, kPlaces> memory{};
    std::array<int, kPlaces> version{};  // the number of stores
    std::array<int, kPlaces> loaded{};   // the version at the load of a read-modify-write
    Results results{};
    auto operator<=>(const State&) const = default;
  };

  static bool loads(const Access& access) {
    return access.kind == Kind::kLoad || access.kind == Kind::kAdd;
  }
  static bool stores(const Access& access) {
    return access.kind == Kind::kStore || access.kind == Kind::kAdd;
  }

  // Whether a part of an access, its load or its store, may be performed before an earlier access.
  static bool mayPass(const Access& earlier, Progress progress, const Access& later, bool isStore) {
    const bool isLoadPending = loads(earlier) && progress == Progress::kNone;
    if (earlier.kind == Kind::kFence || later.kind == Kind::kFence) {
      const bool isLaterFence = later.kind == Kind::kFence;
      switch ((isLaterFence ? later : earlier).order) {
        case kRelaxed: return true;
        // Before it: earlier loads. After it: everything.
        case kAcquire: return isLaterFence && earlier.kind != Kind::kFence && !isLoadPending;
        // Before it: everything. After it: stores.
        case kRelease: return !isLaterFence && !isStore;
        case kSeqCst: return false;
      }
    }
    const bool acquires = earlier.order == kAcquire || earlier.order == kSeqCst;
    if (isLoadPending && acquires) return false;
    if (isStore && (later.order == kRelease || later.order == kSeqCst)) return false;
    if (stores(earlier) && earlier.order == kSeqCst && later.order == kSeqCst) return false;
    if (earlier.place != later.place) return true;
    // One place: a load may take the value of an earlier store, see perform().
    return !isStore && earlier.kind == Kind::kStore && later.kind == Kind::kLoad;
  }

  // Performs the access, or the next part of it. Returns false if it must wait.
  bool perform(State& state, size_t number, size_t at) const {
    const Thread& thread = protocol_.threads[number];
    const Access& access = thread[at];
    Progress& progress = state.progress[number][at];
    if (progress == Progress::kDone) return false;
    const bool isStore = access.kind == Kind::kStore || progress == Progress::kLoaded;
    const Access* source = nullptr;  // of a load: the latest store of the thread to its place
    for (size_t i = 0; i < at; ++i) {
      if (state.progress[number][i] == Progress::kDone) continue;
      if (!mayPass(thread[i], state.progress[number][i], access, isStore)) return false;
      if (access.kind == Kind::kLoad && stores(thread[i]) && thread[i].place == access.place) {
        source = &thread[i];
      }
    }
    int& memory = state.memory[access.place];
    int& version = state.version[access.place];
    const bool isAdd = access.kind == Kind::kAdd;
    if (access.kind == Kind::kFence) {
      progress = Progress::kDone;
    } else if (!isStore) {
      if (source && source->condition != kNone) return false;
      if (access.result != kNone) state.results[access.result] = source ? source->value : memory;
      if (isAdd) state.loaded[access.place] = version;
      progress = isAdd ? Progress::kLoaded : Progress::kDone;
    } else {
      if (access.condition != kNone && !isLoaded(state, number, access.condition)) return false;
      // Another thread has stored meanwhile: an order in which this one loads later has the rest.
      if (isAdd && state.loaded[access.place] != version) return false;
      progress = Progress::kDone;
      if (access.condition != kNone && state.results[access.condition] != access.needed)
        return true;
      memory = isAdd ? memory + access.value : access.value;
      ++version;
    }
    return true;
  }

  bool isLoaded(const State& state, size_t number, int result) const {
    const Thread& thread = protocol_.threads[number];
    for (size_t i = 0; i < thread.size(); ++i) {
      if (thread[i].result == result) return state.progress[number][i] == Progress::kDone;
    }
    return false;
  }

  bool canFail(const State& state) {
    if (!seen_.insert(state).second) return false;
    bool isOver = true;
    for (size_t number = 0; number < state.progress.size(); ++number) {
      for (size_t at = 0; at < state.progress[number].size(); ++at) {
        isOver &= state.progress[number][at] == Progress::kDone;
        State next = state;
        if (perform(next, number, at) && canFail(next)) return true;
      }
    }
    return isOver && protocol_.isBad(state.results);
  }

  const Protocol& protocol_;
  std::set<State> seen_;
};

void expectRight(const Protocol& protocol) { EXPECT(!Machine(protocol).canFail()); }

// Replaces one access by a weaker one. Then the checker must find the outcome.
void expectCaught(Protocol protocol, size_t thread, size_t at, const Access& weaker) {
  protocol.threads[thread][at] = weaker;
  if (Machine(protocol).canFail()) return;
  test::fail(__FILE__, __LINE__,
             "not caught: access " + std::to_string(at) + " of thread " + std::to_string(thread));
}

}  // namespace

// Outcomes that the machine must allow, and others that it must not.
TEST(MemoryModel, knownOutcomes) {
  const auto stored = [](Order storing, Order loading, const Access& between) {
    const Protocol protocol{{{store(0, 1, storing), between, load(1, 0, loading)},
                             {store(1, 1, storing), between, load(0, 1, loading)}},
                            [](const Results& r) { return r[0] == 0 && r[1] == 0; }};
    return Machine(protocol).canFail();
  };
  EXPECT(stored(kRelaxed, kRelaxed, noFence()) && stored(kRelease, kAcquire, noFence()));
  EXPECT(stored(kSeqCst, kAcquire, noFence()) && stored(kRelease, kAcquire, fence(kRelease)));
  EXPECT(!stored(kSeqCst, kSeqCst, noFence()) && !stored(kRelaxed, kRelaxed, fence(kSeqCst)));
  // All threads see one order of the stores to one place, and their own stores.
  expectRight({{{store(0, 1, kRelaxed), load(0, 0, kRelaxed)}, {store(0, 2, kRelaxed)}},
               [](const Results& r) { return r[0] == 0; }});
  expectRight({{{store(0, 1, kRelaxed), store(0, 2, kRelaxed)},
                {load(0, 0, kRelaxed), load(0, 1, kRelaxed)}},
               [](const Results& r) { return r[0] == 2 && r[1] == 1; }});
  expectRight({{{add(0, 1, 0)}, {add(0, 1, 1)}}, [](const Results& r) { return r[0] == r[1]; }});
}

// Arena::arrive() and publish(), against a rank that goes to sleep: Arena::setAsleep(), ready().
TEST(MemoryModel, arenaSignal) {
  enum { kData, kNumber, kSleepers, kAsleep };
  const Protocol signal{{{store(kData, 1, kRelaxed), store(kNumber, 1, kSeqCst),
                          load(kSleepers, 0, kSeqCst), load(kAsleep, 1, kSeqCst)},
                         {add(kAsleep, 1), add(kSleepers, 1), fence(kSeqCst),
                          load(kNumber, 2, kAcquire), load(kData, 3, kRelaxed)}},
                        [](const Results& r) {
                          const bool rings = r[0] != 0 && r[1] != 0;
                          return (!rings && r[2] == 0) || (r[2] == 1 && r[3] == 0);
                        }};
  expectRight(signal);
  expectCaught(signal, 0, 1, store(kNumber, 1, kRelease));
  expectCaught(signal, 0, 2, load(kSleepers, 0, kAcquire));
  expectCaught(signal, 1, 2, noFence());
  expectCaught(signal, 1, 3, load(kNumber, 2, kRelaxed));
}

// Sleeper::wakeSleepers(), against a Nap; Engine::Progress::wake(), against work(). Both sides
// change one variable.
TEST(MemoryModel, sleeper) {
  enum { kDone, kSleepers };
  const Protocol nap{{{store(kDone, 1, kRelaxed), add(kSleepers, 0, 0)},
                      {add(kSleepers, 1), load(kDone, 1, kRelaxed)}},
                     [](const Results& r) { return r[0] == 0 && r[1] == 0; }};
  expectRight(nap);
  expectCaught(nap, 0, 1, load(kSleepers, 0, kSeqCst));
}

// ShmSender and ShmReceiver with room for one byte, which is used twice.
TEST(MemoryModel, ringBytes) {
  enum { kByte, kHead, kTail };
  const Protocol ring{
      {{store(kByte, 1, kRelaxed), store(kHead, 1, kRelease), load(kTail, 0, kAcquire),
        storeIf(0, 1, kByte, 2, kRelaxed), storeIf(0, 1, kHead, 2, kRelease)},
       {load(kHead, 1, kAcquire), load(kByte, 2, kRelaxed), storeIf(1, 1, kTail, 1, kRelease)}},
      [](const Results& r) { return r[1] == 2 || (r[1] == 1 && r[2] != 1); }};
  expectRight(ring);
  expectCaught(ring, 0, 1, store(kHead, 1, kRelaxed));
  expectCaught(ring, 1, 0, load(kHead, 1, kRelaxed));
  expectCaught(ring, 1, 2, storeIf(1, 1, kTail, 1, kRelaxed));
}

// ShmSender::publish(), against ShmReceiver::setAsleep() and maybeReadable().
TEST(MemoryModel, ringBell) {
  enum { kHead, kAsleep };
  const Protocol bell{{{store(kHead, 1, kSeqCst), load(kAsleep, 0, kSeqCst)},
                       {store(kAsleep, 1, kSeqCst), fence(kSeqCst), load(kHead, 1, kRelaxed)}},
                      [](const Results& r) { return r[0] == 0 && r[1] == 0; }};
  expectRight(bell);
  expectCaught(bell, 0, 0, store(kHead, 1, kRelease));
  expectCaught(bell, 0, 1, load(kAsleep, 0, kAcquire));
  expectCaught(bell, 1, 1, noFence());
}

// Arena::fail() and a program that then writes to its tensor, against ReadInTime; SharedHeap::
// revoke(), against Mailbox::readShared().
TEST(MemoryModel, sharedRead) {
  enum { kData, kState };
  const Protocol read{{{store(kState, 1, kSeqCst), fence(kRelease), store(kData, 1, kRelaxed)},
                       {load(kData, 0, kRelaxed), fence(kAcquire), load(kState, 1, kAcquire)}},
                      [](const Results& r) { return r[0] == 1 && r[1] == 0; }};
  expectRight(read);
  expectCaught(read, 0, 1, noFence());
  expectCaught(read, 1, 1, noFence());
}

// GroupRecord::enqueue() over an entry, against BlackBox::snapshot().
TEST(MemoryModel, blackBoxEntry) {
  enum { kId, kField };
  const Protocol entry{
      {{store(kId, 0, kRelease), store(kField, 2, kRelease), store(kId, 2, kRelease)},
       {load(kId, 0, kAcquire), load(kField, 1, kAcquire), load(kId, 2, kAcquire)}},
      [](const Results& r) { return r[0] != 0 && r[0] == r[2] && r[1] != r[0]; },
      {1, 1}};
  expectRight(entry);
  expectCaught(entry, 0, 1, store(kField, 2, kRelaxed));
  expectCaught(entry, 0, 2, store(kId, 2, kRelaxed));
  expectCaught(entry, 1, 0, load(kId, 0, kRelaxed));
  expectCaught(entry, 1, 1, load(kField, 1, kRelaxed));
}
