// The collectives of a group that spans hosts, or may not use an arena: over messages.
//
// Every reduction is computed as in shared memory (one owner for each element, all inputs in rank
// order, one rounding), so the bits are the same either way. Rank r's slice goes to its owner
// directly: that moves no byte more than a ring does, and rounds once instead of at every hop.
//
// Thread contract: as Task. Mailbox, signature, call and memory must outlive the task.
#pragma once

#include "base/call.h"
#include "base/task.h"

namespace mycoll {

class Mailbox;

struct NetGroup {
  Mailbox& mailbox;
  uint64_t sequence;           // of the collective: the upper part of its messages' tags
  const Signature& signature;  // of the call
};

Task netCollective(NetGroup group, const Call& call);

Task netBarrier(NetGroup group);
// Through rank 0, which so knows who has not come.
Task netMonitoredBarrier(NetGroup group);
Task netBroadcast(NetGroup group, const Call& call);
Task netAllGather(NetGroup group, const Call& call);
Task netGather(NetGroup group, const Call& call);
Task netScatter(NetGroup group, const Call& call);
Task netAllToAll(NetGroup group, const Call& call);
Task netReduce(NetGroup group, const Call& call);  // all_reduce, reduce
Task netReduceScatter(NetGroup group, const Call& call);

}  // namespace mycoll
