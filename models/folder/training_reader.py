"""The ``[training]`` table of a ``model.toml``: metrics, loss, transform, the modules that stay in FP32, and the
nets, optimizers and steps of a training with several optimizers.

The latter, as they are stored with a version (``declared_steps``)::

    {"nets": {NAME: {"build": "FILE.py:FUNCTION", "weights": FILE}},
     "optimizers": {NAME: {"nets": [NAME, …], "learning_rate": …, …}},
     "steps": [{"optimizer": NAME, "loss": "FILE.py:FUNCTION", "scaler": NAME}, …]}

The served model is the net ``model``. A net that no optimizer has is frozen.
"""

import re
from collections.abc import Mapping
from typing import Any

from .loss_and_optimizer_names import DEFAULT, LOSSES, OWN_LOSS, read_optimizer, short_name
from .model_keys import CLASS_METRICS, NET, OPTIMIZER, STEP, TRAINING, VALUE_METRICS
from .tensor_reader import TensorReader
from .toml_reader import one_of

MODEL = "model"
_NAME = re.compile(r"[A-Za-z_]\w{0,63}")
_KEYS = ("nets", "optimizers", "steps")
_NOT_TORCH = ("nets", "optimizer", "learning_rate", "weight_decay", "clip_norm")


def net_weights(declared_steps: Mapping[str, Any] | None) -> list[str]:
    """The files of the model folder that declared nets have their weights from."""
    nets = (declared_steps or {}).get("nets", {})
    return [net["weights"] for net in nets.values() if "weights" in net]


