"""The trainer's process: what it trains, what it says, what it leaves behind, and that it never outlives the server."""

import hashlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.archive.archive import save_program
from halfeven.models.capture.child import Flat
from halfeven.models.folder.loss_and_optimizer_names import IGNORED
from halfeven.models.zoo import zoo_folder
from halfeven.models.zoo.digits.model import build
from halfeven.serve.finetune.training import trainee as subject
from halfeven.serve.finetune.training import trainer
from halfeven.serve.finetune.training.loop import amp
from halfeven.serve.finetune.training.loop.setting_names import EMULATED
from halfeven.serve.finetune.training.loop.training_terms import Settings
from halfeven.serve.finetune.training.task import Task
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.patience import PATIENCE_S
from tests.serve.finetune.training.trainer_runs import TRAINER, Line, job, run, started
from tests.simulated_gpu import SimulatedGpu

DIGITS = zoo_folder("digits")
PARENT = load_file(DIGITS / "weights.safetensors")

SMALL = """
import os, subprocess, sys, threading
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
    def forward(self, x):
        {forward}
        return self.first(x)

def build():
    {build}
    return Net()
"""


@pytest.fixture
def digits(tmp_path: Path) -> Line:
    """A job on pictures the shipped weights do not know: the digits in white on black are now black on white."""
    samples = load_file(DIGITS / "samples.safetensors")
    inverted = {"image": 1 - samples["image"], "target:logits": samples["target:logits"]}
    request = job(tmp_path, inverted, ["image"], "logits", "cross_entropy")
    source = {"folder": str(DIGITS), "source": "model.py:build", "path": []}
    return request | {"source": source, "weights": str(DIGITS / "weights.safetensors"), "max_batch_size": 64}


@pytest.fixture
def small(tmp_path: Path) -> Line:
    """A job for SMALL; `with_code` gives it its source."""
    random = np.random.default_rng()
    x = torch.from_numpy(random.standard_normal((32, 4)).astype(np.float32))
    save_file(
        {"first.weight": torch.zeros(3, 4), "first.bias": torch.zeros(3)}, tmp_path / "parent.safetensors"
    )
    request = job(tmp_path, {"x": x, "target:y": x[:, :3].contiguous() * 2}, ["x"], "y", "mse")
    return request | {"weights": str(tmp_path / "parent.safetensors")}


def with_code(request: Line, forward: str = "pass", build: str = "pass") -> Line:
    folder = Path(request["out"]).parent / "source"
    folder.mkdir()
    (folder / "model.py").write_text(SMALL.format(forward=forward, build=build))
    return request | {"source": {"folder": str(folder), "source": "model.py:build", "path": []}}


def with_program(request: Line, module: nn.Module, example: Tensor) -> Line:
    path = Path(request["out"]).parent / "original.pt2"
    rows = torch.export.Dim.DYNAMIC(min=1, max=request["max_batch_size"])
    flat = Flat(module.eval(), request)  # as the capture does: the outputs are a tuple
    with torch.no_grad():
        program = torch.export.export(
            flat.module, (example,), dynamic_shapes={"tensors": ({0: rows},)}, strict=False
        )
    for name, weight in program.named_parameters():  # the store keeps a copy for every name, tied or not
        program.state_dict[name] = nn.Parameter(weight.clone(), requires_grad=False)
    save_program(program, path, weights=True)
    return request | {"source": None, "program": str(path)}


