"""The child's messages when the operator's code cannot be captured: the construct, the source line, what to do.

Runs in the child and the trainer.
"""

import contextlib
import inspect
import linecache
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files.durable import no_space_left
from ..order.lacking_memory import causes, is_out_of_memory

Request = Mapping[str, Any]

LIVE = 'or serve the model uncaptured with form = "live"'
_BRANCHES = (
    "a torch.cond whose two branches do not give the same shapes and dtypes",
    "make both branches give the same, with no change to what they are given",
)
_DTYPE = (
    "a half dtype written into the code, against FP32 weights",
    "leave it out, or use .to(weight.dtype): the FP32 original comes first, the half is made of it",
)
_DOUBLE = (
    "a float64 input or number beside FP32 weights",
    "give the samples in float32, or use .to(weight.dtype)",
)
_DEVICE = ("a device written into the code", "use the input's device: x.device")
# The exceptions that a model's forward function raises where its inputs do not fit.
PLAIN = (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError)
SPECIALISED = "specialized it to be a constant"
# Words of torch's message (all of them) → the construct, and what to do about it. The first that fits is reported.
CAUSES = (
    (("Could not extract specialized integer",), "a size or count that is read from a tensor's values",
     "take it from a shape, make it a fixed number, or mask with torch.where"),
    (("failed to unpack the object", "FakeTensor"), "a size or count that is read from a tensor's values",
     "take it from a shape or make it a fixed number (a packed sequence has such sizes: give the recurrent layer the "
     "padded rows, and mask with torch.where)"),
    (("Could not guard on data-dependent",), "a decision that depends on a tensor's values",
     "write both sides with torch.where, or use torch.cond (torch.while_loop for a loop)"),
    (("Expected input at", "to be equal to"), "a size that the exported program has fixed",
     "export it again with that size free (torch.export.Dim.DYNAMIC), or write the size into model.toml"),
    ((".numpy() is not supported",), "a NumPy call on a tensor", "use torch's own function"),
    ((SPECIALISED,), "a free size that the code turns into a constant",
     "take sizes from x.shape and keep them as they are (no number written out, no .tolist(), no len() of a list "
     "made of rows); or write the size into model.toml (max_batch_size = 1 for the batch)"),
    (("not linked with support for cuda",), *_DEVICE),
    (("not compiled with CUDA",), *_DEVICE),
    (("No CUDA GPUs are available",), *_DEVICE),
    (("Found no NVIDIA driver",), *_DEVICE),
    (("found two different devices",), *_DEVICE),
    (("Expected all tensors to be on the same device",), *_DEVICE),  # a CUDA build of torch traces the move itself
    (("must have the same dtype", "Double"), *_DOUBLE),
    (("bias type", "should be the same", "double"), *_DOUBLE),
    (("expected scalar type", "Double"), *_DOUBLE),
    (("must have the same dtype",), *_DTYPE),
    (("bias type", "should be the same"), *_DTYPE),
    (("expected scalar type",), *_DTYPE),
    (("torch.cond", "branches"), *_BRANCHES),
    (("true_fn", "false_fn"), *_BRANCHES),
    (("Cannot access data pointer",), "a kernel that torch.export cannot look into",
     "write it with torch's own functions"),
    (("__obj_flatten__",), "packed weights of a quantised layer", "convert the module that was quantised"),
    (("Failed serializing node",), "a size that forward computes with a function that a program's file does not have",
     "compute it from whole numbers with +, *, // and %, or write the size into model.toml"),
    (("ScriptModule",), "a TorchScript module", "build the nn.Module that it was made of"),
    (("does not support", "ScriptFunction"), "a TorchScript function", "call the Python function it was made of"),
)  # fmt: skip


_LONGEST = 2**20


class Refused(Exception):
    """A failure that has a sentence of its own (others show the user's traceback)."""


def described(error: BaseException, request: Request) -> dict[str, Any]:
    """A failure as result.json has it: a sentence; where that needs it, the last frames (``traceback``) and all of them
    (``every_frame``); the place of a disk that is full, and whether the memory was: then the model is not at fault."""
    if isinstance(error, Refused):
        return {"error": str(error), "traceback": ""}
    found: dict[str, Any] = {"error": explained(error, request), "traceback": tail(error, request)}
    found["every_frame"] = "".join(traceback.format_exception(error))[-_LONGEST:]
    full = [one for one in causes(error) if no_space_left(one)]
    found["disk_full"] = str(getattr(full[0], "filename", None) or request["out"]) if full else None
    found["out_of_memory"] = is_out_of_memory(error)
    return found


