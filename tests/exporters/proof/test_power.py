"""A proof has a power: faults planted in the FP32 original are noticed, or FP32 serves and says why."""

from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.conversion import road
from halfeven.exporters.gate.verdict import ParityReport
from halfeven.exporters.graph.original_graph import OriginalGraph, Rest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.forms import foreign_subject
from halfeven.exporters.proof.maker import Maker
from halfeven.exporters.proof.planted_faults import measured_power
from halfeven.exporters.proof.power import (
    BYPASSED,
    DAMPED,
    DEAD,
    FAULTS,
    FINE,
    NEAR,
    SATURATED,
    STEP,
    UNEXPLAINED,
    Planted,
    Power,
    why_not_shown,
)
from halfeven.exporters.proof.prove import answers_of
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.report.headline import NOT_SHOWN, headline
from halfeven.exporters.report.page import render_html
from halfeven.exporters.report.version_facts import facts_of
from halfeven.exporters.torch.forms import ProgramForms, ProgramOriginal
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.folder.package import ModelFolder
from halfeven.models.program import runnable
from halfeven.models.store.store import Store, Version
from torch import Tensor, nn

from tests.command_line import run
from tests.conversions import as_file, as_subject, samples_of
from tests.corpus import CORPUS, captured, cases
from tests.corpus.case import linear, net
from tests.exporters.blind_nets import blind_nets, usual
from tests.programs import original
from tests.slow import one_in_turn

HEALTHY = [name for name, case in CORPUS.items() if not case.trap]
EXPLAINED = {"", NEAR, DAMPED, STEP, BYPASSED}
Make = Callable[[int], Tensor]


def subject_of(module: nn.Module, make: Make, rows: int = 32) -> Subject:
    made = original(module, {"x": make(8)})
    return as_subject(made, Samples({"x": make(rows).numpy()}))


def power_of(subject: Subject, maker: Maker | None = None) -> Power:
    maker = maker or ProgramForms(subject)
    _, judging = subject.samples.split()
    original = maker.original_graph()
    assert original is not None
    return measured_power(maker.reference_run(judging), original, "fp16")


def powers(subject: Subject, folder: Path, place: int) -> list[Power]:
    """The power of the model as a program or as an ONNX file, in turn; both where every case is asked for."""
    forms: list[Callable[[], tuple[Subject, Maker]]] = [
        lambda: (subject, ProgramForms(subject)),
        lambda: as_file(subject, folder),
    ]
    return [power_of(*form()) for form in one_in_turn(forms, place)]


def published(subject: Subject, path: Path) -> Version:
    return road.travel(subject, ProgramForms(subject), Store(path), lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", blind_nets())
def test_saturated_or_constant_answers_show_nothing(name: str, tmp_path: Path) -> None:
    nets = blind_nets()
    for power in powers(subject_of(*nets[name]), tmp_path, list(nets).index(name)):
        assert not power.is_shown, power.to_json()


@pytest.mark.parametrize("name", cases(HEALTHY))
def test_a_healthy_model_notices_a_fault_or_explains_why_not(name: str) -> None:
    power = power_of(as_subject(captured(name), samples_of(name, 32, seed=1)))
    # One of the two nodes of 'tied' that are not damped is noticed; the other errs by half the limit.
    assert power.is_shown and power.share >= 0.5, power.to_json()
    assert {one.why for one in power.planted} <= EXPLAINED, power.to_json()


class Branch(nn.Module):
    """``times`` scales the branch: a constant, or a gate that is as small on all usual inputs."""

    def __init__(self, times: float | str, bias: float = 0.0) -> None:
        super().__init__()
        self.stream, self.inner, self.outer = linear(16, 32), linear(16, 32), linear(32, 32)
        self.times, self.bias = times, bias
        self.gamma = nn.Parameter(torch.full((32,), 1e-9))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.inner(x) + self.bias)
        branch = self.outer(inner * 0.5)
        if self.times == "gate":
            branch = branch * torch.sigmoid(x.abs().sum(-1, keepdim=True) - 40)
        elif self.times == "constant and gate":
            branch = branch * self.gamma * torch.sigmoid(x.abs().sum(-1, keepdim=True) - 40)
        elif self.times == "square":
            small = branch * 1e-4
            branch = small * small
        elif self.times == "LayerScale":
            branch = branch * self.gamma.reshape(1, 32)
        else:
            branch = branch * float(self.times)
        return self.stream(x) + branch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "bias", "why"),
    [
        (1e-9, 0.0, DAMPED), (0.0, 0.0, DAMPED), ("LayerScale", 0.0, DAMPED), (1.0, -100.0, BYPASSED),
        ("gate", 0.0, BYPASSED), ("constant and gate", 0.0, BYPASSED),
        ("square", 0.0, BYPASSED),
    ],
)  # fmt: skip
def test_a_constant_makes_a_branch_harmless_and_a_gate_or_a_unit_that_is_off_hides_it(
    times: float | str, bias: float, why: str, tmp_path: Path
) -> None:
    """Other samples may open the gate, or switch the unit on; a constant is as small for all of them."""
    subject = subject_of(Branch(times, bias), lambda rows: torch.randn(rows, 16))
    for power, name in ((power_of(subject), "linear"), (power_of(*as_file(subject, tmp_path)), "MatMul")):
        inner = [one for one in power.planted if name.lower() in one.node.lower() or one.op == "Gemm"]
        found = {one.node: (one.why, one.is_blind) for one in inner}
        assert (why, why == BYPASSED) in found.values(), power.to_json()
        other = DAMPED if why == BYPASSED else BYPASSED
        assert other not in {cause for cause, _ in found.values()}, power.to_json()


