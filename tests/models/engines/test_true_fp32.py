"""Whatever a process has set for FP32 products before, afterwards they are FP32."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from halfeven.models.engines import true_fp32
from halfeven.models.engines.true_fp32 import settings_kept, use_true_fp32
from halfeven.models.errors import BadSetting

CUDNN: Any = torch.backends.cudnn  # torch gives `conv` no type
BEFORE: dict[str, Callable[[], None]] = {
    "for everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "recurrent layers": lambda: setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(CUDNN.conv, "fp32_precision", "tf32"),
    "convolutions, the older way": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "products, the older way": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "products, the newer way alone": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "products on a CPU too": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.fixture(autouse=True)
def true_afterwards() -> Iterator[None]:
    yield
    use_true_fp32()


def precisions() -> set[str]:
    return {settings.fp32_precision for settings in true_fp32._settings()}


@pytest.mark.parametrize("setting", BEFORE)
def test_no_setting_is_left_that_computes_fp32_in_less(setting: str) -> None:
    use_true_fp32()
    BEFORE[setting]()
    assert precisions() != {"ieee"}
    use_true_fp32()
    assert precisions() == {"ieee"}


@pytest.mark.parametrize("setting", BEFORE)
def test_the_older_interface_reads_the_same_and_does_not_raise(setting: str) -> None:
    BEFORE[setting]()
    use_true_fp32()
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


def test_where_onednns_own_variable_asks_for_less_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
        patched.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
        with pytest.raises(BadSetting, match="DNNL_DEFAULT_FPMATH_MODE=BF16"):
            use_true_fp32()


def all_settings() -> list[object]:
    products = torch.backends.cuda.matmul
    older = [lambda: products.allow_tf32, lambda: CUDNN.allow_tf32, torch.get_float32_matmul_precision]
    reduced = products.allow_fp16_reduced_precision_reduction
    newer = [settings.fp32_precision for settings in true_fp32._settings()]
    return [*map(true_fp32._older, older), reduced, *newer]


@pytest.mark.parametrize("setting", BEFORE)
def test_a_conversion_in_the_callers_process_leaves_the_settings_as_they_were(setting: str) -> None:
    BEFORE[setting]()
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    before = all_settings()
    with settings_kept():
        use_true_fp32()
        assert precisions() == {"ieee"}
    assert all_settings() == before
