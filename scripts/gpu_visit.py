"""Runs traces against real engines on a GPU host, unattended: results and logs into one folder.

    python scripts/gpu_visit.py --model FOLDER --out visit        does what is not done yet, then ends
    python scripts/gpu_visit.py --out visit --wait 500            prints its progress for 500 s or until it ends

Engines of a group start together, because starting takes longer than asking, and are then asked one after another
while the others idle. With several GPUs, `--backends` gives each process its share, CUDA_VISIBLE_DEVICES its GPU.
`visit/results.duckdb` is complete after each run, so a visit may be cut short and taken up again; what
`replay calibrate` measures is in `visit/BACKEND.grid.json`. Weights are random: prompts are token ids, and neither
time nor caching depends on their values.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from replay import runs
from replay.backends.connect import Where
from replay.backends.launch import Launched
from replay.backends.launch.command import Options
from replay.backends.preset import load
from replay.calibration import measure
from replay.engine import profiles
from replay.load.schedule import Settings
from replay.results.store import Store
from replay.trace import Trace, read
from replay.trace.synth import generate

ROOT = Path(__file__).resolve().parents[1]
GPU_TOKENS, MAX_LEN = 64_000, 40_000
# Of a context of this trace: 16k tokens are 2.4 GB in Qwen3-8B, so the disk's 45 GiB hold about 320,000 tokens.
GROUPS = (
    (("vllm-no-cache",), ("vllm",), ("lmcache-cpu", "tiers.cpu.gib=60")),
    (("vllm-offload-cpu", "tiers.cpu.gib=60"), ("lmcache-disk", "tiers.cpu.gib=12", "tiers.disk.gib=45")),
)
# KV bytes of a GPU tier that is shared with other engines must be said, or vLLM takes what it finds free.
ARGS = "launch.args=[--gpu-memory-utilization, '0.05', --kv-cache-memory-bytes, '{}']"


@dataclass(frozen=True)
class Job:
    """A run to do."""

    name: str
    trace: Path | Trace
    settings: Settings
    only: tuple[str, ...] = ()
    """Backends; empty: all."""
    cold: bool = False
    """The system's page cache is dropped all the time, so that a disk is a disk; needs root."""


def jobs(agents: Path, levels: list[int]) -> list[Job]:
    """What each engine is asked, most wanted first."""
    live, disk = Settings(outputs="live"), ("lmcache-disk",)
    serial = replace(live, concurrency=1)
    # 36 others are 92 GB, more than the CPU tiers of most hosts: of 8 the first document comes back.
    eight = Trace(*generate("evict-and-return", 8, 0))
    return [
        Job("doc_qa", ROOT / "traces/doc_qa.jsonl", serial),
        Job("evict_and_return-8", eight, serial),
        Job("agents", agents, live),
        *(Job(f"agents-c{n}", agents, replace(live, concurrency=n)) for n in levels),
        Job("evict_and_return-8-cold", eight, serial, only=disk, cold=True),
        Job("agents-cold", agents, live, only=disk, cold=True),
        Job("agents-again", agents, live, only=("vllm", "vllm-offload-cpu", "lmcache-cpu")),
        Job("evict_and_return", ROOT / "traces/evict_and_return.jsonl", serial),
    ]


