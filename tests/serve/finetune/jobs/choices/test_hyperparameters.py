"""The value of ``auto``: a number that fits the data and the model, and the asker's own word before it."""

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from halfeven.models.errors import BadInput
from halfeven.models.folder.loss_and_optimizer_names import OPTIMIZERS
from halfeven.models.store.store import Version
from halfeven.serve.finetune.jobs import training_request
from halfeven.serve.finetune.jobs.choices.hyperparameter_table import AUTO, RANGES, WORDS, BadHyperparameter
from halfeven.serve.finetune.jobs.choices.hyperparameters import (
    KNOWN,
    held_out_share,
    read_hyperparameters,
    resolve,
)
from halfeven.serve.finetune.jobs.choices.setting_aliases import NAMES
from halfeven.serve.finetune.jobs.choices.setting_aliases import WORDS as WORDS_OF_OTHERS
from halfeven.serve.finetune.jobs.choices.trainable import check_patterns
from halfeven.serve.finetune.training.loop.batch_loop import evenly


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 1437, 10**6])
@pytest.mark.parametrize("max_batch_size", [0, 1, 8, 64])
def test_auto_becomes_numbers_within_their_ranges(rows: int, max_batch_size: int) -> None:
    values = read_hyperparameters({})
    values["validation_split"] = held_out_share(values["validation_split"], rows)
    found = resolve(values, rows, max_batch_size)
    measured = {"learning_rate", "learning_rate_multiplier"}  # by the trainer
    assert {name for name in RANGES if found[name] == AUTO} == measured
    numbers = {name: found[name] for name in RANGES.keys() - measured}
    assert all(RANGES[name].low <= value <= RANGES[name].high for name, value in numbers.items())
    assert found["batch_size"] <= min(rows, max(max_batch_size, 1), 32)
    assert rows < 2 or max_batch_size < 2 or found["batch_size"] >= 2
    steps = math.ceil(rows / found["batch_size"]) * found["n_epochs"]
    assert steps >= 300 or found["n_epochs"] == 50


@pytest.mark.parametrize(("rows", "held"), [(3, 1), (30, 10), (60, 20), (100, 20), (200, 20), (1437, 144)])
def test_a_tenth_is_held_out_and_of_few_rows_more(rows: int, held: int) -> None:
    assert round(rows * held_out_share(AUTO, rows)) == held
    assert held_out_share(0.25, rows) == 0.25


def test_a_word_that_is_none_of_a_setting_is_refused_with_those_there_are() -> None:
    assert read_hyperparameters({})["stale_parent"] == "refuse"
    with pytest.raises(
        BadInput, match="stale_parent: expected one of refuse, rejudge, retrain, got 'ignore'"
    ):
        read_hyperparameters({"hyperparameters": {"stale_parent": "ignore"}})


def test_the_two_ways_to_say_the_learning_rate_agree() -> None:
    factor = float(np.random.default_rng().uniform(0.5, 50))
    by_factor = resolve(
        read_hyperparameters({"hyperparameters": {"learning_rate_multiplier": factor}}), 100, 8
    )
    rate = by_factor["learning_rate"]
    by_rate = resolve(read_hyperparameters({"hyperparameters": {"learning_rate": rate}}), 100, 8)
    assert by_rate["learning_rate_multiplier"] == pytest.approx(factor)
    assert rate == pytest.approx(1e-4 * factor)


def test_what_is_given_is_kept_and_the_method_s_own_place_wins() -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 9, "batch_size": None}}}
    asked = {"hyperparameters": {"n_epochs": 2, "batch_size": 5, "precision": "fp32"}, "method": method}
    found = resolve(read_hyperparameters(asked), 100, 8)
    assert (found["n_epochs"], found["batch_size"], found["precision"]) == (9, 5, "fp32")
    assert read_hyperparameters({"hyperparameters": {"n_epochs": AUTO}})["n_epochs"] == AUTO


