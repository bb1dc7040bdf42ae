#include "engine/endpoint.h"

#include <algorithm>
#include <utility>

#include "base/sha256.h"
#include "base/text.h"
#include "engine/engine.h"
#include "engine/formation.h"

namespace mycoll {
namespace {

std::string nonceOfTexts(const Handle& handle) {
  return toHex(hmacSha256(handle.nonce, "mycoll texts").data(), 16);
}

}  // namespace

Status Endpoint::make(GroupOptions options, std::shared_ptr<Engine> engine,
                      std::unique_ptr<Endpoint>* result) {
  if (!engine) MYCOLL_RETURN_IF_ERROR(Engine::process(&options, &engine));
  result->reset(new Endpoint(std::move(options), std::move(engine)));
  Endpoint& endpoint = **result;
  MYCOLL_RETURN_IF_ERROR(Handle::freshNonce(&endpoint.own_.nonce));
  endpoint.own_.settings = Handle::settingsHere();
  endpoint.own_.address = endpoint.engine_->mesh()->address();
  endpoint.text_ = endpoint.own_.encode();
  return Reception::open(endpoint.engine_->mesh(), nonceOfTexts(endpoint.own_), endpoint.wakeup_,
                         &endpoint.reception_);
}

Endpoint::Endpoint(GroupOptions options, std::shared_ptr<Engine> engine)
    : options_(std::move(options)), engine_(std::move(engine)) {}

std::string Endpoint::mismatch(const std::string& text) const {
  Handle handle;
  if (!Handle::decode(text, &handle).ok()) {
    return "not a handle of this version of mycoll: " + std::string(beginning(sanitized(text), 40));
  }
  if (handle.settings == own_.settings) return "";
  return handle.address.describe() + " has '" + sanitized(handle.settings) + "', this process '" +
         own_.settings + "': it must be the same on all ranks";
}

Status Endpoint::check(int64_t number, const std::vector<std::string>& handles,
                       GroupOptions* options, KnownPeers* known) const {
  const auto invalid = [](const std::string& what) {
    return Status(Code::kInvalidArgument, "reconfigure: " + what);
  };
  options->rank = -1;
  std::vector<PeerAddress> peers;
  for (const std::string& text : handles) {
    const std::string rank = std::to_string(peers.size());
    Handle handle;
    if (!Handle::decode(text, &handle).ok()) {
      return invalid("the handle of rank " + rank + " is not one of mycoll's");
    }
    if (std::count(handles.begin(), handles.end(), text) > 1) {
      return invalid("the handle of rank " + rank + " (" + handle.address.describe() +
                     ") occurs more than once");
    }
    if (handle.settings != own_.settings) return invalid("rank " + rank + ": " + mismatch(text));
    if (handle.nonce == own_.nonce) options->rank = static_cast<int>(peers.size());
    // Different for each group, so that an invitation to one is not taken for one to another.
    known->nonces.push_back(
        toHex(hmacSha256(handle.nonce, "mycoll endpoint " + std::to_string(number)).data(), 16));
    peers.push_back(std::move(handle.address));
  }
  if (options->rank < 0) return invalid("this process's own handle is not among the handles");
  options->ranks = static_cast<int>(peers.size());
  known->peers = std::move(peers);
  return Status();
}

Status Endpoint::form(int64_t number, const std::vector<std::string>& handles,
                      std::chrono::milliseconds timeout, std::shared_ptr<Communicator>* result) {
  GroupOptions options = options_;
  KnownPeers known;
  MYCOLL_RETURN_IF_ERROR(check(number, handles, &options, &known));
  {
    const MutexLock lock(mutex_);
    if (!used_.insert(number).second) {
      return Status(Code::kInvalidArgument, "reconfigure: the number " + std::to_string(number) +
                                                " was already used: use a new one each time");
    }
  }
  options.name.append("@").append(std::to_string(number));
  options.globalRanks.clear();
  options.isOfJob = false;
  options.timeout = timeout;
  return Communicator::form(std::move(options), /*store=*/nullptr, engine_, std::move(known),
                            result);
}

Status Endpoint::link(const std::string& handle) {
  if (links_.contains(handle)) return Status();
  Handle receiver;
  std::unique_ptr<Invitation> link;
  if (!Handle::decode(handle, &receiver).ok()) {
    return Status(Code::kInvalidArgument, mismatch(handle));
  }
  MYCOLL_RETURN_IF_ERROR(
      Invitation::open(engine_->mesh(), {receiver.address, nonceOfTexts(receiver)}, {}, &link));
  links_.emplace(handle, std::move(link));
  return Status();
}

Status Endpoint::send(const std::string& handle, const std::string& text) {
  const MutexLock lock(mutex_);
  MYCOLL_RETURN_IF_ERROR(link(handle));
  links_[handle]->send({InvitationMessage::Content::kText, text});
  return Status();
}

std::vector<std::string> Endpoint::receive(std::chrono::milliseconds atMost) {
  std::vector<InvitationMessage> messages = reception_->takeMessages();
  if (messages.empty() && atMost.count() > 0) {
    const Listening listening(*engine_->mesh());
    engine_->wake();
    wakeup_.wait(atMost);
    engine_->mesh()->progress();
    engine_->mesh()->checkProcesses();
    messages = reception_->takeMessages();
  }
  std::vector<std::string> texts;
  for (InvitationMessage& message : messages) texts.push_back(std::move(message.text));
  return texts;
}

Status Endpoint::watch(const std::vector<std::string>& handles) {
  const MutexLock lock(mutex_);
  std::erase_if(links_, [&](const auto& entry) {
    return std::find(handles.begin(), handles.end(), entry.first) == handles.end();
  });
  for (const std::string& handle : handles) {
    if (handle != text_) MYCOLL_RETURN_IF_ERROR(link(handle));
  }
  return Status();
}

std::string Endpoint::lossOf(const std::string& handle) {
  const MutexLock lock(mutex_);
  const auto found = links_.find(handle);
  if (found == links_.end() || !found->second->hasFailed()) return "";
  Handle lost;
  (void)Handle::decode(handle, &lost);
  return lost.address.describe() + " " + found->second->failure();
}

}  // namespace mycoll
