"""Nets of 100 to 300 nodes of the kinds that people bring: a detector of text, a finder of objects, a ConvNeXt, a Swin
transformer, a recogniser, a U-Net.

Each is built like its original, with small widths and fresh weights, and with what makes trained ones hard in half: a
sharpened score map whose rows are nearly empty, few channels that are far louder than the others, confident scores.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.corpus.case import Case


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, batch norm with statistics of its own, activation."""
    norm = nn.BatchNorm2d(outputs)
    norm.running_mean, norm.running_var = 0.4 * torch.rand(outputs) - 0.2, 0.3 + 0.9 * torch.rand(outputs)
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, norm, nn.Hardswish())


class _Residual(nn.Module):
    """Expanded, filtered channel by channel, weighed by what the channels hold, narrowed, added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.filter = _conv(width, 2 * width, 1), _conv(2 * width, 2 * width, 3, groups=2 * width)
        self.squeeze, self.weigh = nn.Conv2d(2 * width, width, 1), nn.Conv2d(width, 2 * width, 1)
        self.narrow = nn.Conv2d(2 * width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.filter(self.widen(x))
        weights = self.weigh(torch.relu(self.squeeze(hidden.mean((2, 3), keepdim=True))))
        return x + self.narrow(hidden * nn.functional.hardsigmoid(weights))


class Detector(nn.Module):
    """Text or not, for every pixel (DBNet): a sharp step between two maps, so errors before it count fiftyfold."""

    def __init__(self, width: int = 16, blocks: int = 4, sharpness: float = 50.0) -> None:
        super().__init__()
        self.stem, self.sharpness = _conv(3, width, stride=2), sharpness
        self.stages = nn.ModuleList(
            nn.Sequential(*(_Residual(width) for _ in range(blocks))) for _ in range(3)
        )
        self.down = nn.ModuleList(_conv(width, width, stride=2) for _ in range(2))
        self.side = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.heads = nn.ModuleList(
            nn.Sequential(_conv(3 * width, width), nn.ConvTranspose2d(width, 1, 2, 2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        found, x = list[Tensor](), self.stem(x)
        for place, stage in enumerate(self.stages):
            x = stage(self.down[place - 1](x) if place else x)
            found.append(self.side[place](x))
        merged = [nn.functional.interpolate(one, scale_factor=2.0**place) for place, one in enumerate(found)]
        scores, bar = (head(torch.cat(merged, 1)) for head in self.heads)
        return torch.sigmoid(self.sharpness * (0.3 + 0.2 * torch.sigmoid(bar) - scores))


class Finder(nn.Module):
    """Boxes and scores of objects on three scales (YOLO, FCOS): what a NonMaxSuppression chooses from."""

    SIDE = 64  # pixels of a picture

    def __init__(self, width: int = 16, blocks: int = 4, kinds: int = 3) -> None:
        super().__init__()
        self.stem = _conv(3, width, stride=2)
        self.stages = nn.ModuleList(
            nn.Sequential(*(_Residual(width) for _ in range(blocks))) for _ in range(3)
        )
        self.down = nn.ModuleList(_conv(width, width, stride=2) for _ in range(2))
        self.boxes = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in range(3))
        self.scores = nn.ModuleList(nn.Conv2d(width, kinds, 1) for _ in range(3))

    def found(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes ``[rows, places, 4]`` (upper, left, lower, right: pixels) and logits ``[rows, kinds, places]``."""
        x, boxes, scores = self.stem(x), list[Tensor](), list[Tensor]()
        for place, stage in enumerate(self.stages):
            x = stage(self.down[place - 1](x) if place else x)
            side, step = self.SIDE >> (1 + place), 2.0 ** (1 + place)
            centres = (torch.arange(side) + 0.5) * step
            grid = torch.stack(torch.meshgrid(centres, centres, indexing="ij"), -1).reshape(1, -1, 2)
            box = self.boxes[place](x).flatten(2).transpose(1, 2)
            middle, half = grid + step * torch.tanh(box[..., :2]), 4.0 * step * torch.sigmoid(box[..., 2:])
            boxes.append(torch.cat([middle - half, middle + half], -1))
            scores.append(self.scores[place](x).flatten(2))
        return torch.cat(boxes, 1), torch.cat(scores, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        boxes, logits = self.found(x)
        return boxes, torch.sigmoid(logits)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.filter, self.norm = (
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            nn.LayerNorm(width, 1e-6),
        )
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(gain * torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.filter(x).permute(0, 2, 3, 1))
        hidden = self.scale * self.narrow(nn.functional.gelu(self.widen(hidden)))
        return x + hidden.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Three stages; two channels of the residual stream are two hundred times as loud as the others."""

    def __init__(self, width: int = 24, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.stages = nn.ModuleList(
            nn.Sequential(*(_ConvNeXtBlock(width, 0.8) for _ in range(blocks))) for _ in range(3)
        )
        self.down = nn.ModuleList(nn.Conv2d(width, width, 2, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)
        loud = torch.ones(width)
        loud[[3, 11]] = 200.0
        self.stem.weight.data *= loud[:, None, None, None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place, stage in enumerate(self.stages):
            x = stage(self.down[place - 1](x) if place else x)
        return self.head(self.norm(x.mean((2, 3))))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.before(x)).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(4.0 * query @ key.transpose(-2, -1) / math.sqrt(width // self.heads), -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(nn.functional.silu(self.widen(self.after(x))))


class _Window(nn.Module):
    """Attention within windows of 4 by 4, moved by half a window in every other block; masked where edges meet."""

    mask: Tensor

    def __init__(self, width: int, heads: int, side: int, shift: int) -> None:
        super().__init__()
        self.before, self.after, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias, self.shift = nn.Parameter(torch.randn(heads, 16, 16)), shift
        region = (torch.arange(side) >= side - shift).long()
        places = self._windows((2 * region[:, None] + region).reshape(1, side, side, 1)).squeeze(-1)
        self.register_buffer("mask", -100.0 * (places[:, None, :] != places[:, :, None]).float())

    @staticmethod
    def _windows(x: Tensor) -> Tensor:
        rows, side, _, width = x.shape
        cut = x.reshape(rows, side // 4, 4, side // 4, 4, width).permute(0, 1, 3, 2, 4, 5)
        return cut.reshape(-1, 16, width)

    def _attended(self, x: Tensor, windows: int) -> Tensor:
        width = x.shape[-1]
        query, key, value = self.qkv(x).reshape(-1, 16, 3, self.heads, width // self.heads).unbind(2)
        query, key, value = query.transpose(1, 2), key.permute(0, 2, 3, 1), value.transpose(1, 2)
        scores = 14.0 * query @ key / math.sqrt(width // self.heads) + self.bias
        scores = scores.reshape(-1, windows, self.heads, 16, 16) + self.mask[:, None]
        weights = torch.softmax(scores, -1).reshape(-1, self.heads, 16, 16)
        return self.out((weights @ value).transpose(1, 2).reshape(-1, 16, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, side, _, width = x.shape
        hidden = torch.roll(self.before(x), (-self.shift, -self.shift), (1, 2))
        hidden = self._attended(self._windows(hidden), (side // 4) ** 2)
        hidden = hidden.reshape(rows, side // 4, side // 4, 4, 4, width).permute(0, 1, 3, 2, 4, 5)
        hidden = torch.roll(hidden.reshape(rows, side, side, width), (self.shift, self.shift), (1, 2))
        x = x + hidden
        return x + self.narrow(nn.functional.gelu(self.widen(self.after(x))))


class Swin(nn.Module):
    """Two stages of moved windows with a merge between them; few channels of the residual stream are loud."""

    def __init__(self, width: int = 24, pairs: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.first, self.second = (
            nn.Sequential(*(_Window(wide, 4, side, shift) for _ in range(pairs) for shift in (0, 2)))
            for wide, side in ((width, 16), (2 * width, 8))
        )
        self.before_merge, self.merge = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 20)
        loud = torch.ones(width)
        loud[[2, 9]] = 100.0
        self.stem.weight.data *= loud[:, None, None, None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).permute(0, 2, 3, 1))
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        x = self.second(self.merge(self.before_merge(torch.cat(corners, -1))))
        return 4.0 * self.head(self.norm(x).mean((1, 2)))


class Recogniser(nn.Module):
    """Letters of a line of text (SVTR and a recurrent layer): which of 96, in every column; most are hardly likely."""

    def __init__(self, width: int = 32, blocks: int = 8, sharpness: float = 6.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, stride=2), _Residual(width), _conv(width, width, stride=2))
        self.blocks = nn.Sequential(*(_Attention(width, 4) for _ in range(blocks)))
        self.recurrent = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.norm, self.head, self.sharpness = nn.LayerNorm(width), nn.Linear(width, 96), sharpness

    def scores(self, x: Tensor) -> Tensor:
        """Logits, ``[rows, columns, 96]``."""
        x = self.stem(x).mean(2).transpose(1, 2)
        x = self.blocks(x)
        x = x + self.recurrent(x)[0]
        return self.sharpness * self.head(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.scores(x), -1)


class UNet(nn.Module):
    """A net down and up again with bridges; each pixel's value is a difference of two large ones (a residual image)."""

    def __init__(self, width: int = 16, depth: int = 3, blocks: int = 4) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.fall = nn.ModuleList(self._blocks(width, blocks) for _ in range(depth))
        self.rise = nn.ModuleList(self._blocks(width, blocks) for _ in range(depth))
        self.merge = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(depth))
        self.middle = self._blocks(width, blocks)

    @staticmethod
    def _blocks(width: int, count: int) -> nn.Module:
        one = (nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        return nn.Sequential(*(part for _ in range(count) for part in _copies(one)))

    def residual(self, x: Tensor) -> Tensor:
        """The correction that `forward` subtracts, of the same shape as the input picture."""
        hidden, bridges = self.stem(x), list[Tensor]()
        for part in self.fall:
            hidden = hidden + part(hidden)
            bridges.append(hidden)
            hidden = nn.functional.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden)
        for part, merge, bridge in zip(self.rise, self.merge, reversed(bridges), strict=True):
            hidden = merge(torch.cat([nn.functional.interpolate(hidden, scale_factor=2.0), bridge], 1))
            hidden = hidden + part(hidden)
        return self.last(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return 8.0 * x - self.residual(x) - 7.9 * x


def _copies(layers: tuple[nn.Module, ...]) -> list[nn.Module]:
    """Layers of the same shape with weights of their own."""
    conv, norm, activation = layers
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.GroupNorm)
    width = conv.out_channels
    return [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(norm.num_groups, width), activation]


def lines_of_text(channels: int, height: int, width: int) -> Callable[[int], dict[str, Tensor]]:
    """Pictures that are nearly black but for a band of noise, as pages are."""

    def draw(rows: int) -> dict[str, Tensor]:
        picture = 0.02 * torch.randn(rows, channels, height, width)
        picture[:, :, height // 3 : height // 2] += 2.0 * torch.randn(
            rows, channels, height // 2 - height // 3, width
        )
        return {"x": picture}

    return draw


WILD: dict[str, Case] = {
    "detector": Case(Detector, lines_of_text(3, 64, 64)),
    "finder": Case(Finder, lines_of_text(3, 64, 64)),
    "swin": Case(Swin, lines_of_text(3, 64, 64), kinds=("logits",)),
    "convnext": Case(ConvNeXt, lines_of_text(3, 64, 64), kinds=("logits",)),
    "recogniser": Case(Recogniser, lines_of_text(3, 32, 96), kinds=("probabilities",)),
    "unet": Case(UNet, lines_of_text(1, 64, 64)),
}
