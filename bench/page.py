"""What the page asks for with many runs stored: `python -m bench.page --runs 100000`.

Runs of three workflows on a SQLite file: most have finished, some failed, some wait. Then a service is asked over HTTP
for what the page shows: the newest runs, each filter, and searches for what is there, what is rare and what is not. If
there is a browser it shows the list, a search, and a run with a long history.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import async_playwright

import holdfast as hf
from bench.report import Rows, percentile, progress, table
from bench.stores import as_the_command, opened
from holdfast.app import App
from holdfast.engine.start.requests import StartOptions
from holdfast.service.context import make_service
from holdfast.service.http.server import listening
from holdfast.service.options import ServiceOptions

AT_ONCE = 500
ROUNDS = 30
SCREEN = 200
LONG_EVENTS = 10_000
REGIONS = ("eu", "us", "apac")

Ask = Callable[[], Awaitable[Any]]


def make_app() -> App:
    """Make the app whose runs fill the list."""
    app = App("bench")

    @app.activity
    async def pick(number: int) -> int:
        return number

    @app.workflow
    async def order(number: int) -> int:
        return await pick(number)

    @app.workflow(failures=ValueError)
    async def payment(number: int) -> int:
        raise ValueError(f"the card of customer {number} was declined")

    @app.workflow
    async def approval(number: int) -> Any:
        return await hf.wait_signal("approved")

    @app.workflow
    async def long(steps: int) -> int:
        for start in range(0, steps, 100):
            await asyncio.gather(*(pick(number) for number in range(start, min(steps, start + 100))))
        return steps

    return app


async def fill(app: App, runs: int) -> None:
    """Start runs and wait until each has finished, or waits."""
    runtime = app.runtime()
    for start in range(0, runs, AT_ONCE):
        progress(f"page: {start:,} of {runs:,} runs")
        started = []
        for number in range(start, min(runs, start + AT_ONCE)):
            name = "approval" if number % 10 == 0 else "payment" if number % 10 == 1 else "order"
            definition = app.registry.workflow(name, None)
            tags = (REGIONS[number % 3], "vip") if number % 1_000 == 7 else (REGIONS[number % 3],)
            packed = definition.signature.pack((), {"number": number})
            options = StartOptions(reference_key=f"ORD-{number:07}", tags=tags)
            started.append(await runtime.start(definition, packed, options))
        if start % (10 * AT_ONCE) == 0:
            await asyncio.gather(*(_ended(app, run.run_id) for n, run in enumerate(started) if (start + n) % 10 > 1))


async def _ended(app: App, run_id: str) -> None:
    await app.run(run_id).result()


async def long_run(app: App, events: int = LONG_EVENTS) -> str:
    """Do a run with this many events, and return its id."""
    runtime = app.runtime()
    definition = app.registry.workflow("long", None)
    packed = definition.signature.pack((), {"steps": events // 2})
    run = await runtime.start(definition, packed, StartOptions(reference_key="LONG"))
    await app.run(run.run_id).result()
    return run.run_id


def questions(runs: int) -> dict[str, dict[str, Any]]:
    """Return what is asked, by what it is called."""
    return {
        "the newest": {},
        "of a workflow": {"workflow": "approval"},
        "that failed": {"status": "FAILED"},
        "that are paused (none)": {"status": "PAUSED"},
        "of a workflow that has none": {"workflow": "nothing"},
        "with a tag": {"tag": "eu"},
        "with a rare tag": {"tag": "vip"},
        "with a tag that none has": {"tag": "nothing"},
        "since an hour": {"created_from": "2020-01-01T00:00:00Z"},
        "until long ago": {"created_until": "2020-01-01T00:00:00Z"},
        "by reference": {"reference_key": f"ORD-{runs // 2:07}"},
        "text, everywhere": {"text": "ORD"},
        "text, of one old run": {"text": "ORD-0000007"},
        "text, nowhere": {"text": "no such thing"},
    }


async def timed(ask: Ask, rounds: int) -> list[float]:
    """Ask again and again, and return how long each answer took, in milliseconds."""
    await ask()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await ask()
        times.append((time.perf_counter() - begun) * 1_000)
    return times


async def measure(runs: int, path: Path, rounds: int = ROUNDS, events: int = LONG_EVENTS, chromium: str = "") -> Rows:
    """Return how long each question takes with so many runs, and in a browser how long until it is on the screen."""
    app = make_app()
    rows: Rows = {}
    async with opened(path) as store, app.node(store, options=as_the_command()):
        if not (await store.stats()).runs:
            await fill(app, runs)
        async with (
            listening(make_service(app, ServiceOptions(port=0, is_open=True))) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
        ):
            for name, fields in questions(runs).items():
                progress(f"page: {name}")
                ask = partial(_ask, http, fields)
                times = await timed(ask, rounds)
                rows[name] = {"found": await ask(), "p50 ms": percentile(times, 50), "p99 ms": percentile(times, 99)}
            if chromium:
                run_id = await long_run(app, events)
                rows |= await on_screen(chromium, f"http://127.0.0.1:{port}", f"/runs/{run_id}", rounds)
    return rows


async def _ask(http: httpx.AsyncClient, fields: dict[str, Any]) -> int:
    response = await http.get("/v1/runs", params={"order": "newest", "limit": SCREEN, **fields})
    assert response.status_code == 200, response.text
    return len(response.json()["items"])


async def on_screen(chromium: str, address: str, long: str, rounds: int) -> Rows:
    """Return how long it takes until a browser shows something, from an empty page and with the files in its cache."""
    places = {
        "list on the screen": ("/runs", ".rows-body .run-row"),
        "search on the screen": ("/runs?text=ORD-0000007", ".rows-body .run-row"),
        "long run on the screen": (long, ".head-marks [data-status=COMPLETED]"),
    }
    rows: Rows = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(base_url=address)
        for name, (place, shown) in places.items():
            progress(f"page: {name}")

            async def show(place: str = place, shown: str = shown) -> None:
                await page.goto(place)
                await page.locator(shown).first.wait_for()

            times = await timed(show, rounds)
            rows[name] = {"p50 ms": percentile(times, 50), "p99 ms": percentile(times, 99)}
            await page.goto("about:blank")
        await browser.close()
    return rows


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--events", type=int, default=LONG_EVENTS, help="of the run that a browser opens")
    parser.add_argument("--keep", type=Path, help="a file to make, or to use again")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), "")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        path = options.keep or Path(folder) / "page.db"
        rows = asyncio.run(measure(options.runs, path, options.rounds, options.events, chromium))
    progress("")
    print(table(f"page: answers with {options.runs:,} runs stored, {SCREEN} to a page", rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
