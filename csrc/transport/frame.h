// What travels on a link: frames, each a header and `payloadBytes` of payload.
//
//   kEager          a whole message that is small enough to be buffered by the receiver; or,
//                   without its payload, the beginning of one: the rest comes in kMore frames
//   kRequestToSend  a larger message is ready; its payload waits at the sender. The frame's own
//                   payload, if any: where the receiver can read that itself (SharedPlace)
//   kClearToSend    the receiver has posted memory for it; goes back over the same connection
//   kTaken          ... or the receiver has read it where it lies
//   kData           a piece of that payload
//   kMore           a piece of the payload that an kEager frame came without
//   kAbort          the group has failed; the payload is the first cause
//   kGoodbye        the sender has closed its end of the group; the payload says why, or nothing
//   kProbe          the sender tells the numbers and signatures of collectives it has begun, the
//                   latest last, to be compared
//   kArrived        a collective that somebody waits long in, and who is known to have come to it
//   kQuestion, kAnswer, kDeadlock  why a rank does not come: engine/questions.h
//                   kArrived and kQuestion repeat themselves: of those with the same `tag` the
//                   latest says all that the others do
//   kPut            a piece of what is written into a window of the receiver: `tag` is the window,
//                   `offset` where in it the piece begins. The next frames of that window
//                   from this sender, signals for instance, leave after its last piece.
//   kHold, kGoOn    the sender buffers much that nobody receives: what is sent to it from now on
//                   is to wait for its receiver, however small; it may come at once again
//
// Two hosts may be connected by several sockets. All frames leave by the first one, in order, but
// for pieces of payloads (kData, kMore), which say where they belong and leave by any socket. What
// a piece needs to come first is waited for where it is read: its kEager frame. So are the pieces
// that a kGoodbye must not overtake.
//
// A frame may be checked (MYCOLL_CHECKSUM; its sender decides): then it says so by its magic
// number, and holds the CRC-32C of its header, which is looked at before anything in it is
// believed, and that of its payload, which is looked at before anybody is told that it has come.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.h"
#include "base/crc32c.h"

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
  kGoOn,
  kPut,
  kMore,
  kTaken,
};

// Tags of collectives: the collective's number, then the step within it.
constexpr int kStepBits = 20;

// Messages of different classes never match each other. kWindow: what is put into a window, and
// signals, which are empty and counted where nobody waits for one (mailbox.h).
enum class MessageClass : uint8_t { kCollective, kPointToPoint, kControl, kWindow };

// Whether two calls may exchange a message: of the sizes of parts that only two ranks know, the
// receiver compares its own (Mailbox::agrees()).
inline bool agree(MessageClass messageClass, const Signature& mine, const Signature& theirs) {
  if (messageClass != MessageClass::kPointToPoint) return mine == theirs;
  return mine.dtype == theirs.dtype && mine.opaqueType == theirs.opaqueType &&
         mine.bytes == theirs.bytes;
}

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x4c59434d;         // "MCYL"
  static constexpr uint32_t kCheckedMagic = 0x6c79636d;  // "mcyl"

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kEager;
  MessageClass messageClass = MessageClass::kCollective;
  uint16_t reserved = 0;
  int32_t source = 0;  // ranks in the group
  int32_t destination = 0;
  uint64_t context = 0;  // the group, see Mailbox
  uint64_t tag = 0;      // kClearToSend: the region that could not be read, or 0
  Signature signature;
  uint64_t messageBytes = 0;
  uint64_t payloadBytes = 0;  // that follow this header
  union {
    uint64_t senderRequest = 0;
    uint64_t offset;  // kData, kMore: of the piece in its message; kPut: of it in the window
  };
  union {
    uint64_t receiverRequest = 0;
    // kMore, and kEager without its payload: which such message of this connection it is, from 1
    // on. kGoodbye: how many pieces have left by other sockets than the first.
    uint64_t number;
  };
  uint32_t payloadCheck = 0;  // checked frames only
  uint32_t headerCheck = 0;   // of all that stands before it

  bool isChecked() const { return magic == kCheckedMagic; }
  bool isPiece() const { return kind == FrameKind::kData || kind == FrameKind::kMore; }
  // The beginning of a message whose payload comes in pieces.
  bool isBeginning() const {
    return kind == FrameKind::kEager && payloadBytes == 0 && messageBytes > 0;
  }
  uint32_t check() const { return crc32c(this, offsetof(FrameHeader, headerCheck)); }
};
static_assert(sizeof(FrameHeader) == 96);

// Larger announcements are nonsense; smaller ones are still checked against what was posted.
constexpr uint64_t kMaxControlBytes = 16 * 1024;

}  // namespace mycoll
