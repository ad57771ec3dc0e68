"""Every shell block of the pages: run as it stands in a prepared folder, or parsed where it needs what is not here."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import typer
from halfeven.models.store.store import Store
from halfeven.models.zoo import zoo_folder
from halfeven.models.zoo.digits.train import read_images, split
from halfeven.serve.cli.main import app
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from tests.commands_of_scripts import forked_halfeven
from tests.digits import digits_that_ask_for_torch
from tests.exporters.importing.server_files import archive, triton_model
from tests.serve.access.authority import Pair
from tests.server_process import settle
from tests.shell_blocks import PAGES, ROOT, RUN, Block, blocks, run, script, write_commands
from tests.slow import drawn

ELSEWHERE = [
    "docker",
    "kubectl",
    "helm",
    "ray",
    "serve",
    "pip",
    "make",
    "systemctl",
    "systemd-analyze",
    "sudo",
    "python3",
    "git",
    "pytest",
    "npm",
    "trtexec",
    "cosign",
    "openssl",
    "brew",
]
ANOTHER_CODE = {"halfeven parity signal@1 --limit": 3, "halfeven convert signal --level O3": 3}
WITH_DIGITS = {
    f"docs/{name}.md"
    for name in (
        *("export", "howto/keys", "howto/finetune", "howto/rollback", "howto/canary", "howto/engines"),
        *("operation", "howto/upgrade", "security", "howto/prometheus", "bench", "protocol", "observability"),
        *("comparison",),
    )
}
# Pages of one reader, who has a server, one after another; the last one makes a key.
WITH_ONE_SERVER = [
    ROOT / f"docs/{name}.md"
    for name in (
        *("howto/engines", "export", "protocol", "bench", "comparison", "howto/finetune", "howto/canary"),
        *("howto/serve", "howto/prometheus"),
    )
]
# No other page needs the blocks of these.
NEEDED_BY_NONE = [
    ROOT / f"docs/{name}.md" for name in ("export", "protocol", "bench", "comparison", "howto/prometheus")
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def sittings() -> list[list[Path]]:
    """Pages that are run one after another in one folder: those of one server, every other page alone. Of those a run
    has the first page of all, and every fourth other one; of the pages of one server one of `NEEDED_BY_NONE`."""
    run_here = [page for page in PAGES if any(block.kind == RUN for block in blocks(page))]
    assert set(WITH_ONE_SERVER) <= set(run_here)
    first, *others = [page for page in run_here if page not in WITH_ONE_SERVER]
    left_out = {*NEEDED_BY_NONE} - {*drawn(5, NEEDED_BY_NONE)}
    of_one_server = [page for page in WITH_ONE_SERVER if page not in left_out]
    return [of_one_server, [first], *([page] for page in drawn(4, others))]


def net() -> onnx.ModelProto:
    """Eight numbers in, three out, any number of rows."""
    draw = np.random.default_rng()
    weights = [draw.normal(size=size).astype(np.float32) / 3 for size in ((8, 32), (32, 3))]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "w1"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", size]) for n, size in (("x", 8), ("y", 3))
    ]
    kept = [numpy_helper.from_array(one, f"w{place}") for place, one in enumerate(weights)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def module_and_program(folder: Path) -> None:
    (folder / "mymodel").mkdir()
    (folder / "mymodel/model.py").write_text(
        "import torch\n\n\ndef build():\n    torch.manual_seed(0)\n    return torch.nn.Linear(8, 3)\n"
    )
    given, free = (torch.randn(2, 8),), ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(
        torch.export.export(torch.nn.Linear(8, 3), given, dynamic_shapes=free), folder / "program.pt2"
    )


def other_servers(folder: Path) -> None:
    (folder / "rooted").mkdir()
    triton_model(folder / "rooted/models/plain", None, {"1": net()})
    archive(folder / "resnet.mar", {"model.onnx": net().SerializeToString()}, serializedFile="model.onnx")
    onnx.save(net(), folder / "detector.onnx")


def second_version_active(folder: Path) -> None:
    store = Store(folder / "halfeven-store")
    store.promote(store.version("digits", 2))


def own_store(folder: Path) -> None:
    (folder / "halfeven-store").rename(folder / "mystore")


def certificate(folder: Path) -> None:
    Pair(folder)


def system_store(folder: Path) -> None:
    (folder / "rooted/var/lib").mkdir(parents=True)
    (folder / "rooted/backups").mkdir()
    shutil.copytree(folder / "halfeven-store", folder / "rooted/var/lib/halfeven")


def other_samples(folder: Path) -> None:
    save_file(
        {"x": np.random.default_rng().normal(size=(64, 64)).astype(np.float32)}, folder / "other.safetensors"
    )


MORE: Mapping[str, Callable[[Path], None]] = {
    "docs/howto/torch.md": module_and_program,
    "docs/files.md": other_servers,
    "docs/howto/rollback.md": second_version_active,
    "docs/security.md": certificate,
    "docs/operation.md": system_store,
    "docs/howto/upgrade.md": system_store,
    "docs/observability.md": own_store,
    "docs/precision.md": other_samples,
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The files of the page's reader: the zoo's digits, files of his own, and a store where the page speaks of one."""
    page = name_of(request.getfixturevalue("pages")[0])
    shutil.copytree(zoo_folder("digits"), tmp_path / "models/zoo/digits")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/seven.png", tmp_path / "docs")
    onnx.save(net(), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.random.default_rng().normal(size=(64, 8)).astype(np.float32))
    if page in WITH_DIGITS:
        shutil.copytree(digits_that_ask_for_torch(), tmp_path / "halfeven-store")
        settle(Store(tmp_path / "halfeven-store"))
        images, labels = read_images()
        rows, _ = split(labels)
        image, label = images[rows].numpy(), labels[rows].numpy()
        both = np.concatenate([1 - np.rot90(image, axes=(2, 3)), image]), np.concatenate([label, label])
        save_file(dict(zip(("image", "target:logits"), both, strict=True)), tmp_path / "new.safetensors")
        np.save(tmp_path / "vectors.npy", np.random.default_rng().normal(size=(500, 10)).astype(np.float32))
    if page in MORE:
        MORE[page](tmp_path)
    write_commands(tmp_path / "bin")
    with forked_halfeven(tmp_path / "bin/halfeven"):
        yield tmp_path


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("pages", sittings(), ids=lambda pages: name_of(pages[0]))
def test_the_blocks_of_a_page_run_one_after_another(pages: list[Path], folder: Path) -> None:
    text = script(pages, folder / "bin", ANOTHER_CODE, served=pages[0] == WITH_ONE_SERVER[0])
    done = run(text, folder)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def every_block() -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        for block in blocks(page):
            yield name_of(page), block


