"""`replay doctor`: what is found, what is missing, and how fast a folder's disk is."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from replay.backends import disk
from replay.backends.disk import Disk, measure
from replay.backends.doctor import Check, as_json, doctor, render
from replay.errors import ReplayError

CHUNK = 1 << 20


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def measured(**changes) -> Disk:
    figures = Disk(
        path="/data",
        filesystem="ext4",
        free_gib=100.0,
        raw_gbps=2.0,
        direct=True,
        cache_gbps=1.5,
        write_gbps=0.5,
        chunk_bytes=36 << 20,
    )
    return replace(figures, **changes)


def test_an_engine_of_a_known_version_is_ok_and_absent_ones_say_how_to_get_them(fake_vllm):
    found = by_name(doctor())
    assert found["vllm"] == Check("vllm", "ok", "0.32.0+cpu (CPU build)")
    for name in ("sglang", "mooncake"):
        assert found[name].status == "missing"
        assert "pip install" in found[name].advice


def test_an_unknown_version_is_a_warning_that_names_the_known_ones(fake_vllm):
    info = fake_vllm / "vllm-0.32.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
    found = by_name(doctor())["vllm"]
    assert (found.status, found.found) == ("warn", "9.9.9")
    assert "0.32.0" in found.advice


def test_a_broken_engine_python_is_one_line_of_the_report(monkeypatch):
    monkeypatch.setenv("REPLAY_ENGINE_PYTHON", "/nowhere/python")
    found = by_name(doctor())
    assert found["engine python"].status == "missing"
    assert "REPLAY_ENGINE_PYTHON" in found["engine python"].advice
    assert {"tokenizers", "gpu", "memory"} <= set(found)


def test_an_engine_python_that_was_named_and_does_not_run_is_an_error():
    with pytest.raises(ReplayError, match=r"^--python /nowhere/python: does not run") as caught:
        doctor(python="/nowhere/python")
    assert "REPLAY_ENGINE_PYTHON" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_an_error_and_not_made(tmp_path):
    with pytest.raises(ReplayError, match="no such folder"):
        doctor(disk=tmp_path / "mnt" / "nvme")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    found = measure(tmp_path, chunk_bytes=CHUNK, total_bytes=8 * CHUNK)
    assert found.raw_gbps > 0
    assert found.cache_gbps > 0
    assert found.write_gbps > 0
    assert found.free_gib > 0
    assert not list(tmp_path.iterdir())


def test_every_byte_of_the_files_is_read(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(disk, "_rate", lambda files, threads, how: read.append(sum(map(how, files))) or 1.0)
    measure(tmp_path, chunk_bytes=CHUNK + 512, total_bytes=5 * CHUNK)
    assert read == [4 * (CHUNK + 512)] * 2


def test_memory_is_not_mistaken_for_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.backends.doctor.measure", lambda *a, **k: measured(filesystem="tmpfs"))
    found = by_name(doctor(disk=tmp_path))["disk"]
    assert found.status == "warn"
    assert "memory, not a disk" in found.advice


def test_a_software_path_that_wastes_the_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("replay.backends.doctor.measure", lambda *a, **k: measured(raw_gbps=6.0))
    found = by_name(doctor(disk=tmp_path))["disk as a cache"]
    assert found.status == "warn"
    assert "1.50 GB/s (25% of raw)" in found.found


@pytest.mark.parametrize(("gbps", "status"), [(0.5, "warn"), (8.0, "ok")])
def test_a_disk_slower_than_computing_again_is_said(tmp_path, monkeypatch, gbps, status):
    monkeypatch.setattr("replay.backends.doctor.measure", lambda *a, **k: measured(cache_gbps=gbps, raw_gbps=gbps))
    found = by_name(doctor(disk=tmp_path, model="qwen3-8b", gpu="h200"))["disk tier"]
    assert found.status == status
    assert f"16,000 of them load in {16_000 * 147_456 / gbps / 1e9:.2f} s" in found.found


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ReplayError, match=r"file: cannot be written .* name another folder"):
        measure(tmp_path / "file")


def test_the_report_fits_80_columns_and_is_json(fake_vllm):
    checks = doctor()
    out = io.StringIO()
    Console(file=out, width=80).print(render(checks))
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    assert "-> pip install sglang" in out.getvalue()
    assert json.loads(json.dumps(as_json(checks)))[0]["name"] == "python"
