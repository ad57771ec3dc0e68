"""The pixels of a picture are turned into the numbers of a tensor, and back, as the ``picture`` entry says.

A number is ``(pixel · scale − mean) / std`` per channel, pixels being 0 … 255. The tensor's shape decides the
layout: channels first (``[-1, 3, 224, 224]``) wherever that fits, else last (``[-1, 224, 224, 3]``); a grey
picture may have no axis of channels (``[-1, 28, 28]``). Bytes of PNG and JPEG are `picture.py`'s.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadFolder
from ..spec.datatypes import DATATYPES
from ..spec.spec import Dim, TensorSpec

CHANNELS = {"L": 1, "RGB": 3}


@dataclass(frozen=True, slots=True)
class Picture:
    """One tensor's ``picture`` entry, checked against its shape.

    ``channel_axis`` counts from the end: -3 first, -1 last, None where there is none. A size of None is the
    picture's own. ``mean`` and ``std`` broadcast over a row.
    """

    color: str
    sizes: tuple[int | None, int | None]
    channel_axis: int | None
    rank: int
    scale: float
    mean: np.ndarray
    std: np.ndarray
    dtype: np.dtype

    @classmethod
    def of(cls, tensor: TensorSpec, batched: bool) -> "Picture":
        """Raises BadFolder where the entry is wrong, or the shape is none that a picture can have."""
        row = tensor.shape[1:] if batched else tensor.shape
        entry = tensor.picture if tensor.picture is not None else _unsaid(row, tensor.datatype)
        color = entry.get("color", "RGB")
        if color not in CHANNELS:
            raise BadFolder(f"picture.color = {color!r}: expected one of {', '.join(CHANNELS)}")
        scale, said = _scale(entry), _said_sizes(entry)
        mean, std = (
            _per_channel(entry, key, value, CHANNELS[color]) for key, value in (("mean", 0.0), ("std", 1.0))
        )
        axis = _channel_axis(row, CHANNELS[color], tensor)
        each = {None: (-1,), -1: (-1,), -3: (-1, 1, 1)}[axis]
        picture = cls(
            color=color,
            sizes=_sizes(row, axis, said),
            channel_axis=axis,
            rank=len(row),
            scale=scale,
            mean=mean.reshape(each),
            std=std.reshape(each),
            dtype=tensor.type.numpy,
        )
        if tensor.datatype == "UINT8" and tensor.wire is None and not picture.is_plain and tensor.picture:
            raise BadFolder(
                "picture: a UINT8 tensor has the pixels as they are; leave scale, mean and std out"
            )
        if tensor.datatype not in ("UINT8", "FP16", "BF16", "FP32", "FP64") and tensor.picture is not None:
            raise BadFolder(
                f"picture: expected datatype UINT8 or a floating point one, got {tensor.datatype}"
            )
        return picture

    @property
    def is_plain(self) -> bool:
        """True if the numbers are the pixels themselves."""
        return self.scale == 1.0 and not self.mean.any() and bool((self.std == 1.0).all())

    @property
    def channels(self) -> int:
        return CHANNELS[self.color]

    @property
    def spatial(self) -> tuple[int, int]:
        """The axes of height and width, counted from the end."""
        return (-3, -2) if self.channel_axis == -1 else (-2, -1)

    def numbers(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels, whose last axes lie as the tensor's, as its numbers."""
        return self._numbers(pixels, self.mean, self.std)

    def _numbers(self, pixels: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
        if self.dtype == np.uint8:
            return pixels.astype(np.uint8)
        return ((pixels * self.scale - mean) / std).astype(self.dtype)

    def slope(self) -> tuple[np.ndarray, np.ndarray]:
        """(scale, offset), float64, with which ``pixel · scale + offset`` is the same."""
        return self.scale / self.std, -self.mean / self.std

    def row(self, pixels: np.ndarray) -> np.ndarray:
        """UINT8 pixels [height, width, channels] as one row of the tensor, without the batch's axis.

        By a table of the 256 numbers of each channel: the bits of `numbers`, and 17 times as fast.
        """
        each = np.broadcast_to(np.arange(256), (self.channels, 256))
        table = self._numbers(each, self.mean.reshape(-1, 1), self.std.reshape(-1, 1))
        planes = [table[channel][pixels[..., channel]] for channel in range(self.channels)]
        row = planes[0] if self.channel_axis is None else np.stack(planes, self.channel_axis)
        return row.reshape((1,) * (self.rank - row.ndim) + row.shape)

    def pixels(self, row: np.ndarray) -> np.ndarray:
        """The inverse of `row`: UINT8 [height, width, channels], rounded to the nearest and clipped.

        NaN is 0, black.
        """
        laid = row.reshape(row.shape[-2:] if self.channel_axis is None else row.shape[-3:])
        if self.dtype != np.uint8:
            numbers = (laid.astype(np.float64) * self.std + self.mean) / self.scale
            laid = np.rint(np.nan_to_num(numbers, nan=0.0, posinf=255.0, neginf=0.0).clip(0, 255))
        laid = laid[..., None] if self.channel_axis is None else laid
        laid = laid.transpose(1, 2, 0) if self.channel_axis == -3 else laid
        return np.ascontiguousarray(laid.astype(np.uint8))


def _unsaid(row: Sequence[Dim], datatype: str) -> Mapping[str, Any]:
    """The entry of an image output without one: 0 … 1 (integers: 0 … 255), colours as its shape has them."""
    has_three = any(len(row) >= 3 and row[axis].fixed and row[axis].minimum == 3 for axis in (-3, -1))
    parts = DATATYPES[datatype].is_float or datatype == "BOOL"
    return {"color": "RGB" if has_three else "L", "scale": 1 / 255 if parts else 1.0}


def _channel_axis(row: Sequence[Dim], channels: int, tensor: TensorSpec) -> int | None:
    if all(dim.fixed and dim.minimum == 1 for dim in row[:-3]):
        if len(row) == 2 and channels == 1:
            return None
        if len(row) >= 3:
            for axis in (-3, -1):
                if row[axis].fixed and row[axis].minimum == channels:
                    return axis
            if row[-3].admits(channels):
                return -3
    raise BadFolder(
        f"picture: the shape {tensor.describe_shape()} has no place for {channels} channel"
        f"{'s' if channels > 1 else ''}: expected [-1, {channels}, height, width] or [-1, height, width, {channels}]"
        + (" or [-1, height, width]" if channels == 1 else "")
    )


def _said_sizes(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    if (said := entry.get("size")) is None:
        return None
    if len(said) != 2 or not all(type(size) is int and size > 0 for size in said):
        raise BadFolder(f"picture.size = {said}: expected [height, width] in pixels")
    return said[0], said[1]


def _sizes(
    row: Sequence[Dim], axis: int | None, said: tuple[int, int] | None
) -> tuple[int | None, int | None]:
    high, wide = (row[-3], row[-2]) if axis == -1 else (row[-2], row[-1])
    if said is None:
        return high.minimum if high.fixed else None, wide.minimum if wide.fixed else None
    if not (high.admits(said[0]) and wide.admits(said[1])):
        raise BadFolder(
            f"picture.size = {list(said)}: expected [{high.to_json()}, {wide.to_json()}], as the shape says"
        )
    return said


def _scale(entry: Mapping[str, Any]) -> float:
    scale = float(entry.get("scale", 1.0))
    if not math.isfinite(scale) or scale == 0.0:
        raise BadFolder(f"picture.scale = {scale}: expected a finite number that is not 0")
    return scale


def _per_channel(entry: Mapping[str, Any], key: str, default: float, channels: int) -> np.ndarray:
    values = entry.get(key, [default])
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise BadFolder(f"picture.{key} = {list(values)}: expected a number per channel")
    if len(values) not in (1, channels):
        raise BadFolder(f"picture.{key} = {list(values)}: expected a number per channel, {channels} of them")
    if not all(math.isfinite(v) and (key != "std" or v > 0) for v in values):
        kind = "positive numbers" if key == "std" else "finite numbers"
        raise BadFolder(f"picture.{key} = {list(values)}: expected {kind}")
    return np.array(list(values) * (channels // len(values)), np.float64)
