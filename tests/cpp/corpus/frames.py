"""Writes the handwritten inputs of fuzz_test: `python tests/cpp/corpus/frames.py`.

The layout of a header is defined in csrc/transport/frame.h. After a change there, change `frame`
and run this again. fuzz_test defines the first bytes of offers and windows.
"""

from __future__ import annotations

import struct
from pathlib import Path

FOLDER = Path(__file__).parent
EAGER, REQUEST, CLEAR, DATA, ABORT, GOODBYE, PROBE, ARRIVED, QUESTION, ANSWER, DEADLOCK = range(
    1, 12
)
PUT = 14
COLLECTIVE, MESSAGE, CONTROL, WINDOW = range(4)
SEND, OPAQUE, NO_OP = 10, 64, 8
MAGIC = 0x4C59434D
MOST = 2**64 - 1


def call(
    kind: int = SEND, dtype: int = OPAQUE, op: int = NO_OP, root: int = -1, size: int = 64,
    layout: int = 0,
) -> bytes:  # fmt: skip
    return struct.pack("<BBBBiQQ", kind, dtype, 0, op, root, size, layout)


def note(rank: int, sequence: int = 0) -> bytes:
    return struct.pack("<Q", sequence) + call() + struct.pack("<iI", rank, 0)


def frame(
    kind: int = EAGER, group: int = MESSAGE, *, source: int = 0, to: int = 1, context: int = 42,
    tag: int = 7, signature: bytes | None = None, message: int = 64, payload: int = 64,
    sender: int = 1, receiver: int = 1, magic: int = MAGIC, body: bytes | None = None,
    descriptor: int = 0,
) -> bytes:  # fmt: skip
    body = b"a" * min(payload, 20_000) if body is None else body
    head = struct.pack("<IBBHiiQQ", magic, kind, group, descriptor, source, to, context, tag)
    head += call() if signature is None else signature
    head += struct.pack("<QQQQ", message, payload, sender, receiver)
    assert len(head) == 88
    return head + body


def control(kind: int, body: bytes = b"", **changes: int) -> bytes:
    return frame(kind, CONTROL, message=0, payload=len(body), body=body, **changes)  # type: ignore


def announced_at(
    offset: int, group: int = MESSAGE, region: int = 1, size: int = 65536
) -> bytes:  # fmt: skip
    place = struct.pack("<QQQQ", region, offset, size, 0)
    return frame(REQUEST, group, payload=len(place), body=place, descriptor=1)


OPERATIONS = (
    "broadcast", "scatter", "gather", "all-gather", "all-to-all", "reduce-scatter", "all-reduce",
)  # fmt: skip
HEAD, TENSOR, REGION = 4096, 1024 * 1024, 64 << 20


def offer(
    operation: int, *spans: tuple[int, int, int], rounds: int = 0, size: int | None = None,
    is_offer: bool = True,
) -> list[bytes]:  # fmt: skip
    size = 24 * len(spans) if size is None else size
    head = struct.pack("<BBHI", operation, is_offer, rounds, size)
    return [head, *(struct.pack("<QQQ", *span) for span in spans)]


def offers() -> dict[str, list[bytes]]:
    good = (1, HEAD, TENSOR)
    return {
        **{f"good-{name}": offer(i, good, good) for i, name in enumerate(OPERATIONS)},
        "at-the-end": offer(3, (1, REGION - TENSOR, TENSOR)),
        "beyond-the-end": offer(3, (1, REGION - TENSOR + 1, TENSOR)),
        "in-the-head": offer(3, (1, HEAD - 1, TENSOR)),
        "before-everything": offer(4, (1, MOST - TENSOR + 1, TENSOR)),
        "of-another-size": offer(5, (1, HEAD, TENSOR - 1)),
        "of-no-region": offer(6, (0, HEAD, TENSOR), (0, HEAD, TENSOR)),
        "of-a-region-that-is-none": offer(0, (99, HEAD, TENSOR)),
        "of-many-regions": offer(3, *((region, HEAD, TENSOR) for region in range(1000, 1200))),
        "of-too-few": offer(6, good),
        "of-nothing": offer(3),
        "cut": offer(3, good, size=23),
        "too-large": offer(3, good, size=2**32 - 1),
        "with-rounds": offer(1, good, rounds=3),
        "rounds-alone": offer(4, good, rounds=3, is_offer=False),
        "rounds-of-too-large": offer(3, rounds=2, size=2**32 - 1, is_offer=False),
    }


