"""Kernels that torch.compile's Inductor generates for a CUDA device, made and compiled where there is none.

    python -m tests.generated_kernels NAME[=ARCHITECTURE,…] …

Run alone: torch is told here that there is an H100. NAME is a model of the corpus or one of `BLOCKS`. Prints, as JSON,
for each how many kernels were generated and compiled for each architecture that is asked for (for all by itself), and
the library calls beside them; of one that fails, the error. Triton's wheel brings the compiler.
"""

import ast
import importlib
import importlib.util
import json
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from halfeven.models.program import runnable
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from tests.benchmarks.gpu.facts import Facts
from tests.benchmarks.gpu.nets import nets
from tests.benchmarks.gpu.phase import Phase
from tests.exporters.torch.autocast.half_programs import half_program, inputs_of
from tests.fake_cuda import CUDA, _moved

ARCHITECTURES = (80, 90, 100)
ROWS = 32
BLOCKS = ("BERT-base", "ViT-B/16")  # with one block of their real width: the others are the same
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.S)
_HEADER = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def _of_triton(module: str) -> Any:
    """A module of Triton's, which is not installed with the project."""
    return importlib.import_module(f"triton.{module}")


class _Driver:
    """A driver that answers what Triton asks before it generates code."""

    utils = None

    def get_current_target(self) -> Any:
        return _of_triton("backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cuda"

    def get_device_interface(self) -> Any:
        return torch.cuda


def _with_an_h100() -> ExitStack:
    """Torch's and Inductor's questions about the device are answered as an H100 does (its data sheet)."""
    from torch._dynamo.device_interface import CudaInterface

    _of_triton("runtime").driver.set_active(_Driver())
    facts = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, gcnArchName="", L2_cache_size=50 << 20, max_threads_per_block=1024,
    )  # fmt: skip
    stack = ExitStack()
    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "is_available": lambda: True,
                "device_count": lambda: 1,
                "current_device": lambda: 0,
                "get_device_properties": lambda device=None: facts,
                "get_device_capability": lambda device=None: (9, 0),
                "get_device_name": lambda device=None: facts.name,
                "synchronize": lambda device=None: None,
                "_lazy_init": lambda: None,
            },
        ),
        (torch.version, {"cuda": "13.0"}),
        (
            CudaInterface,
            {
                "is_available": staticmethod(lambda: True),
                "get_compute_capability": staticmethod(lambda device=None: 90),
                "current_device": staticmethod(lambda: 0),
                "device_count": staticmethod(lambda: 1),
                "get_raw_stream": staticmethod(lambda device: 0),
                "get_device_properties": staticmethod(lambda device=None: facts),
                "is_triton_capable": staticmethod(lambda device=None: True),
                "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
            },
        ),
        (
            CudaInterface.Worker,
            {
                "get_device_properties": staticmethod(lambda device=None: facts),
                "current_device": staticmethod(lambda: 0),
            },
        ),
    ]
    for place, replaced in answers:
        for name, value in replaced.items():
            stack.enter_context(patch.object(place, name, value))
    return stack


def generated(program: GraphModule, example: Sequence[Tensor]) -> str:
    """The code that Inductor writes for a half program, at the example's sizes."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = _moved(program, mode)
    inputs = [mode.from_tensor(tensor, static_shapes=True).to(CUDA) for tensor in example]
    weights = dict(module.named_buffers())

    def run(values: list[Any], tensors: list[Any]) -> Any:
        held = dict(zip(weights, values, strict=True))
        return torch.func.functional_call(module, held, tuple(tensors))

    with mode, torch.no_grad():
        graph = make_fx(run, decomposition_table=select_decomp_table())(list(weights.values()), inputs)
    graph.graph.set_codegen(CodeGen())  # inputs and outputs as they are in the graph, flat
    given = [*weights.values(), *inputs]
    lowering = GraphLowering(graph, given, shape_env=mode.shape_env)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*given)
        code, *_ = lowering.codegen()
    return str(getattr(code, "value", code))


def compiled(code: str, folder: Path, architectures: Sequence[int]) -> dict[int, int]:
    """The number of the code's kernels that were compiled for each architecture. Raises the compiler's error."""
    compiler, target = _of_triton("compiler"), _of_triton("backends.compiler").GPUTarget
    counts: dict[int, int] = dict.fromkeys(architectures, 0)
    for number, (name, body) in enumerate(_KERNEL.findall(code)):
        path = folder / f"kernel_{number}.py"
        path.write_text(_HEADER + body[body.index("@triton.jit") :])
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        found = re.search(r"'signature': (\{.*?\})", body)
        assert found is not None
        signature = ast.literal_eval(found.group(1))
        sizes = {key: _size(key) for key, kind in signature.items() if kind == "constexpr"}
        for architecture in architectures:
            source = compiler.ASTSource(fn=vars(made)[name], signature=signature, constexprs=sizes)
            kernel = compiler.compile(source, target=target("cuda", architecture, 32))
            assert kernel.asm["cubin"], f"{name} has no code for sm_{architecture}"
            counts[architecture] += 1
    return counts


def _size(name: str) -> int:
    """A block's size, which a tuner would choose on the device."""
    return {"XBLOCK": 8, "YBLOCK": 8, "R0_BLOCK": 256}.get(name, 16)


def programs_of(names: Sequence[str]) -> dict[str, tuple[GraphModule, list[Tensor]]]:
    """The half of each, by autocast's lists for CUDA alone, and inputs for it."""
    found = {name: (runnable(half_program(name)), inputs_of(name)) for name in names if name not in BLOCKS}
    if blocks := [name for name in names if name in BLOCKS]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            phase = Phase(Facts(folder, "", 0.0), torch.device("cpu"), False, False, folder, float("inf"))
            for net in nets(phase, *blocks, layers=1):
                found[net.name] = runnable(net.half), [torch.from_numpy(net.draw(ROWS))]
    return found


def main(arguments: list[str]) -> None:
    from torch._inductor import config

    warnings.simplefilter("ignore")
    config.compile_threads = 1  # processes of its own would have no work
    asked = {
        name: [*map(int, some.split(","))] if some else ARCHITECTURES
        for name, _, some in (argument.partition("=") for argument in arguments)
    }
    programs = programs_of([*asked])
    with _with_an_h100(), tempfile.TemporaryDirectory() as folder:
        found = dict[str, dict[str, Any]]()
        for number, (name, (program, example)) in enumerate(programs.items()):
            place = Path(folder) / str(number)
            place.mkdir()
            try:
                code = generated(program, example)
                library = sorted(set(re.findall(r"extern_kernels\.(\w+)", code)))
                found[name] = {"compiled": compiled(code, place, asked[name]), "library": library}
            except Exception:  # the others are asked all the same
                found[name] = {"error": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