@pytest.mark.slow
def test_a_captcha_reader_is_not_shown_and_would_pass_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's answers to all of these samples are the same certain letters; to others they are not."""
    subject = subject_of(*blind_nets()["captcha"])
    version = published(subject, tmp_path / "checked")
    assert version.status == "live" and version.manifest["half"] is None
    assert "not shown: these samples cannot tell" in version.manifest["reason"]
    found = version.json("parity.json")["power"]
    assert (
        found["hidden"] > 0.5
        and not found["shown"]
        and found["noticed"][FINE] < 0.5
        and len(found["nodes"]) > 3
    )
    shown = facts_of(version) | found
    assert headline(facts_of(version)) == NOT_SHOWN
    assert NOT_SHOWN in version.bytes("report.html").decode() and "fault blind" in render_html(
        {**shown, "power": found}
    )
    monkeypatch.setattr(road, "why_not_shown", lambda power: "")
    unchecked = published(subject, tmp_path / "unchecked")
    assert unchecked.manifest["half"] == "fp16" and unchecked.manifest["reason"].startswith("proven equal")


@pytest.mark.slow
def test_a_file_is_asked_as_a_program_is(tmp_path: Path) -> None:
    seeing = subject_of(net(sees, last=linear(32, 8, bias=True)), usual(32))
    assert power_of(*as_file(seeing, tmp_path)).is_shown and power_of(seeing).is_shown
    blind = subject_of(blind_nets()["captcha"][0], usual(32))
    as_file(blind, tmp_path)
    np.savez(tmp_path / "samples.npz", x=blind.samples.arrays["x"])
    words = ("--samples", tmp_path / "samples.npz", "--store", tmp_path / "store")
    code, facts, said = run("convert", tmp_path / "original.onnx", *words)
    assert code == 0 and not facts["power"]["shown"] and facts["half"] is None, said
    assert "these samples cannot tell" in facts["reason"]


