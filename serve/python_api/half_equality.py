"""``halfeven.assert_half_equal``: the gate for any two callables, in a test of the user's own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...exporters.gate.parity import judge, noise_of
from ...exporters.gate.trial import Trial
from ...exporters.proof.informative import why_answers_show_nothing
from ...models.errors import BadSetting
from ...models.spec.datatypes import name_of
from ...models.spec.spec import KINDS, Dim, ModelSpec, ParityLimits, TensorSpec
from .arrays_given import Arrays, Given, as_numpy, is_tensor

Model = Callable[..., Any]
_SIZES = (1, 2, 3)
_FEW = 64  # samples that are also asked in small batches


def assert_half_equal(
    fp32: Model,
    fp16: Model,
    *,
    samples: Given | tuple[Given, ...] | Mapping[str, Given],
    kind: str = "tensor",
    dtype: str = "fp16",
    **limits: Any,
) -> None:
    """Raise AssertionError, with the sentences of halfeven's gate, unless ``fp16`` answers as ``fp32`` does, and where
    the answers of ``fp32`` are such that any half would pass.

    ``fp32``, ``fp16``: a module, a `Half`, or any callable that takes the samples as they are given (an array, a tuple
    in order, or arrays by name; the first axis counts the samples) and answers an array, a tuple or a dictionary. A
    module gets tensors, in its own datatype and on its own device. Both are asked all samples at once, and the first
    64 in batches of 1, 2 and 3. ``kind``: of the outputs, as in model.toml; ``limits``: keys of its ``[parity]`` that
    limit the gate.
    """
    if kind not in KINDS:
        raise BadSetting(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    allowed = _allowed(limits)
    count = len(next(iter(_values(samples))))
    batches = list(_batches(count))
    reference = [_answers(fp32, _part(samples, rows)) for rows in batches]
    candidate = [_answers(fp16, _part(samples, rows)) for rows in batches]
    outputs = tuple(
        TensorSpec(
            name, name_of(array.dtype), (Dim(),) * array.ndim, kind if array.dtype.kind == "f" else "tensor"
        )
        for name, array in reference[0].items()
    )
    if reason := why_answers_show_nothing(outputs, reference[:1]):
        raise AssertionError(f"nothing is proven: {reason}")
    spec = ModelSpec("model", (), outputs, count, parity=allowed)
    trials = [
        Trial(tuple(rows), original, _widened(half, original))
        for rows, original, half in zip(batches, reference, candidate, strict=True)
    ]
    everything = reference[0]
    itself = [
        Trial(tuple(rows), {name: array[rows] for name, array in everything.items()}, found)
        for rows, found in zip(batches[1:], reference[1:], strict=True)
    ]
    report = judge(spec, dtype, trials, noise=noise_of(spec, itself))
    if not report.passed:
        raise AssertionError(
            "the half is not equal:\n" + "\n".join(one.message for one in report.all_failures)
        )


def _allowed(limits: Mapping[str, Any]) -> ParityLimits:
    """The limits of the gate by their keys. Raises BadSetting for a key that limits nothing here."""
    if "min_recall" in limits:
        raise BadSetting("limits: min_recall limits `halfeven index-check`, and not what is compared here")
    try:
        return ParityLimits(**limits, overridden=tuple(sorted(limits)))
    except TypeError as error:
        raise BadSetting(f"limits: expected keys of [parity] in model.toml: {error}") from None


def _batches(count: int) -> Iterator[list[int]]:
    """The rows of each batch: all of them, then the first ones in small batches."""
    yield list(range(count))
    for size in _SIZES:
        for start in range(0, min(count, _FEW) - size + 1, size):
            yield list(range(start, start + size))


def _values(samples: Any) -> tuple[Given, ...]:
    if isinstance(samples, Mapping):
        return tuple(samples.values())
    return samples if isinstance(samples, tuple) else (samples,)


def _part(samples: Any, rows: list[int]) -> Any:
    if isinstance(samples, Mapping):
        return {name: array[rows] for name, array in samples.items()}
    return tuple(array[rows] for array in _values(samples))


def _answers(model: Model, given: Any) -> Arrays:
    """The answers by name, to inputs by name or in order."""
    import torch

    if isinstance(model, torch.nn.Module):
        first = next((one for one in model.parameters() if one.is_floating_point()), None)

        def tensor(value: Given) -> torch.Tensor:
            made = value if is_tensor(value) else torch.from_numpy(as_numpy(value))
            if first is None:
                return made
            return made.to(first.device, first.dtype if made.is_floating_point() else None)

        given = (
            {n: tensor(v) for n, v in given.items()} if isinstance(given, dict) else tuple(map(tensor, given))
        )
    with torch.no_grad():
        found = model(**given) if isinstance(given, dict) else model(*given)
    if isinstance(found, Mapping):
        return {str(name): as_numpy(value) for name, value in found.items()}
    if isinstance(found, tuple | list):
        return {str(place): as_numpy(value) for place, value in enumerate(found)}
    return {"output": as_numpy(found)}


def _widened(half: Arrays, original: Arrays) -> Arrays:
    """The half's answers in the datatypes of FP32's, for the gate asks for the same; other names stay as they are."""
    return {
        name: array.astype(original[name].dtype)
        if name in original and original[name].dtype.kind == "f"
        else array
        for name, array in half.items()
    }
