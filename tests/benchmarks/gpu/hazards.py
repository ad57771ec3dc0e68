"""Checks that may leave the device unusable, and so run last: recordings that are closed, captures that fail."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.serve.selftest.nets import answers_in_flight
from torch import Tensor

from tests.benchmarks.gpu.nets import Net, Parts, nets
from tests.benchmarks.gpu.phase import Phase


def measure(phase: Phase) -> None:
    (net,) = nets(phase, "BERT-base")
    if not phase.cuda:
        phase.facts.add("not applicable", device=str(phase.device))
        return
    phase.part("another engine is closed", partial(_another_closed, phase, net))
    phase.part("a capture fails", partial(_failed_capture, phase, net))


def _recorded(phase: Phase, net: Net, parts: Parts) -> TorchEngine:
    engine = net.engine(phase.device)
    engine.warm_up(parts)
    engine.record(parts)
    return engine


def _another_closed(phase: Phase, net: Net) -> None:
    """An engine's recordings live on when those of another are closed and their memory is used again."""
    batches = [[[net.draw(8)]] for _ in range(8)]
    one, other = (_recorded(phase, net, batches[0]) for _ in range(2))
    right = answers_in_flight(one, batches)
    other.close()
    rubbish = [
        torch.full((2**16 if phase.tiny else 2**22,), float("nan"), device=phase.device) for _ in range(64)
    ]
    phase.synchronize()
    del rubbish
    came = answers_in_flight(one, batches)
    wrong = sum(not all(map(np.array_equal, a, b)) for a, b in zip(came, right, strict=True))
    phase.facts.claim("recordings outlive another engine", not wrong, wrong=wrong, batches=len(batches))
    one.close()


def _failed_capture(phase: Phase, net: Net) -> None:
    """The engine computes as before after a capture that the driver refuses, and can be closed."""
    parts: Parts = [[net.draw(8)]]
    engine = net.engine(phase.device)
    engine.warm_up(parts)
    (right,) = engine.run(parts)

    def asking(*inputs: Tensor) -> Sequence[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            inputs[0].float().sum().item()
        return inputs

    engine.change_inputs(asking)
    steps: dict[str, Callable[[], object]] = {
        "record": lambda: engine.record(parts),
        "forget": engine.forget_recordings,
        "empty the cache": torch.cuda.empty_cache,
    }
    said = {name: _said(step) for name, step in steps.items()}
    phase.facts.add("after a capture that failed", **said)
    (came,) = engine.run(parts)
    phase.facts.claim("the engine computes after a capture that failed", np.array_equal(right, came))
    engine.close()


def _said(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "nothing"
