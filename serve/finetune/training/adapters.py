"""LoRA by the ``peft`` library: small matrices beside the weights of chosen layers learn, and are added to them.

``peft`` is imported only where a job asks for it. Source: Hu et al., LoRA (2021), in the form of peft.LoraConfig.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .loop.training_terms import Stopped

BASE, ADAPTER = ".base_layer", "default"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Adapters:
    """``asked``: ``rank``, ``alpha``, ``dropout`` and ``targets`` (patterns of layers; None: see `layers_of`)."""

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
    pattern. Raises Stopped where there is none.

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
    able = [
        name
        for name, one in module.named_modules()
        if name and isinstance(one, _LAYERS) and getattr(one, "groups", 1) == 1
        if uses[id(one._parameters.get("weight"))] == 1 and id(one) not in uncalled
    ]
    found = [name for name in able if patterns is None or any(fnmatchcase(name, one) for one in patterns)]
    if not found:
        what = "the module has" if patterns is None else f"lora_targets {list(patterns)} fit"
        raise Stopped(
            "NO_TRAINABLE_PARAMS",
            f"{what} no linear layer or convolution that could have an adapter, with a weight of its own (there are "
            f"{able[:10]}); train with trainable = head, or with patterns of parameters",
        )
    return found
