"""The models that Triton's client-side material expects on a server, as small model folders of ours.

Names and signatures are those of Triton's test repository (`qa/common/gen_qa_*_models.py` make them for its
own server); the protocol cannot see what is behind them. Those with BYTES tensors or sequences are not
here: models of ours have neither.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store

from tests.model_folders import tensor, write_folder

HEAD = "import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n"
TAIL = "\n\ndef build():\n    return Model()\n"
SUM_AND_DIFFERENCE = (
    HEAD + "    def forward(self, INPUT0, INPUT1):\n        return INPUT0 + INPUT1, INPUT0 - INPUT1" + TAIL
)
# `+ 0` and not `clone`: what only copies is taken out of a captured program.
IDENTITY = HEAD + "    def forward(self, *inputs):\n        return tuple(x + 0 for x in inputs)" + TAIL
# The gate refuses a model whose FP32 answers are NaN, rightly; a division is finite until somebody sends 0.
NAN_AND_INF = (
    HEAD + "    def forward(self, INPUT0):\n"
    "        x = INPUT0\n"
    "        return torch.cat([x / x, 1 / x, -1 / x, x + 1, x + 2, x + 3], dim=0)" + TAIL
)
RANKED = HEAD + "    def forward(self, INPUT0):\n        return INPUT0 * 2" + TAIL

ANIMALS = ["ant", "bee", "cat", "dog", "eel", "fox"]
# The first of two requests waits for a batch to fill, and there is room for no second one.
ONE_WAITS = {"max_queue_delay_us": 2_000_000, "max_queue_size": 1}
Folder = Callable[[Path], Path]


def _two_in_two_out(datatype: str, rows: int = 8) -> Folder:
    pair = [tensor(f"INPUT{i}", datatype, [-1, 16]) for i in range(2)]
    out = [tensor(f"OUTPUT{i}", datatype, [-1, 16]) for i in range(2)]
    return lambda path: write_folder(path, SUM_AND_DIFFERENCE, inputs=pair, outputs=out, max_batch_size=rows)


def _identity(datatype: str, axes: int = 1, tensors: int = 1, **settings: Any) -> Folder:
    code = IDENTITY.replace("*inputs", ", ".join(f"INPUT{i}" for i in range(tensors)))
    code = code.replace("in inputs", f"in ({', '.join(f'INPUT{i}' for i in range(tensors))},)")
    inputs, outputs = (
        [tensor(f"{kind}{i}", datatype, [-1] * (1 + axes)) for i in range(tensors)]
        for kind in ("INPUT", "OUTPUT")
    )
    return lambda path: write_folder(path, code, inputs=inputs, outputs=outputs, max_batch_size=8, **settings)


def _nan_inf(path: Path) -> Path:
    return write_folder(
        path,
        NAN_AND_INF,
        inputs=[tensor("INPUT0", "FP32", [1])],
        outputs=[tensor("OUTPUT0", "FP32", [6])],
        samples={"INPUT0": np.linspace(1, 4, 8, dtype=np.float32).reshape(8, 1)},
        precision={"level": "O0"},
        max_batch_size=0,
    )


def _ranked(path: Path) -> Path:
    return write_folder(
        path,
        RANKED,
        inputs=[tensor("INPUT0", "FP32", [-1, 6])],
        outputs=[tensor("OUTPUT0", "FP32", [-1, 6], kind="logits", labels=ANIMALS)],
        max_batch_size=8,
    )


MODELS: dict[str, Folder] = {
    "simple": _two_in_two_out("INT32"),
    "simple_int8": _two_in_two_out("INT8"),
    "simple_identity_int64": _identity("INT64"),
    "onnx_zero_1_float32": _identity("FP32"),
    "onnx_zero_1_float32_queue": _identity("FP32", batching=ONE_WAITS),
    "onnx_zero_1_float16": _identity("FP16", axes=2),
    "onnx_zero_3_float32": _identity("FP32", tensors=3),
    "onnx_float32_float32_float32": _two_in_two_out("FP32"),
    "nan_inf_output": _nan_inf,
    "ranked": _ranked,
}


# The model control example sets the largest batch to 16: a load may do that where 16 is what was proven.
SIMPLE_OF_16 = _two_in_two_out("INT32", rows=16)


def host(store: Store, folders: Path, models: Mapping[str, Folder]) -> None:
    """Convert the models into the store. Only the torch form: the wire is what is looked at here."""
    for name, folder in models.items():
        converted = convert(folder(folders / name), store, Options(forms=("torch",)))
        assert converted.any_passed, f"{name}: {converted.facts}"