@contextlib.contextmanager
def cold_cache(wanted: bool) -> Iterator[None]:
    """Drops the system's page cache twice a second while the block lasts, where wanted."""
    loop = "while sleep 0.5; do echo 3 > /proc/sys/vm/drop_caches; done"
    process = subprocess.Popen(["bash", "-c", loop]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


class Visit:
    """A folder of results, and what is in it already."""

    def __init__(self, out: Path, model: str, kv_bytes: int) -> None:
        self.out, self.model, self.kv_bytes = out, model, kv_bytes
        self.db = out / "work.duckdb"
        out.mkdir(parents=True, exist_ok=True)
        if (out / "results.duckdb").exists():
            shutil.copy(out / "results.duckdb", self.db)

    def done(self) -> set[str]:
        """Names of complete runs."""
        with Store.create_or_open(str(self.db)) as store, store.reader() as con:
            return {name for (name,) in con.execute("SELECT name FROM runs WHERE status = 'complete'").fetchall()}

    def say(self, line: str) -> None:
        """One line of progress."""
        with (self.out / "progress.txt").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def launched(self, backend: str, overrides: tuple[str, ...]) -> Launched:
        """An engine, not yet started."""
        sizes = (f"tiers.gpu.tokens={GPU_TOKENS}", ARGS.format(GPU_TOKENS * self.kv_bytes))
        preset = load(backend, [*overrides, *sizes])
        if preset.tiers.disk is not None:
            # Room for logs and for what the host keeps compiled.
            room = shutil.disk_usage(tempfile.gettempdir()).free / 2**30 - 5
            disk = msgspec.structs.replace(preset.tiers.disk, gib=min(preset.tiers.disk.gib, int(room)))
            preset = msgspec.structs.replace(preset, tiers=msgspec.structs.replace(preset.tiers, disk=disk))
        options = Options(self.model, max_model_len=MAX_LEN, dummy_weights=True)
        recorder = ROOT / "replay/backends/lmcache_recorder.py"
        return Launched(preset, options, log_dir=self.out / "logs" / backend, recorder=recorder)

    def group(self, presets: tuple[tuple[str, ...], ...], todo: list[Job]) -> None:
        """Starts the engines of a group together and asks each what is still to be asked."""
        done = self.done()
        wanted = {name: [job for job in todo if self.wanted(job, name, done)] for name, *_ in presets}
        engines = {name: self.launched(name, tuple(sets)) for name, *sets in presets if wanted[name]}
        begin = time.monotonic()
        try:
            started = asyncio.run(start(list(engines.values())))
            for (name, engine), failure in zip(engines.items(), started, strict=True):
                if failure is not None:
                    self.say(f"{name} did not start: {failure}")
                    continue
                self.say(f"{name} is up after {time.monotonic() - begin:.0f} s, {engine.capacity}")
                self.grid(name, engine)
                for job in wanted[name]:
                    self.run(job, name, engine)
        finally:
            asyncio.run(end(list(engines.values())))

    def where(self, engine: Launched) -> Where:
        """A running engine as the target of a run."""
        return Where(engine.preset, "launch", self.model, max_model_len=MAX_LEN, dummy_weights=True, engine=engine)

    def grid(self, backend: str, engine: Launched) -> None:
        """What `replay calibrate` measures, once."""
        path, begin = self.out / f"{backend}.grid.json", time.monotonic()
        if path.exists() or not engine.preset.prefix_caching:
            return
        try:
            asyncio.run(engine.reset())
            found = measure.measure(self.where(engine), measure.others(engine.preset, profiles.model(self.model)))
            path.write_bytes(msgspec.json.encode(found))
        except Exception as error:
            self.say(f"{backend} grid failed: {error!r}")
            return
        self.say(f"{backend} grid: {time.monotonic() - begin:.0f} s")

    @staticmethod
    def wanted(job: Job, backend: str, done: set[str]) -> bool:
        """Whether a job is one of a backend's and not done."""
        return f"{backend} {job.name}" not in done and (not job.only or backend in job.only)

    def run(self, job: Job, backend: str, engine: Launched) -> None:
        """One run on a running engine; what goes wrong is noted, and the visit goes on."""
        begin = time.monotonic()
        trace = read(str(job.trace)) if isinstance(job.trace, Path) else job.trace
        try:
            asyncio.run(engine.reset())
            with cold_cache(job.cold), Store.create_or_open(str(self.db)) as store:
                runs.execute(trace, self.where(engine), job.settings, store, name=f"{backend} {job.name}")
            # Renamed into place, so that whoever copies it meanwhile gets a whole file.
            shutil.copy(self.db, self.out / "results.part")
            (self.out / "results.part").rename(self.out / "results.duckdb")
        except Exception as error:
            self.say(f"{backend} {job.name} failed: {error!r}; engine: {engine.failure()}")
            (self.out / "logs" / f"{backend}-{job.name}.error").write_text(traceback.format_exc())
            return
        self.say(f"{backend} {job.name}: {time.monotonic() - begin:.0f} s")


async def start(engines: list[Launched]) -> list[BaseException | None]:
    """Starts engines at the same time; null for each that runs, else why not."""
    found = await asyncio.gather(*(engine.__aenter__() for engine in engines), return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else None for answer in found]


async def end(engines: list[Launched]) -> None:
    """Stops engines; those that did not start have stopped."""
    await asyncio.gather(*(engine.__aexit__() for engine in engines))


def wait(out: Path, seconds: float) -> None:
    """Prints progress as it comes."""
    shown = 0
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        text = (out / "progress.txt").read_text() if (out / "progress.txt").exists() else ""
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
        if text.endswith("the visit has ended\n"):
            return
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with the model's config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for results, progress and logs")
    parser.add_argument(
        "--agents", type=Path, default=ROOT / "traces/agents48.jsonl", help="trace of agents (default: %(default)s)"
    )
    parser.add_argument("--levels", type=int, nargs="*", default=[], help="further concurrency levels of the agents")
    parser.add_argument("--backends", nargs="*", default=[], help="these alone, all started together")
    parser.add_argument("--one-by-one", action="store_true", help="start each engine when its turn comes")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="only print the progress of a running visit")
    args = parser.parse_args()
    if args.wait is not None:
        return wait(args.out, args.wait)
    if args.model is None:
        parser.error("--model is needed to begin a visit")
    visit = Visit(args.out, args.model, profiles.model(args.model).kv_bytes_per_token())
    todo = jobs(args.agents, args.levels)
    groups = list(GROUPS)
    if args.backends:
        groups = [tuple(preset for group in GROUPS for preset in group if preset[0] in args.backends)]
    if args.one_by_one:
        groups = [(preset,) for group in groups for preset in group]
    try:
        for group in groups:
            visit.group(group, todo)
    except BaseException as error:
        visit.say(f"stopped: {error!r}")
        raise
    finally:
        visit.say("the visit has ended")
    return None


if __name__ == "__main__":
    main()
