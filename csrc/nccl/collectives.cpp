#include "nccl/collectives.h"

#include <algorithm>

namespace mycoll::nccl {
namespace {

// A reduction in NCCL's terms.
struct Reduction {
  DataType type = DataType::kInt8;
  RedOp op = RedOp::kSum;
  size_t unitBytes = 1;  // NCCL's element: a part of ours for complex numbers
};

// The oldest GPU on which NCCL reduces float8.
constexpr int kFloat8Capability = 90;

Status refuse(const Call& call, const std::string& why) {
  return Status(Code::kUnsupported,
                std::string(name(call.kind)) + " " + name(call.reduceOp) + " of " +
                    name(call.dtype) + " is beyond NCCL: " + why +
                    ". With MYCOLL_CUDA=host such tensors travel through the CPU engine");
}

bool findType(DType dtype, Reduction* reduction) {
  auto is = [reduction](DataType type, size_t unitBytes) {
    reduction->type = type;
    reduction->unitBytes = unitBytes;
    return true;
  };
  switch (dtype) {
    case DType::kFloat32: return is(DataType::kFloat32, 4);
    case DType::kFloat64: return is(DataType::kFloat64, 8);
    case DType::kFloat16: return is(DataType::kFloat16, 2);
    case DType::kBFloat16: return is(DataType::kBFloat16, 2);
    case DType::kFloat8E4M3: return is(DataType::kFloat8E4M3, 1);
    case DType::kFloat8E5M2: return is(DataType::kFloat8E5M2, 1);
    case DType::kInt8: return is(DataType::kInt8, 1);
    case DType::kUInt8: return is(DataType::kUInt8, 1);
    case DType::kInt32: return is(DataType::kInt32, 4);
    case DType::kUInt32: return is(DataType::kUInt32, 4);
    case DType::kInt64: return is(DataType::kInt64, 8);
    case DType::kUInt64: return is(DataType::kUInt64, 8);
    case DType::kBool: return is(DataType::kUInt8, 1);
    case DType::kComplex64: return is(DataType::kFloat32, 4);
    case DType::kComplex128: return is(DataType::kFloat64, 8);
    default: return false;
  }
}

bool findOp(DType dtype, ReduceOp op, RedOp* found) {
  auto is = [found](RedOp value) {
    *found = value;
    return true;
  };
  if (dtype == DType::kBool) {  // bytes of 0 and 1
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMax:
      case ReduceOp::kBOr: return is(RedOp::kMax);
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
      case ReduceOp::kBAnd: return is(RedOp::kMin);
      default: return false;
    }
  }
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  switch (op) {
    case ReduceOp::kSum: return is(RedOp::kSum);
    case ReduceOp::kAvg: return is(RedOp::kAvg);
    case ReduceOp::kProduct: return !isComplex && is(RedOp::kProd);
    case ReduceOp::kMin: return !isComplex && is(RedOp::kMin);
    case ReduceOp::kMax: return !isComplex && is(RedOp::kMax);
    default: return false;
  }
}

Status findReduction(const Library& library, const Call& call, const Form& form,
                     Reduction* reduction) {
  if (!findType(call.dtype, reduction)) return refuse(call, "it has no such element type");
  if (!findOp(call.dtype, call.reduceOp, &reduction->op)) {
    return refuse(call, "it has no such reduction for this element type");
  }
  const bool isFloat8 = call.dtype == DType::kFloat8E4M3 || call.dtype == DType::kFloat8E5M2;
  if (isFloat8 && library.version() < versionCode(2, 24, 0)) {
    return refuse(call, "that takes version 2.24, and this is " + library.describe());
  }
  if (isFloat8 && form.capability != 0 && form.capability < kFloat8Capability) {
    return refuse(call, "that takes GPUs from sm_90 on, and a rank has one of sm_" +
                            std::to_string(form.capability));
  }
  return {};
}

// One call on one stream.
class Enqueuer {
 public:
  Enqueuer(Issue& issue, CudaStream stream)
      : issue_(issue), functions_(issue.functions()), stream_(stream) {}

  int rank() const { return issue_.comm().rank(); }
  int ranks() const { return issue_.comm().ranks(); }

  Status send(Span data, int peer) {
    return call("ncclSend", functions_.send, data.bytes, data.data, data.bytes, kBytes, peer);
  }

  Status receive(Span data, int peer) {
    return call("ncclRecv", functions_.recv, data.bytes, data.data, data.bytes, kBytes, peer);
  }

  Status broadcast(const void* from, Span to, int root) {
    return call("ncclBroadcast", functions_.broadcast, to.bytes, from, to.data, to.bytes, kBytes,
                root);
  }

  Status allReduce(Span from, Span to, const Reduction& how) {
    return call("ncclAllReduce", functions_.allReduce, from.bytes, from.data, to.data,
                from.bytes / how.unitBytes, how.type, how.op);
  }

  Status reduce(Span from, void* to, const Reduction& how, int root) {
    return call("ncclReduce", functions_.reduce, from.bytes, from.data, to,
                from.bytes / how.unitBytes, how.type, how.op, root);
  }

