"""The pictures of docs/pages.md: the home page and a model's page, after some minutes of callers.

    python -m tests.benchmarks.page_pictures [--seconds 240]

Take them where nothing else runs: the figures on them are measured. Prints the p50 and p99 that they show.
Needs Chromium.
"""

import argparse
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import halfeven as he
import numpy as np
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.errors import HalfevenError
from halfeven.models.store.store import Store
from halfeven.serve.access.direct_requests import ask
from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

from tests.benchmarks.server_process import free_port, process

Scheme = Literal["light", "dark"]
ROOT = Path(__file__).resolve().parents[2]
ROWS = {"digits": (0.02, (1, 1, 8, 8)), "mlp": (0.1, (1, 784))}  # seconds between two requests, an input


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for name, level in (("digits", "O1"), ("digits", "O2"), ("mlp", "O1")):
            convert(ROOT / "models/zoo" / name, store, Options(forms=("onnx",), all_forms=True, level=level))
        store.promote(store.version("digits", 1))
        with process(["halfeven", "serve", "--store", folder], ROOT, free_port()) as port:
            url = f"http://127.0.0.1:{port}"
            ready(url)
            ask(f"{url}/v1/models/digits/canary", b'{"version": 2, "percent": 15}', "application/json")
            end = time.monotonic() + seconds
            callers = [threading.Thread(target=call, args=(url, name, end)) for name in ROWS]
            for caller in callers:
                caller.start()
            time.sleep(seconds - 1)  # while they still call
            print("home", picture(url, ROOT / "docs/home.webp", 1300, 897, "light"))
            print("model", picture(f"{url}/models/digits", ROOT / "docs/model.webp", 560, 1204, "dark"))
            for caller in callers:
                caller.join()


def ready(url: str) -> None:
    while True:
        try:
            ask(f"{url}/v2/health/ready", None)
            return
        except HalfevenError:
            time.sleep(0.2)


def call(url: str, name: str, end: float) -> None:
    client, (pause, shape) = he.Client(url), ROWS[name]
    while time.monotonic() < end:
        client.predict(name, np.random.normal(size=shape).astype(np.float32))
        time.sleep(pause)


def picture(url: str, file: Path, width: int, height: int, scheme: Scheme) -> list[str]:
    """Write a picture of the page; gives the times that the picture shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        scale = 1.3 if width > 1000 else 1.4
        viewport = ViewportSize(width=round(width / scale), height=round(height / scale))
        page = browser.new_context(
            viewport=viewport, device_scale_factor=scale, color_scheme=scheme
        ).new_page()
        page.goto(url)
        raw = file.with_suffix(".png")
        page.screenshot(path=raw)
        text = page.inner_text("body")
        browser.close()
    Image.open(raw).save(file, quality=80)
    raw.unlink()
    return re.findall(r"\d[\d.,]* (?:ms|µs|s)\b", text)[:6]


if __name__ == "__main__":
    main()
