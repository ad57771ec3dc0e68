"""``halfeven.assert_half_equal``: the gate for any two callables, in a test of the user's own."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ...exporters.gate.parity import judge, noise_of
from ...exporters.gate.refusals import without_advice
from ...exporters.gate.trial import Trial
from ...exporters.gate.verdict import ParityReport
from ...exporters.inputs.samples import as_fp32
from ...exporters.proof.informative import why_answers_show_nothing, why_noise_proves_nothing
from ...models.errors import BadFolder, BadInput, BadSamples, BadSetting
from ...models.folder.model_keys import HALF_DTYPES, PARITY
from ...models.folder.toml_reader import TomlReader
from ...models.spec.datatypes import name_of
from ...models.spec.spec import KINDS, Dim, ModelSpec, ParityLimits, TensorSpec
from .arrays_given import Arrays, Given, as_numpy, by_name, is_tensor

Model = Callable[..., Any]
_HALF = f"{__package__}.half"  # brings a server's modules, which two functions do not need
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
    module gets tensors, in its own datatype and on its own device. ``fp32`` is asked without TF32, ``fp16`` with the
    settings of the process. Both are asked all samples at once, and the first
    64 in batches of 1, 2 and 3. ``kind``: of the outputs, as in model.toml; ``limits``: keys of its ``[parity]`` that
    limit the gate.
    """
    for name, word, known in (("kind", kind, KINDS), ("dtype", dtype, HALF_DTYPES)):
        if word not in known:
            raise BadSetting(f"{name}={word!r}: expected one of {', '.join(known)}")
    for name, model in (("fp32", fp32), ("fp16", fp16)):
        if not callable(model):
            raise BadSetting(f"{name}: expected a module, or a function of the samples, got {model!r}")
    _check_original(fp32, fp16)
    allowed, samples = _allowed(limits), _checked(samples)
    batches = list(_batches(len(next(iter(_values(samples))))))
    with _true_fp32():
        reference = [_answers(fp32, _part(samples, rows)) for rows in batches]
    for rows, answers in zip(batches, reference, strict=True):
        _check_rows(answers, len(rows))
    candidate = [_answers(fp16, _part(samples, rows)) for rows in batches]
    report = _judged(allowed, kind, dtype, batches, reference, candidate)
    if not report.passed:
        raise AssertionError(
            "the half is not equal:\n" + "\n".join(without_advice(one).message for one in report.all_failures)
        )
    if reason := why_noise_proves_nothing([report], allowed):
        in_training = getattr(fp32, "training", False) is True  # a module of torch
        advice = "; fp32 is in training mode: call fp32.eval() first" if in_training else ""
        raise AssertionError(f"nothing is proven: {reason}{advice}")


def _judged(
    limits: ParityLimits,
    kind: str,
    dtype: str,
    batches: Sequence[list[int]],
    reference: Sequence[Arrays],
    candidate: Sequence[Arrays],
) -> ParityReport:
    """The gate's report on the answers to each batch, of which the first has all samples. Raises AssertionError where
    the answers of FP32 are such that any half would pass."""
    everything = reference[0]
    outputs = tuple(
        TensorSpec(
            name, name_of(array.dtype), (Dim(),) * array.ndim, kind if array.dtype.kind == "f" else "tensor"
        )
        for name, array in everything.items()
    )
    if reason := why_answers_show_nothing(outputs, [everything]):
        raise AssertionError(f"nothing is proven: {reason}")
    spec = ModelSpec("model", (), outputs, len(batches[0]), parity=limits)
    trials = [
        Trial(tuple(rows), original, _widened(half, original))
        for rows, original, half in zip(batches, reference, candidate, strict=True)
    ]
    itself = [
        Trial(tuple(rows), {name: array[rows] for name, array in everything.items()}, found)
        for rows, found in zip(batches[1:], reference[1:], strict=True)
    ]
    return judge(spec, dtype, trials, noise=noise_of(spec, itself))


@contextmanager
def _true_fp32() -> Iterator[None]:
    """Torch's own setting for convolutions on CUDA is TF32, whose error is as large as that of half."""
    if sys.modules.get("torch") is None:
        yield
        return
    from ...models.engines.true_fp32 import settings_kept, use_true_fp32

    with settings_kept():
        use_true_fp32()
        yield


