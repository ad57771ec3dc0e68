"""Makes a module of each kind of source, and puts weights into the module.

    model.py:build    a function of the operator's
    hf:.              a transformers folder: config.json and safetensors, never a hub, never its own code
    program.pt2       an exported program, which only the child may open
    a module          of the program that called us: it is captured in that process

Runs in the child.
"""

import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import failures, more_rows

if TYPE_CHECKING:
    from torch import Tensor, nn

Request = Mapping[str, Any]
State = Mapping[str, "Tensor"]

HALF = ("F16", "BF16")  # in the header of a safetensors file
# This file lies beside safetensors in several files, as save_pretrained writes large models.
INDEX = ".safetensors.index.json"
STATES = ("state_dict", "model_state_dict", "model")  # in a checkpoint of a training, beside its optimiser
SCRIPT = "a TorchScript module, which is not taken: build the nn.Module that it was made of"
WRAPPERS = ("module.", "_orig_mod.", "model.")  # before all names: of DataParallel, torch.compile, Lightning


def build(torch: ModuleType, request: Request, folder: Path, attention: str | None = "sdpa") -> Any:
    """The module in evaluation, without gradients, as its source has it."""
    source = request["source"]
    if "module" in request:  # alive in this process (`capture.result_here`)
        if is_script(request["module"]):
            raise failures.Refused(f"it is {SCRIPT}")
        return as_built(request["module"])
    if source.startswith("hf:"):
        return transformers_module(torch, folder / source[3:], attention)
    if source.endswith(".pt2"):
        return program_module(torch, folder / source, request)
    return python_module(torch, source, folder)


