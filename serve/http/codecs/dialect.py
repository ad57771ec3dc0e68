"""The deliberate differences from Triton's answers, and those that ``--triton-strict`` removes.

The table for people, with the reasons, is in ``docs/protocol.md``. Only differences that could break a client are
here; the statuses that belong to them are in ``serve/http/error_mapping.py``, like all others.
"""

from dataclasses import dataclass

from ....models.errors import BadRequest


class UnreadableTensor(BadRequest):
    """The JSON is no tensor: it has a negative size, or data that does not fill its shape. Correct shape or data.
    Triton answers with 500."""

    code = "unreadable_tensor"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences from Triton that a server has: `OURS` by default, `STRICT` with ``--triton-strict``."""

    half_in_json: bool = True  # FP16 and BF16 as JSON numbers; Triton takes and gives them in binary alone
    classify_half: bool = True  # the classification of FP16 and BF16 outputs; Triton refuses it
    split_large: bool = True  # requests of more rows than max_batch_size; Triton refuses them
    # HTTP libraries send "gzip, deflate" by default. Triton compresses then; here a caller has to name one coding.
    compress_lists: bool = False
    triton_statuses: bool = False  # see error_mapping.py


OURS = Dialect()
STRICT = Dialect(
    half_in_json=False,
    classify_half=False,
    split_large=False,
    compress_lists=True,
    triton_statuses=True,
)
