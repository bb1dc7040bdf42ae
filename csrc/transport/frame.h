// What travels on a link: frames, each a header and `payloadBytes` of payload.
//
//   kEager          a whole message that is small enough to be buffered by the receiver
//   kRequestToSend  a larger message is ready; its payload waits at the sender
//   kClearToSend    the receiver has posted memory for it; goes back over the same connection
//   kData           a piece of that payload
//   kAbort          the group has failed; the payload is the first cause
//   kGoodbye        the sender has closed its end of the group, after an exception, too
//   kProbe          the sender tells the numbers and signatures of collectives it has begun, the
//                   latest last, to be compared
//   kArrived        a collective that somebody waits long in, and who is known to have come to it
//   kQuestion, kAnswer, kDeadlock  why a rank does not come: engine/questions.h
//   kPut            a piece of what is written into a window of the receiver: `tag` is the window,
//                   `receiverRequest` where in it the piece begins. The next frames of that window
//                   from this sender, signals for instance, leave after its last piece.
//   kHold, kGoOn    the sender buffers much that nobody receives: what is sent to it from now on
//                   is to wait for its receiver, however small; it may come at once again
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
};

// Tags of collectives: the collective's number, then the step within it.
constexpr int kStepBits = 20;

// Messages of different classes never match each other. kWindow: what is put into a window, and
// signals, which are empty and counted where nobody waits for one (mailbox.h).
enum class MessageClass : uint8_t { kCollective, kPointToPoint, kControl, kWindow };

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
  uint64_t tag = 0;
  Signature signature;
  uint64_t messageBytes = 0;
  uint64_t payloadBytes = 0;  // that follow this header
  uint64_t senderRequest = 0;
  uint64_t receiverRequest = 0;  // kPut: where in the window
  uint32_t payloadCheck = 0;     // checked frames only
  uint32_t headerCheck = 0;      // of all that stands before it

  bool isChecked() const { return magic == kCheckedMagic; }
  uint32_t check() const { return crc32c(this, offsetof(FrameHeader, headerCheck)); }
};
static_assert(sizeof(FrameHeader) == 96);

// Larger announcements are nonsense; smaller ones are still checked against what was posted.
constexpr uint64_t kMaxControlBytes = 16 * 1024;

}  // namespace mycoll
