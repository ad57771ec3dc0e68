"""The bounds of an order as the environment sets them, with the limits that the server's settings have."""

import pytest
from annotated_types import Ge, Gt, Le
from halfeven.models.errors import BadSetting
from halfeven.models.order.one_order import DEFAULT_BOUNDS, OrderBounds
from halfeven.models.order.order_settings import order_bounds
from halfeven.serve.settings import Settings
from pydantic import ValidationError

SECONDS, MEMORY, RUNS = "HALFEVEN_CONVERT_SECONDS", "HALFEVEN_CONVERT_MEMORY_MIB", "HALFEVEN_CONVERT_RUNS"


def test_what_is_not_set_is_as_by_default() -> None:
    assert order_bounds(environment={}) == DEFAULT_BOUNDS
    assert order_bounds(3, {"HALFEVEN_PORT": "none"}) == OrderBounds(at_once=3), (
        "only its own settings are read"
    )


def test_every_bound_is_read_in_its_unit_and_in_either_case() -> None:
    given = {SECONDS: "1.5", MEMORY.lower(): "512", RUNS: "7"}
    assert order_bounds(2, given) == OrderBounds(1.5, 512 * 2**20, 7, 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((SECONDS, text) for text in ("0", "-1", "nan", "", "soon")),
        *((MEMORY, text) for text in ("255", "16777217", "1e3", "")),
        *((RUNS, text) for text in ("0", "2.5", "many")),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected_and_the_server_refuses_it_too(
    name: str, text: str
) -> None:
    with pytest.raises(BadSetting, match=f"^{name} = '{text}': expected a "):
        order_bounds(environment={name: text})
    with pytest.raises(ValidationError):
        Settings(**{name.removeprefix("HALFEVEN_").lower(): text})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["convert_seconds", "convert_memory_mib", "convert_runs"])
def test_the_least_and_the_most_that_the_server_takes_are_taken(name: str) -> None:
    variable = f"HALFEVEN_{name.upper()}"
    for limit in Settings.model_fields[name].metadata:
        if isinstance(limit, Ge | Le):
            number = limit.ge if isinstance(limit, Ge) else limit.le
            assert order_bounds(environment={variable: str(number)})
        if isinstance(limit, Gt):
            with pytest.raises(BadSetting):
                order_bounds(environment={variable: str(limit.gt)})
