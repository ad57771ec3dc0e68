"""The recogniser and the U-Net of `tests/wild.py` with trained weights, for the benchmark `wild.py`.

Nets with random weights give nearly equal scores to all classes, trained nets do not: errors of a half change the
answers of the two differently. The recogniser is trained to read drawn lines of text (CTC, Graves et al., ICML 2006),
the U-Net to remove noise from pictures of such lines.
"""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from tests.corpus.case import Case
from tests.wild import Recogniser, UNet

LETTERS = "".join(map(chr, range(32, 127)))  # the first, a space, is never drawn: it is CTC's blank
SIZES = (14, 16, 18, 20)
HEIGHT, NOISE = 32, 0.05
READING_STEPS, READING_ROWS, CLEANING_STEPS, CLEANING_ROWS, RATE = 4000, 48, 1200, 8, 2e-3


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
    "trained-recogniser": Case(_with(Recogniser, reader_weights), _drawn(lines), kinds=("probabilities",)),
}
