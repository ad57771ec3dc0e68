"""Bytes from one process to another: what is written is read, whatever its size; what no writer writes is refused."""

import struct

import numpy as np
import pytest
from halfeven.serve.workers.ring import BrokenRing, Message, RingReader, RingWriter

SIZE = 8192
HEAD = 32


def ring(most: int = 10**6) -> tuple[bytearray, RingWriter, RingReader]:
    memory = bytearray(SIZE)
    return memory, RingWriter(memoryview(memory)), RingReader(memoryview(memory), most)


def read(writer: RingWriter, reader: RingReader) -> list[Message]:
    """Everything that can be written and read now."""
    found: list[Message] = []
    while True:
        found += reader.messages(writer.written)
        writer.heard(reader.read)
        before = writer.written
        writer.go_on()
        if writer.written == before:
            return found


def test_messages_of_every_length_arrive_whole_in_their_order_and_at_every_place_of_the_ring() -> None:
    _, writer, reader = ring()
    rng = np.random.default_rng()
    sent: list[tuple[int, int, bytes]] = []
    found: list[Message] = []
    for number in range(3000):
        data = rng.bytes(int(rng.integers(0, 3000) if rng.random() < 0.2 else rng.integers(0, 200)))
        cut = int(rng.integers(0, len(data) + 1))
        kind = int(rng.integers(1, 8))
        sent.append((kind, number, data))
        writer.put(kind, number, [data[:cut], memoryview(data)[cut:]])
        if rng.random() < 0.5:
            found += reader.messages(writer.written)
            writer.heard(int(rng.integers(writer.read, reader.read + 1)))  # what it hears may be old
            writer.go_on()
        assert writer.written - writer.read <= SIZE, "what may be unread was written over"
    found += read(writer, reader)
    assert [(one.kind, one.number, bytes(one.data)) for one in found] == sent
    assert writer.waiting == 0


def test_a_message_that_is_larger_than_the_ring_comes_in_pieces_and_waits_for_room() -> None:
    _, writer, reader = ring()
    data = np.random.default_rng().bytes(10 * SIZE + 7)
    writer.put(3, 5, [data])
    assert writer.waiting == 1 and writer.written <= SIZE
    (message,) = read(writer, reader)
    assert (message.kind, message.number, bytes(message.data)) == (3, 5, data)


def test_a_message_is_taken_back_where_nothing_of_it_is_written_and_the_others_arrive() -> None:
    _, writer, reader = ring()
    long = np.random.default_rng().bytes(2 * SIZE)
    for number in (1, 2, 3):
        writer.put(1, number, [long])
    writer.put(1, 4, [])
    assert [writer.take_back(1, number) for number in (1, 2, 4, 5)] == [False, True, True, False]
    assert not writer.take_back(2, 3), "another kind of message"
    assert [(one.number, bytes(one.data)) for one in read(writer, reader)] == [(1, long), (3, long)]


def test_an_unread_byte_is_never_written_over() -> None:
    memory, writer, reader = ring()
    while not writer.waiting:
        writer.put(1, 1, [b"a" * 100])
    full = bytes(memory)
    writer.put(1, 2, [b"b" * 100])
    assert bytes(memory) == full
    assert writer.written - reader.read <= SIZE


def test_an_empty_ring_begins_at_its_first_page_again() -> None:
    memory, writer, reader = ring()
    for number in range(100):
        writer.put(1, number, [b"x" * 200])
        assert [one.number for one in read(writer, reader)] == [number]
    assert not any(memory[2 * (HEAD + 200 + HEAD) :]), (
        "small messages that are read at once use the same bytes"
    )


@pytest.mark.parametrize(
    ("place", "form", "value"),
    [
        (0, "<I", SIZE),  # longer than the ring
        (0, "<I", 2**32 - 1),
        (0, "<I", 500),  # longer than what was written
        (8, "<I", 7),  # a frame out of its order, as one that was left from before
        (16, "<Q", 2**40),  # a message beyond the bound
        (16, "<Q", 10),  # a message shorter than its frame
    ],
)
def test_a_frame_that_no_writer_writes_is_refused(place: int, form: str, value: int) -> None:
    memory, writer, reader = ring()
    writer.put(1, 1, [b"x" * 100])
    struct.pack_into(form, memory, place, value)
    with pytest.raises(BrokenRing):
        list(reader.messages(writer.written))


def test_a_frame_of_another_message_in_the_middle_of_one_is_refused() -> None:
    memory, writer, reader = ring()
    writer.put(1, 1, [b"x" * 3000])
    second = (HEAD + SIZE // 4 - HEAD) // HEAD * HEAD
    struct.pack_into("<I", memory, second + 4, 2)
    with pytest.raises(BrokenRing, match="in the middle"):
        list(reader.messages(writer.written))


@pytest.mark.parametrize("written", [-1, SIZE + 1, 2**63])
def test_a_count_that_no_writer_has_is_refused(written: int) -> None:
    _, _, reader = ring()
    with pytest.raises(BrokenRing):
        list(reader.messages(written))


def test_a_reader_that_says_more_or_less_than_it_can_have_read_is_refused() -> None:
    _, writer, _ = ring()
    writer.put(1, 1, [b"x" * 100])
    writer.heard(writer.written)
    for read in (writer.written + 1, writer.written - 1):
        with pytest.raises(BrokenRing):
            writer.heard(read)
