"""Runs the operator's own ``nn.Module``, which ``torch.export`` cannot capture, under ``torch.autocast``.

The one place where user code runs in the server. Autocast casts every weight again at every request (its cache
serves weights that require gradients only) and the FP32 weights stay in memory: this form passes the same gate as the
others, but it is not as small or as fast.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..capture import child
from ..errors import DamagedFile, EngineFailed
from ..files.opened_file import OpenedFile
from ..spec.spec import ModelSpec
from ..store.store import Version
from .cpu.setup import PLAIN, CpuSetup
from .engine import LIVE_FILE
from .live_source import LiveSource
from .torch_engine import TorchEngine

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class LiveModule:
    """The operator's module: the spec's inputs in order, its outputs in order and in the spec's datatypes."""

    def __init__(self, module: nn.Module, source: LiveSource, spec: ModelSpec) -> None:
        names: dict[str, Any] = {"inputs": [{"name": tensor.name} for tensor in spec.inputs]}
        names["outputs"] = [tensor.name for tensor in spec.outputs]
        child.Flat(module, names | {"batch_axes": spec.batch_axes}).copies = True
        self.module = module
        self.source = source
        self.spec = spec

    def __call__(self, inputs: Sequence[Tensor], half: bool) -> list[Tensor]:
        """Run the module. Raises EngineFailed for an error of the operator's code and for outputs that break the
        spec."""
        try:
            answers = self.module(*inputs)
        except child.Refused as error:
            raise EngineFailed(f"the live model '{self.spec.name}': {error}") from None
        except (Exception, SystemExit) as error:
            sentence = f"{type(error).__name__}: {child.first_lines(error)}{self.source.place(error)}"
            raise EngineFailed(f"the live model '{self.spec.name}' raised {sentence}") from error
        return [self._promised(index, answer, half) for index, answer in enumerate(answers)]

    def _promised(self, index: int, answer: Tensor, half: bool) -> Tensor:
        """The output in the spec's datatype (half answers are upcast), in new memory: the module may keep its own."""
        spec = self.spec.outputs[index]
        if answer.dtype != spec.type.torch and not (half and answer.dtype in HALVES and spec.type.is_float):
            raise EngineFailed(
                f"output '{spec.name}' of the live model '{self.spec.name}': model.toml says {spec.datatype}, "
                f"the model gives {str(answer.dtype).removeprefix('torch.')}"
            )
        return answer.detach().to(spec.type.torch, copy=True)


class LiveEngine(TorchEngine):
    """One module on one device; threads, staging and copies are those of `TorchEngine`.

    ``precision`` is ``fp16``, ``bf16`` or ``fp32`` (no autocast region, no islands); ``islands`` are module
    paths. Engines of the same module do not run at the same time, nor while another's islands are raised.
    """

    form = "live"
    host_reads = ("the model's own code",)

    def __init__(
        self,
        module: LiveModule,
        precision: str,
        device: torch.device,
        islands: Iterable[str] = (),
        setup: CpuSetup = PLAIN,
    ) -> None:
        # One fused op, whose parts neither autocast nor islands see.
        torch.backends.mha.set_fastpath_enabled(False)
        self._place(precision, device, setup.only(()))
        self._dtype = _DTYPES.get(precision)
        self._live = module
        module.module.to(device)
        half = self._dtype is not None
        self._sink: Callable[[], None] = raise_islands(module.module, islands if half else (), device.type)
        self._module: Any = self._answer
        self._stage()

    def close(self) -> None:
        self._sink()
        del self._live
        super().close()

    def _answer(self, *inputs: Tensor) -> list[Tensor]:
        # Autocast's state belongs to the thread: entered here, on the device thread, at every call.
        with self._region():
            return self._live(inputs, half=self._dtype is not None)

    def _region(self) -> Any:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype, cache_enabled=False)


def load_live(version: Version, precision: str, device: torch.device, setup: CpuSetup = PLAIN) -> LiveEngine:
    """A version's live form, or with ``fp32`` its original.

    Raises EngineFailed naming a file of the model folder that has changed since the proof, DamagedFile,
    BadFolder or CaptureFailed where the module cannot be built any more.
    """
    wanted = version.json(LIVE_FILE)
    with version.opened("weights.safetensors") as weights:
        module = live_module(wanted, weights, version.spec())
    return LiveEngine(module, precision, device, wanted["islands"], setup)


def live_module(wanted: Mapping[str, Any], weights: Path | OpenedFile, spec: ModelSpec) -> LiveModule:
    """The module that ``live.json`` describes, with the stored weights."""
    source = LiveSource(
        Path(wanted["folder"]), wanted["source"], tuple(Path(root) for root in wanted["path"])
    )
    source.check(wanted["text"])
    module = source.build(proven=wanted["text"])
    path, readable = (weights.path, weights.again) if isinstance(weights, OpenedFile) else (weights, weights)
    try:
        module.load_state_dict(load_file(readable), strict=True)
    except Exception as error:
        raise DamagedFile(f"{path} does not fit the module of {source.folder}: {error}") from error
    return LiveModule(module, source, spec)


def live_json(
    source: LiveSource, text: Mapping[str, str], islands: Sequence[str], weights: str
) -> dict[str, Any]:
    """The contents of ``live.json``, which `live_module` reads; ``weights``: the SHA-256 of the weights' file."""
    return {
        "folder": str(source.folder),
        "source": source.source,
        "path": [str(root) for root in source.path],
        "text": dict(text),
        "islands": list(islands),
        "weights": weights,
    }


def is_current(version: Version) -> bool:
    """True if the operator's folder still has the text with which a live version was proven."""
    wanted = version.json(LIVE_FILE)
    try:
        LiveSource(Path(wanted["folder"]), wanted["source"]).check(wanted["text"])
    except EngineFailed:
        return False
    return True


HALVES = (torch.float16, torch.bfloat16)


def raise_islands(module: nn.Module, paths: Iterable[str], device_type: str) -> Callable[[], None]:
    """Make the modules at ``paths`` FP32 islands, whose inputs are upcast and which run outside the autocast region,
    until the function that this gives is called.

    Floating tensors among a module's arguments are upcast, also inside lists, tuples and dictionaries.
    ``torch.autocast(enabled=False)`` alone upcasts nothing: a half tensor that enters such a region stays half and
    meets FP32 weights there (torch.amp, "torch.autocast").
    """
    islands = [module.get_submodule(path) for path in paths]
    before = [island.__dict__.get("forward") for island in islands]
    for island in islands:
        island.forward = _in_fp32(island.forward, device_type)

    def sink() -> None:
        for island, forward in zip(islands, before, strict=True):
            del island.forward
            if forward is not None:  # the operator's own, set on the instance
                island.forward = forward

    return sink


def _in_fp32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def island(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = tree_map(_widened, (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            return forward(*wide_args, **wide_kwargs)

    return island


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
