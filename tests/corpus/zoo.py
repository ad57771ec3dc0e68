"""The shipped folders as cases: the healthy architectures. Inputs are those that a conversion would make up.

Those that need transformers are not among them.
"""

import importlib

import torch
from halfeven.exporters.inputs.synthetic import generate
from halfeven.models.folder.package import read_folder
from halfeven.models.zoo import zoo_folder
from torch import Tensor

from .case import Case

NAMES = (
    "digits", "mlp", "cnn28", "resnet", "unet", "lstm", "bert", "gpt", "vit", "llama", "pix2pix", "switch",
    "recommender",
)  # fmt: skip


def shipped(name: str) -> Case:
    spec = read_folder(zoo_folder(name)).spec

    def draw(rows: int) -> dict[str, Tensor]:
        seed = int(torch.randint(2**31, ()))
        return {key: torch.from_numpy(array) for key, array in generate(spec, rows, seed).arrays.items()}

    return Case(
        build=importlib.import_module(f"halfeven.models.zoo.{name}.model").build,
        inputs=draw,
        kinds=tuple(output.kind for output in spec.outputs),
        free={
            axis: dim
            for tensor in spec.inputs
            for axis, dim in enumerate(tensor.shape)
            if axis and not dim.fixed
        },
        max_batch_size=min(spec.max_batch_size, 8),
    )


CASES = {f"zoo {name}": shipped(name) for name in NAMES}
