"""Runs traces against real engines on a GPU host, unattended: results and logs into one folder.

    python scripts/gpu_visit.py --model FOLDER --out visit        does what is not done yet, then ends
    python scripts/gpu_visit.py --out visit --wait 500            prints its progress for 500 s or until it ends

Engines of a group start together, because starting takes longer than asking, and are then asked one after another
while the others idle. `visit/results.duckdb` is complete after each run, so a visit may be cut short and taken up
again. Weights are random: prompts are token ids, and neither time nor caching depends on their values.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from replay import runs
from replay.backends.connect import Where
from replay.backends.launch import Launched
from replay.backends.launch.command import Options
from replay.backends.preset import load
from replay.load.schedule import Settings
from replay.results.store import Store
from replay.trace import Header, Trace, Turn, read
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
PREFILL = [(0, 64), (0, 512), (0, 2048), (0, 8192), (0, 16384), (0, 32768)] + [
    (cached, new) for cached in (4096, 16384, 32768) for new in (64, 512, 4096)
]
DECODE = [(batch, context) for batch in (1, 8, 32) for context in (1024, 8192) if batch * context <= 60_000]


@dataclass(frozen=True)
class Job:
    """A run to do."""

    name: str
    trace: Path | Trace
    settings: Settings
    only: tuple[str, ...] = ()
    """Backends; empty: all."""


def jobs(agents: Path, levels: list[int]) -> list[Job]:
    """What each engine is asked, most wanted first."""
    serial = Settings(outputs="live", concurrency=1)
    found = [
        Job("doc_qa", ROOT / "traces/doc_qa.jsonl", serial),
        Job("evict_and_return", ROOT / "traces/evict_and_return.jsonl", serial),
        # 36 others are 92 GB, more than the CPU tiers of most hosts: of these the first document comes back.
        Job("evict_and_return-8", Trace(*generate("evict-and-return", 8, 0)), serial),
        Job("agents", agents, Settings(outputs="live")),
        Job("calibration", calibration(), serial, only=("vllm",)),
    ]
    return found + [Job(f"agents-c{n}", agents, replace(serial, concurrency=n)) for n in levels]


def calibration() -> Trace:
    """Requests whose times give an engine's step costs: prefills alone, then batches of equal decodes."""
    turns: list[Turn] = []

    def add(session: str, number: int, append: list[tuple[str, int]], output: int, after: list[str]) -> str:
        at = 0.0 if number == 0 else None
        turns.append(Turn(session=session, turn=number, at=at, append=append, output=output, after=after))
        return f"{session}/{number}"

    last: list[str] = []
    for cached, new in PREFILL:
        session = f"prefill-{cached}-{new}"
        number = 0
        if cached:
            last = [add(session, 0, [(f"{session}-cached", cached)], 1, last)]
            number = 1
        last = [add(session, number, [(f"{session}-new", new)], 1, last)]
    for batch, context in DECODE:
        names = [f"decode-{batch}-{context}-{member}" for member in range(batch)]
        last = [add(name, 0, [(name, context)], 128, last) for name in names]
    return Trace(Header(format="replay-trace", version=1, name="calibration", synthetic=True), turns)


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
                for job in wanted[name]:
                    self.run(job, name, engine)
        finally:
            asyncio.run(end(list(engines.values())))

    @staticmethod
    def wanted(job: Job, backend: str, done: set[str]) -> bool:
        """Whether a job is one of a backend's and not done."""
        return f"{backend} {job.name}" not in done and (not job.only or backend in job.only)

    def run(self, job: Job, backend: str, engine: Launched) -> None:
        """One run on a running engine; what goes wrong is noted, and the visit goes on."""
        begin = time.monotonic()
        trace = read(str(job.trace)) if isinstance(job.trace, Path) else job.trace
        where = Where(engine.preset, "launch", self.model, max_model_len=MAX_LEN, dummy_weights=True, engine=engine)
        try:
            asyncio.run(engine.reset())
            with Store.create_or_open(str(self.db)) as store:
                runs.execute(trace, where, job.settings, store, name=f"{backend} {job.name}")
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
    parser.add_argument("--one-by-one", action="store_true", help="start each engine when its turn comes")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="only print the progress of a running visit")
    args = parser.parse_args()
    if args.wait is not None:
        return wait(args.out, args.wait)
    from replay.engine import profiles

    if args.model is None:
        parser.error("--model is needed to begin a visit")
    visit = Visit(args.out, args.model, profiles.model(args.model).kv_bytes_per_token())
    todo = jobs(args.agents, args.levels)
    groups = [(preset,) for group in GROUPS for preset in group] if args.one_by_one else GROUPS
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
