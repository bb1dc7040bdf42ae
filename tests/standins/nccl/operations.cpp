// NCCL's functions that enqueue operations, and groups of them.
#include <string>
#include <utility>
#include <vector>

#include "comm.h"
#include "device.h"

namespace standin::nccl {
namespace {

// Operations since ncclGroupStart, of this thread.
struct Group {
  struct Pending {
    std::shared_ptr<Comm> comm;
    void* stream;
    std::vector<Operation> operations;
  };
  int depth = 0;
  Result error = Result::kSuccess;
  std::vector<Pending> pending;
  std::vector<std::shared_ptr<Comm>> entered;  // also by operations that were refused
};

thread_local Group group;

Result startGroup() {
  ++group.depth;
  return Result::kSuccess;
}

Result endGroup() {
  if (group.depth == 0) {
    return complain(Result::kInvalidUsage, "ncclGroupEnd: not in a group call");
  }
  if (--group.depth > 0) return Result::kSuccess;
  const Group ended = std::exchange(group, Group());
  for (const auto& comm : ended.entered) Entry::leaveGroup(*comm);
  if (ended.error != Result::kSuccess) return ended.error;
  Result result = Result::kSuccess;
  for (const auto& pending : ended.pending) {
    if (pending.comm->isBlocking != ended.pending.front().comm->isBlocking) {
      return invalid("Blocking and nonblocking communicators are not allowed in the same group");
    }
    const Entry entry(*pending.comm, "ncclGroupEnd", false);
    const Result issued = pending.comm->issue(pending.operations, pending.stream);
    if (issued != Result::kSuccess) result = issued;
  }
  return result;
}

// Whether an operation uses its send and receive buffers.
struct Reach {
  bool reads = true, writes = true;
};

Result checkArguments(const Comm& comm, const Operation& op, Reach reach) {
  const std::string name = op.name;
  const int type = static_cast<int>(op.type);
  if (type < 0 || type > static_cast<int>(DataType::kFloat8E5M2)) {
    return invalid(name + ": invalid type " + std::to_string(type));
  }
  if (type >= static_cast<int>(DataType::kFloat8E4M3) && script().version < 22400) {
    return invalid(name + ": float8 comes with 2.24");
  }
  if (op.root < -1 || op.root >= comm.ranks) {
    return invalid(name + ": invalid root or peer " + std::to_string(op.root));
  }
  if (op.count == 0) return Result::kSuccess;
  // As NCCL_CHECK_POINTERS does.
  for (const auto& [isUsed, buffer] :
       {std::pair(reach.reads, op.send), std::pair<bool, const void*>(reach.writes, op.receive)}) {
    if (!isUsed) continue;
    const int where = Device::get().pointerDevice(buffer);
    if (where < 0) return invalid(name + ": a buffer is not device memory");
    if (where != comm.device) {
      return invalid(name + ": a buffer is on device " + std::to_string(where) +
                     ", the communicator on " + std::to_string(comm.device));
    }
  }
  return Result::kSuccess;
}

Result add(Handle handle, Operation op, void* stream, Reach reach) {
  if (Device::get().isIdle()) {
    Device::get().spend(1);
    return Result::kSuccess;
  }
  count(op.name);
  const std::shared_ptr<Comm> comm = find(handle, op.name);
  const Entry entry(*comm, op.name, group.depth > 0);
  if (group.depth > 0) group.entered.push_back(comm);
  Result result = comm->readiness();
  if (result == Result::kSuccess) {
    hangWhile("enqueue", comm->rank, [&] { return comm->isStopped(); });
    if (comm->isStopped() || script().fails("enqueue", comm->rank)) {
      result = complain(Result::kInternalError, "aborted, or told to fail");
    }
  }
  if (result == Result::kSuccess) result = checkArguments(*comm, op, reach);
  stream = Device::get().stream(stream);
  if (group.depth > 0) {
    if (result != Result::kSuccess) {
      group.error = result;
      return result;
    }
    for (auto& pending : group.pending) {
      if (pending.comm != comm) continue;
      if (pending.stream != stream) die("several streams in one group are not supported");
      pending.operations.push_back(std::move(op));
      return Result::kSuccess;
    }
    group.pending.push_back({comm, stream, {std::move(op)}});
    return Result::kSuccess;
  }
  if (result != Result::kSuccess) return result;
  // Like NCCL, start nothing for collectives of no elements.
  if (op.count == 0 && op.kind != Kind::kSend && op.kind != Kind::kReceive) return result;
  return comm->issue({std::move(op)}, stream);
}

Operation operation(Kind kind, const char* name, const void* send, void* receive, size_t count,
                    DataType type, RedOp op, int root) {
  Operation made;
  made.kind = kind;
  made.name = name;
  made.send = send;
  made.receive = receive;
  made.count = count;
  made.type = type;
  made.op = op;
  made.root = root;
  return made;
}

}  // namespace

bool isGrouping() { return group.depth > 0; }

}  // namespace standin::nccl

