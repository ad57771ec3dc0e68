"""The live form's part of the road: built and checked, islands found, proven by the same gate, published."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import load_samples
from halfeven.exporters.live.forms import live_subject
from halfeven.exporters.proof.prove import ask_reference
from halfeven.models.engines.live_engine import load_live
from halfeven.models.errors import BadFolder, BadSetting, CannotConvert, CaptureFailed
from halfeven.models.folder.package import read_folder
from halfeven.models.store.store import LIVE, REFUSED, Store, Version

from tests.model_folders import samples_of, write_folder

CPU = torch.device("cpu")
ORIGIN = {"parent": None, "lineage": {"by": "test"}, "source": None, "fingerprint": None}


def net(
    forward: str, parts: str = "self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)", more: str = ""
) -> str:
    """The text of a model: its modules, its forward, and what stands before them."""
    body = "\n".join(f"        {line}" for line in forward.splitlines())
    made = "\n".join(f"        {line}" for line in parts.splitlines())
    return f"""
import torch
from torch import nn
{more}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{made}

    def forward(self, x):
{body}

def build():
    torch.manual_seed(3)
    return Net()
"""


LOOP = net("""hidden = self.first(x)
while bool(hidden.abs().max() > 1e9):
    hidden = hidden / 2
return self.last(torch.tanh(hidden))""")

LOUD = net(
    "return self.last(self.loud(self.first(x)))",
    "self.first, self.loud, self.last = nn.Linear(4, 8), Loud(), nn.Linear(1, 3)",
    """
class Loud(nn.Module):
    def forward(self, hidden):
        return (hidden * 600).pow(2).mean(-1, keepdim=True).sqrt() / 600
""",
)


def folder(tmp_path: Path, code: str, name: str = "net", **settings: Any) -> Path:
    return write_folder(
        tmp_path / name, code, form="live", samples=samples_of({"x": [4]}, count=24), **settings
    )


def converted(path: Path, store: Path | None = None) -> Version:
    """The whole way of a folder, as `convert` goes it."""
    asked = read_folder(path)
    samples = load_samples(path / "samples.safetensors", asked.spec)
    subject, maker = live_subject(asked, samples, ORIGIN, lambda _: None)
    return travel(subject, maker, Store(store or path.parent / "store"), lambda _: None)


def answers(version: Version, precision: str, x: np.ndarray) -> np.ndarray:
    return load_live(version, precision, CPU).run([[x]])[0]


def kept(version: Version) -> Sequence[dict[str, str]]:
    return version.manifest["forms"]["live"]["kept"]


def fresh(rows: int = 7) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, 4)).astype(np.float32)


def test_a_module_that_cannot_be_captured_is_proven_published_and_loads_as_it_was_proven(
    tmp_path: Path,
) -> None:
    version = converted(folder(tmp_path, LOOP))
    form, x = version.manifest["forms"]["live"], fresh()
    assert version.status == LIVE and form["passed"] and not form["kept"]
    assert version.manifest["half"] == "fp16" and version.spec().form == "live"
    assert form["file"] == "live.json" and form["digest"] == version.manifest["files"]["live.json"]
    # Two weights, two biases, every time.
    assert 0 < form["half_nodes"] <= form["nodes"] and form["casts"] >= 4
    assert version.json("parity.json")["forms"]["live"]["passed"]
    assert Store(tmp_path / "store").live_number("net") == version.number
    original, half = answers(version, "fp32", x), answers(version, "fp16", x)
    assert 0 < np.abs(half - original).max() <= 4 * 2**-11 * np.abs(original).max() * 2


def test_a_net_that_overflows_gets_the_one_island_that_it_needs_with_its_certificate(tmp_path: Path) -> None:
    version = converted(folder(tmp_path, LOUD))
    assert version.status == LIVE
    assert [one["node"] for one in kept(version)] == ["loud"]
    assert (
        kept(version)[0]["op"] == "Loud"
        and "without it: the answer is not finite" in kept(version)[0]["evidence"]
    )
    assert version.json("live.json")["islands"] == ["loud"]
    x = fresh() * 4
    np.testing.assert_allclose(answers(version, "fp16", x), answers(version, "fp32", x), rtol=0.02, atol=0.02)


def test_an_overflow_in_a_containers_own_forward_makes_the_container_an_island(tmp_path: Path) -> None:
    code = net(
        "return self.last(self.block(self.first(x)))",
        "self.first, self.block, self.last = nn.Linear(4, 8), Block(), nn.Linear(8, 3)",
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden):
        loud = nn.functional.linear(self.inner(hidden) * 3e3, torch.eye(8) * 3e3)  # autocast makes it half again
        return torch.tanh(loud / 9e6)
""",
    )
    version = converted(folder(tmp_path, code))
    assert version.status == LIVE and [one["node"] for one in kept(version)] == ["block"]


