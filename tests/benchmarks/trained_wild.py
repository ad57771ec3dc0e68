"""Nets of `tests/wild.py` with trained weights, for the benchmark `wild.py`.

Nets with random weights give nearly equal scores to all classes, trained nets do not: errors of a half change the
answers of the two differently. The recogniser is trained to read drawn lines of text (CTC, Graves et al., ICML 2006),
the U-Net to remove noise from pictures of such lines, the finder to find drawn shapes (focal loss, Lin et al., ICCV
2017).
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from tests.corpus.case import Case
from tests.wild import Finder, Recogniser, UNet

LETTERS = "".join(map(chr, range(32, 127)))  # the first, a space, is never drawn: it is CTC's blank
SIZES = (14, 16, 18, 20)
HEIGHT, NOISE = 32, 0.05
READING_STEPS, READING_ROWS, CLEANING_STEPS, CLEANING_ROWS, RATE = 4000, 48, 1200, 8, 2e-3
FINDING_STEPS, FINDING_ROWS = 2500, 12
SMALL, MEDIUM = 10, 19  # pixels: a shape of up to so many is found on the first scale, on the second

Box = tuple[float, float, float, float]  # upper, left, lower, right: pixels


class Reader(Recogniser):
    """A `Recogniser` without the softmax at its end: its output are logits, ``[rows, columns, 96]``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x)


class Denoiser(UNet):
    """A `UNet` that removes noise: it computes the noise of its input picture and subtracts it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.residual(x)


def line_of_text(random: np.random.Generator, width: int) -> tuple[str, np.ndarray]:
    """A text of two to seven random characters and its picture, ``[32, width]`` FP32: 0 to 1, with a little noise."""
    while True:
        text = "".join(LETTERS[code] for code in random.integers(1, len(LETTERS), random.integers(2, 8)))
        font = ImageFont.load_default(size=SIZES[random.integers(len(SIZES))])
        if font.getlength(text) < width - 8:
            break
    picture = Image.new("L", (width, HEIGHT), 0)
    draw = ImageDraw.Draw(picture)
    _, top, _, bottom = draw.textbbox((0, 0), text, font=font)
    left = random.uniform(1, width - 2 - font.getlength(text))
    place = left, random.uniform(-top, HEIGHT - 1 - bottom)
    draw.text(place, text, fill=int(random.integers(120, 256)), font=font)
    pixels = np.asarray(picture, np.float32) / 255
    return text, pixels + random.normal(0, NOISE, pixels.shape).astype(np.float32)


def lines(random: np.random.Generator, rows: int) -> tuple[list[str], Tensor]:
    """Random texts and their pictures, ``[rows, 3, 32, 96]`` FP32."""
    drawn = [line_of_text(random, 96) for _ in range(rows)]
    pictures = np.stack([np.repeat(picture[None], 3, 0) for _, picture in drawn])
    return [text for text, _ in drawn], torch.from_numpy(pictures)


def noisy(random: np.random.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Pictures of two lines of text, ``[rows, 1, 64, 64]`` FP32: first without noise, then the same ones with noise."""
    pages = [np.concatenate([line_of_text(random, 64)[1] for _ in range(2)]).clip(0, 1) for _ in range(rows)]
    clean = torch.from_numpy(np.stack(pages)[:, None])
    noise = random.normal(0, random.uniform(0.1, 0.4), clean.shape).astype(np.float32)
    return clean, clean + torch.from_numpy(noise)


def shapes(random: np.random.Generator) -> tuple[np.ndarray, list[tuple[Box, int]]]:
    """A picture of up to three rectangles, ellipses and crosses, ``[3, 64, 64]`` FP32: 0 to 1, with a little noise; and
    the shapes' boxes and kinds."""
    picture = Image.new("RGB", (Finder.SIDE, Finder.SIDE), _colour(random, 0, 80))
    draw, found = ImageDraw.Draw(picture), list[tuple[Box, int]]()
    for kind in random.integers(0, 3, random.integers(1, 4)).tolist():
        height, width = random.uniform(6, 28, 2)
        upper, left = random.uniform(1, Finder.SIDE - 1 - height), random.uniform(1, Finder.SIDE - 1 - width)
        lower, right, fill = upper + height, left + width, _colour(random, 110, 256)
        if any(
            upper < b[2] + 2 and b[0] - 2 < lower and left < b[3] + 2 and b[1] - 2 < right for b, _ in found
        ):
            continue
        if kind == 2:
            draw.line((left, upper, right, lower), fill=fill, width=2)
            draw.line((left, lower, right, upper), fill=fill, width=2)
        else:
            (draw.rectangle if kind == 0 else draw.ellipse)((left, upper, right, lower), fill=fill)
        found.append(((upper, left, lower, right), kind))
    pixels = np.asarray(picture, np.float32) / 255
    return (pixels + random.normal(0, 0.03, pixels.shape)).astype(np.float32).transpose(2, 0, 1), found


def _colour(random: np.random.Generator, darkest: int, lightest: int) -> tuple[int, ...]:
    return tuple(random.integers(darkest, lightest, 3).tolist())


def drawn_shapes(random: np.random.Generator, rows: int) -> tuple[list[list[tuple[Box, int]]], Tensor]:
    """Boxes and kinds of the shapes of each picture, and the pictures, ``[rows, 3, 64, 64]`` FP32."""
    drawn = [shapes(random) for _ in range(rows)]
    return [found for _, found in drawn], torch.from_numpy(np.stack([picture for picture, _ in drawn]))


