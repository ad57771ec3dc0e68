"""The training script of a tutorial, in FP32: no proof, no checkpoints, nothing that watches the numbers.

    python tutorial_script.py MODEL.py TRAIN TEST INPUT EPOCHS BATCH RATE SEED

The files are safetensors with ``INPUT`` and ``target:logits``. Prints accuracy on TEST, seconds of the loop and of the
process, and the most memory in MiB as one JSON object.
"""

import json
import resource
import runpy
import sys
import time

began = time.perf_counter()

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402


def main() -> None:
    source, train, test, name, epochs, batch, rate, seed = sys.argv[1:]
    rows, judged = load_file(train), load_file(test)
    net: nn.Module = runpy.run_path(source)["build"]()
    torch.manual_seed(int(seed))
    optimizer, criterion = torch.optim.Adam(net.parameters(), lr=float(rate)), nn.CrossEntropyLoss()
    net.train()
    looped = time.perf_counter()
    for _ in range(int(epochs)):
        for part in torch.randperm(len(rows[name])).split(int(batch)):
            optimizer.zero_grad()
            criterion(net(rows[name][part]), rows["target:logits"][part]).backward()
            optimizer.step()
    ended = time.perf_counter()
    net.eval()
    with torch.no_grad():
        right = (net(judged[name]).argmax(1) == judged["target:logits"]).double().mean().item()
    facts = {"accuracy": right, "seconds": ended - looped, "process_seconds": time.perf_counter() - began}
    print(json.dumps({**facts, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
