"""The training task of a job: the rows of its data file, and the loss of some of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .loop.batch_loop import evenly
from .loop.losses import CLASS_LOSSES, Loss, class_count, counted, losses_of
from .loop.setting_names import MASK
from .loop.training_terms import Stopped
from .row_transform import RowTransform, in_the_callers_file


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
        self._fetched: dict[tuple[int, ...], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self.processes = 1 if held_out else request.get("processes", 1)
        self.transform = None if held_out else RowTransform.of(request)
        wanted = {name: one[self.rows] for name, one in self.targets.items()}
        self.losses = losses or losses_of(request, wanted)
        classes = [name for name, loss in request["losses"].items() if loss in CLASS_LOSSES]
        # The largest class number of each output that has classes.
        self.largest = {name: int(wanted[name].max()) for name in classes if _are_classes(wanted[name])}
        self._masked = request.get("missing_targets") == MASK
        self._left_out = [name for name, target in wanted.items() if self._leaves_out(name, target)]
        self._shares: dict[tuple[int, ...], dict[str, float]] = {}

    def parts(self, batch: Tensor) -> Sequence[Tensor]:
        """A batch in parts that the model takes in one pass, one or more for each process; of a model that is not
        batched row by row."""
        parts = self._parted(batch)
        self._shares = self._shares_of(parts) if len(parts) > 1 and self._left_out else {}
        return parts

    def _parted(self, batch: Tensor) -> Sequence[Tensor]:
        largest = self.request["max_batch_size"]
        if not largest:
            return list(batch)
        largest = min(largest, self.request.get("pass_rows", largest))
        shared = max(2, -(-len(batch) // self.processes))  # BatchNorm has no variance of one row
        return evenly(batch, largest if self.processes == 1 else min(largest, shared))

    def _leaves_out(self, output: str, target: Tensor) -> bool:
        """True if some targets of an output do not count in its loss; of rows that are transformed any may not."""
        counts = counted(self.request["losses"][output], target, self._masked)
        return counts is not None and (self.transform is not None or not bool(counts.all()))

    def _shares_of(self, parts: Sequence[Tensor]) -> dict[tuple[int, ...], dict[str, float]]:
        """By part and output: its share of the batch's targets that count, over its share of the rows. With it a batch
        in parts has the loss that it has in one: the mean over those targets."""
        shares: dict[tuple[int, ...], dict[str, float]] = {_numbers(part): {} for part in parts}
        rows = sum(part.numel() for part in parts)
        for output in self._left_out:
            counts = [self._count(part, output) for part in parts]
            total = max(sum(counts), 1)  # where none counts, each loss is 0
            for part, count in zip(parts, counts, strict=True):
                shares[_numbers(part)][output] = (count / total) / (part.numel() / rows)
        return shares

    def _count(self, part: Tensor, output: str) -> int:
        if self.transform is None:
            target = self.targets[output][self.rows[part.reshape(-1)]]
        else:  # it may change the targets
            key = _numbers(part)
            if key not in self._fetched:
                self._fetched[key] = self._moved(part)
            target = self._fetched[key][1][output]
        counts = counted(self.request["losses"][output], target, self._masked)
        return target.numel() if counts is None else int(counts.sum())

    def tensors(self, batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Inputs and targets of ``rows[batch]`` by name, on the device."""
        return self._fetched.pop(_numbers(batch), None) or self._moved(batch)

    def first_inputs(self) -> Sequence[Tensor]:
        """The inputs of the first two rows, of a model that is not batched of the first."""
        return list(self.tensors(self.parts(torch.arange(min(2, len(self.rows))))[0])[0].values())

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """The numbers that these training rows have in the caller's file."""
        return [
            in_the_callers_file(one, self.request.get("left_out", ()))
            for one in self.rows[list(rows)].tolist()
        ]

    def fetch(self, parts: Sequence[Tensor]) -> None:
        """Put these rows on their way to the device while it computes others. What fails here is said when the rows are
        asked for."""
        self._fetched = {}
        with suppress(Stopped, torch.OutOfMemoryError):
            self._fetched = {_numbers(part): self._moved(part) for part in parts}

    def _moved(self, batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rows, device = self.rows[batch.reshape(-1)], self.request["device"]
        names = [spec["name"] for spec in self.request["inputs"]]
        inputs = {name: one[rows] for name, one in zip(names, self.inputs, strict=True)}
        targets = {name: one[rows] for name, one in self.targets.items()}
        if self.transform is not None:
            inputs, targets = self.transform.rows(rows.tolist(), inputs, targets)
        if batch.ndim == 0:  # of a model that is not batched: no axis of rows
            inputs, targets = ({name: one[0] for name, one in part.items()} for part in (inputs, targets))
        return _on(device, inputs), _on(device, targets)

    def begin(self, epoch: int) -> None:
        """From now on the rows are those of this epoch."""
        if self.transform is not None and self.transform.epoch != epoch:
            self.transform.epoch, self._fetched = epoch, {}

    @contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Inside, the rows are not transformed: they are judged."""
        transform, self.transform, self._fetched = self.transform, None, {}
        try:
            yield
        finally:
            self.transform = transform

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss of ``rows[batch]``, in one pass. Of a part of the last batch (`parts`) it is such that the mean of
        all parts, weighted by their rows, is the loss of the batch."""
        inputs, targets = self.tensors(batch)
        answers = self.forward(*inputs.values())
        by_name = dict(zip(self.request["outputs"], answers, strict=True))
        kind = torch.device(self.request["device"]).type
        with torch.amp.autocast(kind, enabled=False):  # on CUDA it forbids some losses
            self._check_classes(by_name, targets)
            losses = [loss(by_name[output].float(), targets[output]) for output, loss in self.losses.items()]
            if shares := self._shares.get(_numbers(batch)):
                losses = [
                    one * shares.get(output, 1.0) for one, output in zip(losses, self.losses, strict=True)
                ]
        return torch.stack(losses).sum()

    def _check_classes(self, answers: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Raises Stopped where an answer has too few classes for any row. A free axis is known by an answer alone."""
        for output, largest in self.largest.items():
            count = class_count(answers[output], targets[output])
            if largest >= count:
                raise Stopped(
                    "BAD_DATA",
                    f"target:{output}: the model answers with {count} classes, so 0..{count - 1} are expected, and the "
                    f"rows have the class {largest}. Correct the file.",
                )


def _are_classes(target: Tensor) -> bool:
    return bool(target.numel()) and not target.is_floating_point()


def _numbers(batch: Tensor) -> tuple[int, ...]:
    return tuple(batch.reshape(-1).tolist())


def _on(device: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if torch.device(device).type == "cpu":
        return dict(tensors)
    return {name: _page_locked(one).to(device, non_blocking=True) for name, one in tensors.items()}


def _page_locked(one: Tensor) -> Tensor:
    """A copy in memory from which a device copies while the host goes on."""
    return torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one)
