"""Every small ONNX file of these tests by name, with inputs for it."""

import numpy as np

from tests.exporters.onnx.exported_nets import NETS, exported
from tests.exporters.onnx.traps import FOREIGN

MODELS = {
    **{name: trap.model for name, trap in FOREIGN.items()},
    **{name: lambda n=name: exported(n) for name in NETS},
}


def inputs_of(name: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    if name in NETS:
        return NETS[name].inputs(random, 3)
    inputs = FOREIGN[name].inputs(random, 3)
    return {k: array[0] for k, array in inputs.items()} if FOREIGN[name].max_batch_size == 0 else inputs
