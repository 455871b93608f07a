"""What a preset needs beside the engine: folders, ports, LMCache's server, a remote store."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from replay.backends.launch import lmcache, mooncake
from replay.backends.launch.command import LOOPBACK, Command, Services, free_port
from replay.backends.launch.probe import Probe, executable
from replay.backends.preset import Preset
from replay.errors import ReplayError

GIB = 2**30
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


def with_disk_folder(preset: Preset, scratch: Path) -> Preset:
    """The preset with its disk tier's path set: the user's folder, else one in `scratch`, removed with it.

    Raises:
        ReplayError: the disk tier is larger than what its file system has free.
    """
    disk = preset.tiers.disk
    if disk is None:
        return preset
    path = Path(disk.path).expanduser().absolute() if disk.path else scratch / "disk"
    path.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path).free / GIB
    kept = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / GIB
    each = copies(preset, "disk")
    if disk.gib * each > free + kept:
        fits = max(1, int(free * 0.9 / each))
        times = f" for each of {each} instances" if each > 1 else ""
        raise ReplayError(
            f"--target launch: tiers.disk.gib is {disk.gib:g}{times}, {path} has {free:.0f} GiB free; "
            f"--set tiers.disk.gib={fits}, or name another folder with --set tiers.disk.path=DIR"
        )
    disk = msgspec.structs.replace(disk, path=str(path))
    tiers = msgspec.structs.replace(preset.tiers, disk=disk)
    return msgspec.structs.replace(preset, tiers=tiers)


def copies(preset: Preset, tier: str) -> int:
    """How many of a lower tier there are: each instance has its own, or all share the one of a server."""
    return 1 if tier == "remote" or preset.connector == "lmcache-mp" else preset.instances


def of_instance(preset: Preset, instance: int) -> Preset:
    """The preset with the disk tier of one of several instances in a folder of its own: none evicts another's files."""
    disk = preset.tiers.disk
    if disk is None or disk.path is None or copies(preset, "disk") == 1:
        return preset
    folder = Path(disk.path) / f"instance-{instance}"
    folder.mkdir(exist_ok=True)
    disk = msgspec.structs.replace(disk, path=str(folder))
    return msgspec.structs.replace(preset, tiers=msgspec.structs.replace(preset.tiers, disk=disk))


def plan(preset: Preset, probe: Probe, scratch: Path, recorder: Path | None) -> tuple[Services, list[Command]]:
    """The services of a preset and the commands that start them, in order.

    Raises:
        ReplayError: a program is missing, or the preset contradicts itself.
    """
    commands: list[Command] = []
    remote = _remote(preset, probe, scratch, commands) if preset.tiers.remote else None
    services = Services(scratch, remote=remote)
    if preset.connector == "lmcache-mp":
        services = Services(scratch, free_port(), free_port(), remote)
        commands.append(lmcache.server(preset, probe, services, recorder))
    return services, commands


def _remote(preset: Preset, probe: Probe, scratch: Path, commands: list[Command]) -> str:
    tier = preset.tiers.remote
    assert tier is not None
    if tier.url:
        return tier.url
    port = free_port()
    if preset.connector == "mooncake":
        commands.append(mooncake.master(probe, port, tier))
        return f"mooncakestore://{LOOPBACK}:{port}"
    program = executable("redis-server", probe.python) or executable("valkey-server", probe.python)
    if program is None:
        raise ReplayError(
            f"--target launch: backend {preset.name} needs redis-server for its remote tier; install it or "
            "name a running one with --set tiers.remote.url=redis://HOST:PORT"
        )
    argv = [
        program,
        "--bind",
        LOOPBACK,
        "--port",
        str(port),
        "--dir",
        str(scratch),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    argv += ["--maxmemory", str(int(tier.gib * GIB)), "--maxmemory-policy", "allkeys-lru"]
    commands.append(Command("redis", argv, {}, f"tcp://{LOOPBACK}:{port}"))
    return f"redis://{LOOPBACK}:{port}"


def filesystem(path: Path) -> str | None:
    """Type of the file system that holds a folder, e.g. ``ext4``; null where the system does not tell."""
    try:
        rows = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    path = path.resolve()
    holding = [(len(point), kind) for point, kind in rows if path.is_relative_to(point)]
    return max(holding)[1] if holding else None


def in_memory(path: Path) -> bool:
    """True for a folder that is no disk at all (tmpfs)."""
    return filesystem(path) in _MEMORY_FILESYSTEMS