def test_a_block_is_not_run_only_where_it_needs_what_a_test_machine_lacks() -> None:
    for page, block in every_block():
        words = [word for line in block.commands for word in re.findall(r"[\w.-]+", line)]
        if block.kind not in (RUN, ""):
            assert block.kind == "sh" and set(words) & set(ELSEWHERE), f"{page}:\n{block.text}"
        if block.kind == "":
            pytest.fail(f"{page}: mark this block with {RUN!r} or 'sh':\n{block.text}")


def halfeven_lines() -> list[tuple[str, str]]:
    """The commands of halfeven, also behind variables, a path, or another command's ``--``."""
    found = [(page, line) for page, block in every_block() for line in block.commands]
    starts = [
        (page, re.search(r"(?:^|-- |bin/|[A-Z]=\S+ )halfeven (?=[a-z])(.*)", line)) for page, line in found
    ]
    return [(page, start[1]) for page, start in starts if start]


def test_every_command_of_halfeven_in_a_block_is_one_with_these_options() -> None:
    root = typer.main.get_command(app)
    lines = halfeven_lines()
    assert len(lines) > 60
    for page, line in lines:
        words = shlex.split(re.split(r" [|&<>]|\$\(", line)[0])
        command = root.commands[words.pop(0)]  # type: ignore[attr-defined]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        try:  # the options alone: the files that they name are those of the page's reader
            command.make_parser(command.context_class(command)).parse_args(words)
        except Exception as error:  # of the copy of click that typer has
            pytest.fail(f"{page}: {line}: {error!r}")
