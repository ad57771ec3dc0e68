"""The module that a job trains: the operator's in training mode, or the captured program switched to training.

Loaded in the trainer's process (see trainer.py), where only this file and capture/child.py touch the operator's code.
"""

import importlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule

from ....models.capture import sources
from ....models.capture.child import Flat
from ....models.capture.failures import Refused, first_lines
from ....models.order import lacking_memory
from .loop.half_model import HalfModel, without_autocast
from .loop.setting_names import HALF_LEVELS
from .loop.training_terms import DTYPES, Stopped

BASE, ADAPTER = ".base_layer", "default"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Adapters:
    """LoRA by the ``peft`` library, which is imported only where a job asks for it: small matrices beside the weights
    of chosen layers learn, and are added to the weights.

    ``asked``: ``rank``, ``alpha``, ``dropout`` and ``targets`` (patterns of layers; None: see `layers_of`). Source: Hu
    et al., LoRA (2021), in the form of peft.LoraConfig.
    """

    def __init__(self, module: nn.Module, asked: Mapping[str, Any]) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self.layers = layers_of(module, asked["targets"])
        config = LoraConfig(
            r=asked["rank"], lora_alpha=asked["alpha"], lora_dropout=asked["dropout"],
            target_modules="|".join(map(re.escape, self.layers)),
        )  # fmt: skip
        inject_adapter_in_model(config, module, ADAPTER)
        self._module = module

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state_dict under the names that it had without adapters, their products added to the weights."""
        added = tuple(f"{name}.lora_" for name in self.layers)
        found = {self._as_before(name): one for name, one in state.items() if not name.startswith(added)}
        with torch.no_grad():
            for name in self.layers:
                layer: Any = self._module.get_submodule(name)
                found[f"{name}.weight"] = found[f"{name}.weight"] + layer.get_delta_weight(ADAPTER)
        return found

    def _as_before(self, name: str) -> str:
        owner, _, last = name.rpartition(".")
        return f"{layer}.{last}" if (layer := owner.removesuffix(BASE)) in self.layers else name


def layers_of(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """The names of the layers that get an adapter: linear ones and ungrouped convolutions, all or those that fit a
    pattern. Raises Stopped where there is none. Layers whose weight the operator's code froze get none.

    A weight that is used elsewhere too (tied, or its layer has two names) is left alone: the adapter would be beside it
    in one place, and its product be added in all. One that is computed (weight_norm) is no parameter to add it to.
    ``nn.MultiheadAttention`` reads the weight of its ``out_proj`` and never calls the layer: an adapter there would
    never learn.
    """
    uses = Counter(
        id(weight)
        for _, one in module.named_modules(remove_duplicate=False)
        for weight in one._parameters.values()
        if weight is not None
    )
    uncalled = {
        id(one.out_proj) for one in module.modules() if type(one).forward is nn.MultiheadAttention.forward
    }
    frozen: Collection[str] = getattr(module, "frozen_when_built", ())
    able = [
        name
        for name, one in module.named_modules()
        if name and isinstance(one, _LAYERS) and getattr(one, "groups", 1) == 1
        if f"{name}.weight" not in frozen
        if uses[id(one._parameters.get("weight"))] == 1 and id(one) not in uncalled
    ]
    found = [name for name in able if patterns is None or any(fnmatchcase(name, one) for one in patterns)]
    if not found:
        what = "the module has" if patterns is None else f"lora_targets {list(patterns)} fit"
        raise Stopped(
            "NO_TRAINABLE_PARAMS",
            f"{what} no linear layer or convolution that could have an adapter, with a weight of its own that the "
            f"model's code did not freeze (there are {able[:10]}); train with trainable = head, or with patterns of "
            "parameters",
        )
    return found


Request = Mapping[str, Any]


@dataclass
class Trainee:
    """The module to train. ``same_as``: names that no node reads, each with the name of the tied weight that is
    read. ``adapters``: those that learn instead of the module's own parameters. ``half``: the
    forward of a half model (O2). ``in_fp32``: the modules that compute in FP32 under autocast, with the reason."""

    module: nn.Module
    forward: Callable[..., tuple[Tensor, ...]]
    trained: str
    note: str = ""
    same_as: dict[str, str] = field(default_factory=dict)
    adapters: Adapters | None = None
    half: HalfModel | None = None
    in_fp32: Mapping[str, str] = field(default_factory=dict)

    def enter(self, precision: str) -> None:
        """From now on a half model (O2) computes in this precision; autocast does not need to be told before."""
        if self.half is not None:
            self.half.dtype = DTYPES[precision]

    def facts(self) -> dict[str, Any]:
        parameters = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        kept, mixed = (self.half.in_fp32, self.half.mixed) if self.half else (self.in_fp32, [])
        kept_facts = {"in_fp32": dict(kept), "mixed": mixed}
        return {"parameters": parameters, "trained": self.trained, "note": self.note, **kept_facts}

    def state(self) -> dict[str, Tensor]:
        """The weights by the names that they have in the parent."""
        state = self.module.state_dict()
        if self.adapters is not None:
            return self.adapters.merged(state)
        return state | {name: state[twin] for name, twin in self.same_as.items()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside: no dropout, BatchNorm by its running statistics; then each part is as before."""
        if isinstance(self.module, GraphModule) and self.trained == "program":
            set_training(self.module, False)
            try:
                yield
            finally:
                set_training(self.module, True)
            return
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode


