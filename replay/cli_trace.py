"""The commands about traces: ``replay inspect``, ``import`` and ``synth``."""

from __future__ import annotations

import click

from replay.cli import _progress, _trace, main


@main.command()
@click.argument("trace")
@click.option("--model", help="Model profile or config.json for sizes in GB [default: qwen2.5-7b-1m].")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def inspect(trace: str, model: str | None, as_json: bool) -> None:
    """Say what TRACE asks of a cache: lengths, pauses, reuse, working set, broken prefixes.

    \b
    Example:
      replay inspect traces/claude_code.jsonl --model qwen3-8b
    """
    import msgspec

    from replay.backends.connect import DEFAULT_MODEL
    from replay.engine import profiles
    from replay.trace.describe import describe, render

    profile = profiles.model(model or DEFAULT_MODEL)
    found = describe(_trace(trace), profile.kv_bytes_per_token())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    from replay.results.render import emit as show

    show(render(found))


@main.command("import")
@click.argument("sources", nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="Trace to write; .gz, .xz and .zst are compressed.")
@click.option("--format", "fmt", help="Format of the sources [default: told from their content].")
@click.option("--keep-text", is_flag=True, help="Keep prompts and outputs, not only their lengths.")
def import_(sources: tuple[str, ...], output: str, fmt: str | None, keep_text: bool) -> None:
    """Turn foreign logs (files or folders) into one trace. Text is dropped unless --keep-text.

    \b
    Examples:
      replay import ~/.claude/projects -o mine.jsonl
      replay import traces/*.json.xz -o all.jsonl
    """
    from replay.results import units
    from replay.trace import Trace, importers, write

    with _files(len(sources)) as progress:
        imported = importers.load(sources, fmt, keep_text, progress)
    trace = Trace(imported.header, imported.turns)
    write(output, imported.header, imported.turns)
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{output}: {units.count(len(trace.sessions), 'session')}, {units.count(len(trace), 'turn')}, "
        f"{units.count(trace.prompt_tokens, 'prompt token')}",
        err=True,
    )


class _files(_progress):
    """Progress over files."""

    def __init__(self, total: int):
        super().__init__(total, shown=True)

    def _update(self, done: int, total: int) -> None:  # type: ignore[override]
        self.bar.update(self.task, completed=done, total=total, description="reading files")


@main.command()
@click.argument("profile")
@click.option("-o", "--output", required=True, help="Trace to write.")
@click.option("--sessions", type=int, required=True, help="Sessions to draw.")
@click.option("--seed", type=int, default=0, show_default=True)
def synth(profile: str, output: str, sessions: int, seed: int) -> None:
    """Draw a synthetic trace: PROFILE is claude-code, doc-qa or evict-and-return.

    \b
    Example:
      replay synth claude-code -o team.jsonl --sessions 200 --seed 1
    """
    from replay.results import units
    from replay.trace import write
    from replay.trace.synth import generate

    header, turns = generate(profile, sessions, seed)
    count = write(output, header, turns)
    click.echo(f"{output}: {units.count(count, 'turn')}", err=True)
