"""Takes the answer of a forward apart into tensors: nested tuples, lists and dicts are gone into, in order.

A part of a dict has its key as its name, a part of a tuple or list its place; names of nested parts are joined with
dots: ``{"logits": a, "hidden": (b, c)}`` has the parts ``logits``, ``hidden.0`` and ``hidden.1``. A dataclass is taken
for the dict of its fields.

Runs in the child, the trainer and the live form.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .failures import Refused


def by_name(answer: Any) -> Mapping[str, Any] | None:
    """The parts of a dict or dataclass; None for anything else."""
    if hasattr(answer, "keys"):
        return {key: answer[key] for key in list(answer.keys())}
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    return None


def parts_of(answer: Any) -> list[tuple[str, Any]]:
    """(name, value) of every part that is no tuple, list or dict. Raises Refused where two have one name."""
    parts = list(_parts(answer, ""))
    names = Counter(name for name, _ in parts)
    if twice := [name for name, times in names.items() if times > 1]:
        raise Refused(
            f"forward gives {names[twice[0]]} outputs with the name '{twice[0]}' (a part of a dict or a list has the "
            "names of both, with a dot): give them other names"
        )
    return parts


def _parts(answer: Any, name: str) -> Iterator[tuple[str, Any]]:
    if (named := by_name(answer)) is not None:
        inside = named.items()
    elif isinstance(answer, (tuple, list)):
        inside = enumerate(answer)
    else:
        yield name, answer
        return
    for key, part in inside:
        yield from _parts(part, f"{name}.{key}" if name else str(key))


def is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage")


def in_order(answer: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """The parts that model.toml names, in its order: of a dict by name, of a tuple or list by place.

    Raises Refused where a name is missing, the number is another one, or a part is no tensor.
    """
    named = parts_of(answer)
    if by_name(answer) is not None:
        found = dict(named)
        if missing := [name for name in names if name not in found]:
            raise Refused(f"forward gave outputs {sorted(found)}, but model.toml names {missing}")
        values = tuple(found[name] for name in names)
    else:
        values = tuple(value for _, value in named)
        if len(values) != len(names):  # a None or a number beside the tensors is no output
            values = tuple(value for value in values if is_tensor(value))
        if len(values) != len(names):
            nested = any("." in name for name, _ in named)
            counted = " (each tensor inside of a tuple, list or dict is one)" if nested else ""
            raise Refused(
                f"forward gave {len(values)} outputs{counted}, model.toml names {len(names)}: {names}"
            )
    for name, value in zip(names, values, strict=True):
        if not is_tensor(value):
            raise Refused(f"output '{name}' must be a tensor, forward gave {type(value).__name__}")
    return values