def place_of(box: Box) -> int:
    """The place of the cell that is to find a shape: of the scale for its size the one where its centre lies."""
    size = max(box[2] - box[0], box[3] - box[1])
    scale = 0 if size < SMALL else 1 if size < MEDIUM else 2
    sides = [Finder.SIDE >> (1 + one) for one in range(3)]
    row, column = (int((box[one] + box[one + 2]) / 2 * sides[scale] / Finder.SIDE) for one in (0, 1))
    return sum(side * side for side in sides[:scale]) + row * sides[scale] + column


def read(scores: Tensor) -> str:
    """The text that CTC reads from the logits of one line, ``[columns, 96]``: the most probable letter of each column,
    repeated letters once, without blanks."""
    best = scores.argmax(-1).tolist()
    return "".join(
        LETTERS[now] for before, now in zip([0, *best], best, strict=False) if now and now != before
    )


@cache
def reader_weights() -> dict[str, Tensor]:
    """Trains a `Reader` and returns its weights."""
    random, loss_of = np.random.default_rng(0), nn.CTCLoss(zero_infinity=True)

    def loss(net: nn.Module) -> Tensor:
        texts, pictures = lines(random, READING_ROWS)
        likelihoods = torch.log_softmax(net(pictures), -1).transpose(0, 1)
        targets = torch.tensor([LETTERS.index(letter) for text in texts for letter in text])
        columns = torch.full((len(texts),), len(likelihoods))
        return loss_of(likelihoods, targets, columns, torch.tensor([len(text) for text in texts]))

    net = _trained(Reader, loss, READING_STEPS)
    texts, pictures = lines(np.random.default_rng(1), 256)
    with torch.no_grad():
        right = sum(read(scores) == text for scores, text in zip(net(pictures), texts, strict=True))
    print(f"the recogniser reads {right} of {len(texts)} fresh lines right", flush=True)
    return net.state_dict()


@cache
def denoiser_weights() -> dict[str, Tensor]:
    """Trains a `Denoiser` and returns its weights."""
    random = np.random.default_rng(0)

    def loss(net: nn.Module) -> Tensor:
        clean, picture = noisy(random, CLEANING_ROWS)
        return (net(picture) - clean).square().mean()

    net = _trained(Denoiser, loss, CLEANING_STEPS)
    clean, picture = noisy(np.random.default_rng(1), 64)
    with torch.no_grad():
        left, before = ((one - clean).square().mean().item() for one in (net(picture), picture))
    print(f"the U-Net leaves {left / before:.1%} of the noise's power", flush=True)
    return net.state_dict()


@cache
def finder_weights() -> dict[str, Tensor]:
    """Trains a `Finder` and returns its weights."""
    random = np.random.default_rng(0)

    def loss(net: nn.Module) -> Tensor:
        assert isinstance(net, Finder)
        pictures_shapes, pictures = drawn_shapes(random, FINDING_ROWS)
        boxes, logits = net.found(pictures)
        wanted, missed = torch.zeros_like(logits), list[Tensor]()
        for row, found in enumerate(pictures_shapes):
            for box, kind in found:
                wanted[row, kind, place_of(box)] = 1.0
                missed.append((boxes[row, place_of(box)] - torch.tensor(box)).abs().mean())
        gap = (wanted - torch.sigmoid(logits)).square() * (0.25 + 0.5 * wanted)
        focal = (gap * nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum()
        return focal / len(missed) + 0.1 * torch.stack(missed).mean()

    def build() -> nn.Module:
        net = Finder()
        for one in net.scores:
            assert isinstance(one, nn.Conv2d) and one.bias is not None
            nn.init.constant_(one.bias, -4.0)  # most places hold nothing
        return net

    net = _trained(build, loss, FINDING_STEPS)
    pictures_shapes, pictures = drawn_shapes(np.random.default_rng(1), 256)
    with torch.no_grad():
        _, scores = net(pictures)
    right = sum(
        int(scores[row, :, place_of(box)].argmax()) == kind and float(scores[row, kind, place_of(box)]) > 0.5
        for row, found in enumerate(pictures_shapes)
        for box, kind in found
    )
    print(f"the finder finds {right} of {sum(map(len, pictures_shapes))} fresh shapes", flush=True)
    return net.state_dict()


def _trained(build: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor], steps: int) -> nn.Module:
    torch.manual_seed(0)
    net, began = build().train(), time.perf_counter()
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{steps} steps in {time.perf_counter() - began:.0f} s", flush=True)
    return net.eval()


def _with(
    build: Callable[[], nn.Module], weights: Callable[[], dict[str, Tensor]]
) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        net = build()
        net.load_state_dict(weights())
        return net.eval()

    return built


def _drawn(
    draw: Callable[[np.random.Generator, int], tuple[object, Tensor]],
) -> Callable[[int], dict[str, Tensor]]:
    def inputs(rows: int) -> dict[str, Tensor]:
        seed = int(torch.randint(1 << 30, (1,)))  # from the generator that the caller seeded
        return {"x": draw(np.random.default_rng(seed), rows)[1]}

    return inputs


TRAINED: dict[str, Case] = {
    "trained-unet": Case(_with(Denoiser, denoiser_weights), _drawn(noisy)),
    "trained-reader": Case(_with(Reader, reader_weights), _drawn(lines), kinds=("logits",)),
    "trained-finder": Case(_with(Finder, finder_weights), _drawn(drawn_shapes)),
    "trained-recogniser": Case(_with(Recogniser, reader_weights), _drawn(lines), kinds=("probabilities",)),
}
