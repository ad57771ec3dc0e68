"""The least time that a batch can take: its operations at a device's peak, or its bytes at the bandwidth of the memory.

    python -m tests.benchmarks.floors           (needs no device)

Operations are counted by torch (products and convolutions, 2 for a multiply-add) and scale with the rows. Bytes are
what no fusion can save: the FP16 weights once a batch, and inputs and outputs; of a table only the rows that are read.
Peaks are those of the data sheets, FP16 with FP32 sums, without sparsity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.workloads import SOURCE

DEVICES = {"H100 SXM": (989e12, 3.35e12), "L4": (121e12, 0.3e12)}  # operations and bytes a second
BATCHES = (1, 32, 128)


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class Vit(nn.Module):
    """ViT-B/16 without the parts that cost nothing."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12, inner: int = 3072) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 16, 16), nn.Linear(width, 1000)
        layer = nn.TransformerEncoderLayer(
            width, heads, inner, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(torch.cat([tokens[:, :1], tokens], dim=1))[:, 0])


def nets() -> dict[str, Net]:
    made: dict[str, Any] = {}
    exec(SOURCE, made)
    bert = {"width": 768, "heads": 12, "layers": 12, "inner": 3072}
    return {
        "tiny": Net(made["tiny"], lambda rows: torch.zeros(rows, 64)),
        "encoder": Net(made["encoder"], lambda rows: torch.zeros(rows, 32, dtype=torch.long)),
        "image": Net(made["image"], lambda rows: torch.zeros(rows, 3, 64, 64)),
        "BERT-base, 128 tokens": Net(
            lambda: made["Encoder"](**bert), lambda rows: torch.zeros(rows, 128, dtype=torch.long)
        ),
        "ViT-B/16": Net(Vit, lambda rows: torch.zeros(rows, 3, 224, 224)),
    }


def operations_and_bytes(net: Net, rows: int) -> tuple[int, int]:
    """The operations and the bytes of one batch."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.device("meta"), torch.inference_mode(), FlopCounterMode(display=False) as counted:
        module: Any = net.build().eval()
        given = net.inputs(rows).to("meta")
        answer = module(given)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    weights = sum(one.numel() for one in module.parameters() if id(one) not in tables)
    looked_up = given.numel() * module.tok.embedding_dim if hasattr(module, "tok") else 0
    sent = given.numel() * given.element_size() + answer.numel() * answer.element_size()
    return counted.get_total_flops(), 2 * (weights + looked_up) + sent


def floors() -> list[tuple[str, int, int, int, dict[str, float]]]:
    """The rows, the operations and the bytes of each net and batch, and the least milliseconds on each device."""
    found = []
    for name, net in nets().items():
        for rows in BATCHES:
            operations, moved = operations_and_bytes(net, rows)
            least = {
                device: 1e3 * max(operations / peak, moved / bandwidth)
                for device, (peak, bandwidth) in DEVICES.items()
            }
            found.append((name, rows, operations, moved, least))
    return found


if __name__ == "__main__":
    print("| net | rows | GFLOP | MB | " + " | ".join(f"{device}, ms (rows/s)" for device in DEVICES) + " |")
    print("|---|---|---|---|" + "---|" * len(DEVICES))
    for name, rows, operations, moved, least in floors():
        times = " | ".join(f"{ms:.3g} ({rows / ms * 1e3:,.0f})" for ms in least.values())
        print(f"| {name} | {rows} | {operations / 1e9:.3g} | {moved / 1e6:.3g} | {times} |")
