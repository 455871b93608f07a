"""The notes that our LMCache connectors write inside vLLM, with stand-ins for both packages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BACKENDS = Path(__file__).parents[2] / "replay/backends"


class Connector:
    def __init__(self, vllm_config, role, kv_cache_config=None):
        self.calls = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append(num_computed_tokens)
        return 256, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append(num_external_tokens)


class Engine:
    config = SimpleNamespace(chunk_size=256)

    def __init__(self, pins):
        self.pins = pins
        self.lookup_pins = {}

    def lookup(self, hashes=None, lookup_id=None, pin=False):
        if self.pins and pin:
            self.lookup_pins[lookup_id] = self.pins
        return 256 * sum(map(len, self.pins.values()))


def load(name):
    spec = importlib.util.spec_from_file_location(name, BACKENDS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiers(monkeypatch, tmp_path):
    """The module, and a function that reads its notes."""
    found = {
        "lmcache.integration.vllm.lmcache_mp_connector": {"LMCacheMPConnector": type("Client", (Connector,), {})},
        "lmcache.v1.cache_engine": {"LMCacheEngine": type("Engine", (Engine,), {})},
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector": {
            "LMCacheConnectorV1": type("InEngine", (Connector,), {})
        },
    }
    for name in found:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, content in found.items():
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    events = tmp_path / "events.jsonl"
    monkeypatch.setenv("REPLAY_LMCACHE_EVENTS", str(events))
    module = load("lmcache_tiers")
    monkeypatch.setitem(sys.modules, "lmcache_tiers", module)
    module.ServerClient = load("lmcache_client").ServerClient
    module.notes = lambda: [
        {key: value for key, value in json.loads(line).items() if key not in ("time", "event")}
        for line in (events.read_text().splitlines() if events.exists() else [])
    ]
    return module


def test_a_lookup_is_noted_by_backend(tiers):
    engine = tiers.LMCacheEngine({"LocalCPUBackend": [1, 2, 3], "LocalDiskBackend": [4, 5]})
    assert engine.lookup(hashes=[], lookup_id="cmpl-a", pin=True) == 1280
    assert tiers.notes() == [{"session_id": "cmpl-a", "hit_tokens": 1280, "l1_hit_tokens": 768, "l2_hit_tokens": 512}]


def test_a_lookup_without_hits_is_noted_too(tiers):
    tiers.LMCacheEngine({}).lookup(hashes=[], lookup_id="cmpl-a", pin=True)
    assert tiers.notes() == [{"session_id": "cmpl-a", "hit_tokens": 0, "l1_hit_tokens": 0, "l2_hit_tokens": 0}]


def test_lookups_of_no_request_are_not_noted(tiers):
    tiers.LMCacheEngine({"LocalCPUBackend": [1]}).lookup(hashes=[])
    assert tiers.notes() == []


@pytest.mark.parametrize("name", ["InProcess", "ServerClient"])
def test_what_vllm_had_itself_is_noted_once_when_the_request_is_scheduled(tiers, name):
    connector = getattr(tiers, name)("config", "role", None)
    request = SimpleNamespace(request_id="cmpl-a")
    # Asked again while it waits: by then another request's blocks may have become hits.
    assert connector.get_num_new_matched_tokens(request, 128) == (256, False)
    connector.get_num_new_matched_tokens(request, 512)
    connector.update_state_after_alloc(request, [], 256)
    connector.update_state_after_alloc(request, [], 0)
    assert tiers.notes() == [{"session_id": "cmpl-a", "engine_tokens": 512, "load_tokens": 256}]
    assert connector.calls == [128, 512, 256, 0]
