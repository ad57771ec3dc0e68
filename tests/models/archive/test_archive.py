"""Archives: what loading could execute is refused before torch sees it, and nothing of it runs."""

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.errors import DamagedFile
from halfeven.models.program import runnable
from torch import nn
from torch.export import Dim, ExportedProgram

from tests.models.archive.crafting import MODEL, WEIGHTS, Touches, archive_of, contents, crafted


class Net(nn.Module):
    """Free sizes, a tied weight, a buffer, a constant, integers and a data-dependent size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleDict({"a-b": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 16)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(4))
        self.scale = torch.tensor(2.0)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layers["a-b"](self.embed(tokens)) * self.scale + self.offset
        hidden = hidden + self.embed.weight[: tokens.shape[1]]
        return self.head(hidden), tokens.nonzero(), hidden.reshape(tokens.shape[0] * tokens.shape[1], -1)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    tokens = torch.randint(0, 16, (3, 5))
    free = {"tokens": {0: Dim.DYNAMIC(min=1, max=8), 1: Dim.AUTO}}
    return torch.export.export(Net().eval().requires_grad_(False), (tokens,), dynamic_shapes=free)


@pytest.fixture(scope="module")
def saved(program: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "program.pt2"
    save_program(program, path, weights=True)
    return path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that stays absent, unless something from an archive runs."""
    return tmp_path / "canary"


def answers(program: ExportedProgram, tokens: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        return list(runnable(program)(tokens))


def refused(path: Path, canary: Path, *words: str) -> None:
    with pytest.raises(DamagedFile) as caught:
        load_program(path)
    assert not canary.exists(), "something from the archive was executed"
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message.replace(str(path), "") for word in words), message


def writes(canary: Path) -> str:
    return f"__import__('pathlib').Path('{canary}').touch()"


def test_a_program_with_its_weights_answers_the_same_after_loading(
    program: ExportedProgram, saved: Path
) -> None:
    tokens = torch.randint(0, 16, (7, 9))
    expected, came = answers(program, tokens), answers(load_program(saved), tokens)
    assert len(came) == 3 and all(torch.equal(a, b) for a, b in zip(expected, came, strict=True))


def test_weights_that_were_left_out_are_put_in_again(program: ExportedProgram, tmp_path: Path) -> None:
    path = tmp_path / "original.pt2"
    save_program(program, path, weights=False)
    tokens = torch.randint(0, 16, (2, 3))
    loaded = load_program(path, {name: tensor.clone() for name, tensor in program.state_dict.items()})
    came = answers(loaded, tokens)
    assert all(torch.equal(a, b) for a, b in zip(answers(program, tokens), came, strict=True))


def test_other_weights_give_the_answers_of_those(program: ExportedProgram, tmp_path: Path) -> None:
    path = tmp_path / "original.pt2"
    save_program(program, path, weights=False)
    module = Net().eval()
    with torch.inference_mode():
        tokens = torch.randint(0, 16, (2, 3))
        came = answers(load_program(path, module.state_dict()), tokens)
        torch.testing.assert_close(came[0], module(tokens)[0])


def test_weights_that_were_left_out_take_no_room(program: ExportedProgram, tmp_path: Path) -> None:
    wide = torch.export.export(nn.Linear(1000, 1000).eval(), (torch.randn(2, 1000),))
    save_program(wide, tmp_path / "original.pt2", weights=False)
    assert (tmp_path / "original.pt2").stat().st_size < 100_000
    # The program kept its own.
    assert wide.state_dict["weight"].untyped_storage().nbytes() == 4_000_000


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda state: state.pop("offset"), "no such tensor"),
        (lambda state: state.update(offset=torch.zeros(5)), r"float32 \[5\]"),
        (lambda state: state.update(offset=torch.zeros(4).half()), "float16"),
    ],
)
def test_wrong_weights_are_named(
    change: Callable[[dict[str, torch.Tensor]], Any], word: str, program: ExportedProgram, tmp_path: Path
) -> None:
    path = tmp_path / "original.pt2"
    save_program(program, path, weights=False)
    state = dict(program.state_dict)
    change(state)
    with pytest.raises(DamagedFile, match=rf"'offset' must be torch.float32 \[4\], got .*{word}"):
        load_program(path, state)