def imported_files(libraries: Collection[str]) -> dict[str, str]:
    """The operator's own Python files that were imported, with their SHA-256: all whose place on ``sys.path`` is none
    of ``libraries``. Where one place lies in another, the inner one counts."""
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not Path(file).is_file():
            continue
        places = [place for place in sys.path if place and file.startswith(f"{place.rstrip(os.sep)}{os.sep}")]
        if places and max(places, key=len) not in libraries:
            found[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def python_module(torch: ModuleType, source: str, folder: Path) -> "nn.Module":
    path = folder / source.partition(":")[0]
    sys.modules[path.stem] = user_module = types.ModuleType(path.stem)
    loader = importlib.machinery.SourceFileLoader(path.stem, str(path))
    user_module.__spec__ = importlib.util.spec_from_loader(path.stem, loader)
    user_module.__file__ = str(path)
    with without_arguments(path):
        loader.exec_module(user_module)
        module = module_of(torch, user_module, source)
    if is_script(module):
        raise failures.Refused(f"{source}() gave {SCRIPT}")
    return as_built(without_compiler(module))


def module_of(torch: ModuleType, imported: ModuleType, source: str) -> "nn.Module":
    """The module that the function of ``imported`` gives which ``source`` names. Raises Refused."""
    file, _, function = source.partition(":")
    build = getattr(imported, function, None)
    if not callable(build):
        raise failures.Refused(f"{file} has no function '{function}', which source = {source!r} names")
    module: Any = build()
    if not isinstance(module, torch.nn.Module):
        raise failures.Refused(f"{source}() must give a torch.nn.Module, it gave {type(module).__name__}")
    return module


@contextmanager
def without_arguments(path: Path) -> Iterator[None]:
    """Inside the block the command line of this process is the file's path alone: the operator's code may parse its
    command line, and this process's own arguments are none of that code's."""
    own, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = own


def without_compiler(module: Any) -> Any:
    """The module that was given to torch.compile: the capture does not keep what torch.compile makes, and making it
    takes minutes."""
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module


def is_script(module: object) -> bool:
    return type(module).__name__ in ("ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule")


def refuse_scripts(module: "nn.Module") -> None:
    """Raise Refused with the name of the first TorchScript module inside a module that could not be captured: torch's
    own message does not name it."""
    if names := [name for name, part in module.named_modules() if is_script(part)]:
        raise failures.Refused(f"the module's part '{names[0]}' is {SCRIPT}, {failures.LIVE}")


def as_built(module: Any) -> Any:
    """The module in evaluation mode and without gradients. ``frozen_when_built`` records the parameters that the
    operator's code had frozen, because a training must not change those."""
    module.frozen_when_built = {name for name, one in module.named_parameters() if not one.requires_grad}
    for parameter in module.parameters():
        if not is_lazy(parameter):
            parameter.requires_grad_(False)
    return module.eval()


def is_lazy(parameter: object) -> bool:
    """True if the parameter has no size yet. A lazy layer (nn.LazyLinear) begins with such parameters; they get a size
    when weights are loaded or when the layer is run for the first time."""
    return type(parameter).__name__ == "UninitializedParameter"


def refuse_lazy(module: "nn.Module") -> None:
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise failures.Refused(
            f"the parameter '{lazy[0]}' of a lazy layer has no size yet, and no weights give it one: run the module "
            "once on an example where it is built, or name its weights in model.toml"
        )
    module.requires_grad_(False)


def transformers_module(torch: ModuleType, folder: Path, attention: str | None) -> Any:
    """The class that config.json names, from this folder alone. Refused where the checkpoint lacks weights.

    ``attention``: how it computes its attention, where the class can; half of the library's classes can only "eager".
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    try:
        import transformers
    except ImportError:
        raise failures.Refused(
            "source = 'hf:…' needs the transformers library: pip install 'halfeven[hf]'"
        ) from None
    transformers.logging.set_verbosity_error()
    local = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **local)
    config.use_cache, config.return_dict = False, True
    names = getattr(config, "architectures", None) or ()
    kinds = [getattr(transformers, name, None) for name in names]
    known = [kind for kind in kinds if hasattr(kind, "from_pretrained")]
    kind: Any = known[0] if known else transformers.AutoModel
    load = partial(
        kind.from_pretrained, folder, config=config, use_safetensors=True, dtype=torch.float32,
        output_loading_info=True, **local,
    )  # fmt: skip
    try:
        module, found = load(attn_implementation=attention)
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        module, found = load(attn_implementation="eager")
    module.lacking = sorted(found["missing_keys"])  # may be unused: known after the export
    return as_built(module)


def program_module(torch: ModuleType, path: Path, request: Request) -> "nn.Module":
    """A foreign program as a module again, its dtypes not pinned, its batch free where the request says so."""
    program = torch.export.load(path)
    widened = [name for name, t in program.state_dict.items() if t.dtype in (torch.half, torch.bfloat16)]
    module = program.module(check_guards=False)
    program_dtypes(torch, module, widen=bool(widened))
    if request.get("free_batch"):
        more_rows.free(torch, module, more_rows.axes_of(program, request))
    made = plain_module(torch, module).requires_grad_(False)
    if not request.get("free_batch"):
        vars(made)["guarded"] = program.module()  # no part of it: it shares the weights
    return made


def plain_module(torch: ModuleType, graph_module: Any) -> "nn.Module":
    """A plain module with the parameters of ``graph_module`` under the same names: torch.export does not call the
    ``forward`` of a GraphModule."""

    signature = inspect.signature(graph_module.forward)
    # Inputs that were exported by name must be given by name.
    keywords = graph_module._in_spec.child(1).context or ()

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        named = {name: given.pop(name) for name in keywords}
        return graph_module(*given.values(), **named)  # with the hook that checks sizes against the export's

    forward.__signature__ = signature
    module = torch.nn.Module()
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(module, name, getattr(graph_module, name))
    module.forward = forward
    return module


def program_dtypes(torch: ModuleType, module: Any, widen: bool) -> None:
    """Asserted dtypes go; in a program that was half, the casts to half that tracing wrote into it go too."""
    half = (torch.half, torch.bfloat16)
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                part.graph.erase_node(node)
            elif widen:
                node.args = tuple(torch.float32 if arg in half else arg for arg in node.args)
                if node.kwargs.get("dtype") in half:
                    node.kwargs = {**node.kwargs, "dtype": torch.float32}
        part.recompile()


def load_weights(torch: ModuleType, module: "nn.Module", weights: str | None) -> list[str]:
    if weights is None:
        return []
    state = with_tied(module, unwrapped(module, read_state(torch, weights)))
    wide = {name: t.float() if t.dtype in (torch.half, torch.bfloat16) else t for name, t in state.items()}
    try:
        module.load_state_dict(wide, strict=True)
    except RuntimeError as error:
        raise failures.Refused(
            f"{Path(weights).name} does not fit the module: {failures.first_lines(error)}"
        ) from None
    narrow = sum(state[name].dtype != wide[name].dtype for name in state)
    return [f"{narrow} half-precision tensors of {Path(weights).name} were widened to FP32"] if narrow else []


def unwrapped(module: "nn.Module", state: State) -> State:
    """The state under the module's own names: without the name of a wrapper that it was saved with."""
    own = module.state_dict().keys()
    while state and own.isdisjoint(state):
        wrapper = next((each for each in WRAPPERS if all(name.startswith(each) for name in state)), None)
        if wrapper is None:
            break
        state = {name.removeprefix(wrapper): tensor for name, tensor in state.items()}
    return state


def with_tied(module: "nn.Module", state: State) -> State:
    """The state with both names of a tied weight, of which a file of safetensors has one alone."""
    names = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    found = dict(state)
    for same in names.values():
        there = next((name for name in same if name in state), None)
        found.update({name: state[there] for name in same if there and name not in state})
    return found


def read_state(torch: ModuleType, weights: str) -> State:
    """The tensors of safetensors or of a state dict, by name. Pickled code is refused, never run."""
    if weights.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(weights)
    if weights.endswith(INDEX):
        return sharded_state(Path(weights))
    name = Path(weights).name
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise failures.Refused(
            f"{name} is not a state dict of tensors alone ({why_not_opened(error)}); a pickled module or "
            f"TorchScript may run code and is not opened: where the model was made, write its tensors with "
            f"torch.save(model.state_dict(), {name!r})"
        ) from None
    if isinstance(state, dict):
        state = next((state[key] for key in STATES if isinstance(state.get(key), dict)), state)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        keys = f" of {', '.join(map(str, state))[:200]}" if isinstance(state, dict) else ""
        raise failures.Refused(
            f"{name} holds a {type(state).__name__}{keys}, expected a state dict (name → tensor), as "
            f"torch.save(model.state_dict(), {name!r}) writes it"
        )
    return state


def sharded_state(index: Path) -> State:
    """The tensors of several safetensors files beside an index, which says the file of each tensor."""
    from safetensors import safe_open

    try:
        file_of = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise failures.Refused(
            f"{index.name} is not an index of safetensors files ({type(error).__name__}: {error}): expected "
            '{"weight_map": {TENSOR: FILE}}'
        ) from None
    state = {}
    for name in sorted(map(str, set(file_of.values()))):
        path = index.with_name(name) if Path(name).name == name else None
        if path is None or not path.is_file():
            raise failures.Refused(
                f"{index.name} names the file {name!r}, and there is none of that name beside it"
            )
        with safe_open(path, "pt") as shard:
            wanted = [tensor for tensor, file in file_of.items() if file == name]
            if missing := sorted(set(wanted) - set(shard.keys())):
                raise failures.Refused(
                    f"{index.name}: {name} has no tensor {missing[0]!r}; is the file whole?"
                )
            state |= {tensor: shard.get_tensor(tensor) for tensor in wanted}
    return state


def why_not_opened(error: Exception) -> str:
    """Torch's reason, without its advice to open the file all the same."""
    reason = failures.first_lines(str(error).rpartition("WeightsUnpickler error: ")[2]).partition("\n")[0]
    return reason.partition(" Please use")[0][:300]


def widen(torch: ModuleType, module: "nn.Module") -> list[str]:
    # A quantised module's state dict has values that are no tensors, and these have no dtype.
    dtypes = {name: getattr(t, "dtype", None) for name, t in module.state_dict().items()}
    half = [name for name, dtype in dtypes.items() if dtype in (torch.half, torch.bfloat16)]
    if half:
        module.float()
        return [f"{len(half)} half-precision tensors of the module were widened to FP32"]
    return []


def half_in_checkpoint(request: Request, folder: Path) -> list[str]:
    """A note about weights that ``from_pretrained`` has widened while loading, worded as in `load_weights`."""
    if not request["source"].startswith("hf:"):
        return []
    notes = []
    for file in sorted((folder / request["source"][3:]).glob("*.safetensors")):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        narrow = sum(entry.get("dtype") in HALF for entry in header.values())
        if narrow:
            notes.append(f"{narrow} half-precision tensors of {file.name} were widened to FP32")
    return notes
