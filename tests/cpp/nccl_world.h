// Ranks of an NCCL communicator as threads, over the stand-ins for NCCL and for a device.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nccl/collectives.h"
#include "nccl/comm.h"
#include "standin_device.h"
#include "test.h"

namespace mycoll::nccl::world {

// A variant of the stand-in: "" has all functions, "required/" only those that mycoll needs.
class StandIn {
 public:
  explicit StandIn(const std::string& variant) {
    const std::string file = std::string(STANDINS "/") + variant + "libnccl.so.2";
    const Status opened = Library::open(file, &library_);
    if (!opened.ok()) test::fail(__FILE__, __LINE__, test::show(opened));
    handle_ = dlopen(file.c_str(), RTLD_NOLOAD | RTLD_NOW);
    script_ = reinterpret_cast<void (*)(const char*)>(dlsym(handle_, "mycoll_standin_nccl_script"));
    count_ =
        reinterpret_cast<int64_t (*)(const char*)>(dlsym(handle_, "mycoll_standin_nccl_count"));
  }
  static StandIn& full() {
    static StandIn& one = *new StandIn("");
    return one;
  }
  static StandIn& required() {
    static StandIn& one = *new StandIn("required/");
    return one;
  }

  const Library& library() const { return *library_; }
  int64_t count(const char* what) const { return count_(what); }
  void* symbol(const char* name) const { return dlsym(handle_, name); }

  // Sets a script for a scope.
  class Scripted {
   public:
    Scripted(const StandIn& standIn, const char* script) : standIn_(standIn) {
      standIn_.script_(script);
    }
    ~Scripted() { standIn_.script_(nullptr); }

   private:
    const StandIn& standIn_;
  };
  Scripted scripted(const char* script) const { return Scripted(*this, script); }

 private:
  const Library* library_ = nullptr;
  void* handle_ = nullptr;
  void (*script_)(const char*) = nullptr;
  int64_t (*count_)(const char*) = nullptr;
};

inline Deadline in(int milliseconds) {
  return Deadline::after(std::chrono::milliseconds(milliseconds));
}
// Long enough for a busy machine under a sanitizer.
inline Deadline patient() { return in(60000); }

// Device memory, filled by the host and read by it.
class Buffer {
 public:
  Buffer(size_t bytes, void* stream) : bytes_(bytes), stream_(stream) {
    data_ = mycoll_standin_malloc(bytes + 1, stream);  // an empty buffer has an address of its own
  }
  Buffer(const std::vector<char>& content, void* stream) : Buffer(content.size(), stream) {
    if (bytes_ != 0) (void)mycoll_standin_copy(data_, content.data(), bytes_, stream_);
  }
  ~Buffer() { mycoll_standin_free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  Span span() const { return {data_, bytes_}; }
  Span part(size_t offset, size_t bytes) const {
    return {static_cast<char*>(data_) + offset, bytes};
  }
  // Reads the buffer after the work on its stream.
  std::vector<char> read() const {
    std::vector<char> content(bytes_);
    if (bytes_ != 0) (void)mycoll_standin_copy(content.data(), data_, bytes_, stream_);
    return content;
  }

 private:
  const size_t bytes_;
  void* const stream_;
  void* data_ = nullptr;
};

struct Rank {
  std::shared_ptr<Comm> comm;
  void* stream = nullptr;
};

// Each rank has a device and a stream of its own.
inline CommOptions onDeviceOf(int rank, CommOptions options) {
  options.device = rank % 4;
  options.bindDevice = [rank] { mycoll_standin_set_current_device(rank % 4); };
  return options;
}

inline CommOptions blocking(bool isBlocking) {
  CommOptions options;
  options.nccl.isBlocking = isBlocking;
  return options;
}

// All ranks connect, run `body` and close. Streams are reused, as each is a thread that never ends.
class World {
 public:
  World(StandIn& standIn, int ranks, CommOptions options = {}) : standIn_(standIn) {
    UniqueId id;
    const Status made = Comm::createId(standIn.library(), &id);
    if (!made.ok()) test::fail(__FILE__, __LINE__, test::show(made));
    for (int rank = 0; rank < ranks; ++rank) {
      ranks_.push_back({std::make_shared<Comm>(standIn.library(), rank, ranks, "world",
                                               onDeviceOf(rank, options)),
                        streamOf(rank)});
    }
    test::Threads(ranks, [&](int rank) {
      const Status connected = ranks_[rank].comm->connect(id, patient(), nullptr);
      EXPECT_OK(connected);
    });
  }
  ~World() {
    test::Threads(static_cast<int>(ranks_.size()), [&](int rank) {
      const Comm::State state = ranks_[rank].comm->state();
      const Status closed = ranks_[rank].comm->close(patient());
      if (state == Comm::State::kReady) EXPECT_OK(closed);
    });
  }

