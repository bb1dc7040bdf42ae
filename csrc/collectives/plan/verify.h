// Proves the plans of all ranks without running them: that every message has its counterpart, that
// all ranks come to the end even if every send waits for its receiver, and that each byte of every
// output is what the operation says: the right input, or the whole tree over all ranks, with every
// contribution in it once. Where ranks of a host share memory, it also proves that a rank reads
// there only what its writer has said to be there.
//
// Plain functions: nothing blocks. Memory: some 16 bytes for each element of all ranks' buffers.
#pragma once

#include <string>
#include <vector>

#include "collectives/plan/plan.h"

namespace mycoll {

// jobs[rank]: the same collective, as each rank sees it. sharesMemory: on which hosts ranks do so,
// for jobs that they may share. "" if all is well; else what is wrong.
std::string verify(const Shape& shape, const std::vector<Job>& jobs, const Chunking& chunking,
                   const std::vector<bool>& sharesMemory);

// The job of one rank where all blocks are equal: `bytes` is what a rank gives (kReduceScatter: all
// blocks of it together).
Job evenJob(OpKind kind, int ranks, int rank, int root, uint64_t bytes, uint64_t elementBytes,
            uint64_t wideBytes);

}  // namespace mycoll
