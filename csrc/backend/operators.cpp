#include "backend/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "backend/errors.h"
#include "backend/layout.h"
#include "backend/mycoll_backend.h"

namespace mycoll {
namespace {

// ---- on the CPU

// Returns a group's backend for CPU tensors, held: another thread may destroy the group.
c10::intrusive_ptr<MycollBackend> backendOf(const char* function, const std::string& group) {
  auto backend = c10d::resolve_process_group(group)->getBackend(c10::DeviceType::CPU);
  if (auto* const mycoll = dynamic_cast<MycollBackend*>(backend.get())) {
    (void)backend.release();
    return c10::intrusive_ptr<MycollBackend>::reclaim(mycoll);
  }
  throwArgumentError(
      c10::str("torch.ops.mycoll.", function, ": group '", group,
               "' has no mycoll for CPU tensors, but '", backend->getBackendName(),
               "'; make it with backend=\"mycoll\", without MYCOLL_CPU=gloo and "
               "TORCH_DISTRIBUTED_DEBUG=DETAIL, which put something else in its place"));
}

// Returns the shape, of which all_gather and reduce_scatter change the first dimension.
std::vector<int64_t> shapeOf(const char* function, const at::Tensor& x) {
  if (x.dim() == 0) {
    throwArgumentError(c10::str("torch.ops.mycoll.", function,
                                ": x must have a dimension, but it is a scalar; pass x.view(1)"));
  }
  return x.sizes().vec();
}

void allReduceInPlace(const at::Tensor& x, const std::string& group) {
  const auto backend = backendOf("all_reduce_", group);
  static const c10d::AllreduceOptions kOptions = [] {
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    return options;
  }();
  MycollBackend::Tensors tensors{x};
  backend->allreduce(tensors, kOptions);
}

at::Tensor allReduce(const at::Tensor& x, const std::string& group) {
  const auto backend = backendOf("all_reduce", group);
  at::Tensor sum = emptyOfShape(x.sizes(), x.scalar_type());
  backend->allReduceInto(sum, x);
  return sum;
}

at::Tensor allGather(const at::Tensor& x, const std::string& group) {
  const auto backend = backendOf("all_gather", group);
  std::vector<int64_t> shape = shapeOf("all_gather", x);
  shape[0] *= backend->getSize();
  at::Tensor all = emptyOfShape(shape, x.scalar_type());
  at::Tensor input = x;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  backend->_allgather_base(all, input, options);
  return all;
}

at::Tensor reduceScatter(const at::Tensor& x, const std::string& group) {
  const auto backend = backendOf("reduce_scatter", group);
  std::vector<int64_t> shape = shapeOf("reduce_scatter", x);
  if (shape[0] % backend->getSize() != 0) {
    throwArgumentError(c10::str(
        "torch.ops.mycoll.reduce_scatter: the first dimension of x must be "
        "a multiple of the ",
        backend->getSize(), " ranks of group '", group, "', but its shape is ", x.sizes()));
  }
  shape[0] /= backend->getSize();
  at::Tensor mine = emptyOfShape(shape, x.scalar_type());
  at::Tensor input = x;
  c10d::ReduceScatterOptions options;
  options.asyncOp = false;
  backend->_reduce_scatter_base(mine, input, options);
  return mine;
}

// ---- without memory: shapes, for torch.compile and torch.export

void metaOfAllReduceInPlace(const at::Tensor&, const std::string&) {}

at::Tensor metaOfAllReduce(const at::Tensor& x, const std::string&) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor metaOfAllGather(const at::Tensor& x, const std::string& group) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  if (!shape.empty()) shape[0] = shape[0] * c10d::resolve_process_group(group)->getSize();
  return at::empty_symint(shape, x.options());
}

at::Tensor metaOfReduceScatter(const at::Tensor& x, const std::string& group) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  if (!shape.empty()) shape[0] = shape[0] / c10d::resolve_process_group(group)->getSize();
  return at::empty_symint(shape, x.options());
}

// ---- under autograd

constexpr char kAllReduceInPlace[] = "mycoll::all_reduce_";
constexpr char kAllReduce[] = "mycoll::all_reduce";
constexpr char kAllGather[] = "mycoll::all_gather";
constexpr char kReduceScatter[] = "mycoll::reduce_scatter";

// Refuses a tensor that requires a gradient, and passes on all others.
template <const char* kName, typename Result>
Result passOn(c10::DispatchKeySet keys, const at::Tensor& x, const std::string& group) {
  if (x.requires_grad() && at::GradMode::is_enabled()) {
    throwArgumentError(c10::str(
        kName,
        " has no gradient, but one of its tensors requires one: call it under torch.no_grad() "
        "or torch.inference_mode(), or take torch.distributed.nn.functional, which has some"));
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kName, "")
                             .template typed<Result(const at::Tensor&, const std::string&)>();
  return op.redispatch(keys & c10::after_autograd_keyset, x, group);
}

void passOnInPlace(c10::DispatchKeySet keys, const at::Tensor& x, const std::string& group) {
  passOn<kAllReduceInPlace, void>(keys, x, group);
  // So that autograd notices that a tensor which it saved has changed.
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

torch::Library* libraryFor(torch::Library::Kind kind, std::optional<c10::DispatchKey> key) {
  // Never destroyed: at the end of the process, torch may be destroyed first.
  return new torch::Library(kind, "mycoll", key, __FILE__, __LINE__);
}

bool define() {
  torch::Library& schemas = *libraryFor(torch::Library::DEF, std::nullopt);
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  // all_reduce_ returns nothing: torch.compile functionalizes only such operators.
  schemas.def("all_reduce_(Tensor(a!) x, str group) -> ()", tags);
  schemas.def("all_reduce(Tensor x, str group) -> Tensor", tags);
  schemas.def("all_gather(Tensor x, str group) -> Tensor", tags);
  schemas.def("reduce_scatter(Tensor x, str group) -> Tensor", tags);

  torch::Library& cpu = *libraryFor(torch::Library::IMPL, c10::DispatchKey::CPU);
  cpu.impl("all_reduce_", TORCH_FN(allReduceInPlace));
  cpu.impl("all_reduce", TORCH_FN(allReduce));
  cpu.impl("all_gather", TORCH_FN(allGather));
  cpu.impl("reduce_scatter", TORCH_FN(reduceScatter));

  torch::Library& meta = *libraryFor(torch::Library::IMPL, c10::DispatchKey::Meta);
  meta.impl("all_reduce_", TORCH_FN(metaOfAllReduceInPlace));
  meta.impl("all_reduce", TORCH_FN(metaOfAllReduce));
  meta.impl("all_gather", TORCH_FN(metaOfAllGather));
  meta.impl("reduce_scatter", TORCH_FN(metaOfReduceScatter));

  torch::Library& autograd = *libraryFor(torch::Library::IMPL, c10::DispatchKey::Autograd);
  autograd.impl("all_reduce_", TORCH_FN(passOnInPlace));
  autograd.impl("all_reduce", TORCH_FN((passOn<kAllReduce, at::Tensor>)));
  autograd.impl("all_gather", TORCH_FN((passOn<kAllGather, at::Tensor>)));
  autograd.impl("reduce_scatter", TORCH_FN((passOn<kReduceScatter, at::Tensor>)));
  return true;
}

}  // namespace

void defineOperators() { [[maybe_unused]] static const bool kIsDefined = define(); }

}  // namespace mycoll
