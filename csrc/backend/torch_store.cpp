#include "backend/torch_store.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/env.h"

namespace mycoll {
namespace {

// Runs `action`. If the store cannot be reached, the code is kNetwork, so that the user gets
// torch's own exception type.
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
  // torch's words if a class in Python lacks a method.
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
      // One round trip, where check() and get() take three: a value that differs from the expected
      // one stays unchanged and is returned; if there is no value, the expected one is returned.
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

Status TorchStore::compareSet(const std::string& key, const std::string& expected,
                              const std::string& value, std::string* now) {
  if (!isTcp_) return Store::compareSet(key, expected, value, now);
  return guarded("set", key, [&] { *now = store_->compareSet(key, expected, value); });
}

std::string hostOf(const c10::intrusive_ptr<c10d::Store>& store) {
  // Not by c10's cast of an intrusive_ptr, which leaks an object of another type.
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
