"""Inference requests of tensors, and answers read as a client does."""

from typing import Any

import numpy as np
import tritonclient.http as triton


def asked(
    array: np.ndarray, datatype: str, binary: bool, outputs: Any = None, id: str = ""
) -> tuple[bytes, str | None]:
    """A request for one input named x, as tritonclient makes it."""
    given = triton.InferInput("x", list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    body, head = triton.InferenceServerClient.generate_request_body([given], outputs=outputs, request_id=id)
    return body, None if head is None else str(head)


def read_by_client(body: bytes, head: int | None) -> Any:
    return triton.InferenceServerClient.parse_response_body(body, header_length=head)
