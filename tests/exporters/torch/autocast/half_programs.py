"""Half programs of the corpus that the rules alone made."""

from functools import cache

from halfeven.exporters.torch.autocast.bit_equality import half_by_rules
from torch import Tensor
from torch.export import ExportedProgram

from tests.corpus import CORPUS, captured, fresh

# The models of which the plan keeps more in FP32 than live autocast would.
KEPT = {
    "autocast off": "an autocast(enabled=False) region is a true FP32 island: its inputs are upcast",
    "autocast off for CUDA": "the same",
    "zoo llama": "its rotary embedding is such an island",
    "lstm": "recurrent ops stay FP32",
    "gru": "recurrent ops stay FP32",
    "zoo lstm": "recurrent ops stay FP32",
}


@cache
def half_program(name: str) -> ExportedProgram:
    model = captured(name)
    return half_by_rules(model.program, model.spec, model.example, half_loops=True).program


def inputs_of(name: str) -> list[Tensor]:
    return list(fresh(name, min(CORPUS[name].max_batch_size, 3), seed=5).values())