def trainee_of(request: Request, parent: Mapping[str, Tensor]) -> Trainee:
    """The operator's module; the captured program where there is none, or none that can be built any more."""
    found, named = _trainee_of(request, parent), request.get("fp32_modules", [])
    if (level := request["hyperparameters"].get("opt_level")) in HALF_LEVELS:
        dtype = DTYPES.get(request["precision"], torch.float16)
        found.forward = found.half = HalfModel(found.module, dtype, named, norms=level == "O2")
    elif named:
        found.in_fp32 = without_autocast(found.module, named, request["device"])
    return found


def _trainee_of(request: Request, parent: Mapping[str, Tensor]) -> Trainee:
    note = ""
    if request["source"] is not None:
        try:
            return from_source(request, parent)
        except BaseException as error:
            if request["program"] is None or out_of_memory(error) or isinstance(error, Stopped):
                raise
            steps, level = request.get("declared_steps"), request["hyperparameters"].get("opt_level")
            if request.get("lora") or steps or level in HALF_LEVELS or request.get("fp32_modules"):
                raise Stopped(
                    "NO_MODULES",
                    "trainable = lora, opt_level = O2 or O3, fp32_modules and [[training.steps]] need the layers "
                    f"of the model's code, and the module could not be built any more: {one_line(error)}. Mend the "
                    "code and convert again, or train without them",
                ) from error
            note = f"the module could not be built, so the captured program was trained: {one_line(error)}"
    return from_program(request, note)


def from_source(request: Request, parent: Mapping[str, Tensor]) -> Trainee:
    source, lora = request["source"], request.get("lora")
    if lora:
        importlib.import_module("peft")  # before the operator's folder is on the path
    os.chdir(source["folder"])
    sys.path[:0] = [source["folder"], *source["path"]]
    module = sources.build(torch, source, Path(source["folder"]))
    sources.widen(torch, module)
    fit = module.load_state_dict(parent, strict=False)  # the module may know names that the program has not
    if fit.unexpected_keys:
        raise Refused(f"the module has no {fit.unexpected_keys[:5]}, which the weights have")
    flat = Flat(module, request)
    if lora:
        adapters = Adapters(module, lora)
        what = f"module with LoRA of rank {lora['rank']} in {len(adapters.layers)} layers"
        return Trainee(module.to(request["device"]).train(), flat.module, what, adapters=adapters)
    learn(module.to(request["device"]).train(), module.frozen_when_built, request.get("trainable"))
    return Trainee(module, flat.module, "module")


def from_program(request: Request, note: str) -> Trainee:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the absent sample inputs
        program = torch.export.load(request["program"])
    program._guards_code = []
    if request["device"] != "cpu":
        program = move_to_device_pass(program, request["device"])
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    module._forward_pre_hooks.clear()  # the range check of every call
    module._forward_pre_hooks_with_kwargs.clear()
    set_training(module, True)
    learn(module, trainable=request.get("trainable"))
    return Trainee(module, module, "program", note, tied(module))


def learn(module: nn.Module, frozen: Collection[str] = (), trainable: Sequence[str] | None = None) -> None:
    """Every parameter learns but those that the operator's code froze; with ``trainable`` those alone whose names fit
    one of the patterns (`fnmatch`); a tied one has several names, of which any may fit."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in module.named_parameters():
        known = names[id(parameter)]
        chosen = trainable is None or any(fnmatchcase(one, each) for one in known for each in trainable)
        parameter.requires_grad_(parameter.is_floating_point() and name not in frozen and chosen)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Stopped(
            "NO_TRAINABLE_PARAMS",
            "the module has no parameter that learns: the code that builds it froze every one, or every one that fits "
            "`trainable`. Leave requires_grad as it is for those that are to learn.",
        )


def set_training(module: GraphModule, training: bool) -> None:
    """Set the train flag of every operator that has one: dropouts, batch norms, recurrent layers.

    A captured program was traced in evaluation, where attention has lost its dropout: that one stays lost.
    """
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.name in ("train", "training"):
                if position < len(node.args):
                    node.update_arg(position, training)
                else:
                    node.update_kwarg(argument.name, training)
    module.recompile()


def tied(module: GraphModule) -> dict[str, str]:
    """Weights that nothing reads, by the equal one that is read: a capture keeps one name of tied weights.

    Equal by value: the archive may hold two copies. Constants (a bias of zeros) are equal by chance.
    """
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}
    state = module.state_dict()
    pairs: dict[str, str] = {}
    for name in state.keys() - read:
        tensor = state[name]
        if tensor.numel() > 1 and tensor.is_floating_point() and bool(tensor.min() != tensor.max()):
            twin = next(
                (other for other in sorted(state.keys() & read) if torch.equal(state[other], tensor)), None
            )
            pairs |= {name: twin} if twin else {}
    return pairs


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or lacking_memory.is_out_of_memory(error)


def one_line(error: BaseException) -> str:
    sentence = " ".join(first_lines(error).split())
    return sentence if isinstance(error, Refused) else f"{type(error).__name__}: {sentence}"
