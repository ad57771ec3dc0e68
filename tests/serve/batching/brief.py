"""An engine that says of each batch that it is brief."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.serve.batching.stage import (
    Fake,
)
from tests.serve.clock import Clock


@dataclass(eq=False)
class Brief(Fake):
    """An engine that says that it is brief, and remembers the thread of each batch; ``costs_ns`` moves the clock."""

    brief: bool = True
    clock: Clock[int] | None = None
    costs_ns: int = 0
    threads: list[int] = field(default_factory=list)

    def run(self, parts: Any) -> list[np.ndarray]:
        self.threads.append(threading.get_ident())
        if self.clock is not None:
            self.clock.now += self.costs_ns
        return super().run(parts)


def here() -> int:
    return threading.get_ident()
