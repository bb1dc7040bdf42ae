// Frames, which are sent on links. Each is a header and `payloadBytes` of payload.
//
//   kEager          a whole message that is small enough for the receiver to buffer; or, without
//                   its payload, the beginning of one: the rest follows in kMore frames
//   kRequestToSend  a larger message is ready; its payload waits at the sender. The frame's own
//                   payload, if any, is the place where the receiver can read it (SharedPlace)
//   kClearToSend    the receiver has posted memory for it; sent back over the same connection
//   kTaken          ... or the receiver has read it in place
//   kData           a piece of that payload
//   kMore           a piece of the payload of a kEager frame that has none itself
//   kAbort          the group has failed; the payload is the first cause
//   kGoodbye        the sender has closed its end of the group; the payload is the reason, if any
//   kProbe          the numbers and signatures of collectives that the sender has begun, the latest
//                   last, to be compared
//   kArrived        a collective in which a rank waits long, and the ranks known to be in it
//   kQuestion, kAnswer, kDeadlock  why a rank is missing: engine/diagnosis.h
//                   kArrived and kQuestion are repeated: of those with the same `tag`, the latest
//                   contains everything that the others do
//   kPut            a piece of a write to a window of the receiver: `tag` is the window, `offset`
//                   the place of the piece in it. Later frames of that window from this sender,
//                   such as signals, are sent after its last piece
//   kHold           the sender of this frame buffers many messages without a receive: from now on,
//                   even small messages to it must wait for one
//   kResume           ... small messages to it no longer wait
//   kInvitation, kJoined, kFormed  a group is being made: engine/round.h. A later invitation
//                   replaces an earlier one. `tag` 1: the receiver opened its group before the
//                   sender could know of it, and if it is not open any more, a kGoodbye answers
//   kFarewell       the last frame of a process that has left all groups and closes the connection
//
// Inside a host, a kEager or kRequestToSend frame may come with a descriptor of shared memory,
// which was sent over the link's socket before the frame.
//
// Two hosts may be connected by several sockets. All frames are sent on the first one, in order,
// except for pieces of payloads (kData, kMore). These name their place in the message and are sent
// on any socket. A reader delays a piece until it has read the kEager frame of its message, and a
// kGoodbye until it has read all pieces sent before it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.h"

namespace mycoll {

enum class FrameKind : uint8_t {
  kEager = 1,
  kRequestToSend,
  kClearToSend,
  kData,
  kAbort,
  kGoodbye,
  kProbe,
  kArrived,
  kQuestion,
  kAnswer,
  kDeadlock,
  kHold,
  kResume,
  kPut,
  kMore,
  kTaken,
  kInvitation,
  kJoined,
  kFormed,
  kFarewell,
};
constexpr FrameKind kLastFrameKind = FrameKind::kFarewell;

inline bool isForming(FrameKind kind) {
  return kind == FrameKind::kInvitation || kind == FrameKind::kJoined || kind == FrameKind::kFormed;
}

// Whether its payload may be a part of a message only.
inline bool comesInPieces(FrameKind kind) {
  return kind == FrameKind::kData || kind == FrameKind::kMore || kind == FrameKind::kPut;
}

// The tag of a collective: its number, then the step within it, in this many bits.
constexpr int kStepBits = 20;

// Messages of different classes never match each other. kWindow: data put into a window, and
// signals, which are empty messages; a signal without a receive is counted (mailbox.h).
enum class MessageClass : uint8_t { kCollective, kPointToPoint, kControl, kWindow };
constexpr MessageClass kLastMessageClass = MessageClass::kWindow;

// Whether two calls may exchange a message. The receiver compares sizes of parts that only two
// ranks know with its own (Mailbox::agrees()).
inline bool agree(MessageClass messageClass, const Signature& mine, const Signature& theirs) {
  if (messageClass != MessageClass::kPointToPoint) return mine == theirs;
  return mine.dtype == theirs.dtype && mine.opaqueType == theirs.opaqueType &&
         mine.bytes == theirs.bytes;
}

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x4c59434d;  // "MCYL"

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kEager;
  MessageClass messageClass = MessageClass::kCollective;
  uint16_t hasDescriptor = 0;  // kEager, kRequestToSend: one was sent beside the ring
  int32_t source = 0;          // ranks in the group
  int32_t destination = 0;
  uint64_t context = 0;  // the group, see Mailbox
  uint64_t tag = 0;      // kClearToSend: the region that was not read (SharedPlace), or 0
  Signature signature;
  uint64_t messageBytes = 0;
  uint64_t payloadBytes = 0;  // that follow this header
  union {
    uint64_t senderRequest = 0;
    uint64_t offset;  // kData, kMore: of the piece in the message; kPut: in the window
  };
  union {
    uint64_t receiverRequest = 0;
    // kMore, and kEager without its payload: the number of that message on this connection, from 1
    // on. kGoodbye: the number of pieces sent by other sockets than the first.
    uint64_t number;
  };

  bool isOfCollective() const { return messageClass == MessageClass::kCollective; }
  // The number of the collective; only if isOfCollective().
  uint64_t collective() const { return tag >> kStepBits; }
  bool isPiece() const { return kind == FrameKind::kData || kind == FrameKind::kMore; }
  // Whether it begins a message whose payload follows in pieces.
  bool isBeginning() const {
    return kind == FrameKind::kEager && payloadBytes == 0 && messageBytes > 0;
  }
};
static_assert(sizeof(FrameHeader) == 88);

// The largest valid payload of a control frame.
constexpr uint64_t kMaxControlBytes = 16 * 1024;
// ... of a frame that lists the ranks of a group: a quarter of a million.
constexpr uint64_t kMaxInvitationBytes = 64 * 1024 * 1024;

}  // namespace mycoll
