"""Patches of a folder's own source are tried in a copy; the ones that gain are written, and apply to the source."""

import re
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.drifted_inputs import drifted_digests, folder_of, keep_input
from halfeven.exporters.patches import tried_patches
from halfeven.exporters.patches.patch_files import check_patches_asked, patch_sentences, write_patches
from halfeven.exporters.patches.tried_patches import PatchTrials, TriedPatch
from halfeven.models.errors import BadInput, BadSetting, EngineFailed
from halfeven.models.order.one_order import SECONDS_SETTING, Order, OrderBounds, one_order
from halfeven.models.store.store import Store

from tests.command_line import run
from tests.few_unseen import unseen_samples
from tests.model_folders import LINEAR, samples_of, tensor, write_folder

KINDS = ("guard", "mask", "square", "sum", "softmax")
# Each branch has one pattern that keeps a node in FP32. `head` reads them all.
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(16, 32)
        self.head = nn.Linear({outputs}, 4)

    def forward(self, x):
        h = self.wide(x)
{body}


def build():
    torch.manual_seed(3)
    return Net()
"""
BRANCHES = """
guarded = h / (h.norm(dim=-1, keepdim=True) + 1e-8)
masked = h.masked_fill(h.abs() > 1e3, -1e9).max(-1, keepdim=True).values
large = h * 500
normal = large * torch.rsqrt(large.pow(2).mean(-1, keepdim=True) + 1e-3)
positive = torch.relu(h) * 9000
share = positive / positive.sum(-1, keepdim=True)
e = torch.exp(h * 16)
attention = e / e.sum(-1, keepdim=True)
return self.head(torch.cat([guarded, masked * 0.1 + h, normal, share, attention], -1))
"""
END = "return self.head(torch.cat([guarded, share], -1))"
INPUTS, OUTPUTS = [tensor("x", "FP32", [-1, 16])], [tensor("y", "FP32", [-1, 4])]
OPTIONS = Options(forms=("torch",), level="O2")


@dataclass(frozen=True)
class Done:
    folder: Path
    target: Path
    trials: PatchTrials
    tried: list[TriedPatch]
    facts: dict[str, Any]

    def row(self, kind: str) -> dict[str, Any]:
        [row] = [row for row in self.facts["tried"] if row["kind"] == kind]
        return row


def patched(place: Path, body: str, outputs: int = 32, **more: Any) -> Done:
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    code = NET.format(body=lines, outputs=outputs)
    samples = samples_of({"x": [16]}, 40)
    return tried_of(
        write_folder(place / "net", code, inputs=INPUTS, outputs=OUTPUTS, samples=samples, **more)
    )


def tried_of(folder: Path) -> Done:
    place = folder.parent
    with unseen_samples(few=True):
        store = Store(place / "store")
        trials = PatchTrials(folder, convert(folder, store, OPTIONS), store, OPTIONS, lambda _: None)
        found = list(trials.go())
    return Done(folder, place / "patches", trials, found, write_patches(trials, found, place / "patches"))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return patched(tmp_path_factory.mktemp("patched"), BRANCHES, outputs=160)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_frees_nodes_that_were_kept_in_fp32(kind: str, done: Done) -> None:
    row = done.row(kind)
    assert not row["why"] and row["kept"] < done.facts["kept"]
    assert row["error_u"] <= done.facts["limit_u"] and row["moved_u"] <= done.facts["limit_u"]


@pytest.mark.slow
def test_all_together_keep_fewer_nodes_than_each_alone(done: Done) -> None:
    assert done.facts["tried"][-1]["file"] == str(done.target / "all.patch")
    assert done.row("all")["kept"] < min(done.row(kind)["kept"] for kind in KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [("git", "apply"), ("patch", "-p1", "-i")], ids=["git", "patch"])
def test_a_patch_applies_and_gives_the_source_that_was_tried(
    tool: tuple[str, ...], done: Done, tmp_path: Path
) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    before = (done.folder / "model.py").read_text()
    for number, (patch, row) in enumerate(zip(done.tried, done.facts["tried"], strict=True)):
        if row["file"] is None:
            continue
        copy = shutil.copytree(done.folder, tmp_path / str(number))
        subprocess.run([*tool, row["file"]], cwd=copy, check=True, capture_output=True)
        assert (copy / "model.py").read_text() == patch.texts[Path("model.py")] != before
        saved = f"{done.facts['kept']} of {done.facts['nodes']} nodes kept in FP32 become {patch.kept}; proven equal"
        assert saved in Path(row["file"]).read_text() and saved in row["sentence"]
    assert (done.folder / "model.py").read_text() == before, "the operator's own files are never edited"


@pytest.mark.slow
def test_a_patch_that_changes_the_fp32_answers_too_much_is_not_offered(tmp_path: Path) -> None:
    found = patched(
        tmp_path, "n = h.norm(dim=-1, keepdim=True) * 1e-3\nreturn self.head(h * 1e-3 / (n + 1e-8))"
    )
    row = found.row("guard")
    assert row["kept"] < found.facts["kept"] and "its FP32 answers are others" in row["why"]
    assert row["file"] is None and not found.target.exists()
    assert patch_sentences(found.facts)[0].startswith("tried without gain: guard at model.py:15 (its FP32")


@pytest.mark.slow
def test_a_trial_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dangling link in the folder, as an editor leaves it, is no file of the model. Inputs on which a half drifted
    are read where they are, and one that cannot be read ends nothing."""
    begun, kept = list[Path](), Store(tmp_path / "store")
    (kept.root / "models/net").mkdir(parents=True)
    keep_input(kept, "net", {"x": np.ones((1, 16), np.float32)}, 10)
    (folder_of(kept, "net") / "gone.safetensors").symlink_to("nowhere")

    def failing_once(folder: Any, store: Store, *more: Any) -> Any:
        begun.append(folder.folder)
        assert drifted_digests(store, "net") == drifted_digests(kept, "net") != {}
        if len(begun) == 1:
            raise EngineFailed("the device has no memory left")
        return convert(folder, store, *more)

    monkeypatch.setattr(tried_patches, "convert", failing_once)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/.#model.py").symlink_to("nobody@nowhere.1")
    body = "\n".join(
        line for line in BRANCHES.splitlines() if line.startswith(("guarded", "positive", "share"))
    )
    found = patched(tmp_path, f"{body}\n{END}", outputs=64)
    first, *others = found.facts["tried"]
    assert first["why"] == "the patched folder is not converted: the device has no memory left"
    assert first["file"] is None and [row["file"] for row in others if not row["why"]]
    assert not any(place.exists() for place in begun)


