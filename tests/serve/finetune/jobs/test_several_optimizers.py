"""The example of docs/finetune.md for several optimizers, from uploaded files to a served generator; and the settings
that such a job does not read."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from halfeven.exporters.conversion import convert as convert_module
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.folder.package import read_folder
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.store import Store, Version
from halfeven.serve.finetune.jobs.choices.declared_steps import check_settings
from halfeven.serve.finetune.jobs.choices.hyperparameter_table import BadHyperparameter
from halfeven.serve.finetune.jobs.choices.hyperparameters import read_hyperparameters
from halfeven.serve.finetune.training.loop.setting_names import STATE_FILE
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.model_folders import tensor, write_folder
from tests.patience import PATIENCE_S
from tests.serve.finetune.jobs.job_server import ended, served_to_client

DOCS = Path(__file__).parents[4] / "docs" / "finetune.md"
SECTION = DOCS.read_text().partition("### Several optimizers")[2].partition("\n### ")[0]
ASKED = {"n_epochs": 12, "batch_size": 8, "checkpoint_every": 24, "schedule": "constant", "keep_state": "all"}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    assert found
    return found[1]


# A small net of the pix2pix type: down, up again, and the picture itself beside what comes up.
GENERATOR = """
import torch
from torch import nn

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1), nn.ReLU())
        self.paint = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, image):
        return torch.tanh(self.paint(torch.cat([self.up(self.down(image)), image], 1)))

def build():
    torch.manual_seed(0)
    return Generator()
"""
PICTURE = {"color": "RGB", "scale": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3}


def pictures(count: int) -> dict[str, np.ndarray]:
    """Smooth pictures, and their negatives to be painted."""
    coarse = np.random.default_rng().uniform(-0.8, 0.8, (count, 3, 4, 4)).astype(np.float32)
    image = np.ascontiguousarray(coarse.repeat(4, 2).repeat(4, 3))
    return {"image": image, "target:painted": -image}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(
        tmp_path_factory.mktemp("gan") / "painter",
        GENERATOR,
        inputs=[tensor("image", "FP32", [-1, 3, 16, 16], picture=PICTURE)],
        outputs=[tensor("painted", "FP32", [-1, 3, 16, 16], kind="image", picture=PICTURE)],
        files={"gan.py": block("python")},
        extra_toml="\n" + block("toml"),
        max_batch_size=8,
    )
    random = np.random.default_rng()
    features = {"0.weight": random.normal(0, 0.3, (8, 3, 3, 3)), "0.bias": np.zeros(8)}
    save_file(
        {name: one.astype(np.float32) for name, one in features.items()}, folder / "features.safetensors"
    )
    return folder


@pytest.mark.slow(seconds=30)
def test_the_example_trains_a_generator_that_answers_with_a_png(folder: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert convert(folder, store, Options(forms=("torch",))).asked_passed
    save_file(pictures(96), tmp_path / "train.safetensors")
    save_file(pictures(24), tmp_path / "held.safetensors")
    with served_to_client(store, "painter") as (_, port, client):
        files = [
            client.files.create(file=tmp_path / f"{name}.safetensors", purpose="fine-tune").id
            for name in ("train", "held")
        ]
        job = client.fine_tuning.jobs.create(
            model="painter", training_file=files[0], validation_file=files[1], seed=7,
            extra_body={"hyperparameters": ASKED},
        )  # fmt: skip
        job = ended(client, job.id)
        assert job.status == "succeeded", job.error
        ours = job.to_dict()["halfeven"]
        assert ours["promotion"]["state"] == "promoted", ours
        metrics = httpx.get(f"http://127.0.0.1:{port}/v1/fine_tuning/jobs/{job.id}/metrics?most=10000").json()
        buffer = io.BytesIO()
        pixels = np.random.default_rng().integers(60, 190, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/models/painter:predict", content=buffer.getvalue(),
            headers={"content-type": "image/png", "accept": "image/png"}, timeout=PATIENCE_S,
        )  # fmt: skip
        url, rows = f"http://127.0.0.1:{port}/v1/fine_tuning/jobs/validate", {"training_file": files[0]}
        warm = {"hyperparameters": {"batch_size": 8, "warm_start": "all"}}
        tried = {
            number: httpx.post(
                url, json={"model": f"painter@{number}", **rows, **warm}, timeout=PATIENCE_S
            ).json()
            for number in (1, 2)
        }
    assert tried[2]["valid"], tried[2]["error"]
    assert tried[1]["error"]["code"] == "NO_TRAINING_STATE"
    assert answer.headers["content-type"] == "image/png", answer.text
    assert answer.headers["halfeven-version"] == "2"
    assert Image.open(io.BytesIO(answer.content)).size == (16, 16)
    assert all(set(step["losses"]) == {"critic", "generator"} for step in metrics["data"])
    version = store.version("painter", 2)
    kept = load_file(version.file(STATE_FILE))
    assert version.manifest["files"][STATE_FILE] == sha256_of(version.folder / STATE_FILE)
    assert {"net:critic:0.weight", "net:critic:3.running_var"} <= kept.keys()
    assert "optimizer:generator:AdamW:model_net.paint.weight:exp_avg_sq" in kept
    names = load_file(version.file("weights.safetensors")).keys()
    assert names == load_file(store.version("painter", 1).file("weights.safetensors")).keys()
    assert (version.folder / "source" / "features.safetensors").is_file(), "the next job needs it"


def test_other_weights_of_a_net_are_other_work_for_a_conversion(folder: Path) -> None:
    before = convert_module._fingerprint(read_folder(folder), Options())
    assert convert_module._fingerprint(read_folder(folder), Options()) == before
    file = folder / "features.safetensors"
    save_file({name: one + 1 for name, one in load_file(file).items()}, file)
    assert convert_module._fingerprint(read_folder(folder), Options()) != before


PARENT = cast(
    Version, SimpleNamespace(manifest={"training": {"declared_steps": {"optimizers": {}, "steps": []}}})
)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"learning_rate": 1e-3}, "learning_rate: each optimizer .* change it there"),
        ({"clip_norm": 1.0}, "clip_norm: each optimizer .* convert again"),
        ({"opt_level": "O2"}, "opt_level: O2 is for"),
        ({"bad_rows": "quarantine"}, "bad_rows: quarantine is for .* choose another value"),
    ],
)
def test_a_setting_that_several_optimizers_do_not_read_is_refused(asked: dict[str, Any], said: str) -> None:
    values = read_hyperparameters({"hyperparameters": asked})
    with pytest.raises(BadHyperparameter, match=said):
        check_settings(PARENT, asked, values)
    check_settings(cast(Version, SimpleNamespace(manifest={})), asked, values)


def test_the_state_of_nets_is_no_setting_where_there_are_none_and_adapters_have_no_state() -> None:
    for name in ("keep_state", "warm_start"):
        with pytest.raises(BadHyperparameter, match=f"{name}: .* no net beside the model .* none or all"):
            asked = {name: "nets"}
            check_settings(
                cast(Version, SimpleNamespace(manifest={})),
                asked,
                read_hyperparameters({"hyperparameters": asked}),
            )
        with pytest.raises(BadHyperparameter, match=f"{name}: expected none with trainable = lora"):
            read_hyperparameters({"hyperparameters": {name: "all", "trainable": "lora"}})
