"""Makes the FP16 convolutions of every process that has this folder on its PYTHONPATH slower: a processor without FP16
kernels. ``SLOW_HALF`` says how many times; an answer stays what it is in FP16 storage."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TIMES = int(os.environ.get("SLOW_HALF", "1"))


class TorchSlowed(MetaPathFinder):
    """A finder of torch as it is, which slows torch when it was executed."""

    searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self.searching:
            return None
        self.searching = True
        spec = importlib.util.find_spec("torch")
        self.searching = False
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            slow(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def slow(torch: Any) -> None:
    plain = torch.ops.aten._convolution.default
    ending = (False, False, True, True)  # benchmark, deterministic, cudnn_enabled, allow_tf32

    def convolution(x: Any, weight: Any, bias: Any, *how: Any) -> Any:
        if x.dtype != torch.float16:
            return plain(x, weight, bias, *how, *ending)
        began = time.thread_time()
        wide = plain(x.float(), weight.float(), None if bias is None else bias.float(), *how, *ending)
        until = time.thread_time() + (TIMES - 1) * (time.thread_time() - began)
        while time.thread_time() < until:
            pass
        return wide.half()

    torch._slow_half = torch.library.Library("aten", "IMPL")
    torch._slow_half.impl("convolution", convolution, "CPU")


if TIMES > 1:
    sys.meta_path.insert(0, TorchSlowed())
