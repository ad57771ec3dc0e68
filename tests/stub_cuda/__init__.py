"""CUDA's libraries without a device, compiled here: ONNX Runtime's real CUDA provider makes sessions on them.

Its kernel registry then says which node it would compute on the device, and its calls of the runtime say which stream
they use and where the host waits. Kernels do nothing: values mean nothing, and a convolution cannot be run.
"""

import mmap
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime.capi
import torch

HERE = Path(__file__).resolve().parent
PROVIDER = Path(onnxruntime.capi.__file__).parent / "libonnxruntime_providers_cuda.so"
LACKING = (
    "needs gcc, nm and readelf to compile the stub libraries, an ONNX Runtime with its CUDA provider, and a torch "
    "without CUDA (another one has the real libraries loaded)"
)


def can_compile() -> bool:
    tools = all(map(shutil.which, ("gcc", "nm", "readelf")))
    return tools and PROVIDER.exists() and torch.version.cuda is None


def stub_libraries(folder: Path) -> Path:
    """Compile the stubs into the folder, under the names by which the provider asks for them."""
    symbols = {
        word.partition("@")[0] for word in _output("nm", "-D", "--undefined-only", str(PROVIDER)).split()
    }
    needed = re.findall(r"NEEDED.*\[(libcu.*)\]", _output("readelf", "-d", str(PROVIDER)))
    library = _compiled(
        folder / "libstub.so", "runtime.c", {one for one in symbols if one.lstrip("_").startswith("cu")}
    )
    for name in needed:
        (folder / name).symlink_to(library)
    with PROVIDER.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        asked = re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", content)  # it opens cuDNN by itself
    _compiled(folder / "libcudnn.so", "cudnn.c", {name.decode() for name in asked})
    return folder


def run_on_stubs(libraries: Path, script: str, *arguments: str) -> tuple[str, list[str]]:
    """Run the script in a process of its own; gives what it printed, and what the runtime noted of its calls."""
    paths = {
        "LD_LIBRARY_PATH": str(libraries),
        "STUB_CUDA_TRACE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | paths,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    notes = [line.removeprefix("[stub] ") for line in done.stderr.splitlines() if line.startswith("[stub] ")]
    return done.stdout, notes


def _compiled(library: Path, source: str, symbols: set[str]) -> Path:
    """The source as a library; symbols that it does not define are functions that return 0."""
    own, code = (HERE / source).read_text(), library.with_suffix(".c")
    rest = sorted(symbol for symbol in symbols if not re.search(rf"\b{symbol}\(", own))
    code.write_text(own + "".join(f"int {symbol}() {{ return 0; }}\n" for symbol in rest))
    _output("gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(code))
    return library


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
