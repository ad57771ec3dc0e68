"""The exponential moving average of a module's weights over the steps that were taken. Needs torch alone."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The average of the parameters that learn and of the floating buffers among ``sound``; each keeps its dtype.

    After step t the old average counts min(``decay``, (1+t)/(10+t)): the parent's weights soon count nothing.
    Source of that limit: tf.train.ExponentialMovingAverage (``num_updates``).
    """

    def __init__(self, module: nn.Module, decay: float, sound: Collection[str]) -> None:
        self._module, self._decay, self._sound = module, decay, sound
        self.taken = 0
        self.tensors: Mapping[str, Tensor] = {name: one.clone() for name, one in self._averaged().items()}

    def take(self) -> None:
        """Count the weights as they are now."""
        self.taken += 1
        keep = min(self._decay, (1 + self.taken) / (10 + self.taken))
        with torch.no_grad():
            for name, now in self._averaged().items():
                if self.tensors[name].shape == now.shape:
                    self.tensors[name].lerp_(now, 1 - keep)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the average inside, and its own weights again afterwards."""
        own = {name: one.clone() for name, one in self._averaged().items()}
        self.put_in()
        try:
            yield
        finally:
            self._copy(own)

    def put_in(self) -> None:
        self._copy(self.tensors)

    def _averaged(self) -> dict[str, Tensor]:
        found = {name: one.detach() for name, one in self._module.named_parameters() if one.requires_grad}
        buffers = self._module.named_buffers()
        return found | {name: one for name, one in buffers if name in self._sound and one.is_floating_point()}

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, one in self._averaged().items():
                if one.shape == tensors[name].shape:
                    one.copy_(tensors[name])
