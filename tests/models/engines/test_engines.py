"""Engines: both kinds answer as the program does, in the spec's order, and leave what came off the wire alone."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import torch
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.archive.archive import save_program
from halfeven.models.engines import staged_engine
from halfeven.models.engines.arrays import to_numpy, to_torch
from halfeven.models.engines.cpu.in_place import write_in_place
from halfeven.models.engines.cpu.one_product import make_one_product
from halfeven.models.engines.cpu.setup import PLAIN, CpuSetup
from halfeven.models.engines.device_choice import resolve_device
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.engines.staged_engine import is_brief, joined
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadSetting, DamagedFile, EngineFailed
from halfeven.models.program import runnable
from halfeven.models.store.store import LIVE, Store, Version
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nets import NETS, captured_net
from tests.programs import Original, original

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two inputs, two outputs, and the first input changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2.0)
        return self.linear(x), index + 1


@pytest.fixture(scope="module")
def net() -> Original:
    return original(Net(), {"x": torch.randn(8, 4), "index": torch.arange(8).reshape(8, 1)})


@pytest.fixture(scope="module")
def onnx_file(net: Original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "original.onnx"
    write_onnx(net.program, net.spec, path, {})
    return path


@pytest.fixture(params=["torch", "onnx"])
def engine(request: pytest.FixtureRequest, net: Original, onnx_file: Path) -> Engine:
    if request.param == "onnx":
        return OnnxEngine(onnx_file, "fp32", CPU)
    return TorchEngine(net.program, "fp32", CPU)


@pytest.mark.slow
def test_onnx_runtime_without_a_number_of_threads_is_given_that_of_the_usable_cores(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of ONNX Runtime itself is the number of the machine's cores."""
    monkeypatch.setattr("halfeven.models.engines.onnx_engine.usable_cores", lambda: 3)
    for setup, threads in ((PLAIN, 3), (CpuSetup(2), 2)):
        session = OnnxEngine(onnx_file, "fp32", CPU, setup)._session
        assert session.get_session_options().intra_op_num_threads == threads


def parts(*rows: int) -> list[list[np.ndarray]]:
    """One array per request and input, read-only as views of a request's body are."""
    random = np.random.default_rng()
    requests = [
        [random.standard_normal((n, 4)).astype(np.float32) for n in rows],
        [random.integers(0, 9, (n, 1)) for n in rows],
    ]
    for arrays in requests:
        for array in arrays:
            array.setflags(write=False)
    return requests


@pytest.mark.parametrize("rows", [(1,), (7,), (64,), (1, 2, 3), (5, 1)])
def test_an_engine_answers_as_the_program_does_whole_and_in_the_specs_order(
    rows: tuple[int, ...], engine: Engine, net: Original
) -> None:
    requests = parts(*rows)
    together = [torch.from_numpy(np.concatenate(arrays)) for arrays in requests]
    expected = net.run(*together)
    came = engine.run(requests)
    assert [array.dtype for array in came] == [np.float32, np.int64]
    np.testing.assert_allclose(came[0], expected[0].numpy(), rtol=1e-5, atol=1e-6)
    assert np.array_equal(came[1], expected[1].numpy())
    assert all(array.flags.c_contiguous for array in came)


def test_what_came_off_the_wire_is_never_written_to(engine: Engine) -> None:
    for rows in ((2,), (2, 3)):
        requests = parts(*rows)
        before = [[array.copy() for array in arrays] for arrays in requests]
        engine.run(requests)
        assert all(
            np.array_equal(one, other)
            for a, b in zip(requests, before, strict=True)
            for one, other in zip(a, b, strict=True)
        )


def test_answers_do_not_change_when_the_engine_runs_again(engine: Engine) -> None:
    first = engine.run(parts(3))
    kept = [array.copy() for array in first]
    engine.run(parts(3))
    assert all(np.array_equal(one, other) for one, other in zip(first, kept, strict=True))


def test_warming_up_changes_no_answer(engine: Engine) -> None:
    requests = parts(2)
    cold = engine.run(requests)
    engine.warm_up(parts(4))
    np.testing.assert_allclose(engine.run(requests)[0], cold[0], rtol=1e-5, atol=1e-6)
    assert (engine.precision, engine.device) == ("fp32", "cpu")


def test_a_closed_engine_gives_its_program_back(engine: Engine) -> None:
    engine.close()
    with pytest.raises(AttributeError):
        engine.run(parts(1))


def test_bfloat16_goes_in_and_comes_out() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    program = original(Double(), {"x": torch.randn(3, 4).bfloat16()}).program
    array = np.random.default_rng().standard_normal((5, 4)).astype(ml_dtypes.bfloat16)
    (came,) = TorchEngine(program, "bf16", CPU).run([[array[:2], array[2:]]])
    assert came.dtype == ml_dtypes.bfloat16
    assert np.array_equal(came.astype(np.float32), array.astype(np.float32) * 2)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.float16, np.float64]
)
def test_arrays_become_tensors_and_back_without_a_copy(dtype: type) -> None:
    array = np.random.default_rng().integers(0, 2, (2, 3)).astype(dtype)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert np.array_equal(to_numpy(tensor), array) and to_numpy(tensor).dtype == array.dtype


