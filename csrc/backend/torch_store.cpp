#include "backend/torch_store.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/deadline.h"
#include "base/env.h"

namespace mycoll {
namespace {

// A store that cannot be reached stays a network error, so that the user gets torch's own type.
template <typename Action>
Status guarded(const char* verb, const std::string& key, Action&& action) {
  Code code = Code::kStore;
  std::string cause;
  try {
    action();
    return Status();
  } catch (const c10::DistNetworkError& error) {
    code = Code::kNetwork;
    cause = error.what_without_backtrace();
  } catch (const c10::Error& error) {
    cause = error.what_without_backtrace();
  } catch (const std::exception& error) {
    cause = error.what();
  }
  // torch's words where a class in Python lacks a method.
  if (cause.find("pure virtual function") != std::string::npos) {
    cause += " (a store that is written in Python must define set, get and check)";
  }
  return Status(code,
                std::string("the rendezvous store failed to ") + verb + " '" + key + "': " + cause);
}

}  // namespace

Status TorchStore::set(const std::string& key, const std::string& value) {
  return guarded("set", key, [&] { store_->set(key, value); });
}

TorchStore::TorchStore(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), isTcp_(!hostOf(store_).empty()) {}

Status TorchStore::tryGet(const std::string& key, bool* found, std::string* value) {
  return guarded("get", key, [&] {
    if (isTcp_) {
      // One message there and one back, where check() and get() take three: what is not equal to
      // the expected value stays, and comes back; the expected one where there is nothing.
      static const std::string kNothing = "mycoll: there is nothing";
      *value = store_->compareSet(key, kNothing, kNothing);
      *found = *value != kNothing;
      return;
    }
    *found = store_->check({key});
    if (!*found) return;
    const std::vector<uint8_t> bytes = store_->get(key);
    value->assign(bytes.begin(), bytes.end());
  });
}

// A store that has waited in vain says so by an exception, as it does when it has failed: then the
// next look tells. A TCPStore also prints two warnings each time.
Status TorchStore::wait(const std::string& key, std::chrono::milliseconds atMost, bool* found) {
  if (!waitsItself()) return Store::wait(key, atMost, found);
  const Deadline end = Deadline::after(atMost);
  const Status waited = guarded("wait for", key, [&] { store_->wait({key}, atMost); });
  *found = waited.ok();
  if (*found || end.expired()) return Status();
  canWait_ = waited.code() == Code::kNetwork;
  return Store::wait(key, end.remaining(), found);
}

std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store) {
  // Not by c10's cast of an intrusive_ptr, which never lets go of what is of another type.
  c10::intrusive_ptr<c10d::Store> base = store;
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    base = prefixed->getUnderlyingNonPrefixStore();
  }
  auto* const tcp = dynamic_cast<c10d::TCPStore*>(base.get());
  return tcp != nullptr ? tcp->getHost() : std::string();
}

bool isServedByRankZero(const c10::intrusive_ptr<c10d::Store>& store) {
  return !hostOf(store).empty() && !Env::process().isStoreOfAgent;
}

}  // namespace mycoll
