"""The work of an execution in operations, estimated from shapes. Budgets are counts of them, never seconds.

The unit is one multiply-add of a matrix product. Other work is counted in that unit, with figures that were measured
once: on one core of an AMD EPYC with AVX-512, torch 2.13, the emulated halves of twelve models of the corpus took 84 µs
for a node, 1.0 ns for an element and 0.073 ns for a multiply-add (least squares), on a machine with other work. So
2**34 operations are about a second of one core. The estimate is the same on every machine: where the figures are wrong
for a machine, a conversion takes longer or shorter there and gives the same plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..question import Answers, Arrays
from .classes import Trait, class_of, has

PER_NODE = 1 << 19  # half of the measured time: the machine was not idle
PER_ELEMENT = 16
# Operations for each element and frequency. Measured with ONNX Runtime 1.32 on a Xeon: 3 for frames of 256 and 512
# samples, 15 for frames of 400, whose length is no power of two.
FOURIER = 8

Shape = Sequence[int]


def multiply_adds(op: str, operands: Sequence[Shape], result: Shape) -> int:
    """The multiply-adds of one node; 0 where it is not a product. ``operands``: the shapes of its tensors, in order."""
    name = class_of(op).name
    if name in ("matrix product", "dot product") and operands[0]:
        return math.prod(result) * operands[0][-1]
    if name == "product and sum":
        return math.prod(result) * operands[1][-1]
    if name == "convolution":
        return math.prod(result) * math.prod(operands[1][1:])
    if name == "transposed convolution":
        return math.prod(operands[0]) * math.prod(operands[1][1:])
    if has(op, Trait.ATTENTION):  # scores and values: the keys' number for each element
        apart = len(operands) > 1 and len(operands[1]) > 1  # else queries, keys and values are one tensor
        return 2 * math.prod(result) * (operands[1] if apart else result)[-2]
    if has(op, Trait.RECURRENT):  # every weight once for each row and step
        weights = sum(math.prod(shape) for shape in operands[1:] if len(shape) > 1)
        return math.prod(operands[0][:-1]) * weights
    if name in ("spectral", "short-time spectral"):
        return math.prod(result) * FOURIER * result[-2]  # the frequencies, for a real and an imaginary part
    return 0


@dataclass(slots=True)
class Counted:
    """The counts of one execution: nodes that ran, elements of their results, multiply-adds of products."""

    nodes: int = 0
    elements: int = 0
    multiply_adds: int = 0

    def add(self, op: str, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        self.nodes += 1
        self.elements += sum(map(math.prod, results))
        if results:
            self.multiply_adds += multiply_adds(op, operands, results[0])

    def estimate(self, inputs: int) -> "Operations":
        """``inputs``: how many elements the inputs of the counted execution had."""
        varying = PER_ELEMENT * self.elements + self.multiply_adds
        return Operations(PER_NODE * self.nodes, varying, max(inputs, 1))


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of any execution: ``fixed``, and ``varying`` for every ``inputs`` elements of its inputs."""

    fixed: int = 0
    varying: int = 0
    inputs: int = 1

    def of(self, inputs: Arrays) -> int:
        """The number of operations of one execution on these inputs."""
        return self.fixed + self.varying * sum(array.size for array in inputs.values()) // self.inputs


UNKNOWN = Operations()


class Meter:
    """Adds up the operations of all executions through it."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._spent = 0

    def spent(self) -> int:
        return self._spent

    def on(self, answers: Answers) -> Answers:
        """A function that gives what ``answers`` gives, and counts the operations."""

        def answer(inputs: Arrays) -> dict[str, np.ndarray]:
            self._spent += self._operations.of(inputs)
            return answers(inputs)

        return answer
