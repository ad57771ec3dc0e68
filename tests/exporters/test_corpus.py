"""The corpus: sound in FP32 before anything is said of a half; then every model converts or is refused."""

from collections import Counter

import pytest
import torch
from halfeven.models.archive.admitted_operators import is_admitted
from halfeven.models.program import walk
from torch import Tensor

from tests.corpus import CORPUS, FAMILIES, built, captured, cases, fresh

SAME = 1e-4  # of an output's largest value, as the capture holds a program against its module

every_model = pytest.mark.parametrize("name", cases(CORPUS))
batched = pytest.mark.parametrize(
    "name", cases(name for name, case in CORPUS.items() if case.max_batch_size > 1)
)


def answers(name: str, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return captured(name).run(*[tensor.clone() for tensor in inputs.values()])


def in_batches(name: str, inputs: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """The original's answers to all rows, in batches as large as the model takes."""
    parts = [tensor.split(CORPUS[name].max_batch_size) for tensor in inputs.values()]
    return [answers(name, dict(zip(inputs, part, strict=True))) for part in zip(*parts, strict=True)]


def same(one: Tensor, other: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two answers are the same but for the order in which kernels add."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = (other if scale is None else scale).abs().max()
    return one.shape == other.shape and bool((one - other).abs().max() <= SAME * largest)


def test_the_corpus_is_large_and_no_name_stands_for_two_models() -> None:
    names = Counter(name for family in FAMILIES for name in family.CASES)
    assert [name for name, times in names.items() if times > 1] == []
    traps = [case for case in CORPUS.values() if case.trap and not case.harmless]
    assert len(CORPUS) >= 44 and len(traps) >= 20
    assert len({case.trap for case in CORPUS.values() if case.trap}) == sum(
        bool(c.trap) for c in CORPUS.values()
    )
    assert all(case.trap for case in CORPUS.values() if case.harmless)


@every_model
def test_fp32_is_finite_and_not_constant_on_fresh_inputs(name: str) -> None:
    found = [torch.cat(output) for output in zip(*in_batches(name, fresh(name, 12, seed=101)), strict=True)]
    for output in found:
        assert output.shape[0] == 12
        assert bool(torch.isfinite(output).all())
        assert not torch.equal(output, output[:1].expand_as(output)), "it says the same of every row"


@every_model
def test_an_archive_may_hold_every_operation_of_the_captured_program(name: str) -> None:
    calls = [
        node.target for _, node in walk(captured(name).program.graph_module) if node.op == "call_function"
    ]
    written = [f"torch.ops.{call}" for call in calls if isinstance(call, torch._ops.OpOverload)]
    assert written and [call for call in written if not is_admitted(call)] == []


@every_model
def test_the_captured_program_answers_as_the_module_does(name: str) -> None:
    inputs = fresh(name, min(CORPUS[name].max_batch_size, 5), seed=102)
    with torch.inference_mode():
        expected = built(name)(**{key: tensor.clone() for key, tensor in inputs.items()})
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert all(same(came, want) for came, want in zip(answers(name, inputs), expected, strict=True))


@batched
def test_a_row_is_answered_alone_as_it_is_in_a_batch(name: str) -> None:
    inputs = fresh(name, 4, seed=103)
    together = answers(name, inputs)
    for row in range(4):
        alone = answers(name, {key: tensor[row : row + 1] for key, tensor in inputs.items()})
        assert all(same(one, many[row : row + 1], many) for one, many in zip(alone, together, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CORPUS.items() if case.free])
def test_a_free_axis_stays_free_and_may_be_shorter_and_longer(name: str) -> None:
    case, program = CORPUS[name], captured(name).program
    shapes = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"}
    inputs = fresh(name, 2, seed=104)
    for axis, dim in case.free.items():
        sizes = [
            shapes[user][axis] for user in program.graph_signature.user_inputs if len(shapes[user]) > axis
        ]
        assert sizes and all(isinstance(size, torch.SymInt) for size in sizes)
        for length in (max(2, dim.minimum), dim.maximum or 32):
            resized = {key: _resize(tensor, axis, length) for key, tensor in inputs.items()}
            assert all(bool(torch.isfinite(output).all()) for output in answers(name, resized))


def _resize(tensor: Tensor, axis: int, length: int) -> Tensor:
    """Cut or repeated along an axis, where it has one."""
    return (
        tensor
        if tensor.ndim <= axis
        else tensor.index_select(axis, torch.arange(length) % tensor.shape[axis])
    )


# What a conversion makes of the corpus is claimed below this line.