@pytest.mark.parametrize(
    "forward",
    [
        "return torch.special.bessel_j0(hidden)",
        # no half kernel for one row alone, as with the LSTM of packed rows
        "return torch.special.bessel_j0(hidden if len(hidden) == 1 else hidden.float()).to(hidden.dtype)",
    ],
    ids=["any-rows", "one-row"],
)
def test_a_module_without_half_kernels_on_this_device_becomes_an_island(forward: str, tmp_path: Path) -> None:
    code = net(
        "return self.last(self.bessel(self.first(x)))",
        "self.first, self.bessel, self.last = nn.Linear(4, 8), Bessel(), nn.Linear(8, 3)",
        f"class Bessel(nn.Module):\n    def forward(self, hidden):\n        {forward}\n",
    )
    version = converted(folder(tmp_path, code))
    (island,) = (one["node"] for one in kept(version))  # where it is given FP32, it needs none of its own
    assert version.status == LIVE and island in ("first", "bessel")


def test_a_half_that_no_island_cures_is_refused_and_its_original_can_still_be_loaded(tmp_path: Path) -> None:
    code = net(
        "loud = nn.functional.linear(self.first(x) * 3e3, torch.eye(8) * 3e3)\nreturn self.last(loud / 9e6)"
    )
    version = converted(folder(tmp_path, code))
    assert version.status == REFUSED and not version.manifest["forms"]["live"]["passed"]
    assert "file" not in version.manifest["forms"]["live"] and str(version) == "net@1"
    assert Store(tmp_path / "store").live_number("net") is None
    assert np.isfinite(answers(version, "fp32", fresh())).all()


def test_a_half_that_does_not_run_at_all_cannot_be_converted_and_leaves_nothing(tmp_path: Path) -> None:
    code = net(
        "hidden = nn.functional.linear(self.first(x), torch.eye(8))\nreturn self.last(torch.special.bessel_j0(hidden))"
    )
    with pytest.raises(CannotConvert, match=r"does not run in half precision here.*bessel_j0"):
        converted(folder(tmp_path, code))
    assert Store(tmp_path / "store").names() == []