using namespace standin::nccl;
using mycoll::nccl::CudaStream;

NCCL_API Result ncclGroupStart() { return startGroup(); }

NCCL_API Result ncclGroupEnd() {
  count("ncclGroupEnd");
  return endGroup();
}

NCCL_API Result ncclAllReduce(const void* send, void* receive, size_t count, DataType type,
                              RedOp op, Handle comm, CudaStream stream) {
  return add(comm, operation(Kind::kAllReduce, "ncclAllReduce", send, receive, count, type, op, -1),
             stream, {});
}

NCCL_API Result ncclBroadcast(const void* send, void* receive, size_t count, DataType type,
                              int root, Handle comm, CudaStream stream) {
  const bool isRoot = find(comm, "ncclBroadcast")->rank == root;
  return add(comm,
             operation(Kind::kBroadcast, "ncclBroadcast", send, receive, count, type, {}, root),
             stream, {isRoot, true});
}

// The older, in-place form, which torch's own backend calls.
NCCL_API Result ncclBcast(void* buffer, size_t count, DataType type, int root, Handle comm,
                          CudaStream stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

NCCL_API Result ncclReduce(const void* send, void* receive, size_t count, DataType type, RedOp op,
                           int root, Handle comm, CudaStream stream) {
  const bool isRoot = find(comm, "ncclReduce")->rank == root;
  return add(comm, operation(Kind::kReduce, "ncclReduce", send, receive, count, type, op, root),
             stream, {true, isRoot});
}

NCCL_API Result ncclAllGather(const void* send, void* receive, size_t count, DataType type,
                              Handle comm, CudaStream stream) {
  return add(comm, operation(Kind::kAllGather, "ncclAllGather", send, receive, count, type, {}, -1),
             stream, {});
}

NCCL_API Result ncclReduceScatter(const void* send, void* receive, size_t count, DataType type,
                                  RedOp op, Handle comm, CudaStream stream) {
  return add(
      comm,
      operation(Kind::kReduceScatter, "ncclReduceScatter", send, receive, count, type, op, -1),
      stream, {});
}

NCCL_API Result ncclAlltoAll(const void* send, void* receive, size_t count, DataType type,
                             Handle comm, CudaStream stream) {
  return add(comm, operation(Kind::kAllToAll, "ncclAlltoAll", send, receive, count, type, {}, -1),
             stream, {});
}

// NCCL_CHECK_POINTERS requires both buffers of a gather and a scatter on every rank, used or not.
NCCL_API Result ncclGather(const void* send, void* receive, size_t count, DataType type, int root,
                           Handle comm, CudaStream stream) {
  return add(comm, operation(Kind::kGather, "ncclGather", send, receive, count, type, {}, root),
             stream, {});
}

NCCL_API Result ncclScatter(const void* send, void* receive, size_t count, DataType type, int root,
                            Handle comm, CudaStream stream) {
  return add(comm, operation(Kind::kScatter, "ncclScatter", send, receive, count, type, {}, root),
             stream, {});
}

NCCL_API Result ncclSend(const void* buffer, size_t count, DataType type, int peer, Handle comm,
                         CudaStream stream) {
  return add(comm, operation(Kind::kSend, "ncclSend", buffer, nullptr, count, type, {}, peer),
             stream, {true, false});
}

NCCL_API Result ncclRecv(void* buffer, size_t count, DataType type, int peer, Handle comm,
                         CudaStream stream) {
  return add(comm, operation(Kind::kReceive, "ncclRecv", nullptr, buffer, count, type, {}, peer),
             stream, {false, true});
}