@pytest.mark.parametrize("end", ["damped", "step", "near", "unseen"])
def test_a_missed_fault_carries_its_measured_cause(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damped faults alone are counted apart, and larger faults have to show the damping. A fault that reaches the limit
    and is not noticed is a miss, also where the gate is broken."""
    made = {
        "damped": lambda hidden, x: hidden * 0.02 + x,
        "near": lambda hidden, x: hidden * 1.4 + torch.sign(x) * 4,
        "step": lambda hidden, x: torch.where(hidden > 0.7, 1.0, -1.0) + x,
        "unseen": lambda hidden, x: hidden * 8 + x,
    }[end]

    def forward(self: Any, x: Tensor) -> Tensor:
        reached = self.last(x)
        return made(torch.tanh(100 * (reached + reached.sign())), x)  # 1 or -1, and nothing between

    if end == "unseen":
        monkeypatch.setattr(ParityReport, "passed", True)
    power = power_of(subject_of(net(forward, last=linear(32, 32)), usual(32)))
    found = next(one for one in power.planted if one.node == "tanh")
    cause = {"damped": DAMPED, "step": STEP, "near": NEAR}.get(end, UNEXPLAINED)
    summary = power.to_json()
    assert found.why == cause, summary
    assert power.share < 1.0 or (end == "damped" and summary["damped"]), summary
    assert end == "unseen" or 8 < found.seen_at_u <= 2048, summary


@pytest.mark.slow
def test_a_fault_that_all_keys_share_is_not_the_only_one_that_is_planted() -> None:
    """A softmax takes out what all keys of a head have in common, so signs by head or by channel show nothing there."""

    def attends(self: Any, x: Tensor) -> Tensor:
        query, key = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.query, self.key))
        return torch.softmax(query @ (key * 1.5).transpose(-1, -2) / 3, -1) @ query

    def tokens(rows: int) -> Tensor:
        return torch.randn(rows, 6, 16)

    power = power_of(subject_of(net(attends, query=linear(16, 16), key=linear(16, 16)), tokens))
    assert FINE in next(one for one in power.planted if one.node == "mul").noticed, power.to_json()


def test_faults_are_planted_where_something_is_computed() -> None:
    """No fault is planted where a result is one of the inputs as it was: a half errs there as in the node before."""

    def forward(self: Any, x: Tensor) -> Tensor:
        one, other = torch.relu(self.last(x)).clamp(max=3.0).chunk(2, -1)
        values, _ = torch.std_mean(x, -1, keepdim=True)
        return torch.maximum(one * 2, other) + values

    power = power_of(subject_of(net(forward, last=linear(32, 32)), usual(32)))
    assert [one.op for one in power.planted] == ["linear", "getitem", "mul", "add"], power.to_json()


def test_a_fault_that_the_first_samples_miss_is_asked_on_all() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(3 * self.last(x)) * x[:, :1] + x[:, 1:]

    def make(rows: int) -> Tensor:
        x = torch.randn(rows, 33)
        x[:, 0] = torch.where(torch.arange(rows) < rows // 2, 0.02, 1.0)
        return x

    power = power_of(subject_of(net(forward, last=linear(33, 32)), make))
    assert power.noticed(FINE) == 1 and power.samples == 16, power.to_json()


class TwoHeads(nn.Module):
    """A live output, and another that ``end`` makes of layers of its own."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.trunk, self.live, self.other = nn.Linear(32, 32), nn.Linear(32, 8), linear(32, 8, bias=True)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        seen = torch.tanh(self.trunk(x))
        others = self.end(self.other(seen))
        return (self.live(seen), *(others if isinstance(others, tuple) else (others,)))


BLIND_PARTS: dict[str, Callable[..., Tensor]] = {
    "joined": lambda live, y: torch.cat([live, torch.sigmoid(y + 30)], -1),
    "joined and turned": lambda live, y: torch.stack([torch.relu(y - 50), live]).transpose(0, 1),
    "chosen for no sample": lambda live, y: torch.where(live < 100, live, y),
}
BLIND_HEADS: dict[str, Callable[[Tensor], Any]] = {
    "saturated": lambda y: torch.sigmoid(y + 30),
    "constant": lambda y: y * 0 + torch.linspace(1, 2, 8),
    "always 0": lambda y: torch.relu(y - 50),
    "one class": lambda y: (y + torch.zeros(8).index_fill(0, torch.tensor([3]), 40.0)).argmax(-1),
    "never": lambda y: y > 100.0,
    "two of one layer": lambda y: tuple(torch.sigmoid(one + 30) for one in y.chunk(2, -1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLIND_HEADS)
def test_an_output_that_shows_nothing_beside_a_live_one_is_named(name: str, tmp_path: Path) -> None:
    """The power is that of each output: faults in layers that lead to a blind one alone are not shown by the others."""
    subject = subject_of(TwoHeads(BLIND_HEADS[name]), usual(32))
    for power in powers(subject, tmp_path, list(BLIND_HEADS).index(name)):
        blind = [output.name for output in subject.spec.outputs[1:]]
        assert not power.is_shown and sorted(power.hiding) == blind, power.to_json()
        why = why_not_shown(power)
        assert all(f"'{one}'" in why for one in blind) and "'y0'" not in why, why


class OneReturned(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]


def test_a_head_that_nobody_reads_is_no_part_of_the_proof(tmp_path: Path) -> None:
    """`torch.export` keeps what forward computes and does not return. A file may have such nodes too."""
    program, file = (
        subject_of(heads(lambda y: torch.sigmoid(torch.tanh(y) + 30)), usual(32))
        for heads in (OneReturned, TwoHeads)
    )
    write_onnx(file.exported, file.spec, tmp_path / "original.onnx", {})
    model = onnx.load(tmp_path / "original.onnx")
    del model.graph.output[1]
    onnx.save(model, tmp_path / "original.onnx")
    asked = ModelFolder(tmp_path, "original.onnx", (), None, None, program.spec, program.precision)
    for power in (
        power_of(program),
        power_of(*foreign_subject(asked, program.samples, {}, False, lambda _: None)),
    ):
        assert power.is_shown and len(power.planted) <= 3, power.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("name", BLIND_PARTS)
def test_a_part_of_an_output_that_shows_nothing_is_named(name: str, tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        seen = torch.tanh(self.trunk(x))
        return BLIND_PARTS[name](self.live(seen), self.other(seen))

    made = net(forward, trunk=linear(32, 32), live=linear(32, 8), other=linear(32, 8, bias=True))
    subject = subject_of(made, usual(32))
    for power in powers(subject, tmp_path, list(BLIND_PARTS).index(name)):
        (part,) = power.hiding
        assert part.startswith("y0 (from ") and f"'{part}'" in why_not_shown(power), power.to_json()


@pytest.mark.slow
def test_outputs_that_show_faults_are_shown_also_where_one_of_them_never_changes(tmp_path: Path) -> None:
    """No sample could show more of an output that is computed from weights alone, and none of one that hands on."""

    def forward(self: Any, x: Tensor) -> Any:
        seen = torch.tanh(self.last(x))
        return (
            seen,
            torch.softmax(self.other(seen), -1),
            self.last.weight * 2,
            x + 0,
            self.other(seen).argmax(-1),
        )

    subject = subject_of(net(forward, last=linear(32, 32), other=linear(32, 8)), usual(32))
    for power in (power_of(subject), power_of(*as_file(subject, tmp_path))):
        assert power.is_shown, power.to_json()


class Flagged(nn.Module):
    """A deep output, and one that a flag in the samples saturates: of the trunk, which it amplifies, or the input."""

    def __init__(self, of_trunk: bool) -> None:
        super().__init__()
        self.of_trunk, self.live, self.other = of_trunk, nn.Linear(64, 8), nn.Linear(64, 8)
        self.trunk = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: Tensor) -> Any:
        seen = self.trunk(x)
        return self.live(seen), torch.sigmoid(200 * self.other(seen if self.of_trunk else x) + 100 * x[:, :1])


def flagged(rows: int, flag: float = 9.0) -> Tensor:
    return torch.cat([torch.full((rows, 1), flag), torch.randn(rows, 63)], -1)


@pytest.mark.slow
@pytest.mark.parametrize("of_trunk", [False, True])
@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_all_that_a_blind_output_is_computed_from_stays_in_fp32(
    form: str, of_trunk: bool, tmp_path: Path
) -> None:
    """So inputs that wake the output are answered as in FP32. A trunk in half would err by more than the limit there,
    although the other output shows its errors."""
    subject = subject_of(Flagged(of_trunk), flagged)
    made = (subject, ProgramForms(subject)) if form == "torch" else as_file(subject, tmp_path)
    version = road.travel(*made, Store(tmp_path / "store"), lambda _: None)
    facts = version.manifest["forms"][form]
    assert version.manifest["half"] == "fp16" and facts["half_nodes"] == (1 if of_trunk else 7), facts
    assert any("all that 'y1' is computed from stays in FP32" in note for note in version.manifest["notes"])
    assert "'y1' stays in FP32" in unescape(version.bytes("report.html").decode())
    engines = [load(version, form, torch.device("cpu")) for load in (load_original, load_half)]
    waking = {"x": flagged(8, 0.0).numpy()}
    whole, half = (answers_of(subject.spec, engine)(waking) for engine in engines)
    assert 0.01 < whole["y1"].mean() < 0.99
    np.testing.assert_allclose(half["y1"], whole["y1"], rtol=0, atol=1e-4)
    assert not np.array_equal(half["y0"], whole["y0"])


@pytest.mark.slow
def test_fp32_serves_where_all_leads_to_a_blind_output_and_the_version_says_which(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        seen = self.last(torch.tanh(self.first(x)))
        return seen, torch.sigmoid(seen + 30)

    made = net(forward, first=linear(32, 32), last=linear(32, 8, bias=True))
    version = published(subject_of(made, usual(32)), tmp_path)
    assert version.status == "live" and version.manifest["half"] is None and not version.manifest["notes"]
    assert "lead to no output but 'y1'" in version.manifest["reason"]
    assert version.json("parity.json")["power"]["not_shown"] == ["y1"]
    assert headline(facts_of(version)) == NOT_SHOWN


def sees(self: Any, x: Tensor) -> Tensor:
    return torch.softmax(self.last(torch.tanh(x)), -1)


@pytest.mark.parametrize("pure", [False, True])
def test_a_run_goes_on_from_a_changed_node_as_the_original_graph_does(pure: bool) -> None:
    """The run goes on rightly also where a later node writes into its input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x))
        twice = hidden * 2
        return self.two(twice * 3 if pure else twice.mul_(3.0)) + hidden

    subject = subject_of(net(forward, one=linear(32, 16), two=linear(16, 16)), usual(32))
    original: OriginalGraph = ProgramOriginal(runnable(subject.exported), subject.spec)
    inputs = {"x": torch.randn(4, 32).numpy()}
    answers = original.watched(inputs, lambda name, result, rest: None)
    seen = list[str]()

    def visit(name: str, result: np.ndarray, rest: Rest) -> None:
        seen.append(name)
        for _ in range(2):
            np.testing.assert_array_equal(rest(result)["y0"], answers["y0"])
        assert not np.array_equal(rest(result + 1)["y0"], answers["y0"])

    np.testing.assert_array_equal(original.watched(inputs, visit)["y0"], answers["y0"])
    assert len(seen) >= 4


def test_one_sample_is_beside_its_perturbed_copies() -> None:
    """Copies of a sample of zeros are the same sample."""
    makes: dict[bool, Make] = {True: usual(32), False: lambda rows: torch.zeros(rows, 32)}
    for shown, make in makes.items():
        assert power_of(subject_of(net(sees, last=linear(32, 8, bias=True)), make, rows=1)).is_shown == shown


def test_the_share_of_blind_nodes_decides() -> None:
    y = frozenset({"y"})

    def power(*why: str, alike: bool = False) -> Power:
        nodes = [
            Planted(f"n{i}", "mul", frozenset() if one else frozenset(FAULTS), 0.0, one, outputs=y)
            for i, one in enumerate(why)
        ]
        return Power(tuple(nodes), 4, y if alike else frozenset())

    assert power("", "", SATURATED, "").is_shown and not power("", SATURATED, DEAD, "").is_shown
    assert power(DAMPED, NEAR, DAMPED, "").is_shown and power().is_shown
    assert not power(DAMPED, STEP, BYPASSED, "").is_shown, (
        "faults that are never noticed, whatever their size"
    )
    assert not power("", "", "", "", DEAD, alike=True).is_shown and power("", "", alike=True).is_shown
    assert power("", DAMPED).noticed(FINE) == 0.5 and power("", DAMPED).share == power().share == 1.0
    assert power("", STEP, BYPASSED, UNEXPLAINED, DAMPED).share == 0.25
    assert power("", SATURATED, DAMPED, DAMPED).hidden == 0.5
    form = {"passed": True, "parity": {"samples": 64}}
    facts = {"status": "live", "forms": {"torch": form}, "power": power(DAMPED, DAMPED).summary()}
    assert headline(facts).endswith("all 2 planted errors are damped below the limit, so they show none")
    facts["power"] = power(NEAR, DAMPED, "").summary()
    assert headline(facts).endswith("show 50% and hide 0% (near the limit: 1; damped below it: 1)")
    damped, other = power(DAMPED).planted[0], power(UNEXPLAINED).planted[0]
    assert damped.joined(other).why == other.joined(damped).why == UNEXPLAINED
    one, other = power(SATURATED).planted[0], power("").planted[0]
    assert one.joined(other).why == other.joined(one).why == "" and one.joined(one).is_blind
