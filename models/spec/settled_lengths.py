"""Inputs of lengths where the axis that they are of has one size: a range says the same, and needs no name."""

from collections.abc import Sequence
from dataclasses import replace

from .spec import TensorSpec
from .value_range import ValueRange


def settled(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The inputs, with the range 1 to n in the place of ``lengths_of`` where that axis has the fixed size n."""
    fixed = {dim.name: dim.minimum for tensor in inputs for dim in tensor.shape if dim.name and dim.fixed}
    return tuple(
        replace(tensor, lengths_of="", range=ValueRange((1,), (fixed[tensor.lengths_of],)))
        if tensor.lengths_of in fixed
        else tensor
        for tensor in inputs
    )