def explained(error: BaseException, request: Request) -> str:
    """Construct, source line and what to do, followed by torch's own message; only that for an unknown construct."""
    theirs = f"{type(error).__name__}: {first_lines(error)}"
    if isinstance(error, ImportError):
        return f"{theirs}{where_imports_are_found(error, request)}"
    for words, construct, remedy in CAUSES:
        if all(word in str(error) for word in words) and not _integer_input(error, words):
            construct, remedy = _closer(construct, remedy, line_of(error, request)[1])
            return f"{construct}{place_of(error, request)}: {remedy}, {LIVE}\n{theirs}"
    if blamed := getattr(error, "halfeven_inputs", None):
        return f"{blamed[0]}\n{type(blamed[1]).__name__}: {first_lines(blamed[1])}"
    if type(error).__module__.startswith(("torch._dynamo", "torch.fx", "torch._subclasses", "torch.export")):
        construct = "something that torch.export cannot trace"
        return f"{construct}{place_of(error, request)}: change it, {LIVE}\n{theirs}"
    return theirs


def _closer(construct: str, remedy: str, code: str) -> tuple[str, str]:
    """The construct and remedy, more exact where the user's line has an ``assert`` or an ``.item()``."""
    if "decision" in construct and code.startswith("assert"):
        return "an assertion about a tensor's values", "take it out of forward"
    if "tensor's values" in construct and (".item()" in code or "int(" in code):
        return f"{construct} (.item())", remedy
    return construct, remedy


def _integer_input(error: BaseException, words: Sequence[str]) -> bool:
    """True if an integer input met weights: then its datatype in model.toml is wrong, and half is not the cause."""
    return "dtype" in words[0] and any(
        f" {name} " in f"{error} " for name in ("Long", "Int", "Short", "Byte")
    )


def blame_inputs(
    error: Any,
    module: Callable[..., Any],
    forward: Callable[..., Any],
    example: Sequence[Any],
    request: Request,
) -> None:
    """Note on ``error`` the inputs of forward and its own error, if forward fails without tracing too."""
    try:
        module(*(tensor.clone() for tensor in example))
    except PLAIN as plain:
        called = request.get("batch_axes", {}).get("inputs", {})
        axes = [called.get(spec["name"], 0) for spec in request["inputs"]]
        given = ", ".join(
            f"'{spec['name']}' {spec['declared']} (tried with {list(tensor.movedim(0, axis).shape)})"
            for spec, tensor, axis in zip(request["inputs"], example, axes, strict=True)
        )
        sentence = (
            "forward fails with the inputs that model.toml declares: "
            f"{given}{_parameters(forward, example, plain)}. Where a name, shape or datatype is not "
            f"what the model takes, correct it under [[inputs]] in {request['folder']}/model.toml"
        )
        error.halfeven_inputs = (sentence, plain)
    except Exception:
        return


