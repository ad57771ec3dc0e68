"""Tensors that forward makes at its first call and keeps in the module: a table of angles, a mask for a length.

Where the first call is the one that is traced, what is kept has no numbers, and the module cannot run any more. It is
then put back to what it was, and called once before it is traced. Runs in the child.
"""

import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

Program = TypeVar("Program")


def traced(
    torch: ModuleType, module: "nn.Module", export: Callable[[], Program], example: Sequence["Tensor"]
) -> Program:
    """The program that ``export`` gives of the module; where the module kept what was traced, of its second call.
    ``example``: an input for each parameter of its forward."""
    before = _Before(module)
    try:
        program = export()
        if not before.holds_traced(torch):
            return program
    except Exception:
        if not before.holds_traced(torch):
            raise
    before.put_back()
    with contextlib.suppress(Exception):  # the export raises its own error
        module(*(tensor.clone() for tensor in example))
    return export()


class _Before:
    """The attributes and buffers of a module and its parts, as they are when this object is made."""

    def __init__(self, module: "nn.Module") -> None:
        self._module = module
        self._before = [(held, dict(held)) for held in _dictionaries(module)]

    def holds_traced(self, torch: ModuleType) -> bool:
        """True if the module holds a tensor that was made while it was traced."""
        fake = torch._subclasses.FakeTensor
        return any(isinstance(value, fake) for held in _dictionaries(self._module) for value in held.values())

    def put_back(self) -> None:
        for held, before in self._before:
            held.clear()
            held.update(before)


def _dictionaries(module: "nn.Module") -> list[dict[Any, Any]]:
    """The attributes of each part, and the dictionaries among them: those of its buffers, a cache by length."""
    found = [vars(part) for part in module.modules()]
    return found + [value for held in found for value in held.values() if type(value) is dict]
