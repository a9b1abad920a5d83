"""The pictures of the dashboards in docs/dashboards/: a run under load, drawn by Grafana's own components.

    python -m bench.dashboards --work DIR

Needs prometheus, npm and chromium. DIR gets the components (600 MB) and what Prometheus has recorded; --record-only and
--draw-only do one half. The model is a tiny one, so that the figures say nothing about speed.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from tests.e2e.stack import running_stack
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.monitoring.dashboards import FILES, filled, load
from tests.monitoring.load import Load
from tests.monitoring.prometheus import Prometheus, running_prometheus, targets_of

PICTURES = Path(__file__).parents[1] / "docs" / "dashboards"
PAGE = PICTURES / "page"
RUNNER = ("--num-blocks", "97", "--lease-blocks", "8", "--speculative-tokens", "2", "--max-sequences", "12")
WIDTH = 1600
CELL_PIXELS = 38
HEADER_PIXELS = 64
RATE, STEP_SECONDS = "10s", 1
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def record(folder: Path, seconds: float) -> None:
    """Runs a stack under load, and writes what Prometheus answers to each panel of each dashboard."""
    with tempfile.TemporaryDirectory(prefix="octavo-pictures-") as name:
        directory = Path(name)
        model = write_tiny_chat_model(directory / "model")
        with (
            running_stack(directory, "--model", str(model), *RUNNER) as stack,
            running_prometheus(directory, targets_of(stack)) as prometheus,
        ):
            work = Load(stack)
            time.sleep(seconds)
            work.alive()
            end = int(time.time())
            work.stop()
            for path in FILES:
                answers = _answers(prometheus, path, end, seconds)
                (folder / path.name).write_text(json.dumps(answers))


def _answers(prometheus: Prometheus, path: Path, end: int, seconds: float) -> dict[str, Any]:
    """The dashboard, the times in milliseconds, and by panel and query the series of the load but for its beginning."""
    dashboard = load(path)
    start = end - int(seconds * 0.8)
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    answers = {
        panel["id"]: {
            target["refId"]: prometheus.over(
                filled(target["expr"], rate=RATE, time=f"{int(seconds)}s"), start, end, STEP_SECONDS
            )
            for target in panel["targets"]
        }
        for panel in panels
    }
    cells = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return {
        "dashboard": dashboard,
        "times": [second * 1000 for second in range(start, end + 1, STEP_SECONDS)],
        "answers": answers,
        "height": HEADER_PIXELS + cells * CELL_PIXELS,
    }


def build(work: Path) -> Path:
    """Installs the components and builds the page, as far as that is not done yet. Returns the folder of the page."""
    for path in PAGE.iterdir():
        shutil.copy(path, work)
    if not (work / "node_modules").exists():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"], cwd=work, check=True)
    subprocess.run(["npm", "run", "build"], cwd=work, check=True)
    return work / "dist"


def draw(page: Path, records: Path) -> None:
    """A picture of each dashboard that was recorded."""
    shutil.copytree(records, page / "records", dirs_exist_ok=True)
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(CHROMIUM)} is installed")
    with _served(page) as address:
        for path in sorted(records.glob("*.json")):
            height = json.loads(path.read_text())["height"]
            picture = PICTURES / f"{path.stem}.png"
            options = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={WIDTH},{height}",
                "--virtual-time-budget=20000",
                f"--screenshot={picture}",
            ]
            url = f"http://{address}/index.html?name={path.stem}"
            subprocess.run([browser, *options, url], check=True, capture_output=True, timeout=300)
            # Half the size, and nobody sees it.
            with Image.open(picture) as drawn:
                drawn.convert("RGB").quantize(256).save(picture, optimize=True)
            print(f"drew {picture}")


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder are read."""
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads a line for each file."""


def main(
    work: Annotated[Path, typer.Option(help="Folder for the components and the records; it is kept.")],
    seconds: Annotated[float, typer.Option(help="Seconds of load.")] = 150.0,
    record_only: Annotated[bool, typer.Option("--record-only", help="Draw nothing.")] = False,
    draw_only: Annotated[bool, typer.Option("--draw-only", help="Draw what was recorded before.")] = False,
) -> None:
    """Makes the pictures of the dashboards."""
    records = work / "records"
    records.mkdir(parents=True, exist_ok=True)
    if not draw_only:
        record(records, seconds)
    if not record_only:
        draw(build(work), records)


if __name__ == "__main__":
    typer.run(main)
