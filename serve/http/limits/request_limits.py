"""Every limit on what a caller may send, hold or leave open, in one object. docs/security.md has the same as a table.

Eight of them are settings (`serve/settings.py`); the others hold for every server. Limits of a model's queue are in its
`model.toml`, those of a key in the key file.
"""

from dataclasses import dataclass

from ....models.pictures.picture_bounds import MAX_PIXELS, MAX_SIDE


@dataclass(frozen=True)
class RequestLimits:
    """Sizes in bytes, times in seconds. ``in_flight_bytes`` and ``connections`` of None are taken from the machine
    (`default_limit`, `connection_limit`)."""

    body_bytes: int = 64 * 2**20  # as sent, and once more unpacked; Triton's default
    body_pieces: int = 65_536
    in_flight_bytes: int | None = None  # of all requests together
    arrival_seconds: float = 30.0  # for a head, from the connection on; and for a body
    head_bytes: int = 64 * 1024  # request line and headers; also trailers and chunk extensions
    headers: int = 100  # also of trailers
    requests_ahead: int = 64  # on one connection, or of one gRPC stream
    # A kept connection may idle so long between two requests, as its answers say; a second more is kept.
    idle_seconds: int = 75
    answer_bytes_per_second: int = 16_384  # that a caller takes; and that an upload sends
    answer_stall_seconds: float = 10.0  # over which that is looked at
    connections: int | None = None
    streams_per_connection: int = 100  # calls of gRPC at once on one connection
    ping_seconds: int = 5  # between two pings of a gRPC client that sends nothing else
    bodies_waiting: int = 256  # large bodies, compressed ones or pictures, and large answers
    json_depth: int = 100
    shape_elements: int = 2**63 - 1  # and its bytes: checked before anything is made
    ranked_scores: int = 2**21  # elements that are ranked for one answer (classification)
    # Strings in one answer: 50 ms of work; Triton's 1,000,000 would be most of a second
    ranked_results: int = 2**16
    picture_pixels: int = MAX_PIXELS
    picture_side: int = MAX_SIDE
    upload_bytes: int = 2**30  # of a training file
    files_bytes: int = 10 * 2**30  # of all training files together
    form_field_bytes: int = 256  # of a field of an upload beside its file
    orders_being_read: int = 8  # requests for jobs that wait until their files are read
    unfinished_jobs: int = 1000  # that wait, run or are paused
    event_streams: int = 100  # each looks into the job store four times a second
    events_bytes: int = 2**20  # that are kept of a model's events
    idempotency_characters: int = 255  # of an Idempotency-Key
    error_characters: int = 4000  # of an answer's sentence, which quotes the request
    quoted_characters: int = 200  # of one word or quotation in it


DEFAULTS = RequestLimits()
MORE_ROOM = "send fewer rows in one request, or start the server with a larger HALFEVEN_MAX_BODY_MIB"
