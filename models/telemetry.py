"""Telemetry of the libraries that we use: all of it is off in every process of ours, whatever the environment says.

ONNX Runtime (1.31) sends usage figures to its makers by default, and keeps an identifier and a database in the user's
home folder; it reads its variable when it is imported. Ray and the Hugging Face libraries have such reports too, and
look for newer versions of themselves.

`__init__.py` of the package calls `switch_off` before anything else: every process that imports halfeven, by whatever
door, has the variables before it imports the others. Its children inherit them.
"""

import os
import sys
from collections.abc import MutableMapping

OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray: for a cluster that our process starts
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, and transformers by it
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a service to convert a checkpoint
    "DO_NOT_TRACK": "1",  # the word of consoledonottrack.com, which others follow
}


def switch_off(environment: MutableMapping[str, str] = os.environ) -> None:
    environment.update(OFF)
    runtime = sys.modules.get("onnxruntime")
    if runtime is not None:  # a program imported it before halfeven: from now on it sends nothing
        runtime.disable_telemetry_events()
