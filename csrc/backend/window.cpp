#include "backend/window.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "backend/errors.h"
#include "backend/layout.h"
#include "backend/validation.h"
#include "base/os.h"

namespace mycoll {
namespace {

// Keeps a tensor's storage, and prevents its resizing. Several windows may hold the same storage.
class FixedStorage {
 public:
  explicit FixedStorage(const at::Tensor& tensor)
      : storage_(tensor.storage().unsafeGetStorageImpl()) {
    kept_.add(tensor);
    All& all = perProcess<All>();
    const MutexLock lock(all.mutex);
    Fixed& fixed = all.fixed[storage_];
    if (fixed.holders++ == 0) fixed.wasResizable = storage_->resizable();
    storage_->set_resizable(false);
  }
  ~FixedStorage() {
    All& all = perProcess<All>();
    const MutexLock lock(all.mutex);
    const auto found = all.fixed.find(storage_);
    if (found == all.fixed.end() || --found->second.holders > 0) return;  // none in a forked child
    storage_->set_resizable(found->second.wasResizable);
    all.fixed.erase(found);
  }
  FixedStorage(const FixedStorage&) = delete;
  FixedStorage& operator=(const FixedStorage&) = delete;

 private:
  struct Fixed {
    int holders = 0;
    bool wasResizable = true;
  };
  struct All {
    Mutex mutex;
    std::map<c10::StorageImpl*, Fixed> fixed GUARDED_BY(mutex);
  };

  Kept kept_;
  c10::StorageImpl* const storage_;
};

void checkCpu(const CallerInfo& caller, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return;
  refuse(caller, "windows are for CPU tensors, but the tensor is on ", tensor.device());
}

void check(const CallerInfo& caller, const Status& status) {
  if (status.code() == Code::kInvalidArgument) refuse(caller, status.message());
  throwIfFailed(status);
}

}  // namespace

// A tensor's type and shape, as sent in mycoll::Window::Description.
struct MycollWindow::Layout {
  static constexpr size_t kMaxDimensions = 16;
  int64_t type = 0;  // at::ScalarType
  int64_t dimensions = 0;
  std::array<int64_t, kMaxDimensions> sizes{};

