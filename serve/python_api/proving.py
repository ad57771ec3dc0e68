"""``halfeven.prove``: the gate for the answers of another engine."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...exporters.report.page import table
from ...models.errors import ParityRefused
from ..cli.console import DEFAULT_STORE, notify
from ..cli.prove_command import prove_against
from .half import Half


@dataclass(frozen=True, slots=True, repr=False)
class Proof:
    """``facts``: what ``halfeven prove --json`` prints."""

    facts: Mapping[str, Any]

    @property
    def equal(self) -> bool:
        return self.facts["status"] == "equal"

    @property
    def max_error_u(self) -> float | None:
        return self.facts["forms"]["engine"]["max_error_u"]

    def raise_if_unequal(self) -> "Proof":
        """The proof itself. Raises ParityRefused with the sentences of the gate."""
        if not self.equal:
            failures = self.facts["forms"]["engine"]["parity"]["failures"]
            engine = self.facts["engine"]
            said = (
                "; ".join(one["message"] for one in failures) or "an output differs by more than is allowed"
            )
            raise ParityRefused(f"{engine['kind']} {engine['where']} is not equal to FP32: {said}")
        return self

    def __str__(self) -> str:
        return table(self.facts)

    __repr__ = __str__


def prove(
    model: Half | str,
    *,
    against: str,
    store: str | os.PathLike[str] | None = None,
    samples: str | os.PathLike[str] | None = None,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Proof:
    """Ask another engine what the gate asks of a half, as ``halfeven prove`` does.

    ``model``: a half, or NAME, NAME@VERSION or an exported folder. ``against``: the URL of a V2 server, an ONNX file or
    a file of answers. ``store``: by default HALFEVEN_STORE, or ``halfeven-store`` here. Raises NotReady or EngineFailed
    where the engine gives no answer.
    """
    show: Callable[[str], None] = notify if progress else lambda _: None
    lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
    if isinstance(model, Half):
        target, place = str(model.version), model.store.root
    else:
        target, place = model, Path(store or os.environ.get("HALFEVEN_STORE") or DEFAULT_STORE)
    return Proof(
        prove_against(target, place, against, Path(samples) if samples else None, timeout_s, lines, show)
    )