def window(places: int, *changes: tuple[int, int]) -> list[bytes]:
    return [bytes([places]), *(struct.pack("<QQ", *change) for change in changes)]


def windows() -> dict[str, list[bytes]]:
    number, size, segment, offset, cookie = range(5)
    tcp, shared = 1, 6
    return {
        "good-shared": window(shared),
        "good-of-one-rank": window(4),
        "good-not-shared": window(0),
        "good-tcp": window(tcp | shared),
        "of-another-number": window(shared, (number, 2)),
        "larger": window(shared, (size, 1001)),
        "larger-over-tcp": window(tcp, (size, 1001)),
        "of-everything": window(shared, (size, MOST)),
        "of-nothing": window(shared, (size, 0)),
        "not-shared-after-all": window(shared, (segment, 0)),
        "shared-after-all": window(0, (segment, REGION), (offset, HEAD)),
        "shared-over-tcp": window(tcp, (segment, REGION), (offset, HEAD)),
        "of-a-larger-segment": window(shared, (segment, REGION + 1)),
        "in-the-head": window(shared, (offset, HEAD - 1)),
        "behind-the-segment": window(shared, (offset, REGION + 1)),
        "around-the-end": window(shared, (offset, MOST - 999)),
        "of-another-descriptor": window(shared, (cookie, 0)),
    }