class TrainingReader(TensorReader):
    """The reader of one file's ``[training]``. All methods raise BadFolder."""

    def metrics(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        found = self.strings(self.training(data).get("metrics", []), "training.metrics")
        for metric in found:
            one_of(metric, (*CLASS_METRICS, *VALUE_METRICS), f"{self.file}: [training] metrics")
        return tuple(dict.fromkeys(found))

    def loss(self, data: Mapping[str, Any]) -> str | None:
        found = self.training(data).get("loss")
        if found is None:
            return None
        if OWN_LOSS.fullmatch(found):
            self.existing(found.partition(":")[0], "training.loss", None)
            return found
        one_of(short_name(found), LOSSES, f"{self.file}: [training] loss")
        return short_name(found)

    def transform(self, data: Mapping[str, Any]) -> str | None:
        training = self.training(data)
        return self.function(training, "transform", "training") if "transform" in training else None

    def own_optimizer(self, data: Mapping[str, Any]) -> str | None:
        training = self.training(data)
        return self.function(training, "optimizer", "training") if "optimizer" in training else None

    def fp32_modules(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        found = self.strings(self.training(data).get("fp32_modules", []), "training.fp32_modules")
        if found and data["source"].endswith((".pt2", ".onnx")):
            raise self.error(
                f"[training] fp32_modules: source = {data['source']!r} has no modules that could be named. Take it "
                "out, or convert a folder with source = 'model.py:build'"
            )
        return tuple(found)

    def declared_steps(self, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """None where one optimizer and one loss train the model."""
        training = self.training(data)
        if not any(key in training for key in _KEYS):
            return None
        if not re.fullmatch(r"[^:]+\.py:\w+", source := data["source"]):
            raise self.error(
                f"[[training.steps]]: several optimizers need the layers of the model's code, and source = {source!r} "
                "has none: a captured program, a file and a configuration are trained by one optimizer. Take nets, "
                "optimizers and steps out of [training], or convert a folder with source = 'model.py:build'"
            )
        for key in ("optimizers", "steps"):
            if not training.get(key):
                raise self.error(
                    f"[training] {', '.join(one for one in _KEYS if one in training)} are there and '{key}' is not: "
                    "expected at least one optimizer and one step of it; docs/finetune.md has an example"
                )
        if "optimizer" in training:
            raise self.error(
                "[training] optimizer makes the one optimizer of a training, and [training.optimizers] declares "
                "several, each with an optimizer of torch: take optimizer out of [training], or the others"
            )
        nets = {name: self.net(name, one) for name, one in training.get("nets", {}).items()}
        optimizers = {name: self.optimizer(name, one, nets) for name, one in training["optimizers"].items()}
        self.check_owners(optimizers)
        steps = [
            self.step(one, f"training.steps[{i}]", optimizers) for i, one in enumerate(training["steps"])
        ]
        stepped = [step["optimizer"] for step in steps]
        for name in optimizers:
            if stepped.count(name) != 1:
                raise self.error(
                    f"[[training.steps]]: the optimizer '{name}' is in {stepped.count(name)} steps, expected one. Add "
                    "losses up in one function for one step, or take the optimizer out"
                )
        return {"nets": nets, "optimizers": optimizers, "steps": steps}

    def training(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return self.table(data, "training", TRAINING)

    def net(self, name: str, entry: Any) -> dict[str, Any]:
        where = f"training.nets.{name}"
        if not _NAME.fullmatch(name) or name == MODEL:
            raise self.error(
                f"[{where}]: expected a name such as 'critic'; '{MODEL}' is the model that is served"
            )
        found = self.table({name: entry}, name, NET, "training.nets")
        found["build"] = self.function(found, "build", where)
        if (file := found.get("weights")) is not None:
            if file.startswith("/") or ".." in file:
                raise self.error(f"{where}.weights = {file!r}: expected a file inside this folder")
            self.existing(file, f"{where}.weights", None)
        return found

    def optimizer(self, name: str, entry: Any, nets: Mapping[str, Any]) -> dict[str, Any]:
        where = f"training.optimizers.{name}"
        found = self.table({name: entry}, name, OPTIMIZER, "training.optimizers")
        self.typed(found, "learning_rate", float, where)
        if not self.strings(self.typed(found, "nets", list, where), f"{where}.nets"):
            raise self.error(f"{where}.nets = []: expected the nets that it changes, such as ['{MODEL}']")
        for net in found["nets"]:
            one_of(net, (MODEL, *nets), f"{self.file}: [{where}] nets")
        arguments = {key: one for key, one in found.items() if key not in _NOT_TORCH}
        try:
            name = read_optimizer({"name": found.get("optimizer", DEFAULT), **arguments})["name"]
        except ValueError as error:
            raise self.error(f"[{where}]: {error}") from None
        if name != DEFAULT:
            found |= {"optimizer": name, "weight_decay": found.get("weight_decay", 0.0)}  # torch's default
        return found

    def check_owners(self, optimizers: Mapping[str, Any]) -> None:
        """Every net has one optimizer at most, and the model has one."""
        owners: dict[str, str] = {}
        for name, one in optimizers.items():
            for net in one["nets"]:
                if (other := owners.setdefault(net, name)) != name:
                    raise self.error(
                        f"[training.optimizers]: '{other}' and '{name}' both have the parameters of the net '{net}'; "
                        "a parameter has one optimizer: take it out of one of them"
                    )
        if MODEL not in owners:
            raise self.error(
                f"[training.optimizers]: none has the net '{MODEL}', which is the one that is served: add it to nets"
            )

    def step(self, entry: Any, where: str, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise self.error(f"[[training.steps]]: expected tables, got {entry!r}")
        self.known(entry, STEP, where)
        found = {key: self.typed(entry, key, STEP[key].kind, where) for key in entry}
        one_of(self.typed(found, "optimizer", str, where), optimizers, f"{self.file}: [[{where}]] optimizer")
        return found | {"loss": self.function(found, "loss", where)}

    def function(self, entry: Mapping[str, Any], key: str, where: str) -> str:
        found = self.typed(entry, key, str, where)
        if not OWN_LOSS.fullmatch(found):
            raise self.error(
                f"{where}.{key} = {found!r}: expected a function of this folder, such as 'gan.py:{key}'"
            )
        self.existing(found.partition(":")[0], f"{where}.{key}", None)
        return found