def test_patterns_of_parameters_are_checked_against_the_model_s_names() -> None:
    read = read_hyperparameters({"hyperparameters": {"trainable": "head.*"}})["trainable"]
    assert read == ["head.*"] and read_hyperparameters({})["trainable"] is None
    check_patterns(read, ["body.weight", "head.weight"])
    with pytest.raises(BadInput, match=r"trainable: 'haed\.\*' fits no weight of the model; .* head\.weight"):
        check_patterns(["haed.*"], ["body.weight", "head.weight"])
    for wrong in ([], [""], [3], "x" * 257, {"a": 1}, ["x"] * 65):
        with pytest.raises(BadInput, match="trainable: expected"):
            read_hyperparameters({"hyperparameters": {"trainable": wrong}})


def test_a_setting_that_the_schedule_does_not_read_is_refused() -> None:
    read = read_hyperparameters({"hyperparameters": {"schedule": "step", "schedule_gamma": 0.5}})
    assert (read["schedule"], read["schedule_gamma"]) == ("step", 0.5)
    with pytest.raises(
        BadInput, match="schedule_gamma: is read with schedule = step or exponential only, and"
    ):
        read_hyperparameters({"hyperparameters": {"schedule_gamma": 0.5}})
    with pytest.raises(
        BadInput, match=r"schedule: expected one of cosine, constant, linear, .*, got 'cosnie'"
    ):
        read_hyperparameters({"hyperparameters": {"schedule": "cosnie"}})


def test_numbers_are_whole_where_they_count_and_come_back_as_such() -> None:
    found = resolve(read_hyperparameters({"hyperparameters": {"n_epochs": 3.0}}), 100, 8)
    assert isinstance(found["n_epochs"], int) and isinstance(found["weight_decay"], float)
    with pytest.raises(BadInput, match=r"max_floor_hits: expected a whole number from 1 to 1000, got 2\.5"):
        read_hyperparameters({"hyperparameters": {"max_floor_hits": 2.5}})


def test_more_steps_than_a_job_may_make_are_refused_with_the_settings_that_make_fewer() -> None:
    values = read_hyperparameters({"hyperparameters": {"n_epochs": 1000, "batch_size": 10}})
    assert resolve(values, 100_000, 8)["n_epochs"] == 1000, "just as many"
    with pytest.raises(
        BadInput, match=r"n_epochs: 1000 passes .* 10001000 steps, .* raise batch_size"
    ) as caught:
        resolve(values, 100_010, 8)
    assert caught.value.param == "n_epochs"


def test_more_evaluations_than_a_job_may_make_are_refused_with_the_steps_between_them() -> None:
    def every(steps: int) -> int:
        asked = {"n_epochs": 1000, "batch_size": 10, "checkpoint_every": steps}
        return resolve(read_hyperparameters({"hyperparameters": asked}), 1000, 8)["checkpoint_every"]

    assert every(10) == 10
    with pytest.raises(BadInput, match="checkpoint_every: expected at least 10 for 100000 steps") as caught:
        every(9)
    assert caught.value.param == "checkpoint_every"


def test_an_opt_level_and_a_precision_that_contradict_each_other_are_refused() -> None:
    def read(**asked: str) -> tuple[str, str]:
        found = read_hyperparameters({"hyperparameters": asked})
        return found["opt_level"], found["precision"]

    assert read(opt_level="O0") == read(opt_level="O0", precision="fp32") == ("O1", "fp32")
    assert read(opt_level="O2") == ("O2", "auto") and read(opt_level="O2", precision="bf16") == ("O2", "bf16")
    with pytest.raises(
        BadInput, match="precision: opt_level O0 is fp32; expected fp32 or nothing, got 'bf16'"
    ):
        read(opt_level="O0", precision="bf16")
    with pytest.raises(BadInput, match=r"precision: opt_level O2 trains a half model; .*, got fp32"):
        read(opt_level="O2", precision="fp32")


def asked(**values: object) -> dict[str, Any]:
    return dict(read_hyperparameters({"hyperparameters": values}))