@pytest.mark.slow
def test_the_operators_module_is_trained_in_training_mode_and_its_weights_are_written(digits: Line) -> None:
    lines, _ = run(digits | {"precision": EMULATED, "hyperparameters": {"n_epochs": 3, "batch_size": 60}})
    first, *steps, last = lines
    assert (first["type"], first["trained"], first["total_steps"]) == ("started", "module", 9)
    assert first["parameters"] == sum(parameter.numel() for parameter in build().parameters())
    assert [line["step"] for line in steps] == list(range(1, 10))
    assert [line["epoch"] for line in steps] == [0] * 3 + [1] * 3 + [2] * 3
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["scale"] == 65536.0
    path = Path(last["weights"])
    assert last["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert last["summary"]["steps"] == 9
    assert os.listdir(digits["out"]) == ["weights.safetensors"]  # noqa: PTH208
    new = load_file(path)
    assert {name: (t.shape, t.dtype) for name, t in new.items()} == {
        n: (t.shape, t.dtype) for n, t in PARENT.items()
    }
    build().load_state_dict(new)
    moved = {name for name, tensor in new.items() if not torch.equal(tensor, PARENT[name])}
    assert moved == set(PARENT)  # the running statistics and their counters too


@pytest.mark.slow
def test_without_source_the_captured_program_learns_as_the_module_does(digits: Line) -> None:
    module = build()
    module.load_state_dict(PARENT)
    by_module, _ = run(digits)
    by_program, _ = run(with_program(digits, module, torch.rand(3, 1, 8, 8)))
    assert by_program[0]["trained"] == "program"
    assert by_program[0]["note"] == ""
    assert [line["type"] for line in by_program] == [line["type"] for line in by_module]
    losses = [[line["loss"] for line in lines[1:-1]] for lines in (by_module, by_program)]
    # Dropout drew the same zeros, the batches were normalised.
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    new = load_file(by_program[-1]["weights"])
    assert not torch.equal(new["features.0.1.running_mean"], PARENT["features.0.1.running_mean"])


@pytest.mark.slow
def test_a_captured_program_is_switched_to_training(digits: Line) -> None:
    request = with_program(digits, build(), torch.rand(3, 1, 8, 8))
    program = subject.from_program(request, "")
    images = torch.rand(16, 1, 8, 8)
    before = program.module.state_dict()["features.0.1.running_mean"].clone()
    (one,), (other,) = program.forward(images), program.forward(images)
    assert not torch.equal(one, other)  # dropout is at work
    assert one.requires_grad
    with program.evaluating():
        (still,), (as_still,) = program.forward(images), program.forward(images)
    assert torch.equal(still, as_still) and not torch.equal(still, one)
    (again,) = program.forward(images)
    assert not torch.equal(again, program.forward(images)[0]), "it trains again"
    assert not torch.equal(program.module.state_dict()["features.0.1.running_mean"], before)


def test_tied_weights_of_a_program_are_written_under_both_names(small: Line) -> None:
    first = nn.Linear(4, 4, bias=False)
    net = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = first.weight
    program = subject.from_program(with_program(small, net, torch.randn(3, 4)), "")
    with torch.no_grad():
        for node in program.module.graph.nodes:  # type: ignore[union-attr]
            if node.op == "get_attr" and node.users:
                program.module.get_parameter(node.target).add_(1)
    state = program.state()
    assert torch.equal(state["0.weight"], state["2.weight"])
    assert torch.equal(state["0.weight"], first.weight + 1)


@pytest.mark.slow(seconds=5)
def test_exactly_the_parents_names_are_written_and_prints_do_not_reach_stdout(small: Line) -> None:
    forward = (
        "print('a print'); os.system('echo an echo'); "
        "print('threads', torch.get_num_threads(), sys.stdin.read()); "
        "print('fills', torch.are_deterministic_algorithms_enabled(), "
        "torch.utils.deterministic.fill_uninitialized_memory)"
    )
    lines, errors = run(with_code(small, forward=forward))
    assert lines[-1]["type"] == "done"
    assert errors.count("a print") == errors.count("an echo") == 2
    assert "threads 1 \n" in errors  # and nothing to read but the end
    assert "fills True False\n" in errors, "in deterministic mode torch would fill every new tensor first"
    assert load_file(lines[-1]["weights"]).keys() == {"first.weight", "first.bias"}
    assert lines[-1]["summary"]["last_loss"] < lines[-1]["summary"]["first_loss"]
    (idle,) = [line for line in lines if line["type"] == "note"]
    assert idle["code"] == "NO_GRADIENT" and "2 parameters" in idle["message"]
    assert "'unused.bias', 'unused.weight'" in idle["message"], (
        "they are to learn, and nothing depends on them"
    )


@pytest.mark.slow
def test_what_the_code_froze_stays_as_it_is(small: Line) -> None:
    frozen = with_code(small, build="net = Net(); net.first.weight.requires_grad_(False); return net")
    lines, _ = run(frozen)
    assert lines[0]["parameters"] == 3 + 2 * 2 + 2, "the bias, and the layer that is not used"
    new = load_file(lines[-1]["weights"])
    assert torch.equal(new["first.weight"], torch.zeros(3, 4)) and bool((new["first.bias"] != 0).all())


@pytest.mark.slow
def test_fp32_is_computed_in_fp32(small: Line, tmp_path: Path) -> None:
    said = tmp_path / "said"
    read = f"open({str(said)!r}, 'w').write(torch.backends.cudnn.conv.fp32_precision); return Net()"
    run(with_code(small, build=read))
    assert said.read_text() == "ieee"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["module", "program"])
