#include "engine/invitation.h"

#include <cstring>
#include <utility>

#include "base/secret.h"
#include "base/sha256.h"
#include "transport/mesh.h"

namespace mycoll {
namespace {

constexpr int kSender = 0, kReceiver = 1;

std::string macOf(const GroupAddress& address, const InvitationMessage& message) {
  return asText(hmacSha256(
      address.secret,
      std::string("mycoll frame ") + static_cast<char>(message.content) + asText(message.digest)));
}

Status addressOf(const std::string& nonce, int rank, const PeerAddress& sender,
                 const PeerAddress& receiver, GroupAddress* address) {
  address->isInvitation = true;
  address->name = "invitation";
  address->rank = rank;
  address->peers = {sender, receiver};
  MYCOLL_RETURN_IF_ERROR(secretOf("mycoll invitation " + nonce, &address->secret));
  // The number does not depend on the secret file: two processes with different files find out that
  // they have.
  const Digest number = sha256("mycoll invitation number " + nonce);
  std::memcpy(&address->context, number.data(), sizeof(address->context));
  return Status();
}

}  // namespace

void setContext(GroupAddress* address) {
  const Digest digest = hmacSha256(address->secret, "mycoll context " + address->name);
  std::memcpy(&address->context, digest.data(), sizeof(address->context));
}

// ---- Reception ---------------------------------------------------------------------------------

Reception::Reception(std::shared_ptr<Mesh> mesh, GroupAddress address, Wakeup& wakeup)
    : mailbox_(std::move(mesh), std::move(address), this), wakeup_(wakeup) {}

Status Reception::open(std::shared_ptr<Mesh> mesh, const std::string& nonce, Wakeup& wakeup,
                       std::unique_ptr<Reception>* result, bool isOnce) {
  GroupAddress address;
  address.isOnce = isOnce;
  MYCOLL_RETURN_IF_ERROR(addressOf(nonce, kReceiver, PeerAddress(), mesh->address(), &address));
  result->reset(new Reception(std::move(mesh), std::move(address), wakeup));
  (*result)->mailbox_.open();
  return Status();
}

Reception::~Reception() { mailbox_.detach(); }

void Reception::handle(const Event& event) {
  if (const auto* const lost = std::get_if<PeerLost>(&event)) {
    losses_.push_back(*lost);
    return wakeup_.notify();
  }
  const auto* const frame = std::get_if<ControlFrame>(&event);
  if (!frame || frame->header.kind != FrameKind::kInvitation) return;
  const std::string& payload = frame->payload;
  if (payload.size() <= sizeof(Digest)) return;
  const std::string_view contents = std::string_view(payload).substr(sizeof(Digest));
  using Content = InvitationMessage::Content;
  InvitationMessage message(static_cast<Content>(contents[0]), contents.substr(1));
  const std::string mac = macOf(mailbox_.group(), message);
  if (!constantTimeEqual(mac.data(), payload.data(), sizeof(Digest))) return;
  switch (message.content) {
    case Content::kRoster:
    case Content::kText: messages_.push_back(std::move(message)); break;
    case Content::kError:
      if (!decodeFailure(message.text, &error_)) return;
      break;
    default: return;
  }
  wakeup_.notify();
}

std::vector<InvitationMessage> Reception::takeMessages() {
  IoLock lock(mailbox_.ioMutex());
  return std::exchange(messages_, {});
}

Status Reception::error() {
  IoLock lock(mailbox_.ioMutex());
  return error_;
}

std::vector<PeerLost> Reception::losses() {
  IoLock lock(mailbox_.ioMutex());
  return losses_;
}

// ---- Invitation --------------------------------------------------------------------------------

Invitation::Invitation(std::shared_ptr<Mesh> mesh, GroupAddress address,
                       std::function<void()> refused)
    : mailbox_(std::move(mesh), std::move(address), this), refused_(std::move(refused)) {}

Status Invitation::open(std::shared_ptr<Mesh> mesh, const Receiver& receiver,
                        std::function<void()> refused, std::unique_ptr<Invitation>* result) {
  GroupAddress address;
  MYCOLL_RETURN_IF_ERROR(
      addressOf(receiver.nonce, kSender, mesh->address(), receiver.address, &address));
  address.opensLater = !receiver.isOpened;
  const bool isToItself = receiver.address.uid == mesh->address().uid;
  result->reset(new Invitation(std::move(mesh), std::move(address), std::move(refused)));
  Invitation& invitation = **result;
  if (isToItself) {
    IoLock lock(invitation.mailbox_.ioMutex());
    invitation.fail(/*isRefused=*/true, "is this process");
    return Status();
  }
  invitation.mailbox_.open();
  return Status();
}

Status Invitation::send(std::shared_ptr<Mesh> mesh, const Receiver& receiver,
                        const InvitationMessage& message, std::function<void()> refused,
                        std::unique_ptr<Invitation>* result) {
  MYCOLL_RETURN_IF_ERROR(open(std::move(mesh), receiver, std::move(refused), result));
  (*result)->send(message);
  return Status();
}

void Invitation::send(const InvitationMessage& message) {
  const GroupAddress& group = mailbox_.group();
  const std::string payload =
      macOf(group, message) + static_cast<char>(message.content) + message.text;
  mailbox_.notify(kReceiver, FrameKind::kInvitation, payload, group.opensLater ? 0 : 1);
}

Invitation::~Invitation() { mailbox_.detach(); }

void Invitation::handle(const Event& event) {
  const auto* const frame = std::get_if<ControlFrame>(&event);
  const bool isRefused = std::holds_alternative<RankLeft>(event) ||
                         (frame && frame->header.kind == FrameKind::kGoodbye);
  const auto* const lost = std::get_if<PeerLost>(&event);
  if (isRefused) return fail(isRefused, "has left");
  if (lost && lost->uid == mailbox_.group().peers[kReceiver].uid) {
    fail(isRefused, lost->loss.describe());
  }
}

std::string Invitation::failure() {
  IoLock lock(mailbox_.ioMutex());
  return failure_;
}

void Invitation::fail(bool isRefused, const std::string& why) {
  if (failure_.empty()) failure_ = why;
  if (!isRefused || !mailbox_.isPresent(kReceiver)) return;
  mailbox_.setAbsent(kReceiver, Status(Code::kPeerLost, "it is in no group"), false);
  if (refused_) refused_();
}

}  // namespace mycoll
