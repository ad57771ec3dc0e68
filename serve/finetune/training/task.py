"""The training task of a job: the rows of its data file, and the loss of some of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .batch_loop import evenly
from .losses import Loss, losses_of
from .training_terms import Stopped


class Task:
    """The rows of ``data`` to learn from (or of ``held_out``, all of them), and the mean loss of some of them.

    ``losses``: those of the rows to learn from, for held-out rows; class weights are made of the former.
    """

    def __init__(
        self, request: Mapping[str, Any], forward: Callable[..., tuple[Tensor, ...]],
        losses: Mapping[str, Loss] | None = None, held_out: bool = False,
    ) -> None:  # fmt: skip
        tensors = load_file(request["held_out" if held_out else "data"])
        names = [spec["name"] for spec in request["inputs"]]
        wanted = [*names, *(f"target:{output}" for output in request["losses"])]
        if missing := [name for name in wanted if name not in tensors]:
            raise Stopped("BAD_DATA", f"the data have no tensor {missing}, only {sorted(tensors)}")
        count = min(len(tensors[name]) for name in wanted)
        self.rows = torch.tensor(range(count) if held_out else request["rows"], dtype=torch.int64)
        if not len(self.rows) or not 0 <= int(self.rows.min()) <= int(self.rows.max()) < count:
            raise Stopped("BAD_DATA", f"there are {count} rows, and the rows to train on must be among them")
        self.inputs = [tensors[name] for name in names]
        self.targets = {output: tensors[f"target:{output}"] for output in request["losses"]}
        self.request, self.forward = request, forward
        self.losses = losses or losses_of(
            request, {name: one[self.rows] for name, one in self.targets.items()}
        )

    def parts(self, batch: Tensor) -> Sequence[Tensor]:
        """A batch in parts that the model takes in one pass; of a model that is not batched row by row."""
        largest = self.request["max_batch_size"]
        return evenly(batch, largest) if largest else list(batch)

    def tensors(self, batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and targets of ``rows[batch]`` by name, on the device."""
        rows, device = self.rows[batch], self.request["device"]
        names = [spec["name"] for spec in self.request["inputs"]]
        inputs = {name: one[rows].to(device) for name, one in zip(names, self.inputs, strict=True)}
        return inputs, {name: one[rows].to(device) for name, one in self.targets.items()}

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of ``rows[batch]``, in one pass."""
        inputs, targets = self.tensors(batch)
        answers = self.forward(*inputs.values())
        by_name = dict(zip(self.request["outputs"], answers, strict=True))
        kind = torch.device(self.request["device"]).type
        with torch.amp.autocast(kind, enabled=False):  # on CUDA it forbids some losses
            losses = [loss(by_name[output].float(), targets[output]) for output, loss in self.losses.items()]
        return torch.stack(losses).sum()