def test_with_patterns_only_the_parameters_that_fit_learn(form: str, digits: Line) -> None:
    module = build()
    module.load_state_dict(PARENT)
    request = digits if form == "module" else with_program(digits, module, torch.rand(3, 1, 8, 8))
    lines, _ = run(request | {"trainable": ["classify.bias", "cl*.weight"]})
    new, trained = load_file(lines[-1]["weights"]), {name for name, _ in module.named_parameters()}
    moved = {name for name in trained if not torch.equal(new[name], PARENT[name])}
    assert (lines[0]["trained"], moved) == (form, {name for name in trained if name.startswith("classify.")})
    assert lines[0]["parameters"] == sum(PARENT[name].numel() for name in moved)


@pytest.mark.slow
def test_code_that_froze_everything_is_refused_with_its_reason(small: Line) -> None:
    lines, _ = run(with_code(small, build="return Net().requires_grad_(False)"))
    assert [(line["type"], line["code"]) for line in lines] == [("failed", "NO_TRAINABLE_PARAMS")]


@pytest.mark.slow
def test_rows_that_are_quarantined_are_told_by_their_numbers_in_the_data(small: Line) -> None:
    data = load_file(small["data"])
    data["x"][6] = torch.nan
    save_file(data, small["data"])
    hyperparameters = {**small["hyperparameters"], "bad_rows": "quarantine"}
    lines, _ = run(with_code(small) | {"hyperparameters": hyperparameters})
    assert [line["quarantined"] for line in lines if line.get("quarantined")] == [[6]]
    assert lines[-1]["summary"]["quarantined"] == [6] and lines[-1]["summary"]["skipped"] == 0


