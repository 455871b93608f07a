"""The commands on results files: `export` and `merge`. `replay.cli` imports this module last."""

from __future__ import annotations

import click

from replay.cli import _db, main


@main.command()
@click.argument("runs", nargs=-1)
@click.option("-o", "--output", required=True, help="Folder for the files, made where missing.")
@_db
def export(runs: tuple[str, ...], output: str, db: str) -> None:
    """Write RUNS (all, if none is named) as Parquet: runs, requests, scrapes and cache_events.

    \b
    Examples:
      replay export -o parquet
      replay export vllm lmcache-cpu -o parquet --db team.duckdb
    """
    from replay.results.transfer import export as write
    from replay.results.units import count

    for file, rows in write(db, output, runs).items():
        click.echo(f"{file}: {count(rows, 'row')}", err=True)


@main.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="Results file to add to, made where missing.")
def merge(sources: tuple[str, ...], output: str) -> None:
    """Add the runs of SOURCES, results files of other machines, to one file. Runs that it holds are left out.

    \b
    Example:
      replay merge host-a.duckdb host-b.duckdb -o team.duckdb
    """
    from replay.results.transfer import merge as add
    from replay.results.units import count

    for source, (added, present) in add(output, sources).items():
        click.echo(f"{source}: {count(added, 'run')} added, {present:,} there already", err=True)