def test_optimizers_have_torch_s_names_and_arguments() -> None:
    for name, arguments in OPTIMIZERS.items():
        assert set(arguments) <= set(inspect.signature(getattr(torch.optim, name)).parameters), name
        assert asked(optimizer=name.lower())["optimizer"] == {"name": name}
    sgd = {"name": "SGD", "momentum": 0.9, "nesterov": True}
    found = asked(optimizer=sgd, learning_rates={"backbone.*": 0.1})
    assert (found["optimizer"], found["weight_decay"], found["learning_rates"]) == (
        sgd,
        0.0,
        {"backbone.*": 0.1},
    )
    assert asked(optimizer="adamw_torch")["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "lion",
            r"expected one of AdamW, Adam, .*got 'lion'; another one is made by a function of the model folder",
        ),
        ({"name": "SGD", "beta": 1}, "SGD has no argument 'beta'"),
        ({"name": "SGD", "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"name": "Adam", "betas": [0.9, 1]}, "betas: expected two numbers from 0 to below 1"),
        ({"name": "SGD", "fused": True, "foreach": True}, "fused and foreach are two ways of one step"),
        ({"name": "Adam", "fused": 1}, "fused: expected true or false, got 1"),
        (7, "expected a name such as 'SGD'"),
    ],
)
def test_an_optimizer_that_torch_could_not_make_is_refused(value: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        asked(optimizer=value)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("value", [False, 0, "", [], {}])
def test_an_empty_value_is_no_default(name: str, value: object) -> None:
    with pytest.raises(BadInput, match=f"{name}: expected one of"):
        asked(**{name: value})


@pytest.mark.slow
def test_any_values_are_taken_or_refused_by_their_setting_and_never_an_error_of_ours() -> None:
    random = np.random.default_rng()
    others = [other for names in NAMES.values() for other in names]
    names = [
        *KNOWN,
        *others,
        *{name for of in OPTIMIZERS.values() for name in of},
        "adam_epsilon",
        "adam_beta1",
    ]
    values: list[object] = [
        5, -1, 10**400, 1e308, math.nan, "", "x", "auto", True, [], ["a"], [[1]], {}, {"a": 1}, {"": None},
        {"name": "sgd"}, {"name": 5}, {"name": ["a"]}, {"name": "adamw", "betas": 5}, None,
    ]  # fmt: skip
    taken = 0
    for _ in range(4000):
        drawn = random.choice(names, random.integers(1, 4))
        try:
            asked(**{name: values[random.integers(len(values))] for name in drawn})
            taken += 1
        except BadInput:
            continue
    assert 0 < taken < 4000


@pytest.mark.parametrize("factors", [{"x": -1}, ["x"], {"x": "fast"}, {"": 1}])
def test_factors_of_the_rate_that_are_none_are_refused(factors: object) -> None:
    with pytest.raises(BadInput, match="learning_rates"):
        asked(learning_rates=factors)


BAD_NUMBERS: list[tuple[dict[str, Any], str, str]] = [
    ({"n_epochs": 0}, "n_epochs", 'a whole number from 1 to 1000 or "auto", got 0'),
    ({"n_epochs": 1.5}, "n_epochs", "a whole number from 1 to 1000"),
    ({"n_epochs": True}, "n_epochs", "got True"),
    ({"n_epochs": "many"}, "n_epochs", "got 'many'"),
    ({"batch_size": -1}, "batch_size", "from 1 to 65536"),
    ({"learning_rate": float("inf")}, "learning_rate", "got inf"),
    ({"learning_rate": float("nan")}, "learning_rate", "got nan"),
    ({"learning_rate_multiplier": 0}, "learning_rate_multiplier", "from 1e-06"),
    ({"learning_rate_multiplier": 1, "learning_rate": 1}, "learning_rate", "expected one of them"),
    ({"weight_decay": 2}, "weight_decay", "from 0 to 1, got 2"),
    ({"clip_norm": 0}, "clip_norm", "got 0"),
    ({"precision": "fp8"}, "precision", "auto, fp16, bf16, fp32, fp16_emulated, got 'fp8'"),
    ({"init_scale": 1, "scale_floor": 2}, "scale_floor", "at most init_scale = 1, got 2"),
    ({"scale_floor": 0}, "scale_floor", "got 0"),
    ({"max_floor_hits": 0}, "max_floor_hits", "from 1 to 1000"),
    ({"validation_split": 0.9}, "validation_split", 'from 0.001 to 0.5 or "auto", got 0.9'),
    ({"forgetting_tolerance": -0.1}, "forgetting_tolerance", "from 0 to 1"),
    ({"n_epoch": 3}, "n_epoch", "nearest known one is 'n_epochs'"),
]


@pytest.mark.parametrize(("numbers", "param", "words"), BAD_NUMBERS)
def test_an_impossible_value_is_refused_with_its_name_its_range_and_what_came(
    numbers: dict[str, Any], param: str, words: str
) -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
    for job in ({"hyperparameters": numbers}, {"method": method}):
        with pytest.raises(BadHyperparameter) as refused:
            read_hyperparameters(job)
        said = str(refused.value)
        assert said.startswith(f"hyperparameters: {param}: ") and words in said
        assert refused.value.param == param


def test_an_accumulation_makes_fewer_steps_and_warm_up_steps_are_a_share_of_them() -> None:
    found = resolve(asked(batch_size=8, accumulation=4, n_epochs=10, warmup_steps=20), 640, 32)
    assert found["warmup_ratio"] == 20 / 200 and found["batch_size"] == 8
    assert resolve(asked(n_epochs=4, batch_size=8, warmup_ratio=0.5), 80, 32)["warmup_steps"] == 20
    with pytest.raises(BadInput, match="warmup_steps: and warmup_ratio are both given"):
        asked(warmup_steps=3, warmup_ratio=0.1)


@pytest.mark.parametrize("rows", [2, 3, 5, 9, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_warm_up_is_a_share_of_the_steps_that_the_training_has(rows: int, size: int) -> None:
    """Two rows at least are in a batch, so that an odd number of rows may make a batch fewer."""
    steps = 10 * len(evenly(torch.arange(rows), min(size, rows)))
    found = resolve(asked(batch_size=size, n_epochs=10, warmup_steps=4), rows, 32)
    assert found["warmup_steps"] == min(4, round(0.9 * steps)) or found["warmup_ratio"] * steps == 4


def test_no_more_batches_are_accumulated_than_the_rows_make() -> None:
    assert resolve(asked(batch_size=2, accumulation=8), 5, 32)["accumulation"] == 3
    alone = resolve(asked(accumulation=4), 1, 32)
    assert (alone["batch_size"], alone["accumulation"]) == (1, 1)


def test_the_trainer_has_the_patience_that_a_job_asks_for() -> None:
    parent = cast(Version, SimpleNamespace(manifest={}))
    values = resolve(asked(early_stopping_patience=3), 100, 8)
    assert training_request._settings(parent, values)["patience"] == 3


def test_the_page_has_every_name_and_word_of_other_libraries() -> None:
    page = (Path(__file__).parents[5] / "docs" / "finetune.md").read_text()
    for name, others in NAMES.items():
        assert name in KNOWN and not set(others) & set(KNOWN)
        assert f"| `{name}` | {', '.join(f'`{one}`' for one in others)} |" in page
    for name, words in WORDS_OF_OTHERS.items():
        for word, values in words.items():
            said = ", ".join(f"`{own} = {value}`" for own, value in values.items())
            assert any(
                line.startswith(f"| `{name}` | `") and f"`{word}`" in line and line.endswith(f"| {said} |")
                for line in page.splitlines()
            ), word


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_accumulation_steps": 4, "lr": 1e-3}, {"accumulation": 4, "learning_rate": 1e-3}),
        ({"fp16": True, "bf16": False, "max_grad_norm": 0.5}, {"precision": "fp16", "clip_norm": 0.5}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16", "opt_level": "O1"}),
        ({"precision": 32}, {"precision": "fp32"}),
        ({"precision": "mixed_float16"}, {"precision": "fp16", "opt_level": "O1"}),
        ({"precision": "16-true"}, {"precision": "fp16", "opt_level": "O3"}),
        ({"fp16_opt_level": "O2"}, {"opt_level": "O2"}),
        ({"lr_scheduler_type": "cosine_with_restarts"}, {"schedule": "cosine_restarts"}),
        ({"optim": "sgd", "momentum": 0.9}, {"optimizer": {"name": "SGD", "momentum": 0.9}}),
        ({"adam_beta2": 0.95}, {"optimizer": {"name": "AdamW", "betas": [0.9, 0.95]}}),
        ({"num_train_epochs": 3, "per_device_train_batch_size": 8}, {"n_epochs": 3, "batch_size": 8}),
    ],
)
def test_the_words_of_other_libraries_are_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = asked(**given)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_acumulation_step": 4}, "the nearest known one is 'accumulation'"),
        ({"warmup_step": 4}, "the nearest known one is 'warmup_steps'"),
        ({"learning_rate_schedule": "cosine"}, "the nearest known one is 'schedule'"),
        ({"lrate": 1e-3}, "the nearest known one is 'learning_rate'"),
        ({"bs": 8}, "the nearest known one is 'batch_size'"),
        ({"l2": 0.1}, "the nearest known one is 'weight_decay'"),
        ({"use_amp": True}, "the nearest known one is 'precision'"),
        ({"use_ema": True}, "the nearest known one is 'ema_decay'"),
        ({"freeze_layers": 2}, "the nearest known one is 'trainable'"),
        ({"layer_decay": 0.8}, "the nearest known one is 'learning_rates'"),
        ({"min_scale": 1}, "the nearest known one is 'scale_floor'"),
        ({"pct_start": 0.3}, "the nearest known one is 'warmup_ratio'"),
        ({"seed": 3}, "stands beside them in the request"),
        ({"optimiser": "SGD"}, "the nearest known one is 'optimizer'"),
        ({"momentun": 0.9}, "the nearest known one is 'optimizer'"),
        ({"max_gradient_norm": 1}, "the nearest known one is 'clip_norm'"),
        ({"lr": 1, "learning_rate": 2}, "learning_rate, which is given two times"),
        ({"fp16": True, "bf16": True}, "precision, which is given two times"),
        ({"precision": "float16", "opt_level": "O1"}, "opt_level, which is given two times"),
        ({"fp16_opt_level": "O4"}, "opt_level: expected one of O1, O0, O2, O3, got 'O4'"),
    ],
)
def test_an_unknown_name_is_told_its_meaning_and_one_given_two_times_is_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        asked(**given)


def test_the_page_has_every_setting_with_its_range_and_default() -> None:
    page = (Path(__file__).parents[5] / "docs" / "finetune.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:3] == "| `"
    ]
    table = {row[0].strip("`"): row[1:3] for row in rows if len(row) == 4}
    assert set(table) == set(KNOWN)
    for name, allowed in RANGES.items():
        default = allowed.default if isinstance(allowed.default, str) else f"{allowed.default:g}"
        assert table[name] == [str(allowed), default], name
    for name, words in WORDS.items():
        assert table[name] == [", ".join(f"`{word}`" for word in words), words[0]], name


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"hyperparameters": []}, "hyperparameters: expected an object, got []"),
        ({"method": 3}, "method: expected an object, got 3"),
        (
            {"method": {"type": "dpo"}},
            "method: type: expected 'supervised', the only one offered here, got 'dpo'",
        ),
    ],
)
def test_what_is_no_table_of_hyperparameters_is_named_once(asked: Any, words: str) -> None:
    with pytest.raises(BadHyperparameter) as refused:
        read_hyperparameters(asked)
    assert str(refused.value) == words
