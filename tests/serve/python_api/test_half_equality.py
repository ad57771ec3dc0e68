"""`assert_half_equal` and its fixture: the gate for two callables of a user's test."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import halfeven as he
import numpy as np
import pytest
import torch
from halfeven.models.errors import BadInput, BadSamples, BadSetting
from torch import nn

from tests.serve.python_api.page_blocks import BLOCKS

PLUGIN = "halfeven.serve.python_api.pytest_plugin"
pytest_plugins = ["pytester"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).eval()


def clear_rows(model: nn.Module, count: int) -> torch.Tensor:
    """``[count, 8]``, FP32: rows whose first choice is so far from the second that no rounding to half changes it."""
    rows = torch.randn(10 * count, 8)
    first, second = model(rows).detach().topk(2).values.unbind(-1)
    return rows[first - second > 0.02][:count]


def test_a_true_half_is_equal_and_a_broken_one_is_refused_in_the_words_of_the_gate() -> None:
    whole = net()
    x, half = clear_rows(whole, 40), copy.deepcopy(whole).half()
    he.assert_half_equal(whole, half, samples=x, kind="logits")
    he.assert_half_equal(whole, lambda rows: half(rows.half()), samples=x)
    with torch.no_grad():
        half[2].weight[1] *= 1.02  # type: ignore[index, union-attr]
    with pytest.raises(AssertionError, match="output 'output'"):
        he.assert_half_equal(whole, half, samples=x)
    he.assert_half_equal(whole, half, samples=x, max_error_u=1000, min_sqnr_db=10, min_slice_sqnr_db=10)


def test_fp32_is_asked_without_tf32_and_the_half_with_the_settings_of_the_process() -> None:
    seen = dict[str, set[bool]](fp32=set(), fp16=set())

    def asked(side: str, x: Any) -> Any:
        seen[side].add(torch.backends.cudnn.allow_tf32)
        return x

    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True  # as torch has it by itself
        he.assert_half_equal(
            lambda x: asked("fp32", x), lambda x: asked("fp16", x), samples=torch.randn(8, 4)
        )
        assert seen == {"fp32": {False}, "fp16": {True}}
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("given", ["array", "tuple", "names"])
def test_samples_are_given_in_order_or_by_name_and_answers_are_many(given: str) -> None:
    def whole(a: Any, b: Any) -> Any:
        return {"sum": a + b, "first": np.argmax(a, -1)} if given == "names" else (a + b, np.argmax(a, -1))

    def half(a: Any, b: Any) -> Any:
        found = whole(a, b)
        rounded = [np.float16(one) if one.dtype.kind == "f" else one for one in _listed(found)]
        return dict(zip(found, rounded, strict=True)) if isinstance(found, dict) else tuple(rounded)

    def _listed(found: Any) -> list[Any]:
        return list(found.values()) if isinstance(found, dict) else list(found)

    a, b = (np.random.normal(size=(20, 5)).astype(np.float32) for _ in range(2))
    if given == "array":
        he.assert_half_equal(lambda a: whole(a, a), lambda a: half(a, a), samples=a)
    else:
        he.assert_half_equal(whole, half, samples=(a, b) if given == "tuple" else {"b": b, "a": a})
    with pytest.raises(AssertionError):  # only in a batch of its own is the half wrong
        he.assert_half_equal(lambda a: a, lambda a: a + (len(a) == 2), samples=a)
    with pytest.raises(AssertionError):
        he.assert_half_equal(lambda a: a, lambda a: {"other": a}, samples=a)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (lambda x: (abs(x) + 1) * np.float32(2e9), lambda x: np.full_like(x, np.inf)),
        (lambda x: (abs(x) + 1) * np.float32(2e9), lambda x: (abs(x) + 1) * np.float32(2e5)),
        (lambda x: x * np.float32(np.nan), lambda x: x * np.float32(np.nan)),
        (lambda x: 0 * x, lambda x: 0 * x),
        (lambda x: x[:, :0], lambda x: x[:, :0]),
    ],
    ids=["infinite", "another unit", "not a number", "zero", "no elements"],
)
def test_answers_of_which_none_is_compared_prove_nothing(answer: Any, wrong: Any) -> None:
    rows = np.random.default_rng().standard_normal((64, 8)).astype(np.float32)
    with pytest.raises(AssertionError, match=r"nothing is proven: .*of a half"):
        he.assert_half_equal(answer, wrong, samples=rows)


@pytest.mark.parametrize("asked", [{}, {"kind": "logits"}])
def test_a_model_that_answers_by_chance_proves_nothing(asked: dict[str, str]) -> None:
    """The noise of such an original is wider than every error."""
    trained = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    other = copy.deepcopy(trained).eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    with pytest.raises(AssertionError, match=r"nothing is proven: .*call fp32\.eval\(\) first|not equal"):
        he.assert_half_equal(trained, other, samples=torch.randn(32, 8), **asked)
    x = np.random.default_rng().standard_normal((32, 8)).astype(np.float32)
    with pytest.raises(AssertionError, match="nothing is proven"):
        he.assert_half_equal(
            lambda x: x + 10 * np.random.default_rng().standard_normal(x.shape).astype(np.float32),
            lambda x: -x,
            samples=x,
        )


def test_a_module_that_is_half_itself_is_no_original() -> None:
    both = net()
    with pytest.raises(BadSetting, match="fp32: expected the FP32 original, and fp16 is the same module"):
        he.assert_half_equal(both, both, samples=torch.randn(4, 8))
    with pytest.raises(
        BadSetting, match=r"it has weights of torch\.float16 .*copy\.deepcopy\(net\)\.half\(\)"
    ):
        he.assert_half_equal(both, both.half(), samples=torch.randn(4, 8))


def test_an_engine_that_gives_the_same_memory_again_is_judged_by_what_was_in_it() -> None:
    memory = np.zeros((32, 8), np.float32)

    def by(factor: float) -> Any:
        def answer(x: np.ndarray) -> np.ndarray:
            memory[: len(x)] = factor * x
            return memory[: len(x)]

        return answer

    x = np.random.default_rng().standard_normal((32, 8)).astype(np.float32)
    he.assert_half_equal(by(1.0), by(1.0), samples=x)
    with pytest.raises(AssertionError, match="the half is not equal"):
        he.assert_half_equal(by(1.0), by(-1.0), samples=x)


X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"kind": "loggits"}, BadSetting, "kind='loggits': expected one of"),
        ({"dtype": "float16"}, BadSetting, "dtype='float16': expected one of fp16, bf16"),
        ({"fp16": "net.onnx"}, BadSetting, "fp16: expected a module, or a function of the samples"),
        ({"max_eror_u": 1}, BadSetting, "nearest known key is 'max_error_u'"),
        ({"min_recall": 1.0}, BadSetting, "index-check"),
        ({"max_error_u": "4"}, BadSetting, "max_error_u = '4': expected a number"),
        ({"max_error_u": float("nan")}, BadSetting, "max_error_u = nan: expected a finite number"),
        ({"overridden": ()}, BadSetting, "the key 'overridden' is unknown"),
        ({"samples": {}}, BadSamples, "expected arrays with one row or more"),
        ({"samples": np.float32(3)}, BadSamples, "expected arrays with one row or more"),
        ({"samples": (X, X[:5])}, BadSamples, "got {0: 6, 1: 5}"),
        ({"samples": {1: X}}, BadSamples, "expected the name of an input"),
        ({"samples": [[1.0, 2.0], [3.0]]}, BadInput, "every row of one shape"),
        (
            {"fp32": np.sum},
            BadInput,
            "output 'output' has the shape [] for 6 samples: expected a row for each",
        ),
        ({"fp32": lambda x: (x, None)}, BadInput, "tensor '1': expected numbers"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        he.assert_half_equal(**{"fp32": abs, "fp16": abs, "samples": X, **asked})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: {"y": x, "z": x},
        lambda x: {},
        lambda x: {"y": x[:1]},
        lambda x: {"y": x.sum()},
        lambda x: {"y": x > 0},
    ],
)
def test_other_answers_than_fp32_has_are_not_called_a_fault_of_halfeven(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="the half is not equal") as refused:
        he.assert_half_equal(lambda x: {"y": x}, wrong, samples=X)
    assert "report" not in str(refused.value) and "--keep" not in str(refused.value)


@pytest.mark.slow
def test_lists_are_samples_and_functions_are_compared_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import halfeven as he, numpy as np
he.assert_half_equal(lambda x: x * 3, lambda x: np.float16(x) * 3, samples=[[1.0, 2.0], [3.0, 4.5]])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fixture_runs_as_the_page_has_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BLOCKS[-1])
    Path(pytester.path / "test_other.py").write_text(
        "import numpy as np\ndef test_it(half_equal):\n"
        "    half_equal(lambda x: x, lambda x: x + 1, samples=np.ones((3, 2), 'f'))\n"
    )
    done = pytester.runpytest("-p", "no:halfeven", "-p", PLUGIN, "-q")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*AssertionError: the half is not equal:*"])
