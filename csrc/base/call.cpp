#include "base/call.h"

#include "base/bytes.h"

namespace mycoll {
namespace {

uint64_t hashSizes(const Spans& spans) {
  uint64_t hash = kEmptyHash;
  for (const Span& span : spans) {
    const uint64_t bytes = span.bytes;
    hash = fnv1a({reinterpret_cast<const char*>(&bytes), sizeof(bytes)}, hash);
  }
  return hash;
}

}  // namespace

uint64_t totalBytes(const Spans& spans) {
  uint64_t total = 0;
  for (const Span& span : spans) total += span.bytes;
  return total;
}

Signature Call::signature() const {
  Signature result;
  result.kind = kind;
  result.dtype = dtype;
  result.opaqueType = isScaled ? 1 : opaqueType;
  result.root = root;
  switch (kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      result.reduceOp = reduceOp;
      result.bytes = in[0].bytes;
      break;
    case OpKind::kBroadcast:
    case OpKind::kRecv: result.bytes = out[0].bytes; break;
    case OpKind::kSend: result.bytes = in[0].bytes; break;
    case OpKind::kAllGather:
      result.bytes = totalBytes(out);
      result.layout = hashSizes(out);
      break;
    case OpKind::kReduceScatter:
      result.reduceOp = reduceOp;
      result.bytes = totalBytes(in);
      result.layout = hashSizes(in);
      break;
    default: break;  // sizes are between pairs of ranks
  }
  return result;
}

std::string mismatchText(const std::string& group, const std::string& where, const std::string& me,
                         const Signature& mine, const std::string& other, const Signature& theirs) {
  return "mycoll group '" + group + "': MISMATCH at " + where + "\n  " + me + ": " +
         mine.describe() + "\n  " + other + ": " + theirs.describe() +
         "\n  All ranks must call the same operations in the same order, with the same dtype, "
         "size, reduce op and root.";
}

std::string Signature::describe() const {
  std::string text = name(kind);
  if (kind == OpKind::kBarrier || kind == OpKind::kMonitoredBarrier) return text;
  if (reduceOp != ReduceOp::kCount) {
    const bool isScaled = dtype < DType::kCount && opaqueType != 0;
    text += std::string(isScaled ? " PREMUL_" : " ") + name(reduceOp);
  }
  size_t size = elementSize(dtype);
  if (dtype < DType::kCount) {
    text += std::string(" ") + name(dtype);
  } else {
    text += " dtype#" + std::to_string(opaqueType);
  }
  bool isPairwise =
      kind == OpKind::kAllToAll || kind == OpKind::kGather || kind == OpKind::kScatter;
  if (!isPairwise) {
    text += size ? " numel=" + std::to_string(bytes / size) : " bytes=" + std::to_string(bytes);
  }
  if (layout) {
    char sizes[32];
    snprintf(sizes, sizeof(sizes), " sizes#%04x", static_cast<unsigned>(layout & 0xffff));
    text += sizes;
  }
  if (root >= 0) text += " root=" + std::to_string(root);
  return text;
}

bool Call::isFor(int rank, int ranks) const {
  const auto has = [&](int ins, int outs) {
    return in.size() == static_cast<size_t>(ins) && out.size() == static_cast<size_t>(outs);
  };
  const bool isRoot = rank == root;
  switch (kind) {
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier: return has(0, 0);
    case OpKind::kBroadcast: return has(0, 1) && root >= 0 && root < ranks;
    case OpKind::kAllReduce: return has(1, 1);
    case OpKind::kReduce: return has(1, isRoot ? 1 : 0);
    case OpKind::kAllGather: return has(1, ranks);
    case OpKind::kGather: return has(1, isRoot ? ranks : 0);
    case OpKind::kScatter: return has(isRoot ? ranks : 0, 1);
    case OpKind::kReduceScatter: return has(ranks, 1);
    case OpKind::kAllToAll: return has(ranks, ranks);
    default: return false;
  }
}

}  // namespace mycoll
