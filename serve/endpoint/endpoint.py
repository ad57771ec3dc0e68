"""``halfeven.Endpoint``: Python of the operator's that stands before and behind a model. Needs the standard library
alone."""

from typing import Any, ClassVar


class Endpoint:
    """``POST /v1/models/MODEL:endpoint`` for a ``model``: ``preprocess``, the model in batches with other requests,
    ``postprocess``. Both run in a process of its own, one call after the other, each with a limit of time.

    The class is made once, when the server starts. Each request has a copy of it: what ``preprocess`` keeps in ``self``
    is there in ``postprocess``, and nowhere else.
    """

    model: ClassVar[str] = ""

    def preprocess(self, request: Any) -> Any:
        """The model's inputs: the array of the only one, or all by name. ``request``: what JSON has, of another body
        its bytes. ``raise halfeven.models.errors.BadRequest("…")`` answers 400 with these words."""
        return request

    def postprocess(self, outputs: Any) -> Any:
        """The answer: what JSON can have (numpy's arrays too), or bytes. ``outputs``: the array of the only output, or
        all by name."""
        return outputs
