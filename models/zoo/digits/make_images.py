"""Writes ``images.safetensors`` from scikit-learn's copy of the UCI digits; only this needs scikit-learn.

    python -m halfeven.models.zoo.digits.make_images

``images``: UINT8 ``[1797,8,8]``, 0 (paper) to 16 (ink); ``labels``: INT64 ``[1797]``. See ``ATTRIBUTION.md``.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parent


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    images = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(-1, 8, 8)
    labels = np.ascontiguousarray(labels, dtype=np.int64)
    save_file({"images": images, "labels": labels}, FOLDER / "images.safetensors")


if __name__ == "__main__":
    main()
