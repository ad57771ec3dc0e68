"""The tests that need a CUDA device: the gate there, and the savings of half. Skipped, and counted, without one."""

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.on_device.reprove import holds_here, reprove
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.store.store import Store, Version
from halfeven.models.zoo import zoo_folder

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Version:
    store = Store(tmp_path_factory.mktemp("gpu"))
    return convert(zoo_folder("digits"), store, Options(forms=("torch",))).version


def test_the_half_is_equal_on_the_device_too(digits: Version) -> None:
    assert not holds_here(digits, CUDA)
    samples = load_samples(digits.file("samples.safetensors"), digits.spec())
    report = reprove(digits, load_half(digits, "torch", CUDA), CUDA, samples)
    assert report.passed, report.summary()
    assert report.max_error_u > 0, "nothing was half"


def test_the_original_on_the_device_is_the_original_on_the_cpu(digits: Version) -> None:
    image = np.random.default_rng().random((16, 1, 8, 8), dtype=np.float32)
    (here,) = load_original(digits, "torch", CUDA).run([[image]])
    (there,) = load_original(digits, "torch", torch.device("cpu")).run([[image]])
    assert np.abs(here - there).max() <= 1e-5 * np.abs(there).max()


def test_half_weights_take_half_the_memory(digits: Version) -> None:
    def taken(load: object) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = load(digits, "torch", CUDA)  # type: ignore[operator]
        taken = torch.cuda.memory_allocated() - before
        engine.close()
        return taken

    # allocations are rounded up to 512 bytes, and BatchNorm's statistics stay FP32
    assert taken(load_half) <= 0.6 * taken(load_original)
