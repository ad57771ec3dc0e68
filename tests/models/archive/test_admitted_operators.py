"""The operations of an archive: those that capture gives, and none that shows memory which is not the program's."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.models.archive.admitted_operators import is_admitted
from halfeven.models.archive.archive import load_program, save_program
from halfeven.models.archive.plain_program import read_module
from halfeven.models.errors import DamagedFile
from torch import Tensor, nn

MODEL = "archive/models/model.json"


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(x.clone(), (2, 2), (2, 1))


def with_nodes(module: nn.Module, path: Path, change: Any) -> Path:
    """The archive of ``module`` with the nodes of its graph changed."""
    save_program(torch.export.export(module, (torch.randn(4, 3),)), path, weights=True)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(members[MODEL])
    change(document["graph_module"]["graph"]["nodes"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, MODEL: json.dumps(document).encode()}.items():
            archive.writestr(name, data)
    return path


def refused_by_both(path: Path, word: str) -> None:
    for load in (load_program, read_module):
        with pytest.raises(DamagedFile, match=word):
            load(path)


@pytest.mark.parametrize(
    "name",
    [
        "empty.memory_format", "empty_like.default", "new_empty.default", "empty_strided.default",
        "empty_permuted.default", "new_empty_strided.default", "resize_.default", "resize_as_.default",
        "resize.default", "set_.source_Tensor_storage_offset", "set_.default", "as_strided_.default",
        "as_strided_copy.default", "slice_inverse.default", "add.out", "zeros.out", "from_file.default",
        "save.default", "_print.default", "native_batch_norm.default", "_reshape_alias.default",
        "_index_put_impl_.default", "_sparse_coo_tensor_unsafe.default", "convolution_backward.default",
        "no_such_operation.default", "relu.no_such_overload",
    ],
)  # fmt: skip
def test_an_operation_that_shows_old_memory_or_touches_files_is_refused(name: str, tmp_path: Path) -> None:
    def change(nodes: Any) -> None:
        nodes[-1]["target"] = f"torch.ops.aten.{name}"

    refused_by_both(with_nodes(Relu(), tmp_path / "program.pt2", change), "target = ")


def test_nothing_of_torchs_table_that_gives_memory_as_it_was_found_is_admitted() -> None:
    """The words are those that torch itself uses for such operators, so that they hold for the next torch too."""
    words = ("empty", "resize", "set_", "from_file", "print", "storage", "unsafe_tensor", "backward")
    listed = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    admitted = [
        f"{space}.{name}"
        for space, _, rest in listed
        for name, _, overload in [rest.partition(".")]
        if space in ("aten", "prims") and is_admitted(f"torch.ops.{space}.{name}.{overload or 'default'}")
    ]
    assert len(admitted) > 1000, "the rule goes over the table"
    suspect = [name for name in admitted if any(word in name.split(".")[1] for word in words)]
    harmless = {"aten.sym_storage_offset", "aten.storage_offset", "aten.is_set_to"}  # a number, a truth
    assert set(suspect) <= harmless


def test_an_output_that_is_handed_in_is_never_admitted() -> None:
    outs = [
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and "out" in name
    ]
    assert len(outs) > 500
    for name in outs:
        base, _, overload = name.removeprefix("aten::").partition(".")
        if overload == "out" or overload.endswith("_out"):
            assert not is_admitted(f"torch.ops.aten.{base}.{overload}"), name


def test_as_strided_looks_at_a_copy_alone(tmp_path: Path) -> None:
    """The memory of an input can be a buffer with other callers' rows."""
    x = torch.randn(4, 3)
    path = with_nodes(Strided(), tmp_path / "good.pt2", lambda nodes: None)
    program = read_module(path)
    assert program is not None and torch.equal(program(x)[0], torch.as_strided(x, (2, 2), (2, 1)))
    assert torch.equal(load_program(path).module()(x), torch.as_strided(x, (2, 2), (2, 1)))

    def of_the_input(nodes: Any) -> None:
        nodes[1]["inputs"][0]["arg"] = {"as_tensor": {"name": "x"}}

    def of_the_input_by_another_name(nodes: Any) -> None:
        inputs = nodes[1]["inputs"]
        inputs.insert(0, {"name": "other", "arg": {"as_tensor": {"name": "x"}}, "kind": 1})

    def twice(nodes: Any) -> None:
        nodes[1]["inputs"].append({"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1})

    def not_a_clone(nodes: Any) -> None:
        nodes[0]["target"] = "torch.ops.aten.alias.default"

    for number, change in enumerate((of_the_input, of_the_input_by_another_name, twice, not_a_clone)):
        refused_by_both(
            with_nodes(Strided(), tmp_path / f"bad{number}.pt2", change), "as_strided of a tensor"
        )
