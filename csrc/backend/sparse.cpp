// all_reduce of sparse COO tensors: every rank gathers what all ranks hold, and adds it up.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>

#include <array>

#include "backend/callback_pool.h"
#include "backend/errors.h"
#include "backend/mycoll_backend.h"
#include "backend/plain_dispatch.h"

namespace mycoll {
namespace {

constexpr int64_t kMaxDimensions = 12;

// Each rank sends this first. Everything but the count must be the same on all ranks.
struct Header {
  int64_t sparseDimensions = 0;
  int64_t denseDimensions = 0;
  int64_t type = 0;
  int64_t count = 0;  // of specified elements
  std::array<int64_t, kMaxDimensions> sizes{};

  bool fits(const Header& other) const {
    return sparseDimensions == other.sparseDimensions && denseDimensions == other.denseDimensions &&
           type == other.type && sizes == other.sizes;
  }
  std::string describe() const {
    const size_t dimensions = static_cast<size_t>(sparseDimensions + denseDimensions);
    return c10::str("shape ", at::IntArrayRef(sizes.data(), dimensions), " with ", sparseDimensions,
                    " sparse dimensions, ", c10::toString(static_cast<at::ScalarType>(type)));
  }
};

// Held by the operation. It has tensors that Python knows, so it is passed to CallbackPool::drop().
struct SparseSum {
  static std::shared_ptr<SparseSum> make() {
    return {new SparseSum,
            [](SparseSum* sum) { CallbackPool::get().drop(std::unique_ptr<SparseSum>(sum)); }};
  }

  int rank;
  at::Tensor target;
  // The indices and values of the target, which the sum replaces: Python may know them, too.
  std::vector<at::Tensor> replaced;
  std::vector<Header> headers;  // by rank
  at::Tensor indices;           // mine: (sparse dimensions, count)
  at::Tensor values;            // mine: (count, dense sizes...)
  std::vector<at::Tensor> allIndices;
  std::vector<at::Tensor> allValues;

  // Allocates memory for what every rank sends.
  Status allocate() {
    const Header& own = headers[static_cast<size_t>(rank)];
    for (size_t i = 0; i < headers.size(); ++i) {
      const Header& other = headers[i];
      if (!own.fits(other) || other.count < 0) {
        return Status(
            Code::kMismatch,
            c10::str("all_reduce: sparse tensors must be alike on all ranks, but rank ", rank,
                     " has ", own.describe(), " and rank ", i, " has ", other.describe()));
      }
      std::vector<int64_t> valueSizes = values.sizes().vec();
      valueSizes[0] = other.count;
      allIndices.push_back(emptyOfShape({own.sparseDimensions, other.count}, at::kLong));
      allValues.push_back(emptyOfShape(valueSizes, values.scalar_type()));
    }
    return Status();
  }

  Call gatherCall(const at::Tensor& own, const std::vector<at::Tensor>& all) const {
    Call call = makeCall(OpKind::kAllGather, own);
    call.in.push_back(readable(own));
    for (const at::Tensor& tensor : all) call.out.push_back(writable(tensor));
    return call;
  }

  // All ranks add the same numbers in the same order, so that all get the same bits. Narrow types
  // are added wide and rounded once.
  void addUp() {
    const PlainDispatch guard;
    const at::ScalarType type = values.scalar_type();
    const bool isNarrow = c10::isReducedFloatingType(type);
    if (isNarrow) {
      for (at::Tensor& each : allValues) each = each.to(at::kFloat);
    }
    const at::Tensor sum =
        at::_sparse_coo_tensor_unsafe(at::cat(allIndices, 1), at::cat(allValues, 0), target.sizes(),
                                      target.options().dtype(isNarrow ? at::kFloat : type),
                                      /*is_coalesced=*/false)
            .coalesce();
    target.copy_(isNarrow ? sum.to(type) : sum);
    allIndices.clear();  // a Work may hold the operation much longer
    allValues.clear();
  }
};

Task gatherAndAdd(CollectiveRunner& runner, std::shared_ptr<SparseSum> sum) {
  Call headers;
  headers.kind = OpKind::kAllGather;
  headers.dtype = DType::kInt64;
  headers.elementBytes = sizeof(int64_t);
  for (Header& header : sum->headers) headers.out.push_back(Span{&header, sizeof(Header)});
  headers.in.push_back(headers.out[static_cast<size_t>(sum->rank)]);
  MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(headers)));
  try {  // torch throws, which would end the process here
    MYCOLL_CO_RETURN_IF_ERROR(sum->allocate());
    Call indices = sum->gatherCall(sum->indices, sum->allIndices);
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(indices)));
    Call values = sum->gatherCall(sum->values, sum->allValues);
    MYCOLL_CO_RETURN_IF_ERROR(co_await runner.run(std::move(values)));
    sum->addUp();
  } catch (...) {
    co_return Status(Code::kInternal,
                     "all_reduce: adding up sparse tensors failed: " + describeException());
  }
  co_return Status();
}

}  // namespace

MycollBackend::WorkPtr MycollBackend::allreduce_sparse(Tensors& tensors,
                                                       const c10d::AllreduceOptions& opts) {
  const UserCall caller = enter("all_reduce");
  const at::Tensor& tensor = single(caller, "tensor", tensors);
  if (!tensor.defined() || tensor.layout() != at::kSparse || !tensor.device().is_cpu()) {
    refuse(caller, "invalid tensor layout: tensor must be a sparse COO tensor on the CPU");
  }
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) {
    refuse(caller,
           "unsupported reduction operation: sparse tensors can be reduced with SUM "
           "only, but op is ",
           name(opts.reduceOp.op_));
  }
  checkReduceOp(caller, opts.reduceOp, tensor, toDType(tensor.scalar_type()));
  if (c10::isBarebonesUnsignedType(tensor.scalar_type())) {  // torch does not add these up
    refuse(caller, "a sparse tensor of ", c10::toString(tensor.scalar_type()),
           " cannot be reduced; convert it to a signed type");
  }
  if (tensor.dim() > kMaxDimensions) {
    refuse(caller, "a sparse tensor may have up to ", kMaxDimensions,
           " dimensions, but its shape is ", tensor.sizes());
  }
  Request request(caller, c10d::OpType::_ALLREDUCE_SPARSE, opts);
  request.awaitCallbacks();
  const std::shared_ptr<SparseSum> sum = SparseSum::make();
  {
    const PlainDispatch guard;
    sum->replaced = {tensor._indices(), tensor._values()};
    const at::Tensor coalesced = tensor.coalesce();
    sum->indices = coalesced._indices().contiguous();
    sum->values = coalesced._values().contiguous().resolve_conj().resolve_neg();
  }
  sum->rank = caller.rank;
  sum->target = tensor;
  sum->headers.resize(static_cast<size_t>(caller.ranks));
  Header& own = sum->headers[static_cast<size_t>(caller.rank)];
  own.sparseDimensions = tensor.sparse_dim();
  own.denseDimensions = tensor.dense_dim();
  own.type = static_cast<int64_t>(tensor.scalar_type());
  own.count = sum->indices.size(1);
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), own.sizes.begin());

  request.title = "sparse_all_reduce";
  request.composite = [sum](CollectiveRunner& runner) { return gatherAndAdd(runner, sum); };
  return run(request, tensors, tensors);
}

}  // namespace mycoll
