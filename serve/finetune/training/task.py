"""The training task of a job: the rows of its data file, and the loss of some of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from .amp import evenly
from .training_terms import Stopped


class Task:
    """The rows of ``data`` to learn from (or of ``held_out``, all of them), and the mean loss of some of them."""

    def __init__(
        self, request: Mapping[str, Any], forward: Callable[..., tuple[Tensor, ...]], held_out: bool = False
    ) -> None:
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

    def parts(self, batch: Tensor) -> Sequence[Tensor]:
        """A batch in parts that the model takes in one pass; of a model that is not batched row by row."""
        largest = self.request["max_batch_size"]
        return evenly(batch, largest) if largest else list(batch)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of ``rows[batch]``, in one pass."""
        rows, device = self.rows[batch], self.request["device"]
        answers = self.forward(*(tensor[rows].to(device) for tensor in self.inputs))
        by_name = dict(zip(self.request["outputs"], answers, strict=True))
        losses = [
            LOSSES[kind](by_name[output].float(), self.targets[output][rows].to(device))
            for output, kind in self.request["losses"].items()
        ]
        return torch.stack(losses).sum()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(*classes_last(logits, target))


def nll_of_probabilities(probabilities: Tensor, target: Tensor) -> Tensor:
    """A probability that half rounds to zero still has a finite loss and a slope."""
    return functional.nll_loss(*classes_last((probabilities + 1e-6).log(), target))


def classes_last(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[…,C]`` and ``[…]`` become ``[N,C]`` and ``[N]``; ``[N,C,…]`` and ``[N,…]`` are torch's own layout."""
    if scores.ndim > 1 and scores.shape[:-1] == target.shape:
        return scores.flatten(0, -2), target.flatten()
    return scores, target


def mse(answer: Tensor, target: Tensor) -> Tensor:
    if answer.shape != target.shape:  # torch would broadcast
        raise Stopped("BAD_DATA", f"targets {list(target.shape)} do not fit answers {list(answer.shape)}")
    return functional.mse_loss(answer, target.float())


LOSSES = {"cross_entropy": cross_entropy, "mse": mse, "nll_of_probabilities": nll_of_probabilities}