  at::ScalarType scalarType() const { return static_cast<at::ScalarType>(type); }
  at::IntArrayRef shape() const { return {sizes.data(), static_cast<size_t>(dimensions)}; }
  int64_t elements() const { return c10::multiply_integers(shape()); }
  // Whether a layout that another rank sent is valid, and needs exactly `bytes` bytes.
  bool fits(uint64_t bytes) const {
    if (type < 0 || type >= static_cast<int64_t>(at::ScalarType::NumOptions)) return false;
    if (dimensions < 0 || dimensions > static_cast<int64_t>(kMaxDimensions)) return false;
    uint64_t all = c10::elementSize(scalarType());
    for (const int64_t size : shape()) {
      if (size < 0 || c10::mul_overflows(all, static_cast<uint64_t>(size), &all)) return false;
    }
    return all == bytes;
  }
};

MycollWindow::MycollWindow(c10::intrusive_ptr<MycollBackend> backend)
    : backend_(std::move(backend)),
      generation_([this] {
        Generation now = backend_->generations_.current();
        now.device = nullptr;  // windows are for the CPU
        return now;
      }()),
      window_(std::make_shared<mycoll::Window>(enter("new_window").communicator())) {}

UserCall MycollWindow::enter(const char* function) const {
  (void)backend_->enter(function);
  return backend_->callOf(function, generation_);
}

MycollWindow::~MycollWindow() {
  // As in MycollBackend, a forked child does not touch its parent's objects.
  if (backend_->isForked()) new std::shared_ptr<mycoll::Window>(window_);
}

void MycollWindow::tensor_register(const at::Tensor& tensor, bool /*owning*/) {
  const UserCall caller = enter("tensor_register");
  checkTensor(caller, Argument{"tensor"}, tensor);
  checkCpu(caller, tensor);
  if (!isPlain(tensor)) {
    refuse(caller,
           "tensor must be contiguous, as other ranks write to its memory, but it has "
           "shape ",
           tensor.sizes(), " and strides ", tensor.strides());
  }
  if (static_cast<size_t>(tensor.dim()) > Layout::kMaxDimensions) {
    refuse(caller, "tensor may have ", Layout::kMaxDimensions, " dimensions, but it has ",
           tensor.dim(), "; pass a view(-1) of it");
  }
  Layout layout;
  layout.type = static_cast<int64_t>(tensor.scalar_type());
  layout.dimensions = tensor.dim();
  std::copy_n(tensor.sizes().begin(), tensor.dim(), layout.sizes.begin());
  mycoll::Window::Description description{};
  static_assert(sizeof(layout) <= sizeof(description));
  std::memcpy(description.data(), &layout, sizeof(layout));

  Request request(caller, c10d::OpType::UNKNOWN, c10d::kUnsetTimeout,
                  /*isAsync=*/false);
  request.compositeKind = OpKind::kWindow;
  const Span memory = writable(tensor);
  check(caller, window_->open(memory, description, std::make_shared<FixedStorage>(tensor),
                              &request.composite));
  backend_->run(request, tensor, {});
  at::Tensor own = tensor.detach();
  MutexLock lock(mutex_);
  std::swap(tensor_, own);
}

void MycollWindow::tensor_deregister() {
  const UserCall caller = enter("tensor_deregister");
  at::Tensor last;  // dropped without the lock
  {
    MutexLock lock(mutex_);
    std::swap(tensor_, last);
  }
  Request request(caller, c10d::OpType::UNKNOWN, c10d::kUnsetTimeout,
                  /*isAsync=*/false);
  request.compositeKind = OpKind::kWindow;
  check(caller, window_->close(&request.composite));
  backend_->run(request, {}, {});
}

MycollWindow::Layout MycollWindow::layoutOf(const CallerInfo& caller, int64_t rank) const {
  uint64_t bytes = 0;
  mycoll::Window::Description description;
  check(caller, window_->describe(static_cast<int>(rank), &bytes, &description));
  Layout layout;
  std::memcpy(&layout, description.data(), sizeof(layout));
  if (!layout.fits(bytes)) {
    throwStatus(Status(Code::kNetwork,
                       c10::str("mycoll group '", backend_->groupName(), "': ",
                                generation_.communicator->describeRank(static_cast<int>(rank)),
                                " has described the tensor of its window, of ", bytes,
                                " bytes, in a way that is not valid")));
  }
  return layout;
}

MycollWindow::WorkPtr MycollWindow::workOf(Request& request, const OpPtr& op) {
  const bool isAsync = std::exchange(request.async, true);
  const WorkPtr work = backend_->finishLaunch(request, {}, {op});
  if (!isAsync) work->wait();
  return work;
}

MycollWindow::WorkPtr MycollWindow::put(const at::Tensor& tensor, int64_t dstRank,
                                        int64_t targetOffsetNelems, bool asyncOp,
                                        const PutOptions& opts) {
  const UserCall caller = enter("put");
  checkTensor(caller, Argument{"tensor"}, tensor);
  checkCpu(caller, tensor);
  checkRank(caller, "dst_rank", dstRank);
  const Layout target = layoutOf(caller, dstRank);
  if (tensor.scalar_type() != target.scalarType()) {
    refuse(caller, "tensor must be of the window's dtype on rank ", dstRank, ", ",
           c10::toString(target.scalarType()), ", but it is ", c10::toString(tensor.scalar_type()));
  }
  const int64_t elements = target.elements();
  if (targetOffsetNelems < 0 || targetOffsetNelems > elements ||
      tensor.numel() > elements - targetOffsetNelems) {
    refuse(caller, tensor.numel(), " elements from element ", targetOffsetNelems,
           " on do not fit into the window of rank ", dstRank, ", which has ", elements);
  }
  Request request(caller, c10d::OpType::SEND, opts.timeout, asyncOp);
  request.peer = static_cast<int>(dstRank);
  const Span source = request.input(tensor);
  auto kept = std::make_shared<Kept>(std::move(request.keep));
  const uint64_t offset = static_cast<uint64_t>(targetOffsetNelems) * tensor.element_size();
  OpPtr op;
  check(caller, window_->put(source, request.peer, offset, std::move(kept), !asyncOp,
                             request.timeout, &op));
  return workOf(request, op);
}

bool MycollWindow::isMapped(const CallerInfo& caller, int64_t rank,
                            std::shared_ptr<Pages>* pages) const {
  check(caller, window_->map(static_cast<int>(rank), pages));
  return *pages != nullptr || rank == generation_.rank;
}

at::Tensor MycollWindow::map_remote_tensor(int64_t rank) {
  const UserCall caller = enter("map_remote_tensor");
  checkRank(caller, "rank", rank);
  const Layout layout = layoutOf(caller, rank);
  std::shared_ptr<Pages> pages;
  if (isMapped(caller, rank, &pages)) {
    if (pages) {
      return at::from_blob(
          pages->data(), layout.shape(), [pages](void*) {},
          at::TensorOptions().dtype(layout.scalarType()));
    }
    MutexLock lock(mutex_);
    return tensor_;
  }
  if (layout.elements() == 0) {
    return at::empty(layout.shape(), at::TensorOptions().dtype(layout.scalarType()));
  }
  throwStatus(Status(
      Code::kUnsupported,
      c10::str(
          "mycoll group '", backend_->groupName(), "': map_remote_tensor: the tensor of ",
          generation_.communicator->describeRank(static_cast<int>(rank)),
          " cannot be mapped: that rank is not on this host, or the tensor is an ordinary one; "
          "on one host register shared tensors (mycoll.empty()), between hosts let its owner "
          "put() what is needed")));
}

MycollWindow::WorkPtr MycollWindow::signal(int64_t peerRank, bool asyncOp,
                                           const SignalOptions& opts) {
  const UserCall caller = enter("signal");
  checkRank(caller, "peer_rank", peerRank);
  Request request(caller, c10d::OpType::SEND, opts.timeout, asyncOp);
  OpPtr op;
  check(caller, window_->signal(static_cast<int>(peerRank), !asyncOp, opts.timeout, &op));
  return workOf(request, op);
}

MycollWindow::WorkPtr MycollWindow::wait_signal(int64_t peerRank, bool asyncOp,
                                                const WaitSignalOptions& opts) {
  const UserCall caller = enter("wait_signal");
  checkRank(caller, "peer_rank", peerRank);
  Request request(caller, c10d::OpType::RECV, opts.timeout, asyncOp);
  OpPtr op;
  check(caller, window_->waitSignal(static_cast<int>(peerRank), !asyncOp, opts.timeout, &op));
  return workOf(request, op);
}

WindowAttr MycollWindow::get_attr(int64_t peerRank) {
  const UserCall caller = enter("get_attr");
  checkRank(caller, "peer_rank", peerRank);
  std::shared_ptr<Pages> pages;
  WindowAttr attr;
  attr.access_type =
      isMapped(caller, peerRank, &pages) ? WindowAccessType::UNIFIED : WindowAccessType::SEPARATE;
  return attr;
}

c10::intrusive_ptr<TorchWindow> MycollBackend::new_window(const std::optional<at::Tensor>& tensor) {
  const auto self = c10::intrusive_ptr<MycollBackend>::unsafe_reclaim_from_nonowning(this);
  auto window = c10::make_intrusive<MycollWindow>(self);
  if (tensor) window->tensor_register(*tensor, /*owning=*/true);
  return window;
}

}  // namespace mycoll
