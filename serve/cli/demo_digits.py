"""The demo's digits: held-out ones, the same ones shifted (turned and inverted), and a file to learn those from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ...exporters.inputs.samples import TARGET, Samples
from ...models.zoo.digits.train import read_images, split

INPUT, OUTPUT = "image", "logits"
NEW_ROWS, OLD_ROWS = 720, 360  # a third of old digits among the new ones, so that the old are not forgotten
SEED = 7


def shifted(images: np.ndarray) -> np.ndarray:
    """Turned by a quarter and white on black: digits as version 1 has never seen them."""
    return np.ascontiguousarray(1.0 - np.rot90(images, 1, (2, 3)))


def shifted_samples(samples: Samples) -> Samples:
    """The same held-out digits, shifted."""
    return replace(samples, arrays={INPUT: shifted(samples.arrays[INPUT])})


def write_training_file(path: Path) -> Path:
    """Shifted digits and some as they were, none of them held out: the layout of ``samples.safetensors``."""
    images, labels = (tensor.numpy() for tensor in read_images())
    rows, _ = split(read_images()[1])
    rows = np.random.default_rng(SEED).permutation(rows.numpy())
    new, old = rows[:NEW_ROWS], rows[-OLD_ROWS:]
    tensors = {
        INPUT: np.concatenate([shifted(images[new]), images[old]]).astype(np.float32),
        TARGET + OUTPUT: np.concatenate([labels[new], labels[old]]).astype(np.int64),
    }
    save_file(tensors, path)
    return path
