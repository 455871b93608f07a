"""The command line: parse, call, print. No logic, and no heavy import before a command needs it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from replay import __version__
from replay.cli_output import PAGES, ascii_only, emit, listing, page_options, survive_ascii, write_page
from replay.errors import ReplayError

DEFAULT_DB = "replay.duckdb"
_REFRESH_S = 0.25
PLAN_BACKENDS = ("vllm", "vllm-offload-cpu", "lmcache-cpu", "lmcache-disk")


class _Group(click.Group):
    """Turns our errors into one line on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ReplayError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"replay: {error}", err=True)
            ctx.exit(2)
        except (KeyboardInterrupt, RuntimeError) as error:
            # DuckDB turns Ctrl-C during a query into an error of its own.
            if isinstance(error, RuntimeError) and str(error) != "Query interrupted":
                raise
            click.echo("replay: interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="replay")
@click.option("--debug", is_flag=True, help="Show a traceback instead of one line.")
def main(debug: bool) -> None:
    """Replay LLM agent traces against serving caches: what each tier served, lost and cost.

    \b
    Start here:
      replay run traces/claude_code.jsonl --backend lmcache-disk
    """
    survive_ascii()


def _db(function: Any) -> Any:
    return click.option(
        "--db", default=DEFAULT_DB, envvar="REPLAY_DB", show_default=True, help="Results file (DuckDB)."
    )(function)


def _named(db: str) -> str | None:
    """The results file where a command has to name it; null where every command reads it anyway."""
    return None if db == os.environ.get("REPLAY_DB", DEFAULT_DB) else db


def _machine(function: Any) -> Any:
    function = click.option("--gpu", help="GPU profile of the engine model [default: h200].")(function)
    return click.option("--model", help="Model profile, or a path to a config.json [default: qwen2.5-7b-1m].")(function)


def _trace(path: str) -> Any:
    """Reads a trace. `traces/NAME.jsonl` finds the bundled one where there is no such file."""
    from replay.resources import data_path
    from replay.trace import read

    if not Path(path).exists() and Path(path).parent == Path("traces"):
        try:
            bundled = data_path(*Path(path).parts)
        except FileNotFoundError:
            bundled = None
        if bundled is not None:
            click.echo(f"{path}: not here, using the one that comes with replay", err=True)
            return read(bundled)
    return read(path)


@main.command()
@click.argument("trace")
@click.option("--backend", required=True, help="Preset name or a YAML file; 'replay backends' lists presets.")
@click.option("--target", help="sim, launch, or URL[,URL] of running servers [default: launch with a GPU, else sim].")
@_machine
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override a field, e.g. tiers.disk.gib=500.")
@click.option("--sessions", type=int, help="Families (sessions with sub-agents) to replay; beyond the trace: clones.")
@click.option("--concurrency", type=int, help="Families live at once; the next starts as one ends.")
@click.option("--speed", type=float, default=1.0, help="Divide pauses and start times by this.")
@click.option("--skip-idle", is_flag=True, help="Jump ahead whenever the whole system is idle.")
@click.option("--absolute", is_flag=True, help="Send at recorded times instead of after recorded pauses.")
@click.option("--scale-tokens", type=float, default=1.0, help="Multiply all lengths by this.")
@click.option("--outputs", type=click.Choice(["live", "recorded"]), help="What stands for outputs in later prompts.")
@click.option(
    "--too-long",
    type=click.Choice(["refuse", "drop"]),
    default="refuse",
    show_default=True,
    help="Prompts beyond the model's context, or a simulated GPU tier.",
)
@click.option(
    "--restart-at", type=float, metavar="SECONDS", help="Restart the engine then: what does the disk bring back?"
)
@click.option("--seed", type=int, default=0, help="Seed of token content.")
@click.option("--name", help="Name of the run [default: the backend's].")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Header of every request.")
@click.option("--endpoint", type=click.Choice(["completions", "chat", "messages"]), help="Interface of the server.")
@click.option("--tokenizer", help="Words of chat text: a tiktoken encoding or a path to a tokenizer.json.")
@click.option("--kv-events", metavar="ADDRESS", help="ZMQ address where vLLM publishes its cache events.")
@click.option(
    "--isolation",
    type=click.Choice(["salt", "reset", "none"]),
    default="salt",
    show_default=True,
    help="How a server's cache is kept apart from earlier runs.",
)
@click.option("--workers", type=int, default=1, help="Processes that send, with a URL or --target launch.")
@click.option("--dummy-weights", is_flag=True, help="Launch with random weights: same timing and caching, no download.")
@click.option("--max-model-len", type=int, help="Launch with this longest prompt plus output.")
@click.option("--logs", default="replay-logs", show_default=True, help="Folder for the logs of launched engines.")
@_db
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(
    trace: str,
    backend: str,
    target: str | None,
    model: str | None,
    gpu: str | None,
    overrides: tuple[str, ...],
    db: str,
    name: str | None,
    api_key_env: str | None,
    headers: tuple[str, ...],
    endpoint: str | None,
    tokenizer: str | None,
    kv_events: str | None,
    isolation: str,
    workers: int,
    dummy_weights: bool,
    max_model_len: int | None,
    logs: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay TRACE against a backend, store the run and print its report.

    \b
    Examples:
      replay run traces/claude_code.jsonl --backend lmcache-disk
      replay run my.jsonl --backend lmcache-cpu --set tiers.cpu.gib=200

    Exit code: 1 if the verdict is invalid or a worker died, 2 if something given is wrong, 130 if the run was stopped.
    """
    from replay import runs
    from replay.backends import connect, preset
    from replay.load.schedule import Settings
    from replay.results.render import show
    from replay.results.report import report
    from replay.results.store import Store

    where = connect.Where(
        preset=preset.load(backend, overrides),
        target=target or connect.default_target(),
        model=model,
        gpu=gpu,
        api_key_env=api_key_env,
        headers=connect.parse_headers(headers),
        endpoint=endpoint,
        tokenizer=tokenizer,
        kv_events=kv_events,
        isolation=isolation,
        workers=workers,
        dummy_weights=dummy_weights,
        max_model_len=max_model_len,
        logs=Path(logs),
    )
    options["outputs"] = options["outputs"] or where.default_outputs
    settings = Settings(**options)
    read = _trace(trace)

    progress = _progress(len(read), shown=not as_json, later=True)

    def starts() -> None:
        if not as_json:
            click.echo(where.announce(), err=True)
        progress.start()

    with Store.create_or_open(db) as store:
        with progress as watch:
            run_id = runs.execute(read, where, settings, store, name=name, watch=watch, say=progress.say, starts=starts)
        result = report(store, run_id)
    if as_json:
        click.echo(result.json())
    else:
        show(result, db=_named(db))
    incomplete = result.self_check.get("incomplete")
    if result.run["status"] == "partial" and not incomplete:
        sys.exit(130)
    if result.run["verdict"] == "invalid" or incomplete:
        sys.exit(1)


def _say(line: str) -> None:
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        click.echo(f"\r\x1b[K{line}", err=True, nl=False)


class _progress:
    """A progress bar on stderr where that is a terminal; a context manager that gives the watcher.

    The watcher only notes what it is told. A thread draws it now and then: a run must not wait for a terminal.
    """

    def __init__(self, total: int, shown: bool, later: bool = False):
        """`later`: it appears with `start`, not at once."""
        self.shown = shown and sys.stderr.isatty()
        self.total = total
        self.later = later
        self.latest: tuple[Any, ...] | None = None
        """What the watcher was last told."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._draw, name="progress bar", daemon=True)

    def __enter__(self) -> Any:
        if not self.shown:
            return None
        from replay.cli_progress import bar

        self.bar = bar()
        self.task = self.bar.add_task("replaying", total=self.total)
        if not self.later:
            self.start()
        return self._note

    def start(self) -> None:
        """Shows it."""
        if self.shown:
            self.bar.start()
            self.thread.start()

    def _note(self, *told: Any) -> None:
        self.latest = told

    def _draw(self) -> None:
        while not self.over.wait(_REFRESH_S):
            if self.latest is not None:
                self._update(*self.latest)
            self.bar.refresh()

    def say(self, line: str) -> None:
        """Shows a line in the bar's place, or beside it."""
        if self.shown:
            self.bar.update(self.task, description=line)
        else:
            _say(line)

    def _update(self, progress: Any) -> None:
        self.bar.update(
            self.task,
            completed=progress.done,
            total=progress.total,
            description=f"replaying, {progress.in_flight} in flight, run time {progress.now:,.0f} s",
            until=None if progress.ends is None else time.monotonic() + progress.ends - progress.now,
        )

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            self.over.set()
            if self.thread.is_alive():
                self.thread.join()
            self.bar.stop()


@main.command()
@click.argument("run", required=False)
@_db
@click.option("--watch", is_flag=True, help="Follow a run that is going on until it ends; Ctrl-C leaves.")
@page_options("table", "json", "csv", "md")
def report(run: str | None, db: str, watch: bool, fmt: str, output: str | None, chart: str | None) -> None:
    """Show a run: RUN is an id, the start of one, or a name; the latest if none is given. csv is its rows.

    A run that is going on in another process is shown as far as it got.

    \b
    Examples:
      replay report
      replay report --watch
      replay report lmcache-disk --format html -o report.html
    """
    from replay.results import render
    from replay.results.report import report as read

    if watch:
        _watch(run, db, fmt, output)
        return
    if fmt in PAGES:
        from replay.results.html.run import page

        write_page(page(db, run), fmt, output, chart)
        return
    if fmt == "csv":
        emit(render.csv(db, run), output)
        return
    result = read(db, run)
    if fmt == "table" and output is None:
        render.show(result, db=_named(db))
        return
    texts = {
        "json": lambda: result.json() + "\n",
        "md": lambda: render.markdown(result, ascii_only=output is None and ascii_only(), db=_named(db)),
        "table": lambda: render.text(result, db=_named(db)),
    }
    emit(texts[fmt](), output)


def _watch(run: str | None, db: str, fmt: str, output: str | None) -> None:
    from replay.results import render
    from replay.results.watch import watch

    if fmt != "table" or output is not None:
        raise ReplayError("report --watch shows a run on the terminal: leave out --format and -o")
    try:
        ended = watch(db, run)
    except KeyboardInterrupt:
        click.echo("left; the run goes on", err=True)
        return
    render.show(ended, db=_named(db))


@main.command()
@click.argument("trace")
@click.option(
    "--backend", "backends", multiple=True,
    help=f"Backends to choose from; any but openai [default: {', '.join(PLAN_BACKENDS)}: the caches whose simulation "
    "was compared with the real engine on GPUs].",
)  # fmt: skip
@_machine
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override a field of every backend.")
@click.option("--sessions", type=int, help="Families live at once [default: as the trace has them].")
@click.option("--slo", help="Limit on simulated times to keep, e.g. ttft_p95=2s.")
@click.option("--price", "prices", multiple=True, metavar="K=V", help="gpu_hour, cpu_gib_month, disk_gib_month, ...")
@click.option("--block-tokens", type=int, help="Granularity of the curve [default: the trace's or the backend's].")
@click.option("--partial-blocks", is_flag=True, help="Count a prompt's last, partial block, where the source names it.")
@click.option("--too-long", type=click.Choice(["refuse", "drop"]), default="refuse", show_default=True)
@click.option("--no-predict", is_flag=True, help="Only the curve, an upper bound, and the break-even; no simulation.")
@page_options("table", "json")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def plan(
    trace: str,
    backends: tuple[str, ...],
    model: str | None,
    gpu: str | None,
    overrides: tuple[str, ...],
    sessions: int | None,
    slo: str | None,
    prices: tuple[str, ...],
    block_tokens: int | None,
    partial_blocks: bool,
    too_long: str,
    no_predict: bool,
    fmt: str,
    output: str | None,
    chart: str | None,
    as_json: bool,
) -> None:
    """How much GPU, CPU and disk cache TRACE needs, and whether a slower tier pays at all.

    The curve is an upper bound: LRU without time or memory of running requests. What a backend serves is simulated.

    \b
    Examples:
      replay plan traces/claude_code.jsonl
      replay plan traces/claude_code.jsonl --sessions 32 --slo ttft_p95=2s --format html -o plan.html
    """
    import msgspec

    from replay import runs
    from replay.backends import connect, preset
    from replay.engine import profiles
    from replay.load.schedule import Settings
    from replay.plan import advice, planner
    from replay.plan.render import render

    if sessions is not None and sessions < 1:
        raise ReplayError(f"--sessions must be at least 1, not {sessions}")
    if slo and no_predict:
        raise ReplayError("--slo is a limit on simulated times, and --no-predict simulates nothing: leave one out")
    limit = advice.Slo.parse(slo) if slo else None
    fmt = "json" if as_json else fmt
    if fmt in PAGES:  # what is missing is said before anything is simulated
        from replay.plan.page import page
    read = _trace(trace)
    presets = [preset.load(name, overrides) for name in backends or PLAN_BACKENDS]
    settings = Settings(concurrency=sessions, too_long=too_long)

    def simulate(choice: preset.Preset) -> dict[str, float | None]:
        if fmt != "json":
            _say(f"simulating {choice.name}")
        return runs.predict(read, connect.Where(choice, model=model, gpu=gpu), settings)

    found = planner.plan(
        read,
        profiles.model(model or connect.DEFAULT_MODEL),
        profiles.gpu(gpu or connect.DEFAULT_GPU),
        presets,
        sessions=sessions,
        slo=limit,
        simulate=None if no_predict else simulate,
        known_error=advice.KNOWN_ERROR,
        prices=advice.parse_prices(prices),
        block_tokens=block_tokens,
        partial_blocks=partial_blocks,
    )
    _say("")
    if fmt in PAGES:
        write_page(page(found), fmt, output, chart)
        return
    if fmt == "json":
        emit(msgspec.json.format(msgspec.json.encode(found.as_dict())).decode(), output)
        return
    from replay.results import render as shown

    if output is None:
        shown.emit(render(found, ascii_only=ascii_only()))
    else:
        emit(shown.plain(render(found)), output)


@main.command()
@click.argument("name", required=False)
def backends(name: str | None) -> None:
    """List backend presets, or show one as YAML.

    \b
    Example:
      replay backends lmcache-disk > mine.yaml
    """
    from replay.backends import preset

    if name is not None:
        click.echo(preset.dump(preset.load(name)), nl=False)
        return
    listing([(each, preset.load(each).summary) for each in preset.names()])


@main.command()
@click.argument("name", required=False)
def profiles(name: str | None) -> None:
    """List model and GPU profiles, or show one.

    \b
    Example:
      replay profiles h200
    """
    from replay.engine import profiles as known

    if name is not None:
        click.echo(known.show(name), nl=False)
        return
    for kind in ("models", "gpus"):
        click.echo(f"{kind}:")
        listing([(each, known.summary(kind, each)) for each in known.names(kind)], indent="  ")


@main.command(context_settings={"ignore_unknown_options": True})  # a statement may start with a comment, "--"
@click.argument("statement")
@_db
@click.option("--format", "fmt", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
def sql(statement: str, db: str, fmt: str) -> None:
    """Query the results file, read-only. Views are listed in docs/results.md.

    \b
    Example:
      replay sql "SELECT name, verdict FROM v_runs"
    """
    import shutil

    from replay.results.sql import query

    text = query(db, statement, fmt, width=shutil.get_terminal_size().columns)  # type: ignore[arg-type]
    if fmt == "table" and ascii_only():
        text = text.encode("ascii", "replace").decode()
    emit(text, None)


# They add their commands to `main`, with options defined above.
import replay.cli_calibrate  # noqa: E402
import replay.cli_compare  # noqa: E402
import replay.cli_files  # noqa: E402
import replay.cli_serve  # noqa: E402
import replay.cli_trace  # noqa: E402, F401