def _is_module(model: Any) -> bool:
    """True if the model is a module of torch. Where torch was never imported, no model is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _check_original(fp32: Any, fp16: Any) -> None:
    """Raises BadSetting for a module that is no FP32 original: ``net.half()`` changes ``net`` itself."""
    if not _is_module(fp32):
        return
    short = next((one for one in (*fp32.parameters(), *fp32.buffers()) if _is_short(one)), None)
    if fp32 is fp16 or short is not None:
        why = "fp16 is the same module" if short is None else f"it has weights of {short.dtype}"
        raise BadSetting(
            f"fp32: expected the FP32 original, and {why} (net.half() changes net itself): give the original as fp32, "
            "and copy.deepcopy(net).half() as fp16"
        )


def _is_short(tensor: Any) -> bool:
    return tensor.is_floating_point() and tensor.itemsize < 4


def _allowed(limits: Mapping[str, Any]) -> ParityLimits:
    """The limits of the gate by their keys, held to the table of the keys of model.toml. Raises BadSetting."""
    if "min_recall" in limits:
        raise BadSetting("limits: min_recall limits `halfeven index-check`, and not what is compared here")
    given = {key: value.item() if isinstance(value, np.generic) else value for key, value in limits.items()}
    keys = {key: PARITY[key] for key in PARITY.keys() - {"min_recall", "unstable"}}
    try:
        held = TomlReader(Path("limits")).table({"parity": given}, "parity", keys)
    except BadFolder as error:
        raise BadSetting(str(error)) from None
    return ParityLimits(**held, overridden=tuple(sorted(held)))


def _checked(samples: Any) -> Any:
    """The samples as arrays and tensors, by name or in order. Raises BadInput, BadSamples where their rows do not
    match."""
    named = samples if isinstance(samples, Mapping) else dict(enumerate(_values(samples)))
    made = {
        name: value if isinstance(value, np.ndarray) or is_tensor(value) else as_numpy(value, str(name))
        for name, value in named.items()
    }
    counts = {name: len(value) if value.ndim else 0 for name, value in made.items()}
    if len({*counts.values()}) != 1 or 0 in counts.values():
        raise BadSamples(
            f"samples: expected arrays with one row or more, all with as many (first axis = samples), got {counts}"
        )
    if not isinstance(samples, Mapping):
        return tuple(made.values())
    if odd := [name for name in made if not isinstance(name, str)]:
        raise BadSamples(f"samples: expected the name of an input (a string) as each key, got {odd[0]!r}")
    return made


def _check_rows(answers: Arrays, rows: int) -> None:
    """Raises BadInput for an output of FP32 that has not a row for each sample."""
    for name, array in answers.items():
        if array.shape[:1] != (rows,):
            raise BadInput(
                f"fp32: output '{name}' has the shape {list(array.shape)} for {rows} samples: expected a row for each"
            )


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


def _answers(model: Any, given: Any) -> Arrays:
    """The answers by name, to inputs by name or in order. Where torch was never imported, no model is its module."""
    torch = sys.modules.get("torch")
    if torch is not None and _is_module(model):
        first = next((one for one in model.parameters() if one.is_floating_point()), None)

        def tensor(value: Given) -> Any:
            made = value if is_tensor(value) else torch.from_numpy(as_numpy(value))
            if first is None:
                return made
            return made.to(first.device, first.dtype if made.is_floating_point() else None)

        given = (
            {n: tensor(v) for n, v in given.items()} if isinstance(given, dict) else tuple(map(tensor, given))
        )
    with torch.no_grad() if torch else nullcontext():
        if isinstance(model, getattr(sys.modules.get(_HALF), "Half", ())):
            found = _of_half(model, given)
        else:
            found = model(**given) if isinstance(given, dict) else model(*given)
    if isinstance(found, tuple | list):
        found = dict(enumerate(found))
    named = found if isinstance(found, Mapping) else {"output": found}
    # An engine may give the same memory again for the next batch.
    return {str(name): np.array(as_numpy(value, str(name))) for name, value in named.items()}


def _of_half(half: Any, given: Any) -> Any:
    """The answers of a `Half` to inputs in its own datatypes, in as many requests as their rows need."""
    spec = half.version.spec()
    wanted = {tensor.name: tensor.datatype for tensor in spec.inputs}
    named = by_name([*wanted], (given,) if isinstance(given, dict) else given, {}, f"'{half.name}'")
    arrays = {name: as_fp32(as_numpy(value, name), wanted.get(name, "")) for name, value in named.items()}
    rows = len(next(iter(arrays.values())))
    most = spec.max_request_rows if spec.batched else rows
    parts = [
        half({name: array[start : start + most] for name, array in arrays.items()})
        for start in range(0, rows, most)
    ]
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _widened(half: Arrays, original: Arrays) -> Arrays:
    """The half's answers in the datatypes of FP32's, for the gate asks for the same; other names stay as they are."""
    return {
        name: array.astype(original[name].dtype)
        if name in original and original[name].dtype.kind == "f"
        else array
        for name, array in half.items()
    }
