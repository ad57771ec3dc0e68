"""The words of other libraries for the settings of a job: of Hugging Face's Trainer, Lightning, Keras, Apex and OpenAI.
docs/finetune.md has the same table."""

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from .....models.folder.loss_and_optimizer_names import DEFAULT, OPTIMIZERS
from .....models.nearest_name import nearest_name
from .hyperparameter_table import bad, shown

OPTIMIZER, PRECISION, LEVEL = "optimizer", "precision", "opt_level"
NAMES: Mapping[str, tuple[str, ...]] = {  # of each setting, what else it is called
    "n_epochs": ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
    "batch_size": ("per_device_train_batch_size", "train_batch_size", "micro_batch_size"),
    "accumulation": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps", "accumulation_steps",
    ),
    "learning_rate": ("lr", "base_lr"),
    "schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "weight_decay": ("wd",),
    "clip_norm": ("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "gradient_clipping"),
    "label_smoothing": ("label_smoothing_factor",),
    "loss": ("criterion", "loss_fn"),
    "class_weights": ("class_weight",),
    "ignore_index": ("ignore_label", "label_pad_token_id"),
    OPTIMIZER: ("optim",),
    PRECISION: ("mixed_precision", "amp_dtype"),
    LEVEL: ("fp16_opt_level", "amp_level"),
    "init_scale": ("loss_scale", "initial_scale"),
    "growth_interval": ("scale_window", "loss_scale_window"),
    "growth_factor": ("scale_factor",),
    "scale_floor": ("min_loss_scale",),
    "checkpoint_every": ("eval_steps", "save_steps", "val_check_interval"),
    "validation_split": ("validation_size", "test_size", "val_split"),
    "early_stopping_patience": ("patience",),
    "lora_rank": ("lora_r",),
    "lora_targets": ("target_modules", "lora_target_modules"),
}  # fmt: skip
WORDS: Mapping[str, Mapping[str, Mapping[str, str]]] = {  # of each setting, what else its values are called
    PRECISION: {
        "mixed_float16": {PRECISION: "fp16"},
        "16-mixed": {PRECISION: "fp16"},
        "16": {PRECISION: "fp16"},
        "mixed_bfloat16": {PRECISION: "bf16"},
        "bf16-mixed": {PRECISION: "bf16"},
        "float32": {PRECISION: "fp32"},
        "32-true": {PRECISION: "fp32"},
        "32": {PRECISION: "fp32"},
        "no": {PRECISION: "fp32"},
        "float16": {PRECISION: "fp16", LEVEL: "O3"},
        "16-true": {PRECISION: "fp16", LEVEL: "O3"},
        "bfloat16": {PRECISION: "bf16", LEVEL: "O3"},
        "bf16-true": {PRECISION: "bf16", LEVEL: "O3"},
    },
    "schedule": {
        "constant_with_warmup": {"schedule": "constant"},
        "cosine_with_restarts": {"schedule": "cosine_restarts"},
        "cosine_annealing": {"schedule": "cosine"},
        "onecycle": {"schedule": "one_cycle"},
    },
}
# Arguments of the optimizer beside its name.
_ARGUMENTS = {"adam_epsilon": "eps", **{name: name for of in OPTIMIZERS.values() for name in of}}
_BETAS = ("adam_beta1", "adam_beta2")
_SWITCHES = {"fp16": "fp16", "bf16": "bf16"}  # settings that are true or false
_MISSPELT = 0.85  # of the letters of two names are the same: they are one
# Words of unknown names that mean a setting, the first that fits; a+b: both words.
_MEANT: Mapping[str, str] = {
    "scale_floor": "min+scale",
    "growth_interval": "window",
    "init_scale": "scale scaler scaling",
    "learning_rate_multiplier": "multiplier",
    "schedule_period": "step+size period",
    "schedule_power": "power",
    "schedule": "schedule scheduler policy annealing eta min+lr lr+min",
    "warmup_steps": "warmup",
    "warmup_ratio": "pct",
    "clip_norm": "clip clipping clipnorm norm",
    "accumulation": "accum accumulate accumulation update iter+size",
    "ema_decay": "ema swa average averaging polyak",
    PRECISION: "amp half mixed autocast dtype precision fp16 bf16 float16 bfloat16",
    "trainable": "freeze frozen unfreeze layers trainable",
    "learning_rates": "backbone layer layerwise llrd",
    "lora_rank": "rank r",
    "label_smoothing": "smooth smoothing",
    "ignore_index": "ignore pad padding void",
    "early_stopping_patience": "patience early stopping",
    "validation_split": "split fraction holdout validation val",
    "checkpoint_every": "eval evaluate save checkpoint log logging",
    "weight_decay": "decay l2 regularization",
    "schedule_gamma": "gamma",
    "learning_rate": "lr lrate rate",
    "batch_size": "batch bs batchsize",
    "n_epochs": "epoch epochs iterations iters steps",
    "class_weights": "weights weight class balanced",
    "loss": "loss objective cost",
    OPTIMIZER: "opt solver adam sgd",
}
_OWN = {other: name for name, others in NAMES.items() for other in others}


def with_own_names(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by our names and words. Raises BadHyperparameter where one is given two times."""
    found: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for name, value in asked.items():
        if name in _ARGUMENTS or name in _BETAS:
            arguments[_ARGUMENTS.get(name, name)] = value
        elif name in _SWITCHES and isinstance(value, bool):
            _put(found, name, {PRECISION: _SWITCHES[name]} if value else {})
        else:
            own = _OWN.get(name, name)
            words = WORDS.get(own, {})
            _put(found, name, words.get(str(value), {own: value}))
    if not arguments:
        return found
    named = DEFAULT if found.get(OPTIMIZER) is None else found[OPTIMIZER]
    return {**found, OPTIMIZER: _with_arguments(named, arguments)}


def known_setting(name: str, known: Iterable[str]) -> str:
    """The setting that an unknown name probably means: one with nearly this spelling, else one with this meaning."""
    near = nearest_name(name, [*known, *_OWN, *_ARGUMENTS, *_BETAS])
    if SequenceMatcher(None, name, near).ratio() < _MISSPELT:
        given = set(name.lower().replace("-", "_").split("_"))
        meant = (
            own for own, words in _MEANT.items() for one in words.split() if given >= set(one.split("+"))
        )
        near = next(meant, near)
    return OPTIMIZER if near in _ARGUMENTS or near in _BETAS else _OWN.get(near, near)


def _put(found: dict[str, Any], name: str, values: Mapping[str, Any]) -> None:
    for own, value in values.items():
        if (known := found.setdefault(own, value)) is not value and known != value:
            raise bad(
                name, f"is {own}, which is given two times: {shown(known)} and {shown(value)}; give one"
            )


def _with_arguments(named: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's table. ``adam_beta1`` and ``adam_beta2`` are its ``betas``."""
    if not isinstance(named, str | Mapping):
        raise bad(OPTIMIZER, f"expected a name or a table with name and its arguments, got {shown(named)}")
    table = {"name": named} if isinstance(named, str) else dict(named)
    given = {name: value for name, value in arguments.items() if name not in _BETAS}
    if any(name in arguments for name in _BETAS):
        given["betas"] = [arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)]
    return {**table, **given}