  Status reduceScatter(const Spans& in, Span out, const Reduction& how, bool isFlat) {
    if (isFlat) {
      return call("ncclReduceScatter", functions_.reduceScatter, out.bytes, in[0].data, out.data,
                  out.bytes / how.unitBytes, how.type, how.op);
    }
    MYCOLL_RETURN_IF_ERROR(issue_.group());
    for (int root = 0; root < ranks(); ++root) {
      MYCOLL_RETURN_IF_ERROR(reduce(in[root], root == rank() ? out.data : nullptr, how, root));
    }
    return {};
  }

  Status allGather(Span in, const Spans& out, bool isFlat) {
    if (isFlat) {
      return call("ncclAllGather", functions_.allGather, in.bytes, in.data, out[0].data, in.bytes,
                  kBytes);
    }
    MYCOLL_RETURN_IF_ERROR(issue_.group());
    for (int root = 0; root < ranks(); ++root) {
      const Span part = out[root];
      MYCOLL_RETURN_IF_ERROR(broadcast(root == rank() ? in.data : part.data, part, root));
    }
    return {};
  }

  Status gather(Span in, const Spans& out, int root) {
    if (rank() != root) return send(in, root);
    MYCOLL_RETURN_IF_ERROR(issue_.group());
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank() && out[peer].data == in.data) continue;  // there already
      if (peer == rank()) MYCOLL_RETURN_IF_ERROR(send(in, peer));
      MYCOLL_RETURN_IF_ERROR(receive(out[peer], peer));
    }
    return {};
  }

  Status scatter(const Spans& in, Span out, int root) {
    if (rank() != root) return receive(out, root);
    MYCOLL_RETURN_IF_ERROR(issue_.group());
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank() && in[peer].data == out.data) continue;  // there already
      MYCOLL_RETURN_IF_ERROR(send(in[peer], peer));
      if (peer == rank()) MYCOLL_RETURN_IF_ERROR(receive(out, peer));
    }
    return {};
  }

  // Not ncclAlltoAll, nor ncclGather and ncclScatter above: all ranks would have to call these, and
  // no rank knows whether the sizes of the other pairs of ranks are equal, too.
  Status allToAll(const Spans& in, const Spans& out) {
    MYCOLL_RETURN_IF_ERROR(issue_.group());
    // Starts with the next rank, so that not all ranks send to rank 0 first.
    for (int step = 0; step < ranks(); ++step) {
      const int to = (rank() + step) % ranks(), from = (rank() - step + ranks()) % ranks();
      MYCOLL_RETURN_IF_ERROR(send(in[to], to));
      MYCOLL_RETURN_IF_ERROR(receive(out[from], from));
    }
    return {};
  }

 private:
  static constexpr DataType kBytes = DataType::kInt8;

  // Calls a function of NCCL with these arguments, unless there is nothing to move.
  template <typename Function, typename... Arguments>
  Status call(const char* name, Function function, size_t bytes, Arguments... arguments) {
    if (bytes == 0) return {};
    return issue_.take(function(arguments..., issue_.handle(), stream_), name);
  }

  Issue& issue_;
  const Functions& functions_;
  CudaStream stream_;
};

// As check(), and how a reduction is done.
Status prepare(const Library& library, const Call& call, const Form& form, Reduction* how) {
  const bool isReduction = call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce ||
                           call.kind == OpKind::kReduceScatter;
  return isReduction ? findReduction(library, call, form, how) : Status();
}

}  // namespace

Status check(const Library& library, const Call& call, const Form& form) {
  Reduction how;
  return prepare(library, call, form, &how);
}

Status enqueue(Issue& issue, const Call& call, CudaStream stream, const Form& form) {
  Reduction how;
  MYCOLL_RETURN_IF_ERROR(prepare(issue.comm().library(), call, form, &how));
  MYCOLL_RETURN_IF_ERROR(issue.status());
  Enqueuer nccl(issue, stream);
  switch (call.kind) {
    case OpKind::kBroadcast: return nccl.broadcast(call.out[0].data, call.out[0], call.root);
    case OpKind::kAllReduce: return nccl.allReduce(call.in[0], call.out[0], how);
    case OpKind::kReduce:
      return nccl.reduce(call.in[0], nccl.rank() == call.root ? call.out[0].data : nullptr, how,
                         call.root);
    case OpKind::kReduceScatter: return nccl.reduceScatter(call.in, call.out[0], how, form.isFlat);
    case OpKind::kAllGather: return nccl.allGather(call.in[0], call.out, form.isFlat);
    case OpKind::kGather: return nccl.gather(call.in[0], call.out, call.root);
    case OpKind::kScatter: return nccl.scatter(call.in, call.out[0], call.root);
    case OpKind::kAllToAll: return nccl.allToAll(call.in, call.out);
    default: return {};  // a call without tensors, which runs on the CPU
  }
}

Status send(Issue& issue, Span data, int peer, CudaStream stream) {
  MYCOLL_RETURN_IF_ERROR(issue.status());
  return Enqueuer(issue, stream).send(data, peer);
}

Status receive(Issue& issue, Span data, int peer, CudaStream stream) {
  MYCOLL_RETURN_IF_ERROR(issue.status());
  return Enqueuer(issue, stream).receive(data, peer);
}

}  // namespace mycoll::nccl
