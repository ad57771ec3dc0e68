"""The flight recorder in the trainers of others: Hugging Face's own, and Lightning's by the calls that it makes."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from halfeven.training import lightning_recorder, trainer_recorder
from torch import Tensor, nn

ROWS, BAD = 8, 5


class Net(nn.Module):
    """The loss is the model's own answer, as Hugging Face has it. Row ``BAD`` of the second batch is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        for one in self.parameters():
            nn.init.ones_(one)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        answer = self.last(self.first(x)).float()
        return {"loss": ((answer - labels) ** 2).mean(), "logits": answer}


def rows() -> list[dict[str, Tensor]]:
    x = torch.rand(2 * ROWS, 4)
    x[ROWS + BAD] = 6e4
    return [{"x": one, "labels": torch.zeros(2)} for one in x]


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.slow
def test_hugging_faces_trainer_tells_the_layer_and_the_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer has fp16 on a GPU alone: on a processor the scaler and autocast are put in here."""
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = scaler()

        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
            return torch.autocast("cpu", dtype=torch.float16)

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    recorder = trainer_recorder()
    settings = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=ROWS, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    net = Net()
    with caplog.at_level(logging.WARNING, "halfeven.training"):
        Trainer(net, settings, train_dataset=rows(), callbacks=[recorder]).train()
    (found,) = recorder.records
    assert (found.layer, found.operation, found.direction, found.rows) == (
        "first",
        "linear",
        "forward",
        (BAD,),
    )
    assert recorder.skipped == 1 and found.step == 2 and str(found) in caplog.text and not net._forward_hooks


@pytest.mark.slow
def test_without_a_scaler_nothing_is_watched() -> None:
    pytest.importorskip("transformers")
    recorder, net = trainer_recorder(), Net()
    recorder.on_train_begin(None, None, None, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    recorder.on_step_end(None, None, None)
    assert recorder.records == () and recorder.skipped == 0 and not net._forward_pre_hooks


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_trainer_tells_the_layer_and_the_row(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of Lightning's trainer tell both; the modules of ``training_step`` are attributes, and forward is never
    called."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    parent = package.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, package, fake := ModuleType(package))
    monkeypatch.setattr(fake, "Callback", type("Callback", (), {}), raising=False)
    if parent:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    own, recorder, data = scaler(), lightning_recorder(), rows()
    module = nn.ModuleDict({"encoder": nn.Linear(4, 4), "act": nn.ReLU(), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=own))
    recorder.on_train_start(trainer, module)
    for number in range(2):
        batch = torch.stack([one["x"] for one in data[number * ROWS : (number + 1) * ROWS]])
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (module["head"](module["encoder"](batch) * 1e4)).float().mean()
        own.scale(loss).backward()
        own.step(optimizer)
        own.update()
        optimizer.zero_grad()
        recorder.on_train_batch_end(trainer, module, {}, batch, number)
    recorder.on_train_end(trainer, module)
    (found,) = recorder.records
    assert found.layer == "encoder" and found.rows == (BAD,) and found.step == 2
    assert not module["head"]._forward_hooks and "step" not in vars(own)