def test_joining_gives_fresh_memory_even_for_one_part_and_for_no_dimensions() -> None:
    for array in (np.zeros((2, 3)), np.zeros(())):
        one = joined([array])
        assert one.shape == array.shape and not np.shares_memory(one, array)
    assert joined([np.zeros((2, 3)), np.ones((1, 3))]).shape == (3, 3)


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width", [3, 700])
def test_parts_are_joined_in_order_whatever_their_size(dtype: type, width: int) -> None:
    random = np.random.default_rng()
    wide = random.integers(0, 2, (7, 2, width)).astype(dtype)
    wide.setflags(write=False)
    parts = [wide[:1], wide[1:4], wide[4:], wide[:0], wide[::3]]  # the last is not contiguous
    original = joined(parts)
    assert original.dtype == dtype and np.array_equal(original, np.concatenate(parts))
    assert original.flags.writeable and original.flags.c_contiguous and not np.shares_memory(original, wide)


def test_a_tensor_that_is_not_contiguous_comes_out_so() -> None:
    tensor = torch.arange(6).reshape(2, 3).t()
    assert to_numpy(tensor).flags.c_contiguous and to_numpy(tensor).tolist() == tensor.tolist()


def test_a_model_without_a_batch_takes_scalars_too(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    program = torch.export.export(Scale(), (torch.randn(3), torch.tensor(2.0)))
    x, by = np.arange(3, dtype=np.float32), np.array(3.0, np.float32)
    (came,) = TorchEngine(program, "fp32", CPU).run([[x], [by]])
    assert came.tolist() == [0.0, 3.0, 6.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_onnx_asked_for_cuda_without_it_says_what_there_is_and_never_falls_back(onnx_file: Path) -> None:
    with pytest.raises(EngineFailed) as caught:
        OnnxEngine(onnx_file, "fp32", torch.device("cuda:0"))
    assert "CPUExecutionProvider" in str(caught.value) and "halfeven doctor" in str(caught.value)


def test_onnx_runtime_without_the_cuda_provider_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(EngineFailed, match=r"offers \['CPUExecutionProvider'\].*halfeven doctor"):
        OnnxEngine(tmp_path / "absent.onnx", "fp32", torch.device("cuda:0"))


def test_a_file_that_is_no_onnx_is_named(tmp_path: Path) -> None:
    path = tmp_path / "torn.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(EngineFailed, match=str(path)):
        OnnxEngine(path, "fp32", CPU)


def test_a_device_is_auto_cpu_or_cuda_with_a_number() -> None:
    assert resolve_device("cpu") == resolve_device("cpu:0") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for word in ("gpu", "", "cuda:x", "mps", "meta"):
        with pytest.raises(BadSetting, match="expected auto, cpu or cuda:N"):
            resolve_device(word)
    with pytest.raises(BadSetting, match="CUDA devices"):
        resolve_device("cuda:99")


@pytest.fixture
def version(net: Original, onnx_file: Path, tmp_path: Path) -> Version:
    with Store(tmp_path).draft("net") as draft:
        draft.write_json("spec.json", net.spec.to_json())
        save_program(net.program, draft.folder / "original.pt2", weights=False)
        save_program(net.program, draft.folder / "half.pt2", weights=True)
        save_file(dict(net.program.state_dict), draft.folder / "weights.safetensors")
        for name in ("original.onnx", "half.onnx"):
            (draft.folder / name).write_bytes(onnx_file.read_bytes())
        return draft.publish(LIVE, {"half": "bf16"})


@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize(("load", "precision"), [(load_original, "fp32"), (load_half, "bf16")])
def test_a_version_is_loaded_in_either_form(
    load: Callable[[Version, str, torch.device], Engine],
    precision: str,
    form: str,
    version: Version,
    net: Original,
) -> None:
    engine = load(version, form, CPU)
    assert (engine.form, engine.precision) == (form, precision)
    assert getattr(engine, "_rows_apart", True), "the spec says that its rows are a batch"
    requests = parts(2)
    expected = net.run(*[torch.from_numpy(arrays[0].copy()) for arrays in requests])
    np.testing.assert_allclose(engine.run(requests)[0], expected[0].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "form"), [("weights.safetensors", "torch"), ("original.pt2", "torch"), ("original.onnx", "onnx")]
)
def test_a_version_with_a_damaged_file_is_not_loaded(file: str, form: str, version: Version) -> None:
    path = version.folder / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=file):
        load_original(version, form, CPU)


