"""The spec of a name and the version that takes its requests change as one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.versions.traffic.rules import TrialRules
from halfeven.serve.versions.traffic.served import ServedModel

from tests.serve.versions.traffic.conftest import spec


@dataclass(eq=False)
class Loaded:
    """As much of a `LoadedVersion` as becomes active; ``submit`` says which version it is."""

    number: int
    spec: ModelSpec
    name: str = "net"
    label: str = ""
    drift: Any = field(default_factory=object)

    def submit(self, *_: Any) -> Any:
        return self


class Looking(ServedModel):
    """Asks after each change of one attribute, as another thread may."""

    seen: list[tuple[Any, Any]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.seen is not None:
            self.seen.append((self.submit([], 1), self.spec))


def test_no_request_goes_to_another_version_than_the_spec_is_of() -> None:
    first: Any = Loaded(1, spec())
    second: Any = Loaded(2, spec(width=3))
    nobody: Any = None
    with ThreadPoolExecutor(1) as judge:
        served = Looking(first, TrialRules(keep_previous_s=0), nobody, judge)
        served.seen = []
        served.activate(second)
    assert any(asked is second for asked, _ in served.seen)
    assert all(asked.spec is of for asked, of in served.seen)