# Each with words of the remedy, and the forward that follows it.
BROKEN = {
    "inference part": (
        "with torch.inference_mode(): y = self.first(x)\n        return self.first(x) * y",
        "take that out",
        "with torch.no_grad(): y = self.first(x)\n        return self.first(x) * y",
    ),
    "kept state": (
        "self.kept = self.first(x) + getattr(self, 'kept', torch.zeros(1)).mean(); return self.kept",
        "detach it",
        "self.kept = self.first(x) + getattr(self, 'kept', torch.zeros(1)).detach().mean(); return self.kept",
    ),
    "numpy": (
        "return torch.from_numpy(self.first(x).numpy())",
        "write this part with torch",
        "return self.first(x)",
    ),
    "in place": (
        "y = self.first(x).sigmoid(); y += 1; return self.first(x) + y",
        "compute a new one",
        "y = self.first(x).sigmoid(); y = y + 1; return self.first(x) + y",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_of_torch_that_names_no_mistake_gets_a_remedy_which_cures_it(case: str) -> None:
    broken, said, mended = BROKEN[case]

    def trained(forward: str) -> None:
        names: dict[str, Any] = {}
        exec(SMALL.format(forward=forward, build="pass"), names)
        net, x = names["build"](), torch.rand(16, 4)
        settings = Settings(batch_size=8, n_epochs=2, precision="bf16")
        list(amp.train(net, lambda rows: net(x[rows]).float().square().mean(), 16, settings))

    with pytest.raises(RuntimeError) as caught:
        trained(broken)
    line = trainer.failure(caught.value, {"source": None})
    assert line["code"] == "USER_CODE" and said in line["message"]
    trained(mended)


@pytest.mark.slow
def test_code_that_raises_fails_the_job_with_its_traceback(small: Line) -> None:
    lines, _ = run(with_code(small, forward="raise LookupError('no such lamp')"))
    assert [line["type"] for line in lines] == ["started", "failed"]
    assert (lines[-1]["code"], lines[-1]["message"]) == ("USER_CODE", "LookupError: no such lamp")
    assert "model.py" in lines[-1]["traceback"]
    assert "raise LookupError" in lines[-1]["traceback"]
    assert not list(Path(small["out"]).iterdir())


OWN_BACKWARD = """
class Rounded(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return x.round()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, *grads):
        return grads[0]
"""


@pytest.mark.slow
def test_a_function_of_the_code_with_its_own_backward_learns_under_autocast(small: Line) -> None:
    """Rounding has no slope: only its own backward lets the layer before it learn."""
    request = with_code(small, forward="return Rounded.apply(self.first(x))")
    code = Path(request["source"]["folder"]) / "model.py"
    code.write_text(code.read_text().replace("class Net", f"{OWN_BACKWARD}\nclass Net"))
    settings = {**small["hyperparameters"], "n_epochs": 20, "learning_rate": 0.1}
    lines, _ = run(request | {"precision": "fp16", "hyperparameters": settings})
    summary = lines[-1]["summary"]
    assert summary["last_loss"] < 0.5 * summary["first_loss"] and not bool(
        (load_file(lines[-1]["weights"])["first.weight"] == 0).any()
    )


@pytest.mark.slow
def test_a_module_that_cannot_be_built_any_more_is_replaced_by_its_program(small: Line) -> None:
    request = with_code(small, build="raise SystemExit('the dataset moved')")
    first = nn.Sequential()
    first.add_module("first", nn.Linear(4, 3))
    program = with_program(small, first, torch.randn(3, 4))["program"]
    lines, _ = run(request | {"program": program})
    assert lines[0]["trained"] == "program"
    assert "SystemExit: the dataset moved" in lines[0]["note"]
    assert lines[-1]["type"] == "done"
    lines, _ = run(request)
    assert [(line["type"], line["code"]) for line in lines] == [("failed", "USER_CODE")]
    adapters = {"rank": 2, "alpha": 2.0, "dropout": 0.0, "targets": None}
    lines, _ = run(request | {"program": program, "lora": adapters})
    assert [(line["type"], line["code"]) for line in lines] == [("failed", "NO_MODULES")]


@pytest.mark.slow
def test_a_job_whose_data_overflow_every_gradient_fails_with_its_reason_and_writes_nothing(
    small: Line,
) -> None:
    data = load_file(small["data"])
    save_file(data | {"target:y": torch.full_like(data["target:y"], 1e7)}, small["data"])
    hyperparameters = {
        "n_epochs": 50,
        "batch_size": 16,
        "init_scale": 8.0,
        "max_floor_hits": 3,
        "scale_floor": 1.0,
    }
    lines, _ = run(with_code(small) | {"precision": "fp16", "hyperparameters": hyperparameters})
    steps = [line for line in lines if line["type"] == "step"]
    assert [line["scale"] for line in steps] == [8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert {line["cause"] for line in steps} == {"gradient overflow"}
    assert [line["grad_norm"] for line in steps] == [None] * 6  # JSON has no infinity
    assert lines[-1]["code"] == "SCALE_COLLAPSE"
    assert "bf16 or fp32" in lines[-1]["message"]
    assert not list(Path(small["out"]).iterdir())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_null_and_bad_data(small: Line) -> None:
    data = load_file(small["data"])
    save_file(data | {"x": torch.full_like(data["x"], torch.inf)}, small["data"])
    lines, _ = run(with_code(small))
    assert {line["loss"] for line in lines[1:-1]} == {None}
    assert lines[-1]["code"] == "BAD_DATA"


FILLS_THE_DISK = """
import sys
        def write(*_, **__): open("/dev/full", "wb").write(bytes(100_000))
        sys.modules["halfeven.serve.finetune.training.training_job"].save_tensors = write
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_job_with_its_reason_and_no_weights(small: Line) -> None:
    lines, _ = run(with_code(small, forward=FILLS_THE_DISK.strip()))
    assert (lines[-1]["type"], lines[-1]["code"]) == ("failed", "DISK_FULL")
    assert "Delete versions or files" in lines[-1]["message"]
    assert not (Path(small["out"]) / "weights.safetensors").exists()


@pytest.mark.slow
def test_running_out_of_memory_is_said_so(small: Line) -> None:
    request = with_code(small, forward="torch.ones(2**33)") | {"memory_limit_bytes": 8 * 2**30}
    lines, _ = run(request)
    assert lines[-1]["code"] == "OUT_OF_MEMORY"
    assert "limit is 8.0 GiB" in lines[-1]["message"]
    assert "batch_size" in lines[-1]["message"]


@pytest.mark.slow
def test_cancel_ends_the_job_after_a_step(small: Line) -> None:
    long = {"n_epochs": 5000, "batch_size": 16}
    with started(with_code(small) | {"hyperparameters": long}) as process:
        assert process.stdin and process.stdout
        process.stdin.write("cancel\n")
        process.stdin.flush()
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(PATIENCE_S) == 0
    assert lines[-1] == {"type": "cancelled"}
    assert not list(Path(small["out"]).iterdir())


HANGING = "print('hanging', file=sys.stderr, flush=True); threading.Event().wait()"


@pytest.mark.slow
def test_when_the_control_pipe_ends_the_process_leaves_at_once_even_from_code_that_hangs(small: Line) -> None:
    with started(with_code(small, forward=HANGING)) as process:
        assert process.stdin and process.stderr
        assert any("hanging" in line for line in process.stderr)
        process.stdin.close()
        assert process.wait(PATIENCE_S) != 0


@pytest.mark.slow
def test_when_the_server_is_killed_the_process_dies_though_its_pipes_stay_open(small: Line) -> None:
    request = Path(small["out"]).parent / "request.json"
    request.write_text(json.dumps(with_code(small, forward=HANGING)))
    server = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-m', {TRAINER!r}, {str(request)!r}])"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", server], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout and process.stderr
        assert any("hanging" in line for line in process.stderr)
        process.kill()
        assert json.loads(process.stdout.readline())["type"] == "started"
        out = process.stdout.fileno()
        assert select.select([out], [], [], 10.0)[0], "the trainer lives on"
        assert os.read(out, 1) == b""  # the end: nobody holds the trainer's side any more


def task_of(request: Line, **changes: Any) -> Task:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    return Task(request | changes, lambda x: (x @ weight.T,))


def test_a_batch_larger_than_the_model_takes_is_passed_in_parts_with_the_same_mean(small: Line) -> None:
    batch = torch.arange(13)
    whole = task_of(small, max_batch_size=32).loss(batch).item()
    for largest, passes in ((5, 3), (0, 13)):
        task = task_of(small, max_batch_size=largest)
        parts = task.parts(batch)
        assert len(parts) == passes
        mean = sum(task.loss(part).item() * part.numel() / 13 for part in parts)
        assert mean == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_batch_in_parts_has_the_mean_over_the_targets_that_count(
    loss: str, turned: bool, small: Line
) -> None:
    """As torch has it of the whole batch: padding and missing targets lie unevenly among the parts."""
    data = load_file(small["data"])
    counts = torch.arange(len(data["x"])) % 5 == 0
    if loss == "mse":
        target = torch.where(counts[:, None], data["target:y"], torch.nan)
    else:
        target = torch.where(counts, torch.arange(len(counts)) % 3, IGNORED)
    save_file({**data, "target:y": target}, small["data"])
    asked, batch = {"losses": {"y": loss}, "missing_targets": "mask"}, torch.arange(13)

    class Same:
        epoch = 0

        def rows(self, numbers: list[int], *given: dict[str, Any]) -> Any:
            return given

    whole = task_of(small, max_batch_size=32, **asked).loss(batch).item()
    for largest in (5, 2, 1):
        task = task_of(small, max_batch_size=largest, **asked)
        if turned:
            task.transform = Same()  # type: ignore[assignment]
        parts = task.parts(batch)
        mean = sum(task.loss(part).item() * part.numel() / 13 for part in parts)
        assert mean == pytest.approx(whole, rel=1e-5), largest


def test_rows_are_on_their_way_to_a_device_while_the_host_goes_on_and_are_fetched_one_time(
    small: Line,
) -> None:
    batch, other = torch.arange(13), torch.arange(5, 9)
    here = task_of(small)
    with SimulatedGpu(Random(0)) as gpu:
        task = task_of(small, device="cuda:0")
        task.fetch([batch])
        made, waits = gpu.memory.count, len(gpu.operations.waits)
        for rows in (batch, other, batch):
            for there, expected in zip(task.tensors(rows), here.tensors(rows), strict=True):
                assert {name: one.cpu().tolist() for name, one in there.items()} == {
                    name: one.tolist() for name, one in expected.items()
                }
        names = len(here.inputs) + len(here.targets)
        assert gpu.memory.count == made + 2 * names, "the rows that were fetched are not copied again"
        assert gpu.operations.waits[waits:] == ["aten._to_copy.default"] * (3 * names), "only the test waits"


def test_rows_that_were_fetched_are_never_those_of_another_epoch_or_of_a_judgement(small: Line) -> None:
    task, batch = task_of(small), torch.arange(3)

    class Counting:
        epoch = 0

        def rows(self, numbers: list[int], *given: dict[str, Any]) -> Any:
            return tuple({name: one * 0 + self.epoch for name, one in part.items()} for part in given)

    task.transform = Counting()  # type: ignore[assignment]
    task.begin(1)
    task.fetch([batch])
    with task.as_they_are():
        assert task.tensors(batch)[0]["x"].unique().numel() > 1
    task.fetch([batch])
    assert task.tensors(batch)[0]["x"].unique().tolist() == [1]
    task.fetch([batch])
    task.begin(2)
    assert task.tensors(batch)[0]["x"].unique().tolist() == [2]


def test_a_class_beyond_the_answer_s_is_named_before_the_first_step_whatever_row_has_it(small: Line) -> None:
    classes = torch.arange(32) % 3
    for file, numbers in (("data", classes), ("held_out", torch.where(torch.arange(32) == 31, 5, classes))):
        save_file({**load_file(small["data"]), "target:y": numbers}, Path(small["out"]) / file)
        small[file] = str(Path(small["out"]) / file)
    learnt = task_of(small, losses={"y": "cross_entropy"})
    assert learnt.loss(torch.arange(2)).isfinite()
    judged = Task({**small, "losses": {"y": "cross_entropy"}}, learnt.forward, learnt.losses, held_out=True)
    with pytest.raises(
        Exception, match=r"answers with 3 classes, so 0..2 are expected, .* the class 5"
    ) as refused:
        judged.loss(torch.arange(2))
    assert refused.value.code == "BAD_DATA"  # type: ignore[attr-defined]


def test_only_the_rows_to_train_on_are_read(small: Line) -> None:
    data = load_file(small["data"])
    data["x"][1::2] = torch.nan  # the held-out rows
    save_file(data, small["data"])
    assert task_of(small).loss(torch.arange(len(small["rows"]))).isfinite()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [0, 32]}, "there are 32 rows"),
        ({"rows": []}, "rows"),
        ({"losses": {"z": "mse"}}, "target:z"),
    ],
)
def test_a_request_that_does_not_fit_its_data_is_refused(small: Line, changes: Line, said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        task_of(small, **changes)
    assert refused.value.code == "BAD_DATA"  # type: ignore[attr-defined]