def inputs() -> dict[str, list[bytes]]:
    announced = frame(REQUEST, payload=0)
    return {
        "good-message": [frame()],
        "good-then-goodbye": [frame(), control(GOODBYE)],
        "one-byte": [b"M"],
        "header-cut": [frame()[:87]],
        "payload-cut": [frame()[:100]],
        "wrong-magic": [frame(magic=MAGIC + 1)],
        "kind-unknown": [frame(99)],
        "kind-zero": [frame(0)],
        "payload-longer-than-message": [frame(payload=65)],
        "message-longer-than-posted": [frame(message=65, payload=65)],
        "message-empty": [frame(signature=call(size=0), message=0, payload=0)],
        "eager-of-a-terabyte": [frame(message=2**40, payload=2**40)],
        "eager-at-the-limit": [frame(message=2**24, payload=2**24)],
        "data-nobody-asked-for": [frame(DATA)],
        "data-of-everything": [frame(DATA, message=MOST, payload=MOST)],
        "data-beyond-the-message": [announced, frame(DATA, sender=0), frame(DATA, sender=0)],
        "data-for-another-request": [
            announced,
            frame(DATA, sender=0, receiver=3),
            frame(DATA, sender=0, receiver=0),
        ],
        "announced-small-sent-large": [announced, frame(DATA, sender=0, payload=1 << 20)],
        "announced-twice": [announced, announced],
        "descriptor-of-a-message": [frame(descriptor=1)],
        "descriptor-of-a-put": [frame(PUT, WINDOW, descriptor=1)],
        "good-announced-in-place": [announced_at(4096)],
        "announced-in-place-and-sent": [
            announced_at(4096, COLLECTIVE),
            announced_at(4096),
            frame(DATA, sender=0, receiver=2),
        ],
        "announced-beyond-its-region": [announced_at(65536 - 63)],
        "announced-in-the-head-of-its-region": [announced_at(4095)],
        "announced-in-another-region": [announced_at(4096, region=2, size=65537)],
        "clear-to-send-unknown": [frame(CLEAR, payload=0, message=0, sender=99, receiver=99)],
        "clear-to-send-largest": [
            frame(CLEAR, payload=0, message=MOST, sender=MOST, receiver=MOST)
        ],
        "source-negative": [frame(source=-1)],
        "source-too-large": [frame(source=2)],
        "source-is-the-receiver": [frame(source=1)],
        "source-anyone": [frame(source=-1, tag=MOST)],
        "destination-nobody": [frame(to=0x7FFFFFFF)],
        "group-not-made-yet": [frame(context=c) for c in range(100, 140)],
        "group-not-made-yet-control": [
            control(ABORT, b"a" * 200, context=c) for c in range(100, 110)
        ],
        "abort-empty": [control(ABORT)],
        "abort-nonsense": [control(ABORT, bytes(range(256)) + b"\xff" * 44)],
        "abort-too-long": [control(ABORT, b"a" * 16385)],
        "abort-of-ones": [control(ABORT, b"\xff" * 64)],
        "probe-empty": [control(PROBE)],
        "probe-cut": [control(PROBE, bytes(31))],
        "probe-of-ones": [control(PROBE, b"\xff" * 320)],
        "arrived-cut": [control(ARRIVED, bytes(39))],
        "arrived-of-ones": [control(ARRIVED, b"\xff" * 48)],
        "arrived-everybody": [
            control(ARRIVED, note(rank) + struct.pack("<ii", *run))
            for rank, *run in [(0, 0, 1), (1, -5, 1), (7, 0, 0), (0, 0, 2**31 - 1), (0, 1, 0)]
        ],
        "question-nonsense": [control(QUESTION, b"?" * 100)],
        "answer-nonsense": [control(ANSWER, b"\xfe" * 100)],
        "answer-unasked-empty": [control(ANSWER)],
        "deadlock-nonsense": [control(DEADLOCK, b"\x80" * 100)],
        "signature-out-of-range": [frame(signature=call(255, 255, 255, -(2**31), MOST, MOST))],
        "signature-other": [frame(signature=call(size=63))],
        "class-unknown": [frame(group=200)],
        "collective-out-of-step": [
            frame(group=COLLECTIVE, tag=5 << 16),
            frame(group=COLLECTIVE, tag=0),
        ],
        "good-put-then-message": [
            frame(PUT, WINDOW, sender=0),
            frame(PUT, WINDOW, sender=63, payload=1),
            frame(PUT, WINDOW, sender=64, payload=0),
            frame(PUT, WINDOW, tag=3),  # a window that is closed
            frame(EAGER, WINDOW, message=0, payload=0),
            frame(),
        ],
        "put-beyond-the-window": [frame(PUT, WINDOW, sender=1)],
        "put-behind-the-window": [frame(PUT, WINDOW, sender=65, payload=0)],
        "put-at-the-last-byte": [frame(PUT, WINDOW, sender=MOST, payload=1)],
        "put-of-everything": [frame(PUT, WINDOW, sender=0, message=MOST, payload=MOST)],
        "put-to-no-window": [frame(PUT, WINDOW, sender=0, tag=99)],
        "put-of-another-class": [frame(PUT, MESSAGE, sender=1)],
        "put-to-a-group-not-made-yet": [frame(PUT, WINDOW, context=c) for c in range(100, 140)],
        "signal-with-contents": [frame(EAGER, WINDOW)],
        "signal-announced": [frame(REQUEST, WINDOW, payload=0)],
        "signal-of-no-window": [frame(EAGER, WINDOW, message=0, payload=0, tag=99)],
        "after-goodbye": [control(GOODBYE), frame()],
    }


def main() -> None:
    for folder, kept in [("frames", inputs()), ("offers", offers()), ("windows", windows())]:
        (FOLDER / folder).mkdir(exist_ok=True)
        for name, pieces in kept.items():
            (FOLDER / folder / name).write_bytes(b"".join(pieces))


if __name__ == "__main__":
    main()