def blame_samples(error: Any, forward: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Attach to ``error`` a message with the names, dtypes and shapes of the samples that the model's forward function
    failed with. ``given``: name → tensor."""
    shapes = ", ".join(f"'{name}' {str(t.dtype)[6:]} {list(t.shape)}" for name, t in given.items())
    sentence = (
        f"forward fails with the samples: {shapes}{_parameters(forward, given, error)}. Samples have an array for each "
        "parameter of forward that they give, under its name, first axis = samples, or what forward takes as it is"
    )
    error.halfeven_inputs = (sentence, error)


def _parameters(forward: Callable[..., Any], given: Collection[Any], error: BaseException) -> str:
    """The end of an error message: the parameters of the model's forward function, and advice where the function seems
    to take its tensors in one tuple or dictionary."""
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(forward)
        return f"; its parameters are {signature}{_one_by_one(signature, given, error)}"
    return ""


def _one_by_one(signature: inspect.Signature, example: Collection[Any], error: BaseException) -> str:
    """Advice for a forward that seems to take its tensors in a dict or a list; empty for any other."""
    needed = [
        one
        for one in signature.parameters.values()
        if one.default is one.empty and one.kind < one.KEYWORD_ONLY
    ]
    if len(needed) == len(example) and "str" not in str(error):
        return ""
    return (
        ". Each input is given to it as a tensor of its own: where it takes them in a dict, a list or a tuple, let "
        "source build a module around it, whose forward has a parameter for each and puts them together"
    )


def where_imports_are_found(error: ImportError, request: Request) -> str:
    """A sentence that says where an import was looked for, and which key of model.toml adds a folder."""
    folder, roots = Path(request["folder"]), list(request["path"])
    if "relative import" in str(error):
        return (
            f"\n{request['source']} is imported as a module of its own, not as a part of a package: import the "
            f"files beside it by their names alone ({folder} is searched), or by their package's name with the "
            'parent folder of the package in model.toml, path = [".."]'
        )
    if not error.name:  # raised by a package about itself: no path would mend it
        return ""
    name = error.name.partition(".")[0]
    above = ["/".join([".."] * depth) for depth in (1, 2, 3)]
    places = [up for up in above for end in (".py", "/*.py") for _ in (folder / up).glob(f"{name}{end}")]
    near = list(dict.fromkeys(places))
    there = (
        f"it lies in {(folder / near[0]).resolve()}: write"
        if near
        else "code of yours elsewhere is found with"
    )
    return (
        f"\nimports are looked for in {folder}, in {roots or 'no further folder'} (the key path of model.toml) and "
        f'among the packages installed in {sys.prefix}: {there} path = ["{near[0] if near else ".."}"] in model.toml '
        "(taken from the model's folder); a package that is missing is to be installed there"
    )


def first_lines(error: object) -> str:
    return "\n".join(str(error).strip().splitlines()[:12])


def tail(error: BaseException, request: Request) -> str:
    """Four lines of a traceback: the last three frames of the user's own code, and the last frame of all."""
    _, error = getattr(error, "halfeven_inputs", ("", error))
    frames = traceback.extract_tb(error.__traceback__)
    shown = of_the_model(frames, request)[-3:] or frames[-3:]
    shown += [frame for frame in frames[-1:] if frame not in shown]
    return "".join(
        f"  {one.filename}:{one.lineno}, in {one.name}: {(one.line or '')[:200]}\n" for one in shown
    )


def is_own(file: str, request: Request) -> bool:
    """True if this source file is the user's; libraries may be installed inside the user's folder (.venv)."""
    place, roots = Path(file), {Path(root).resolve() for root in (request["folder"], *request["path"])}
    return any("-packages" not in str(place.relative_to(root)) for root in roots & set(place.parents))


def line_of(error: BaseException, request: Request) -> tuple[str, str]:
    """The innermost line of the user's that an error passed, as (place, code); empty where none did."""
    if place := getattr(error, "halfeven_place", None):
        return place
    return own_line(traceback.extract_tb(error.__traceback__), request)


def of_the_model(frames: Sequence[traceback.FrameSummary], request: Request) -> list[traceback.FrameSummary]:
    """The frames of the user's own files; where there are none, those of the library that the model comes from."""
    own = [frame for frame in frames if is_own(frame.filename, request)]
    return own or [frame for frame in frames if not _is_torch_or_python(frame.filename)]


def _is_torch_or_python(file: str) -> bool:
    """True if this source file is torch's, the Python standard library's or halfeven's. A stack frame in such a file
    does not show which line of the model's code failed."""
    place, torch = Path(file), getattr(sys.modules.get("torch"), "__file__", None)
    folders = [Path(source).parent for source in (__file__, torch) if source]
    is_pythons = Path(traceback.__file__).parent in place.parents and "-packages" not in file
    return file.startswith("<") or is_pythons or any(folder in place.parents for folder in folders)


def own_line(frames: Sequence[traceback.FrameSummary], request: Request) -> tuple[str, str]:
    own = of_the_model(frames, request)
    if not own:
        return "", ""
    return f"{own[-1].filename}:{own[-1].lineno}", (own[-1].line or "").strip()


def place_of(error: BaseException, request: Request) -> str:
    place, code = line_of(error, request)
    return f" at {place} (`{code}`)" if place else ""


def line_of_node(node: Any, request: Request) -> str:
    """The user's line that a node of a program was traced from, as ``place_of`` writes it; else torch's."""
    text = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n +([^\n]+)', text)
    own = [frame for frame in frames if is_own(frame[0], request)] or frames
    return f" at {own[-1][0]}:{own[-1][1]} (`{own[-1][2].strip()}`)" if own else ""


class _Specialised(logging.Handler):
    """A log handler that sees torch.export's message that a size became a constant, and notes the calling line."""

    def __init__(self, request: Request) -> None:
        super().__init__(logging.INFO)
        self.request, self.place = request, ("", "")

    def emit(self, record: logging.LogRecord) -> None:
        if not self.place[0] and str(record.msg).startswith("set_replacement"):
            self.place = own_line(_stack(), self.request)


def _stack() -> list[traceback.FrameSummary]:
    return traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)))[::-1]


def is_specialised(error: BaseException) -> bool:
    """True if this error of torch.export says that the model's code makes a constant of a size that has to stay free,
    such as the number of rows."""
    return SPECIALISED in str(error)


def where_specialised(error: Any, request: Request, export: Callable[[], object]) -> None:
    """Add the line where a size became a constant to torch's error, which lacks it: by exporting once more."""
    if not is_specialised(error):
        return
    heard = _Specialised(request)
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, propagate = log.level, log.propagate
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with contextlib.suppress(Exception):
            export()
    finally:
        log.removeHandler(heard)
        log.setLevel(level)
        log.propagate = propagate
        linecache.checkcache()
    if heard.place[0]:
        error.halfeven_place = heard.place