def swapped_after_the_check(path: Path, other: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another file in the place of ``path`` as soon as the digest of ``path`` has been taken."""
    digest, checked = hashlib.file_digest, path.stat().st_ino

    def taken(file: Any, kind: str) -> Any:
        found = digest(file, kind)
        if os.fstat(file.fileno()).st_ino == checked:
            (path.parent / "swapped").write_bytes(other)
            (path.parent / "swapped").replace(path)
        return found

    monkeypatch.setattr(hashlib, "file_digest", taken)


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("original.pt2", "torch"),
        ("weights.safetensors", "torch"),
        ("half.pt2", "torch"),
        ("half.onnx", "onnx"),
    ],
)
def test_the_file_that_was_checked_is_the_file_that_is_loaded(
    file: str, form: str, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped_after_the_check(version.folder / file, b"another file", monkeypatch)
    engine = (load_half if file.startswith("half") else load_original)(version, form, CPU)
    requests = parts(2)
    expected = engine.run(requests)[0]
    engine.warm_up(requests)  # ONNX Runtime may be given the file once more
    np.testing.assert_allclose(engine.run(requests)[0], expected, rtol=1e-5, atol=1e-6)
    assert (version.folder / file).read_bytes() == b"another file"
    engine.close()


@pytest.mark.parametrize(("file", "form"), [("original.pt2", "torch"), ("original.onnx", "onnx")])
def test_a_file_of_a_version_that_is_a_symbolic_link_is_refused(
    file: str, form: str, version: Version, tmp_path: Path
) -> None:
    (version.folder / file).rename(tmp_path / "elsewhere")
    (version.folder / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedFile, match=rf"{file} cannot be read \(it is a symbolic link\)"):
        load_original(version, form, CPU)


def test_weights_beside_an_onnx_file_are_checked_as_well(version: Version) -> None:
    files = {**version.manifest["files"], "original.onnx.data": "0" * 64}
    (version.folder / "original.onnx.data").write_bytes(b"not what was written")
    with pytest.raises(DamagedFile, match=r"original.onnx.data is damaged"):
        load_original(replace(version, manifest={**version.manifest, "files": files}), "onnx", CPU)


# Ops that write in place


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETS))
def test_writing_in_place_changes_no_bit(name: str) -> None:
    net = NETS[name]
    captured = captured_net(name)
    plain, changed = runnable(captured.program), runnable(captured.program)
    write_in_place(changed)
    inputs = list(net.inputs(5).values())
    with torch.inference_mode():
        expected = plain(*[tensor.clone() for tensor in inputs])
        found = changed(*[tensor.clone() for tensor in inputs])
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Transposed(nn.Module):
    """A linear layer behind a transposed batch, as `nn.MultiheadAttention` has it; `matmul` with one matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.matrix = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.linear(x.transpose(0, 1)))
        return torch.matmul(rows.transpose(0, 1), self.matrix)


class Ops(TorchDispatchMode):
    """A mode that remembers the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_matrix_is_not_multiplied_once_per_batch_entry() -> None:
    captured = original(Transposed(), {"x": torch.randn(8, 3, 6)})
    x = torch.randn(7, 3, 6)
    ran = []
    for change in (lambda module: None, make_one_product):
        module = runnable(captured.program)
        change(module)
        with torch.no_grad(), Ops() as ops:
            (found,) = module(x)
        ran.append("aten.bmm.default" in ops.ran)
        np.testing.assert_allclose(found.detach(), captured.run(x)[0].detach(), rtol=1e-5, atol=1e-6)
    assert ran == [True, False]


@pytest.mark.parametrize("name", sorted(NETS))
def test_one_product_gives_the_same_answers(name: str) -> None:
    net = NETS[name]
    captured = captured_net(name)
    plain, changed = runnable(captured.program), runnable(captured.program)
    make_one_product(changed)
    inputs = list(net.inputs(5).values())
    with torch.inference_mode():
        for one, other in zip(plain(*inputs), changed(*inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


class Branches(nn.Module):
    """Values that are read again after an op that could have been done over them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        once = self.linear(x)
        twice = self.linear(x + 1)
        return torch.relu(once) + once, torch.relu(twice)


def test_only_what_nobody_reads_again_is_written_over() -> None:
    captured = original(Branches(), {"x": torch.randn(8, 4)})
    module = runnable(captured.program)
    write_in_place(module)
    names = [str(node.target) for node in module.graph.nodes]
    assert names.count("aten.relu.default") == 1, "`once` is read again, by the sum"
    assert names.count("aten.relu_.default") == 1, "`twice` is not"
    assert names.count("aten.add.Tensor") == 1, "the request's own memory is never written to"
    assert names.count("aten.add_.Tensor") == 1
    x = torch.randn(3, 4)
    before = x.clone()
    with torch.inference_mode():
        found = module(x)
    assert torch.equal(x, before)
    assert all(torch.equal(one, other) for one, other in zip(found, captured.run(x), strict=True))


@pytest.mark.parametrize(
    ("runs_s", "counted", "brief"),
    [
        ([2e-2, 2e-2, 5e-5], 2, False),  # two long runs in a row
        ([2e-2, 5e-5], 2, True),  # another program made one run long
        ([2e-2, 2e-4, 2e-2, 2e-4, 5e-5], 5, True),
        ([2e-4] * 20, 10, False),
    ],
)
def test_a_batch_is_brief_if_one_of_few_runs_is(
    runs_s: list[float], counted: int, brief: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, now = list[float](), [0.0]

    def run() -> None:
        ran.append(runs_s[len(ran)])
        now[0] += ran[-1]

    monkeypatch.setattr(staged_engine.time, "perf_counter", lambda: now[0])
    assert (is_brief(run), len(ran)) == (brief, counted)
