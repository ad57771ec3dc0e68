"""Trains the digits network: writes ``weights.safetensors`` and the held-out ``samples.safetensors``.

    python -m halfeven.models.zoo.digits.train

One seed decides the split, the first weights, the order, the shifts and the dropout, so on one machine
the files come out the same bit for bit. Another processor may add in another order.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, pad

from .model import build

FOLDER = Path(__file__).parent
SEED = 2019  # the year of IEEE 754's present edition; not chosen among others
HELD_OUT_PER_DIGIT = 36
EPOCHS = 60
BATCH_SIZE = 64


def read_images() -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the model, FP32 ``[1797,1,8,8]`` in 0..1 (pixel / 16), and the digits, INT64 ``[1797]``."""
    data = load_file(FOLDER / "images.safetensors")
    return data["images"].float().div(16).unsqueeze(1), data["labels"]


def split(labels: torch.Tensor, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers to train on and row numbers held out: of every digit equally many are held out, mixed."""
    generator = torch.Generator().manual_seed(seed)
    train, held_out = [], []
    for digit in range(10):
        rows = torch.nonzero(labels == digit).flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        held_out.append(rows[:HELD_OUT_PER_DIGIT])
        train.append(rows[HELD_OUT_PER_DIGIT:])
    mixed = torch.cat(held_out)
    return torch.cat(train), mixed[torch.randperm(len(mixed), generator=generator)]


def shift(images: torch.Tensor) -> torch.Tensor:
    """Each image moved by up to one pixel each way; paper comes in at the edge."""
    rows = torch.randint(0, 3, (len(images), 1, 1)) + torch.arange(8).view(1, 8, 1)
    columns = torch.randint(0, 3, (len(images), 1, 1)) + torch.arange(8).view(1, 1, 8)
    return pad(images, (1, 1, 1, 1))[torch.arange(len(images)).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int = EPOCHS, seed: int = SEED) -> nn.Module:
    """A trained module in eval mode. The caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build().train()
        steps = epochs * (len(images) // BATCH_SIZE)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
        for _ in range(epochs):
            order = torch.randperm(len(images))[: len(images) // BATCH_SIZE * BATCH_SIZE]
            for rows in order.split(BATCH_SIZE):
                loss = cross_entropy(module(shift(images[rows])), labels[rows], label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return module.eval()


@torch.inference_mode()
def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images whose largest logit is their digit's."""
    return (module(images).argmax(1) == labels).double().mean().item()


def write(module: nn.Module, samples: torch.Tensor, targets: torch.Tensor, folder: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    save_file({"image": samples, "target:logits": targets}, folder / "samples.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the zoo's digits again.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the two files")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the number of threads decides the order of additions
    torch.use_deterministic_algorithms(True)
    images, labels = read_images()
    rows, held_out = split(labels)
    module = train(images[rows], labels[rows], options.epochs)
    write(module, images[held_out], labels[held_out], options.out)
    print(f"{len(rows)} images trained on, {len(held_out)} held out")
    print(f"accuracy on the held-out images: {accuracy(module, images[held_out], labels[held_out]):.4f}")


if __name__ == "__main__":
    main()