  Rank& operator[](int rank) { return ranks_[rank]; }
  void run(const std::function<void(Rank& rank)>& body) {
    test::Threads(static_cast<int>(ranks_.size()), [&](int rank) { body(ranks_[rank]); });
  }
  StandIn& standIn() { return standIn_; }

  static void* streamOf(int rank) {
    static std::vector<void*>& streams = *[] {
      auto* made = new std::vector<void*>;
      for (int i = 0; i < 8; ++i) made->push_back(mycoll_standin_stream_create(i % 4, 0));
      return made;
    }();
    return streams[rank];
  }

 private:
  StandIn& standIn_;
  std::vector<Rank> ranks_;
};

// Bytes that depend on rank, part and place.
inline std::vector<char> pattern(size_t bytes, int rank, int part = 0) {
  std::vector<char> content(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    content[i] = static_cast<char>((i * 7 + rank * 31 + part * 101 + i / 256) & 0xff);
  }
  return content;
}

inline Call callOf(OpKind kind, DType dtype, Spans in, Spans out, int root = -1,
                   ReduceOp op = ReduceOp::kSum) {
  Call call;
  call.kind = kind;
  call.dtype = dtype;
  call.elementBytes = elementSize(dtype) != 0 ? elementSize(dtype) : 1;
  call.reduceOp = op;
  call.root = root;
  call.in = std::move(in);
  call.out = std::move(out);
  return call;
}

inline constexpr size_t kSizes[] = {0, 1, 7, 1000,
                                    40000};  // the last is longer than the stand-in's rings

// Part r of a list has this many elements where parts are uneven; some have none.
inline size_t uneven(int part) { return part % 3 == 1 ? 0 : 100 * part + 5; }

// --- waiting and looking

using Clock = std::chrono::steady_clock;

inline double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// In seconds: far more than anything here takes, and far less than a hang.
constexpr double kSoon = 20;

using test::eventually;

inline std::shared_ptr<Comm> lone(StandIn& standIn, int rank = 0, int ranks = 2,
                                  CommOptions options = {}) {
  return std::make_shared<Comm>(standIn.library(), rank, ranks, "lone",
                                onDeviceOf(rank, std::move(options)));
}

inline UniqueId newId(StandIn& standIn) {
  UniqueId id;
  EXPECT_OK(Comm::createId(standIn.library(), &id));
  return id;
}

// Enqueues one call as a launch of its own.
inline Status enqueue(Comm& comm, const Call& call, CudaStream stream, const Form& form = {}) {
  MYCOLL_RETURN_IF_ERROR(check(comm.library(), call, form));
  Issue issue(comm);
  (void)nccl::enqueue(issue, call, stream, form).ok();  // end() returns the same failure
  return issue.end();
}

inline Status sum(Rank& rank, const Buffer& data) {
  return enqueue(*rank.comm,
                 callOf(OpKind::kAllReduce, DType::kInt32, {data.span()}, {data.span()}),
                 rank.stream);
}

inline bool isSumOf(const Buffer& data, int expected) {
  const std::vector<char> content = data.read();
  for (size_t i = 0; i + 4 <= content.size(); i += 4) {
    int value = 0;
    std::memcpy(&value, content.data() + i, 4);
    if (value != expected) return false;
  }
  return true;
}

inline std::vector<char> filled(int value, size_t count = 1000) {
  std::vector<char> content(4 * count);
  for (size_t i = 0; i < count; ++i) std::memcpy(content.data() + 4 * i, &value, 4);
  return content;
}

}  // namespace mycoll::nccl::world
