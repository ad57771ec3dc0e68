"""Looks for what goes wrong with a version's program under autocast, in a process of its own.

    python -m halfeven.serve.finetune.jobs.policy_check REQUEST.json

Reports one JSON object on stdout: ``{"type": "checked", "faults": […]}``. It ends with the server.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ....exporters.inputs.samples import executions, load_samples
from ....exporters.torch.autocast.half_faults import half_faults
from ....models.engines.arrays import to_torch
from ....models.engines.torch_engine import original_program
from ....models.errors import HalfevenError
from ....models.order.ends_with_parent import reporting
from ....models.store.store import Store


def main() -> None:
    request, report = reporting(sys.argv[1])
    torch.set_num_threads(request["threads"])
    try:
        version = Store(Path(request["store"])).version(request["model"], request["version"])
        spec = version.spec()
        _, arrays = next(iter(executions(spec, load_samples(Path(request["samples"]), spec))))
        example = [to_torch(arrays[tensor.name].copy()) for tensor in spec.inputs]
        faults = half_faults(original_program(version), example, request["dtype"])
        report({"type": "checked", "faults": [asdict(fault) for fault in faults]})
    except HalfevenError as error:
        report({"type": "failed", "code": error.code.upper(), "message": str(error)})


if __name__ == "__main__":
    main()
