"""``python -m tests.benchmarks.verified_proofs [NETS]``: how often the independent verifier agrees with the gate.

Seeded nets become ONNX files and halves with proofs; `halfeven verify` and docs/verify_proof.py are asked about each.
That both refuse proofs that were changed is shown by tests/exporters/half_files/test_independent_verifier.py."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.half_files.half_file import verify, write_half
from onnx import TensorProto, helper, numpy_helper

VERIFIER = Path(__file__).parents[2] / "docs" / "verify_proof.py"
ACTIVATIONS = ("Relu", "Tanh", "Sigmoid", "Gelu", "Softmax", "LayerNormalization")


def write_net(path: Path, random: np.random.Generator) -> int:
    """One to four products with activations between them; gives the width of the input."""
    sizes = [int(size) for size in random.integers(3, 48, random.integers(2, 6))]
    nodes, weights, value = [], [], "x"
    for place, (wide, high) in enumerate(pairwise(sizes)):
        weights.append(
            numpy_helper.from_array(
                random.normal(0, wide**-0.5, (wide, high)).astype(np.float32), f"w{place}"
            )
        )
        nodes.append(helper.make_node("MatMul", [value, f"w{place}"], [f"h{place}"], name=f"product{place}"))
        op = str(random.choice(ACTIVATIONS))
        reads = [f"h{place}"]
        if op == "LayerNormalization":
            weights.append(numpy_helper.from_array(np.ones(high, np.float32), f"g{place}"))
            reads.append(f"g{place}")
        value = f"a{place}"
        nodes.append(helper.make_node(op, reads, [value], name=f"act{place}"))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", sizes[0]), (value, sizes[-1]))
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return sizes[0]


def main(nets: int) -> None:
    """Nets are drawn until so many have a proven half."""
    agreed = halves = seed = 0
    while halves < nets:
        random = np.random.default_rng(seed)
        seed += 1
        with TemporaryDirectory() as place:
            net, half, rows = (Path(place) / name for name in ("net.onnx", "half.onnx", "x.npz"))
            wide = write_net(net, random)
            np.savez(rows, x=random.normal(size=(24, wide)).astype(np.float32))
            if write_half(net, half, Options(samples=rows))["verdict"] != "equal":
                continue
            halves += 1
            ours = verify(half)["status"]
            done = subprocess.run(
                [sys.executable, "-I", VERIFIER, half], capture_output=True, text=True, check=False
            )
            agreed += (ours, done.returncode) == ("equal", 0)
            if done.returncode or ours != "equal":
                print(f"seed {seed - 1}: {ours}; {done.stdout.strip()} {done.stderr.strip()[-300:]}")
    print(f"{agreed} of {halves} proofs verified by both ({seed} nets drawn)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
