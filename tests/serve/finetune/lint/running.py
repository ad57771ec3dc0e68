"""Runs a training script on the CPU with what it takes from elsewhere: batches, stand-ins for apex and transformers."""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.lint.finding import Finding
from halfeven.serve.finetune.lint.lint import lint


def applied(text: str, finding: Finding) -> str:
    """The script with one piece of advice followed."""
    lines = text.splitlines()
    old = lines[finding.first - 1]
    indent = old[: len(old) - len(old.lstrip())]
    lines[finding.first - 1 : finding.last] = [
        indent + line if line else "" for line in finding.instead.splitlines()
    ]
    return "\n".join(lines) + "\n"


def mended(text: str, path: Path) -> str:
    """The script after all advice."""
    found: list[Finding] = []
    for _ in range(30):
        path.write_text(text)
        found = lint([path])
        if not found:
            return text
        text = applied(text, found[0])
        compile(text, "train.py", "exec")
    raise AssertionError(f"advice without an end: {found}\n{text}")


def run(text: str, folder: Path, **given: Any) -> dict[str, Any]:
    """The values of the script's names at its end."""
    torch.manual_seed(0)
    text = text.replace('"cuda"', '"cpu"').replace("'cuda'", "'cpu'").replace(".cuda()", "")
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(6)]
    names = {
        "loader": batches,
        "keep": torch.ones(6, 4),
        "path": folder / "state.pt",
        "__name__": "train",
        **given,
    }
    names["keep"][:, 0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where the scripts write their checkpoints
        for name, module in _stand_ins().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(torch, "load", functools.partial(torch.load, weights_only=False))
        exec(compile(text, "train.py", "exec"), names)
    return names


def _stand_ins() -> dict[str, types.ModuleType]:
    apex, amp = types.ModuleType("apex"), _Apex("apex.amp")
    apex.amp = amp  # type: ignore[attr-defined]
    transformers, peft = types.ModuleType("transformers"), types.ModuleType("peft")
    transformers.AutoModelForCausalLM = _Pretrained  # type: ignore[attr-defined]
    peft.LoraConfig = dict  # type: ignore[attr-defined]
    peft.get_peft_model = lambda model, _config: model  # type: ignore[attr-defined]
    return {"apex": apex, "apex.amp": amp, "transformers": transformers, "peft": peft}


class _Pretrained:
    @staticmethod
    def from_pretrained(_name: str, **words: Any) -> torch.nn.Module:
        dtype = words.get("torch_dtype", words.get("dtype", torch.float32))
        return torch.nn.Linear(8, 4, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)


class _Apex(types.ModuleType):
    """Apex as far as its losses have numbers, and its gradients are scaled inside a region."""

    losses = 1

    def initialize(
        self, model: Any, optimizer: Any, opt_level: str = "O1", num_losses: int = 1
    ) -> tuple[Any, Any]:
        self.losses = num_losses
        return model, optimizer

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> Iterator[torch.Tensor]:
        list(range(self.losses))[loss_id]
        yield loss

    def master_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
        return (one for group in optimizer.param_groups for one in group["params"])
