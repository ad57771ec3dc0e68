"""A ring of bytes in shared memory: one process writes messages, one reads them. No sockets here.

Nothing but messages is in the memory. How far the writer has written and the reader has read are two counts of bytes
that never fall; `channel.py` sends them over a socket, so that a count is never seen before the bytes it counts.

A message is cut into frames of at most a quarter of the ring. A frame is a head and its bytes, and lies in one piece:
where it does not fit before the end of the memory, an empty frame fills the rest. The same is done where the ring is
empty after its first pages, so that small messages use these again and again.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence

from ...models.errors import HalfevenError

# length of the frame's bytes, the message's number, the frame's count, kind, length of the whole message
_HEAD = struct.Struct("<IIIB3xQ8x")
_ALIGN = _HEAD.size  # a head always fits before the end of the memory
_SMALL = 512  # bytes of a message that is joined first: one copy more, and fewer slices
_EMPTY = 0  # the kind of a frame that fills the rest of the memory
Buffer = bytes | bytearray | memoryview


class BrokenRing(HalfevenError):
    """The other process wrote what no writer writes: nothing of it is used any more."""

    code = "broken_ring"


class Message:
    """One message: ``kind`` is 1 to 255, ``number`` says which request it belongs to."""

    __slots__ = ("data", "kind", "number")

    def __init__(self, kind: int, number: int, data: Buffer) -> None:
        self.kind, self.number, self.data = kind, number, data


class RingWriter:
    """``memory`` is the whole ring; its size is a multiple of 4 * 32 bytes."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._size = memory, len(memory)
        self._longest = self._size // 4 - _ALIGN
        self._low = self._size // 64  # an empty ring goes on until here
        self._waiting: deque[tuple[int, int, int, list[memoryview]]] = deque()
        self._frames = 0
        self.written = 0
        self.read = 0

    @property
    def waiting(self) -> int:
        """Messages that are not wholly written yet."""
        return len(self._waiting)

    def put(self, kind: int, number: int, parts: Sequence[Buffer]) -> None:
        """Write a message, the parts joined, as far as there is room; the rest is written by `go_on`."""
        total = sum(map(len, parts))
        if not self._waiting and total <= _SMALL and (place := self._place(_HEAD.size + total)) is not None:
            self._head(place, total, number, kind, total)
            place += _HEAD.size
            self._memory[place : place + total] = b"".join(parts)
            self.written += _aligned(_HEAD.size + total)
            return
        views = [view for part in parts if len(view := memoryview(part)) > 0]
        self._waiting.append((kind, number, total, views))
        self.go_on()

    def take_back(self, kind: int, number: int) -> bool:
        """Forget a message of which nothing is written yet; whether there was one."""
        for place, (waiting_kind, waiting_number, total, views) in enumerate(self._waiting):
            if (waiting_kind, waiting_number) == (kind, number):
                is_untouched = sum(map(len, views)) == total
                if is_untouched:
                    del self._waiting[place]
                return is_untouched
        return False

    def heard(self, read: int) -> None:
        """The reader has read so far. Raises BrokenRing."""
        if not self.read <= read <= self.written:
            raise BrokenRing(f"the reader says {read} bytes, expected {self.read} to {self.written}")
        self.read = read

    def go_on(self) -> None:
        """Write what waits, as far as there is room."""
        while self._waiting:
            kind, number, total, views = self._waiting[0]
            length = min(sum(map(len, views)), self._longest)
            if (place := self._place(_HEAD.size + length)) is None:
                return
            self._head(place, length, number, kind, total)
            self._fill(place + _HEAD.size, length, views)
            self.written += _aligned(_HEAD.size + length)
            if not views:
                self._waiting.popleft()

    def _place(self, length: int) -> int | None:
        """Where a frame of so many bytes begins; None where there is no room now."""
        place = self.written % self._size
        rest = self._size - place
        if rest < _aligned(length) or (place > self._low and self.written == self.read):
            if self._size - (self.written - self.read) < rest:
                return None
            self._head(place, rest - _HEAD.size, 0, _EMPTY, 0)
            self.written += rest
            place = 0
        return place if self._size - (self.written - self.read) >= _aligned(length) else None

    def _head(self, place: int, length: int, number: int, kind: int, total: int) -> None:
        _HEAD.pack_into(self._memory, place, length, number, self._frames, kind, total)
        self._frames = (self._frames + 1) & 0xFFFFFFFF

    def _fill(self, place: int, length: int, views: list[memoryview]) -> None:
        while length:
            piece = views[0][:length]
            self._memory[place : place + len(piece)] = piece
            place, length = place + len(piece), length - len(piece)
            if len(piece) == len(views[0]):
                del views[0]
            else:
                views[0] = views[0][len(piece) :]


class RingReader:
    """``most`` is the length of the longest message that is taken, in bytes."""

    def __init__(self, memory: memoryview, most: int) -> None:
        self._memory, self._size, self._most = memory, len(memory), most
        self._frames = 0
        self._begun: tuple[int, int, bytearray, int] | None = None  # kind, number, data, bytes that are here
        self.read = 0

    def messages(self, written: int) -> Iterator[Message]:
        """The messages that are whole where the writer has written so far; their bytes are copies.

        Raises BrokenRing.
        """
        if not self.read <= written <= self.read + self._size:
            raise BrokenRing(
                f"the writer says {written} bytes, expected {self.read} to {self.read + self._size}"
            )
        while self.read < written:
            place = self.read % self._size
            length, number, frames, kind, total = _HEAD.unpack_from(self._memory, place)
            taken = _aligned(_HEAD.size + length)
            if frames != self._frames or taken > min(written - self.read, self._size - place):
                raise BrokenRing(f"frame {frames} of {length} bytes, expected frame {self._frames}")
            self._frames = (self._frames + 1) & 0xFFFFFFFF
            start = place + _HEAD.size
            message = None
            if kind != _EMPTY:
                message = self._joined(kind, number, total, self._memory[start : start + length])
            self.read += taken
            if message is not None:
                yield message

    def _joined(self, kind: int, number: int, total: int, data: memoryview) -> Message | None:
        if self._begun is None:
            if total > self._most or len(data) > total:
                raise BrokenRing(f"a message of {total} bytes, expected at most {self._most}")
            if len(data) == total:
                return Message(kind, number, bytes(data))
            self._begun = kind, number, bytearray(total), 0
        before = self._begun
        whole, here = before[2], before[3] + len(data)
        if (kind, number, total) != (*before[:2], len(whole)) or here > total or not data:
            raise BrokenRing(f"{len(data)} bytes of message {number}, in the middle of message {before[1]}")
        whole[before[3] : here] = data
        self._begun = None if here == total else (kind, number, whole, here)
        return Message(kind, number, whole) if here == total else None


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