def test_asked_islands_are_kept_for_that_reason_also_through_a_list_of_modules(tmp_path: Path) -> None:
    code = net(
        "for layer in self.layers:\n    x = torch.tanh(layer(x))\nreturn self.last(x)",
        "self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])\nself.last = nn.Linear(4, 3)",
    )
    version = converted(folder(tmp_path, code, precision={"keep": ["layers", "layers.1"]}))
    assert [(one["node"], one["reason"]) for one in kept(version)] == [
        ("layers.0", "asked for by keep = 'layers'"),
        ("layers.1", "asked for by keep = 'layers'"),
    ]


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"keep": ["op:softmax"]}, "has no graph whose ops could stay in FP32, only modules"),
        ({"keep": ["frist"]}, r"'frist' matches no module: expected a path, one of \['attention'"),
        ({"keep": ["attention.out_proj"]}, "the forward of 'attention.out_proj' is never called"),
        ({"level": "O2"}, "expected O1"),
        ({"level": "float16"}, "level = 'O3'"),
        ({"embeddings": "half"}, "autocast leaves embeddings in FP32"),
    ],
)
def test_what_a_module_under_autocast_cannot_be_asked_is_refused_with_the_way_out(
    precision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    code = net(
        "return self.last(self.attention(x, x, x)[0])",
        "self.attention, self.last = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)",
    )
    with pytest.raises(BadSetting, match=message):
        converted(folder(tmp_path, code, precision=precision, max_batch_size=1))


def test_at_o0_the_live_form_is_the_fp32_module_and_says_so(tmp_path: Path) -> None:
    version = converted(folder(tmp_path, LOOP, precision={"level": "O0"}))
    assert version.status == LIVE and version.manifest["half"] is None
    assert version.manifest["forms"]["live"]["half_nodes"] == 0 and "FP32" in version.manifest["reason"]


def test_bf16_is_proven_in_bf16(tmp_path: Path) -> None:
    version = converted(folder(tmp_path, LOOP, precision={"dtype": "bf16"}))
    assert (
        version.manifest["half"] == "bf16" and version.json("parity.json")["forms"]["live"]["dtype"] == "bf16"
    )


def test_answers_that_depend_on_the_batch_make_the_model_one_row_at_a_time(tmp_path: Path) -> None:
    version = converted(
        folder(tmp_path, net("return self.last(torch.tanh(self.first(x - x.mean(0))) + x[:, :1])"))
    )
    assert version.spec().max_batch_size == 1
    assert "answers in a batch differ from answers alone" in version.manifest["notes"][0]


def test_a_model_that_is_not_batched_is_asked_one_sample_at_a_time(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "net",
        net("return self.last(torch.tanh(self.first(x))[: int((x > 0).sum()) + 1].mean(0))"),
        inputs=[{"name": "x", "datatype": "FP32", "shape": [5, 4]}],
        outputs=[{"name": "y", "datatype": "FP32", "shape": [3]}],
        samples=samples_of({"x": [5, 4]}, count=24),
        max_batch_size=0,
        form="live",
    )
    version = converted(path)
    assert version.status == LIVE and version.spec().max_batch_size == 0
    assert answers(version, "fp16", fresh(5)).shape == (3,)


LAYERS = "self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)\n"
LOG = "class Log(nn.Module):\n    def forward(self, x):\n        return x.log()\n"
COUNT = "import itertools\nCOUNT = itertools.count(1)\n"
ANSWER = "return self.last(self.first(x))"
FAULTS = {
    "random": (net(f"{ANSWER} + torch.rand(3)"), CaptureFailed, "is something in it random"),
    "state": (
        net(f"self.calls += 1\n{ANSWER} + self.calls", f"{LAYERS}self.calls = 0"),
        CaptureFailed,
        "does it keep state",
    ),
    "built otherwise": (
        net(f"{ANSWER} + self.noise", f"{LAYERS}self.noise = torch.full((3,), float(next(COUNT)))", COUNT),
        CaptureFailed,
        "when it is built again with the same weights",
    ),
    "nan": (net(f"{ANSWER}.log()"), CannotConvert, "NaN in FP32: output 'y'.*in forward itself"),
    "nan in a module": (
        net("return self.last(self.log(self.first(x)))", f"{LAYERS}self.log = Log()", LOG),
        CannotConvert,
        "first in module 'log'",
    ),
    "no batch": (net(f"{ANSWER}[:2]"), BadFolder, "its first axis must be the batch"),
    "pairs": (net("h = self.first(x)\nreturn h @ h.T"), BadFolder, "set max_batch_size = 0"),
    "shape": (net("return self.first(x)"), BadFolder, "output 'y' of 'net': model.toml and the model differ"),
    "two outputs": (net("return x, x"), CaptureFailed, "forward gave 2 outputs, model.toml names 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_the_models_own_fault_is_refused_as_that(fault: str, tmp_path: Path) -> None:
    code, error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        converted(folder(tmp_path, code))
    assert Store(tmp_path / "store").names() == []


def test_the_folders_own_weights_are_stored_once_and_half_ones_are_widened(tmp_path: Path) -> None:
    state = {
        "first.weight": torch.randn(8, 4).half(),
        "first.bias": torch.randn(8),
        "last.weight": torch.randn(3, 8),
        "last.bias": torch.randn(3),
    }
    version = converted(folder(tmp_path, LOOP, weights=state))
    assert "1 half-precision tensors of weights.safetensors were widened to FP32" in version.manifest["notes"]
    engine = load_live(version, "fp32", CPU)
    loaded = engine._live.module.state_dict()
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in state.items())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"weights\.safetensors does not fit the module"):
        converted(folder(tmp_path, LOOP, weights={"first.weight": torch.zeros(2)}))


def test_an_original_that_is_asked_between_two_plans_knows_no_islands(tmp_path: Path) -> None:
    asked = read_folder(folder(tmp_path, LOUD))
    samples = load_samples(asked.folder / "samples.safetensors", asked.spec)
    subject, maker = live_subject(asked, samples, ORIGIN, lambda _: None)
    loud = maker.built.live.module.get_submodule("loud")
    reference_run = ask_reference(subject.spec, samples, maker.original())
    with Store(tmp_path / "store").draft("net") as draft:
        assert maker.plan(samples, 0.75, lambda _: None) and maker.islands == ["loud"]
        maker.make("live", draft, reference_run)
        assert "forward" in vars(loud)
        assert not maker.plan(samples, 0.75, lambda _: None)
        assert "forward" not in vars(loud)