@pytest.mark.slow
def test_lines_of_installed_code_are_not_touched(tmp_path: Path) -> None:
    """A virtual environment may lie in the folder."""
    outside = "import torch\n\n\ndef shared(h):\n    return h / (h.norm(dim=-1, keepdim=True) + 1e-8)\n"
    installed = "lib/site-packages/guards.py"
    body = "from guards import shared\nreturn self.head(shared(h))"
    found = patched(tmp_path, body, files={installed: outside}, path=["lib/site-packages"])
    assert found.facts["kept"] and not found.trials.places
    assert re.fullmatch(
        r"patches: no known pattern is at the lines of the \d+ nodes .*", patch_sentences(found.facts)[0]
    )


@pytest.mark.slow
def test_a_net_without_kept_nodes_has_nothing_to_gain(tmp_path: Path) -> None:
    found = tried_of(write_folder(tmp_path / "net", LINEAR))
    assert patch_sentences(found.facts) == ["patches: no node is kept in FP32, so there is nothing to gain"]


def test_a_model_without_python_code_of_its_own_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net", inputs=INPUTS, outputs=OUTPUTS, source="net.pt2")
    (folder / "net.pt2").write_bytes(b"")
    with pytest.raises(
        BadInput, match=r"net\.pt2 has no Python code of its own to patch: expected a model folder"
    ):
        check_patches_asked(folder, tmp_path / "patches", Options())


def test_patches_of_two_conversions_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/all.patch").write_text("")
    with pytest.raises(
        BadSetting, match=r"--patches .* is not an empty folder: expected a new or an empty one"
    ):
        check_patches_asked(write_folder(tmp_path / "net"), tmp_path / "patches", Options())


class Timed(PatchTrials):
    """Five trials, each of which takes as long as the conversion did: 20 seconds."""

    def __init__(self, order: Order, now_s: list[float], why: str) -> None:
        self.order, self.now_s, self.why, self.version = order, now_s, why, None  # type: ignore[assignment]
        self.places, self.scripts = [(Path(), None)] * 5, {}  # type: ignore[list-item]
        self.kept, self.nodes, self.limit_u, self.notify = 4, 9, 2.0, lambda _: None

    def _tried(self, places: Any) -> TriedPatch:
        self.now_s[0] += 20
        return TriedPatch("guard", "model.py:1", {}, 3, 1.0, 1.0, self.why)


@pytest.mark.parametrize("why", ["no gain", ""], ids=["no gain", "a file that cannot be written"])
def test_trials_end_before_the_orders_time_and_the_rest_is_counted(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    order = Order(OrderBounds(seconds=100.0), lambda: now_s[0])
    monkeypatch.setattr(tried_patches, "one_order", lambda: nullcontext(order))
    now_s[0] = 20.0
    (tmp_path / "file").touch()
    trials = Timed(order, now_s, why)
    facts = write_patches(trials, trials.go(), tmp_path / "file")
    assert (len(facts["tried"]), facts["not_tried"]) == (3, 2)
    assert SECONDS_SETTING in patch_sentences(facts)[-1]
    lost = "it gains, but .*file.* cannot be written"
    assert all(row["file"] is None and re.match(why or lost, row["why"]) for row in facts["tried"])


@pytest.mark.slow
def test_a_version_that_is_there_keeps_its_report_where_the_time_ends_in_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any) -> Any:
        with one_order() as order:
            raise order.out_of_time("the work")

    monkeypatch.setattr(PatchTrials, "go", late)
    folder, report = write_folder(tmp_path / "net", LINEAR), tmp_path / "report.html"
    store, patches = ("--store", tmp_path / "store"), ("--patches", tmp_path / "patches")
    code, _, said = run("convert", folder, "--form", "torch", *store, *patches, "--report", report)
    assert code == 4 and report.is_file() and "net@1 was made before that, and is in the store" in said, said
