"""The keys of a model.toml: one table for the readers (`package.py` and the files that it is made of), for the JSON
Schema (`tests/reference/model_schema.py`) and for the reference page (docs/reference/model-toml.md)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..spec.datatypes import DATATYPES
from ..spec.spec import DIM, FORMS, KINDS, Batching, ParityLimits
from .loss_and_optimizer_names import DEFAULT, LOSSES, OPTIMIZERS, OWN_LOSS, SWITCHES
from .model_name import NAME

LEVELS = ("O0", "O1", "O2", "O3")
# The words of Keras' and TensorFlow's dtype policies, as (level, dtype).
KERAS_LEVELS = {
    "float32": ("O0", "fp16"),
    "mixed_float16": ("O1", "fp16"),
    "mixed_bfloat16": ("O1", "bf16"),
    "float16": ("O3", "fp16"),
    "bfloat16": ("O3", "bf16"),
}
HALF_DTYPES = ("fp16", "bf16")
EMBEDDINGS = ("keep", "half")
UNSTABLE = ("fp32", "accept")
# The metrics that compare fine-tuned versions; the first of each kind is the default.
CLASS_METRICS, VALUE_METRICS = ("accuracy", "f1", "auroc"), ("mse", "mae")
MAX_TENSORS = 256
MAX_RANK = 16
SOURCE = r"[^:]+\.py:[A-Za-z_]\w*|[^:]+\.(pt2|onnx)"


class Key(NamedTuple):
    """One key. ``kind``: the Python type of its value (``float``: whole numbers too). ``meaning``: what it does, for
    the reference. ``default``: what counts without it; None: nothing, or what ``meaning`` tells. ``one_of``: its words;
    ``least`` and ``most``: of its number; ``pattern``: of its text; ``items``: the JSON Schema of a list's items;
    ``keys``: of the table that it is, or of each table in it where ``named`` (the operator gives their names) or
    where ``kind`` is list. ``also``: a JSON Schema that its value may have instead. ``example``: as TOML."""

    kind: type
    meaning: str
    default: Any = None
    one_of: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    pattern: str | None = None
    items: Mapping[str, Any] | None = None
    keys: "Keys | None" = None
    named: bool = False
    needed: bool = False
    also: Mapping[str, Any] | None = None
    example: str = ""


Keys = Mapping[str, Key]
_TEXT: Mapping[str, Any] = {"type": "string"}
_NUMBER: Mapping[str, Any] = {"type": "number"}
_ENDS = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FUNCTION = OWN_LOSS.pattern
_LIMITS, _QUEUE = ParityLimits(), Batching()

PRECISION: Keys = {
    "level": Key(
        str, "how much may be half: nothing (O0), what torch's autocast lists allow (O1), everything but normalisation "
        "and recurrent layers (O2), as much as possible (O3). Keras' words mean a level and a dtype", "O1",
        (*LEVELS, *KERAS_LEVELS), example='"O2"',
    ),
    "dtype": Key(str, "which half", "fp16", HALF_DTYPES, example='"bf16"'),
    "keep": Key(
        list, "nodes that stay in FP32: names, patterns with *, or op:NAME for all of an operation", [], items=_TEXT,
        example='["head*", "op:softmax"]',
    ),
    "embeddings": Key(
        str, "whether tables of embeddings are kept in FP32 or may be half", "keep", EMBEDDINGS, example='"half"',
    ),
}  # fmt: skip
PARITY: Keys = {
    "max_error_u": Key(
        float, "the largest error of a sample, in u·S: half's rounding step times the output's largest value",
        _LIMITS.max_error_u, least=0, example="6.0",
    ),
    "min_sqnr_db": Key(
        float, "the least signal to noise over all samples, in dB; without it 56.2 (fp16), 38.2 (bf16)", least=0,
        example="50.0",
    ),
    "min_slice_sqnr_db": Key(
        float, "the least signal to noise of each slice along each axis, in dB", _LIMITS.min_slice_sqnr_db, least=0,
        example="25.0",
    ),
    "max_flips": Key(
        float, "the share of first choices, and of steps, that may change", _LIMITS.max_flips, least=0, most=1,
        example="0.01",
    ),
    "max_kl_nats": Key(
        float, "the Kullback-Leibler divergence of logits and probabilities", _LIMITS.max_kl_nats, least=0,
        example="0.001",
    ),
    "max_ties": Key(
        float, "the share of pairs of scores, distinct in FP32, that may tie", _LIMITS.max_ties, least=0, most=1,
        example="0.01",
    ),
    "max_swaps": Key(
        float, "the share of pairs, further apart than the allowed error, that may swap", _LIMITS.max_swaps, least=0,
        most=1, example="0.0001",
    ),
    "min_top10_overlap": Key(
        float, "the share of the ten best that must stay", _LIMITS.min_top10_overlap, least=0, most=1, example="0.8",
    ),
    "unstable": Key(
        str, "what becomes of a model whose FP32 answers cannot judge a half: FP32 serves, or a half is accepted under "
        "limits of twice the noise", _LIMITS.unstable, UNSTABLE, example='"accept"',
    ),
    "min_recall": Key(
        float, "the share of the nearest vectors that halfeven index-check must find in half too; no rule of the gate; "
        "without it 0.99", least=0, most=1, example="0.95",
    ),
}  # fmt: skip
BATCHING: Keys = {
    "max_queue_delay_us": Key(
        int, "microseconds that the oldest request may wait for its batch to fill; 0: not at all",
        _QUEUE.max_queue_delay_us, least=0, example="2000",
    ),
    "max_queue_size": Key(
        int, "requests that may wait; more are refused with 503 and Retry-After", _QUEUE.max_queue_size, least=1,
        example="256",
    ),
    "max_queue_bytes": Key(
        int, "bytes of inputs that may wait; a request that finds the queue empty is taken whatever its size",
        _QUEUE.max_queue_bytes, least=1, example="67108864",
    ),
    "max_queue_ms": Key(
        int, "a request that would wait longer than this, by what was measured, is refused at once; 0: no such limit",
        _QUEUE.max_queue_ms, least=0, example="500",
    ),
    "max_batch_bytes": Key(
        int, "bytes of the inputs of one batch, beside its rows; 0: rows alone count", _QUEUE.max_batch_bytes,
        least=0, example="16777216",
    ),
    "max_request_rows": Key(
        int, "rows of one request, more get a 400; 0: 16 × max_batch_size", _QUEUE.max_request_rows, least=0,
        example="4096",
    ),
    "timeout_ms": Key(
        int, "how long a request waits that names no timeout of its own; 0: for ever", _QUEUE.timeout_ms, least=0,
        example="1000",
    ),
    "buckets": Key(
        list, "ascending numbers of rows that a batch is filled up to; auto: none on a CPU, powers of two on CUDA",
        _QUEUE.buckets, items={"type": "integer", "minimum": 1}, also={"const": "auto"}, example="[1, 2, 4, 8]",
    ),
    "lengths": Key(
        list, "ascending sizes that an axis with a mask is filled up to, so that requests of different lengths share a "
        "batch; only where the conversion proves that no answer changes", [],
        items={"type": "integer", "minimum": 1}, example="[16, 32, 64, 128]",
    ),
}  # fmt: skip
PICTURE: Keys = {
    "size": Key(
        list, "height and width that a picture is brought to, where the shape leaves them free",
        items={"type": "integer"}, example="[224, 224]",
    ),
    "color": Key(str, "RGB, or L for grey", "RGB", ("L", "RGB"), example='"L"'),
    "scale": Key(float, "a pixel of 0 to 255 is multiplied by it", 1.0, example="0.00392156862745098"),
    "mean": Key(
        list, "subtracted from each channel, after the scale; a number for all is a list of one", [0.0], items=_NUMBER,
        example="[0.485, 0.456, 0.406]",
    ),
    "std": Key(
        list, "each channel is divided by it at the end", [1.0], items=_NUMBER, example="[0.229, 0.224, 0.225]",
    ),
}  # fmt: skip
_INPUT: Keys = {
    "range": Key(
        list, "the least and the greatest value of an integer, or such a pair for each place of the last axis",
        items={"anyOf": [{"type": "integer"}, _ENDS]}, example="[0, 30521]",
    ),
    "lengths_of": Key(
        str, "the named axis of another input of which this one has the lengths", "", example='"frames"',
    ),
    "wire_datatype": Key(
        str, "the smaller datatype in which requests carry the numbers", one_of=tuple(DATATYPES), example='"UINT8"',
    ),
    "wire_scale": Key(float, "a number in a request is multiplied by it", 1.0, example="0.1"),
    "wire_offset": Key(float, "added to a number in a request, after wire_scale", 0.0, example="-1.0"),
}  # fmt: skip
TENSOR: Keys = {
    "name": Key(str, "the name in requests and answers", needed=True, example='"x"'),
    "datatype": Key(str, "a datatype of the protocol V2", one_of=tuple(DATATYPES), needed=True, example='"FP32"'),
    "shape": Key(
        list,
        "a size, -1 for a free one, bounds (1..512), a name (length) or both (length=2..512) for each axis; the "
        "first is the batch",
        items={"anyOf": [{"type": "integer", "minimum": -1}, {"type": "string", "pattern": f"^(?:{DIM})$"}]},
        needed=True, example='[-1, "length=1..512", 64]',
    ),
    "batch_axis": Key(int, "which axis is the batch, counted from 0", 0, least=0, most=MAX_RANK - 1, example="1"),
    "file_name": Key(
        str, "the name of the tensor in the ONNX file, where it is another", example='"serving_default_x:0"',
    ),
    "kind": Key(str, "what an output is for, and so what the gate holds of it", "tensor", KINDS, example='"logits"'),
    "labels": Key(list, "a name for each class of an output", [], items=_TEXT, example='["cat", "dog"]'),
    "labels_file": Key(
        str, "a file of the folder with a label in each line, in the place of labels", example='"labels.txt"',
    ),
    "picture": Key(dict, "how a PNG or JPEG file becomes this tensor", keys=PICTURE),
    **_INPUT,
}  # fmt: skip
NET: Keys = {
    "build": Key(str, "the function that makes the net", pattern=_FUNCTION, needed=True, example='"gan.py:critic"'),
    "weights": Key(str, "the safetensors file of its weights", example='"critic.safetensors"'),
}  # fmt: skip
OPTIMIZER: Keys = {
    "nets": Key(list, "the nets whose parameters it changes", items=_TEXT, needed=True, example='["model"]'),
    "learning_rate": Key(float, "the learning rate", least=1e-10, most=10.0, needed=True, example="0.0002"),
    "optimizer": Key(str, f"the class in torch.optim ({', '.join(OPTIMIZERS)})", DEFAULT, example='"SGD"'),
    "weight_decay": Key(float, "the weight decay", least=0.0, most=1.0, example="0.01"),
    "clip_norm": Key(float, "the norm that gradients are clipped to", least=1e-6, most=1e6, example="1.0"),
    "betas": Key(list, "torch's argument of this name", items=_NUMBER, example="[0.5, 0.999]"),
    **{
        name: Key(
            bool if name in SWITCHES else float, "torch's argument of this name",
            example="true" if name in SWITCHES else "0.9",
        )
        for name in dict.fromkeys(name for of in OPTIMIZERS.values() for name in of if name != "betas")
    },
}  # fmt: skip
STEP: Keys = {
    "optimizer": Key(str, "the optimizer that takes the step", needed=True, example='"critic"'),
    "loss": Key(
        str, "the function that gives its loss", pattern=_FUNCTION, needed=True, example='"gan.py:critic_loss"',
    ),
    "scaler": Key(
        str, "a loss scale of its own, shared by the steps that give this name; without it all share one",
        example='"both"',
    ),
}  # fmt: skip
TRAINING: Keys = {
    "metrics": Key(
        list, "what judges a fine-tuned version; the first that fits an output counts",
        items={"enum": [*CLASS_METRICS, *VALUE_METRICS]}, example='["auroc", "mae"]',
    ),
    "loss": Key(
        str,
        f"what it minimises: {', '.join(LOSSES)}, torch's own name of one, or a function of the folder; by default the "
        "first that fits the kind of the output", example='"l1"',
    ),
    "transform": Key(str, "the function that augments a row", pattern=_FUNCTION, example='"rows.py:augment"'),
    "optimizer": Key(str, "the function that makes the optimizer", pattern=_FUNCTION, example='"optim.py:make"'),
    "fp32_modules": Key(
        list, "patterns of the modules that training computes in FP32", [], items=_TEXT, example='["head*"]',
    ),
    "nets": Key(dict, "further nets by name, of a training with several optimizers", keys=NET, named=True),
    "optimizers": Key(dict, "the optimizers by name", keys=OPTIMIZER, named=True),
    "steps": Key(list, "what a step of the training does, in order", keys=STEP),
}  # fmt: skip
TOP: Keys = {
    "name": Key(str, "the model's name in URLs", pattern=NAME.pattern, needed=True, example='"mymodel"'),
    "source": Key(
        str, "a Python file and the function that makes the module, an exported program, an ONNX file, or hf: and a "
        "transformers folder", pattern=f"hf:.*|{SOURCE}", needed=True, example='"model.py:build"',
    ),
    "path": Key(
        list, "folders that the code imports from, seen from this one", [], items=_TEXT, example='["../src"]',
    ),
    "weights": Key(
        str, "the safetensors file of the weights", "weights.safetensors, where it exists",
        example='"model.safetensors"',
    ),
    "max_batch_size": Key(
        int, "rows of one batch; 0: the model is not batched", 64, least=0, most=65536, example="256",
    ),
    "form": Key(
        str, "how it is executed; auto: torch and onnx are attempted, and a measurement on the device chooses",
        "auto", FORMS, example='"onnx"',
    ),
    "inputs": Key(list, "the inputs in the order of forward's arguments", keys=TENSOR, needed=True),
    "outputs": Key(
        list, "the outputs in the order of forward's answers",
        keys={name: key for name, key in TENSOR.items() if name not in _INPUT}, needed=True,
    ),
    "precision": Key(dict, "the half that is asked for", keys=PRECISION),
    "parity": Key(dict, "other limits of the gate; the report shows them as overrides", keys=PARITY),
    "batching": Key(dict, "how requests wait and become batches", keys=BATCHING),
    "training": Key(dict, "fine-tuning: what judges, what is minimised, several optimizers", keys=TRAINING),
}  # fmt: skip
