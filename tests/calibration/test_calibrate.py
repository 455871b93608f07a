"""What `replay calibrate` measures on the model is what the model was given."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from replay.backends.connect import Where
from replay.backends.preset import Preset, load
from replay.calibration import measure
from replay.cli import main
from replay.engine import profiles
from replay.errors import ReplayError

MODEL, GPU = profiles.model("qwen3-8b"), profiles.gpu("h200")


def calibrated(preset: Preset, base: profiles.GpuProfile) -> tuple[profiles.GpuProfile, list[measure.Residual]]:
    where = Where(preset, model="qwen3-8b", gpu="h200")
    grid = measure.measure(where, measure.others(preset, MODEL))
    return measure.fit_profile(grid, MODEL, base, preset, "mine")


def test_the_steps_of_a_known_gpu_are_recovered() -> None:
    profile, residuals = calibrated(load("vllm"), profiles.gpu("h100"))
    assert profile.source == "measured"
    for field, truth in msgspec.structs.asdict(GPU.fits["qwen3-8b"]).items():
        assert getattr(profile.fits["qwen3-8b"], field) == pytest.approx(truth, rel=0.05), field
    assert max(abs(each.fitted / each.measured - 1) for each in residuals) < 0.01


@pytest.mark.parametrize("sizes", [["tiers.cpu.gib=60"]])
@pytest.mark.parametrize("backend", ["lmcache-cpu", "vllm-offload-cpu"])
def test_a_tiers_link_is_recovered_and_the_steps_stay(backend: str, sizes: list[str]) -> None:
    preset = load(backend, ["tiers.gpu.tokens=64000", *sizes])
    blank = profiles.Link(load_gbps=1, store_gbps=1, blocking_load=False, blocking_store=backend == "lmcache-cpu")
    base = msgspec.structs.replace(GPU, links={"default": {"cpu": blank}})
    profile, _ = calibrated(preset, base)
    truth, found = GPU.links[preset.connector]["cpu"], profile.links[preset.connector]["cpu"]
    nbytes, chunks = 8192 * MODEL.kv_bytes_per_token(), 8192 // (preset.chunk_tokens or 16)
    assert found.load_seconds(nbytes, chunks) == pytest.approx(truth.load_seconds(nbytes, chunks), rel=0.06)
    if found.blocking_store:
        assert found.store_seconds(nbytes, chunks) == pytest.approx(truth.store_seconds(nbytes, chunks), rel=0.05)
    assert profile.fits == GPU.fits


def test_the_bundled_profile_of_a_visit_is_what_its_grids_give() -> None:
    made, folder = GPU, Path(__file__).parent / "h200-dual"
    for backend, sizes in (
        ("vllm", []),
        ("vllm-offload-cpu", ["tiers.cpu.gib=60"]),
        ("lmcache-cpu", ["tiers.cpu.gib=60"]),
        ("lmcache-disk", ["tiers.cpu.gib=12", "tiers.disk.gib=45"]),
    ):
        grid = msgspec.json.decode((folder / f"{backend}.json").read_bytes(), type=measure.Grid)
        made, _ = measure.fit_profile(grid, MODEL, made, load(backend, ["tiers.gpu.tokens=64000", *sizes]), "h200-dual")
    bundled = measure.plain(profiles.gpu("h200-dual"))
    assert {key: measure.plain(made)[key] for key in ("fits", "links")} == {
        key: bundled[key] for key in ("fits", "links")
    }


def test_a_power_cap_is_recovered() -> None:
    steps = msgspec.structs.replace(GPU.fits["qwen3-8b"], power_cap=1.2)
    assert measure.cool_tokens(steps, 8192) == 8192 and measure.cool_tokens(steps, 2048) == 8192
    profile, _ = calibrated(load("vllm"), profiles.gpu("h100"))
    found = profile.fits["qwen3-8b"].power_cap - 1
    assert found == pytest.approx(GPU.fits["qwen3-8b"].power_cap - 1, rel=0.1)


def test_tiers_are_refused_where_the_gpu_is_unknown() -> None:
    preset = load("lmcache-cpu", ["tiers.gpu.tokens=64000", "tiers.cpu.gib=60"])
    bare = msgspec.structs.replace(GPU, fits={})
    with pytest.raises(ReplayError, match="has no measured steps of qwen3-8b"):
        measure.fit_profile(measure.Grid(), MODEL, bare, preset, "mine")
    with pytest.raises(ReplayError, match=r"tiers\.gpu\.tokens"):
        measure.others(load("lmcache-cpu"), MODEL)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of ``replay serve`` as a process of its own."""
    command = [sys.executable, "-m", "replay", "serve", "--backend", "vllm", "--model", "qwen3-8b", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if word.startswith("http")).rstrip(":")
        finally:
            process.terminate()


def test_the_command_writes_a_profile_of_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"CACHED": (0, 8192), "NEW": (32, 1024, 2048, 4096, 8192), "BATCHES": ((1, 1024), (8, 1024), (8, 4096))}
    for name, value in {**small, "REPEATS": 2, "SMALLS": 4, "STEPS": 32}.items():
        monkeypatch.setattr(measure, name, value)
    path = tmp_path / "mine.yaml"
    with served() as url:
        done = CliRunner().invoke(main, ["calibrate", "--target", url, "--profile", "qwen3-8b", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "Residuals of the fit" in done.output
    profile = profiles.gpu(str(path))
    assert yaml.safe_load(path.read_text())["source"] == "measured"
    truth, found = GPU.fits["qwen3-8b"], profile.fits["qwen3-8b"]
    assert found.token_s == pytest.approx(truth.token_s, rel=0.15)
    assert found.weights_s == pytest.approx(truth.weights_s, rel=0.15)
    lone = truth.overhead_s + truth.graph_launch_s
    assert found.overhead_s + found.graph_launch_s == pytest.approx(lone, rel=0.3)
