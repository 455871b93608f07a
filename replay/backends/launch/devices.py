"""Which GPUs each instance of an engine gets."""

from __future__ import annotations

import os

from replay.backends.launch.probe import Probe
from replay.backends.preset import Preset
from replay.errors import ReplayError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def check(preset: Preset, probe: Probe) -> None:
    """Refuses a preset that needs more GPUs than there are.

    Raises:
        ReplayError: says how many, and what to lower.
    """
    wanted, there = preset.instances * preset.tensor_parallel, len(_visible(preset, probe))
    if probe.device == "cpu" or there >= wanted:
        return
    each = f" of {preset.tensor_parallel} GPUs" if preset.tensor_parallel > 1 else ""
    whose = f"{_VISIBLE} names" if _named(preset) is not None else "this machine has"
    fits = there // preset.tensor_parallel
    advice = f"instances={fits}" if fits else f"tensor_parallel={max(1, there)}"
    raise ReplayError(
        f"--target launch: backend {preset.name} needs {wanted} GPUs ({preset.instances} "
        f"instance{'s' if preset.instances > 1 else ''}{each}), {whose} {there}; lower it with --set {advice}"
    )


def environment(preset: Preset, probe: Probe, instance: int) -> dict[str, str]:
    """`tensor_parallel` GPUs of its own for each of several instances, out of those that the user lets us see.

    Empty for a single instance, which gets what an engine started by hand would get, and on the CPU.
    """
    if probe.device == "cpu" or preset.instances == 1:
        return {}
    first = instance * preset.tensor_parallel
    return {_VISIBLE: ",".join(_visible(preset, probe)[first : first + preset.tensor_parallel])}


def _visible(preset: Preset, probe: Probe) -> list[str]:
    """Numbers or UUIDs of the GPUs that an engine may use."""
    named = _named(preset)
    if named is None:
        return [str(number) for number in range(len(probe.gpus))]
    return [name.strip() for name in named.split(",") if name.strip()]


def _named(preset: Preset) -> str | None:
    return preset.launch.env.get(_VISIBLE, os.environ.get(_VISIBLE))