def test_an_archive_of_ours_has_no_pickle_in_it(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            assert not data.startswith((b"\x80\x02", b"\x80\x04", b"PK")), name
            assert "sample_inputs" not in name or data == b""


def test_a_pickled_member_is_refused(saved: Path, tmp_path: Path, canary: Path) -> None:
    for member in ("archive/data/sample_inputs/model.pt", "archive/data/weights/model.pt"):
        path = tmp_path / "crafted.pt2"
        path.write_bytes(archive_of({**contents(saved), member: pickle.dumps(Touches(canary))}))
        refused(path, canary, member)


def test_a_pickled_weight_is_refused(saved: Path, tmp_path: Path, canary: Path) -> None:
    def pickled(document: dict[str, Any]) -> None:
        document["config"]["offset"].update(use_pickle=True, path_name="weight_99")

    buffer = io.BytesIO()
    torch.save(Touches(canary), buffer)
    path = crafted(saved, tmp_path / "crafted.pt2", WEIGHTS, pickled)
    with zipfile.ZipFile(path, "a") as target:
        target.writestr("archive/data/weights/weight_99", buffer.getvalue())
    refused(path, canary, "pickled tensor")


def test_a_pickled_weight_cannot_hide_under_a_name_that_is_skipped(
    saved: Path, tmp_path: Path, canary: Path
) -> None:
    def hide(document: dict[str, Any]) -> None:
        document["config"]["metadata"] = {**document["config"].pop("offset"), "use_pickle": True}

    refused(crafted(saved, tmp_path / "crafted.pt2", WEIGHTS, hide), canary, "pickled tensor")


@pytest.mark.parametrize("first", [True, False], ids=["bad one first", "bad one last"])
def test_a_member_that_is_there_twice_is_refused(
    first: bool, saved: Path, tmp_path: Path, canary: Path
) -> None:
    """zipfile reads the last of two members, torch's reader the first: one would be checked and the other loaded."""
    path = tmp_path / "crafted.pt2"
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of what is wanted here
        for name in source.namelist():
            good = source.read(name)
            bad = good.replace(b"torch.ops.aten.linear.default", b"torch.hub.load")
            copies = [good] if bad == good else [bad, good] if first else [good, bad]
            for data in copies:
                target.writestr(name, data)
    refused(path, canary, "twice")


def test_two_archives_in_one_file_are_refused(saved: Path, tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "crafted.pt2"
    members = contents(saved)
    other = {name.replace("archive", "other", 1): data for name, data in members.items()}
    path.write_bytes(archive_of({**members, **other}))
    refused(path, canary, "two archives")


def test_a_member_that_does_not_belong_there_is_refused(saved: Path, tmp_path: Path, canary: Path) -> None:
    for member in ("archive/extra/run.py", "archive/data/aotinductor/model/a.so", "archive/../../etc/passwd"):
        path = tmp_path / "crafted.pt2"
        path.write_bytes(saved.read_bytes())
        with zipfile.ZipFile(path, "a") as target:
            target.writestr(member, b"")
        refused(path, canary, member)


@pytest.mark.parametrize(
    "target",
    [
        "torch.hub.load",
        "torch.load",
        "torch.utils._pytree.tree_map",
        "torch.ops.aten.save.default",
        "torch.ops.aten.from_file.default",
        "torch.ops.load_library",
        "torch.ops.mylib.run.default",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.aten.relu.default.__class__",
        "_operator.methodcaller.__call__",
        "math.__loader__.load_module",
        "#extension:run",
        "os.system",
        "",
    ],
)
def test_a_target_that_is_no_tensor_op_is_refused(
    target: str, saved: Path, tmp_path: Path, canary: Path
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["graph_module"]["graph"]["nodes"][-1]["target"] = target

    refused(crafted(saved, tmp_path / "crafted.pt2", MODEL, change), canary, "target")


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch {canary}')",
        "(lambda: {touch})()",
        "Symbol('s0').__class__",
        "Symbol('{touch}')",
        "Symbol('s0') + ().__class__.__base__.__subclasses__()[0]",
        "preview(s0)",
        "(preview)(s0)",
        "sympify(s0)",
        "eval(s0)",
        "Integer(1).func",
        "Symbol('s0', cls=preview)",
        "[{touch}]",
        "s0 if {touch} else s0",
        "Max(" * 2000 + ")" * 2000,
    ],
)
def test_an_expression_that_is_no_arithmetic_is_refused(
    expression: str, saved: Path, tmp_path: Path, canary: Path
) -> None:
    text = expression.replace("{canary}", str(canary)).replace("{touch}", writes(canary))

    def change(document: dict[str, Any]) -> None:
        for name, value in document["graph_module"]["graph"]["tensor_values"].items():
            if name == "tokens":
                value["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}

    refused(crafted(saved, tmp_path / "crafted.pt2", MODEL, change), canary, "expr_str")


@pytest.mark.parametrize("where", ["input", "weight"])
def test_a_name_that_would_become_code_is_refused(
    where: str, saved: Path, tmp_path: Path, canary: Path
) -> None:
    """torch.fx writes source code with the names of inputs and weights in it, and executes it."""
    old, new = {
        "input": ("tokens", f"tokens={writes(canary)}"),
        "weight": ("offset", f"a\"), open('{canary}', 'w'), (\""),
    }[where]
    path = tmp_path / "crafted.pt2"
    given, put = f'"{old}"'.encode(), json.dumps(new).encode()
    path.write_bytes(archive_of({name: data.replace(given, put) for name, data in contents(saved).items()}))
    with pytest.raises(DamagedFile, match=r"name(s)? = "):
        runnable(load_program(path))
    assert not canary.exists()


def _spec_of(kind: str, context: Any) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


@pytest.mark.parametrize("field", ["in_spec", "out_spec"])
@pytest.mark.parametrize(
    ("kind", "context"),
    [
        (
            "collections.defaultdict",
            {"default_factory_module": "touching", "default_factory_name": "list", "dict_context": []},
        ),
        ("builtins.tuple", json.dumps({"__enum__": True, "fqn": "touching:Touch", "name": "x"})),
        ("builtins.dict", json.dumps(["x=touching"])),
        ("torch.Size", "null"),
    ],
)
def test_a_pytree_that_would_import_a_module_is_refused(
    field: str,
    kind: str,
    context: Any,
    saved: Path,
    tmp_path: Path,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "touching.py").write_text(writes(canary))
    monkeypatch.syspath_prepend(tmp_path)

    def change(document: dict[str, Any]) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"][field] = _spec_of(kind, context)

    refused(crafted(saved, tmp_path / "crafted.pt2", MODEL, change), canary, field)


def test_guards_that_are_code_are_never_executed(saved: Path, tmp_path: Path, canary: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["guards_code"] = [f"{writes(canary)} is None"]

    program = load_program(crafted(saved, tmp_path / "crafted.pt2", MODEL, change))
    program.module()(torch.zeros(3, 5, dtype=torch.int64))
    assert not canary.exists()


def test_a_custom_object_is_refused(saved: Path, tmp_path: Path, canary: Path) -> None:
    def as_argument(document: dict[str, Any]) -> None:
        node = document["graph_module"]["graph"]["nodes"][0]
        node["inputs"][0]["arg"] = {"as_custom_obj": {"name": "x", "class_fqn": "a.b"}}

    def as_value(document: dict[str, Any]) -> None:
        document["graph_module"]["graph"]["custom_obj_values"] = {"x": {"name": "x", "class_fqn": "a.b"}}

    for change in (as_argument, as_value):
        refused(crafted(saved, tmp_path / "crafted.pt2", MODEL, change), canary, "custom object")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 0.999])
def test_a_truncated_file_is_refused(share: float, saved: Path, tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "torn.pt2"
    data = saved.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refused(path, canary)


def test_a_file_that_is_missing_or_something_else_is_refused(tmp_path: Path, canary: Path) -> None:
    refused(tmp_path / "absent.pt2", canary)
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "0")
    refused(path, canary)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL, "{")
    refused(path, canary)


class Nothing(nn.Module):
    """A parameter without elements, as an adapter of rank 0 has."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(4, 0))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat([self.linear(x), x @ self.none], 1),)


def test_a_parameter_without_elements_is_saved_and_loaded(tmp_path: Path) -> None:
    module, x = Nothing(), torch.randn(2, 4)
    program = torch.export.export(module, (x,), strict=False)
    save_program(program, tmp_path / "net.pt2", weights=False)
    again = load_program(tmp_path / "net.pt2", module.state_dict())
    torch.testing.assert_close(runnable(again)(x), module(x))
    save_program(program, tmp_path / "with.pt2", weights=True)
    torch.testing.assert_close(runnable(load_program(tmp_path / "with.pt2"))(x), module(x))
