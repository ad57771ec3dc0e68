"""Files of weights and pickles (`torch.save`, `torch.jit.save`, safetensors): what they hold, and the three lines of
Python that make one a model of ours. A pickle may run code: it is looked through here, and never opened."""

import pickletools
import zipfile
from pathlib import Path

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MOST = 1 << 22  # bytes of a pickle that are looked through
_OF_WEIGHTS = ("collections", "torch", "torch._utils", "torch.storage", "numpy", "builtins")
_CONVERT = (
    'halfeven.convert(net, samples={"x": x}).save("halfeven-store")  # x: real inputs, first axis = samples'
)


def advice_for(file: Path) -> str:
    """A message: what the file of weights or pickles holds, and three lines of Python that make a model of it. The
    message is empty where torch did not write the file."""
    found = _held(file)
    if found is None:
        return ""
    what, load = found
    library = "safetensors.torch" if file.suffix == ".safetensors" else "torch"
    lines = (f"import halfeven, {library}", load, _CONVERT)
    return f"{file} holds {what}. Three lines of Python make it a model of ours:\n" + "\n".join(
        f"    {line}" for line in lines
    )


def _held(file: Path) -> tuple[str, str] | None:
    """Two texts: what the file holds, and the line of Python that makes the module ``net`` of it. None where torch did
    not write the file."""
    path = repr(str(file))
    weights = "weights without the code that they belong to"
    if file.suffix == ".safetensors":
        load = f"net = Net(); safetensors.torch.load_model(net, {path})  # Net: the class of the weights"
        return weights, load
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            pickle = next(
                (name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")), None
            )
            if pickle is None:
                return None
            with archive.open(pickle) as member:
                classes = _classes(member.read(_MOST))
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    if any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in names):
        return (
            "TorchScript, which torch.export does not read",
            f"net = Net(); net.load_state_dict(torch.jit.load({path}).state_dict())  # Net: the class it was made of",
        )
    if classes:
        return (
            f"a pickled {classes[0]}, which needs the code of its class",
            f"net = torch.load({path}, weights_only=False)  # where that class can be imported; if you trust it",
        )
    opened = f"torch.load({path}, weights_only=True)"
    which = 'Net: the class of the weights; of a checkpoint take its key, as ["model"]'
    return weights, f"net = Net(); net.load_state_dict({opened})  # {which}"


def _classes(pickle: bytes) -> list[str]:
    """The classes that the pickle names, ``module.Name`` each, but those of weights. Nothing of it is run."""
    found: list[str] = []
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickle):
            if operation.name == "GLOBAL":
                found.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL" and len(texts) > 1:
                found.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    except ValueError:  # cut off, or no pickle
        pass
    return [name for name in found if name.rpartition(".")[0] not in _OF_WEIGHTS]
