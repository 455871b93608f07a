"""Backend presets: which engine, which connector, how large each cache tier is, how it is launched.

A preset is a YAML file described by `schemas/backend.schema.json`. The bundled ones are in
`replay/backends/presets/`; ``--backend FILE.yaml`` is the user's own, ``--set K=V`` changes a field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from replay.errors import ReplayError, unknown_name
from replay.schema import DIALECT, definitions

PRESETS = Path(__file__).parent / "presets"

Gib = Annotated[float, Meta(gt=0, le=1e9)]
Gbps = Annotated[float, Meta(gt=0, le=1e9)]
Policy = Literal["lru", "fifo", "lfu", "none"]
Write = Literal["through", "through_selective", "back"]
Inclusion = Literal["inclusive", "exclusive"]
Prefetch = Literal["best_effort", "wait_complete", "timeout"]


class GpuTier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """KV cache in GPU memory. Default size: what the GPU has left beside the weights."""

    tokens: Annotated[int, Meta(gt=0)] | None = None
    """Size in tokens; wins over `gib`."""
    gib: Gib | None = None
    """Size in GiB."""


class LowerTier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tier below GPU memory: CPU memory, disk or a remote pool."""

    gib: Gib
    """Size in GiB."""
    path: str | None = None
    """Folder of a disk tier; default: a temporary folder, removed after the run."""
    url: str | None = None
    """Address of a remote tier, where it is already running."""
    policy: Policy | None = None
    """Which entry is evicted first, or ``none``: what finds no room is not stored; null: the engine's default."""
    write: Write | None = None
    """When entries reach the tier: ``through``, when they are computed; ``through_selective``, when a second request
    has used them; ``back``, when the tier above evicts them; null: the engine's default."""
    inclusion: Inclusion | None = None
    """``inclusive``: what is loaded from the tier stays in it; ``exclusive``: it leaves; null: the engine's default."""
    prefetch: Prefetch | None = None
    """How long a waiting request lets SGLang bring KV from the tier to CPU memory before it runs without the rest
    (``--hicache-storage-prefetch-policy``); null: the engine's default."""
    watermark: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Used share at which a periodic loop evicts (LMCache's server, Mooncake's master); null: evict on demand, or
    Mooncake's default."""
    evict_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share that one run of that loop frees."""
    ttl_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds after its last use at which an entry goes; null: never."""
    staging: bool = False
    """True: it holds entries only on their way to and from a lower tier, and serves no hits itself."""
    gbps: Gbps | None = None
    """Bandwidth of loads in GB/s; null: the hardware profile's."""
    store_gbps: Gbps | None = None
    """Bandwidth of stores in GB/s; null: the hardware profile's."""


class Tiers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Cache tiers, fastest first; null: absent."""

    gpu: GpuTier = GpuTier()
    cpu: LowerTier | None = None
    disk: LowerTier | None = None
    remote: LowerTier | None = None


class Launch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How ``--target launch`` starts the engine, beyond what follows from the other fields."""

    args: list[str] = []
    """Further arguments of the engine's server."""
    env: dict[str, str] = {}
    """Environment variables."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A backend configuration. Its `repr` and YAML are what a person would write down."""

    name: str
    summary: str = ""
    """One line for ``replay backends``."""
    engine: Literal["vllm", "sglang", "openai", "anthropic"] = "vllm"
    connector: Literal["none", "offload", "lmcache", "lmcache-mp", "hicache", "mooncake"] = "none"
    """What moves KV between the GPU and lower tiers. ``lmcache`` runs in the engine's process,
    ``lmcache-mp`` is LMCache's server, ``offload`` is vLLM's own, ``hicache`` SGLang's."""
    prefix_caching: bool = True
    """False: nothing is reused (vLLM's ``--no-enable-prefix-caching``)."""
    tiers: Tiers = Tiers()
    block_tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens of a GPU cache block (vLLM's default on CUDA; SGLang's page defaults to 1)."""
    chunk_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of a lower tier's entry; null: one GPU block."""
    max_batched_tokens: Annotated[int, Meta(ge=1)] = 8192
    """Most tokens of one engine step (vLLM's ``max_num_batched_tokens``)."""
    max_seqs: Annotated[int, Meta(ge=1)] = 256
    """Most requests that run at once (vLLM's ``max_num_seqs``)."""
    kv_dtype: Literal["auto", "fp16", "bf16", "fp8"] = "auto"
    """Type of the KV cache; auto: the model's."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    instances: Annotated[int, Meta(ge=1)] = 1
    """Copies of the engine behind a router."""
    router: Literal["round-robin", "session", "prefix"] = "session"
    """How requests reach the instances: in turn, by session, or to the longest known prefix."""
    launch: Launch = Launch()

    def lower(self) -> list[tuple[str, LowerTier]]:
        """The tiers below the GPU that are present, fastest first."""
        tiers = (("cpu", self.tiers.cpu), ("disk", self.tiers.disk), ("remote", self.tiers.remote))
        return [(name, tier) for name, tier in tiers if tier is not None]


def names() -> list[str]:
    """Names of the bundled presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load(name: str, overrides: tuple[str, ...] | list[str] = ()) -> Preset:
    """A bundled preset by name, or a user's file, with ``K=V`` overrides such as ``tiers.disk.gib=500``.

    Raises:
        ReplayError: unknown name, a file that does not fit, or an override of a field that does not exist.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
    if not path.exists():
        if path.parent != PRESETS:
            raise ReplayError(f"{path}: no such backend file; check the path")
        raise unknown_name("backend", name, names(), "'replay backends' lists them")
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ReplayError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ReplayError(f"{path}: a backend file is a mapping; see schemas/backend.schema.json")
    data.setdefault("name", path.stem)
    for override in overrides:
        _set(data, override)
    shown = f"backend {path.stem}" if path.parent == PRESETS else str(path)
    where = " with ".join([shown, *(f"--set {each}" for each in overrides)])
    for unknown in _unknown(data):
        raise ReplayError(f"{where}: there is no field {unknown!r}; {_nearest(unknown)}")
    try:
        preset = msgspec.convert(data, Preset, strict=False)
    except msgspec.ValidationError as error:
        raise ReplayError(f"{where}: {_explained(str(error))}") from None
    return _check(preset, where)


def _set(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ReplayError(f"--set {override}: write it as FIELD=VALUE, e.g. --set tiers.disk.gib=500")
    if not _known(key):
        raise ReplayError(f"--set {override}: there is no field {key!r}; {_nearest(key)}")
    *folders, field = key.split(".")
    for folder in folders:
        inner = data.setdefault(folder, {})
        if not isinstance(inner, dict):
            if inner is not None:
                raise ReplayError(f"--set {override}: {folder!r} holds no fields")
            inner = data[folder] = {}
        data = inner
    try:
        data[field] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ReplayError(f"--set {override}: {value!r} is not a value in YAML; quote it") from None


def _fields(struct: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of all fields of a preset, and their types."""
    for field in msgspec.structs.fields(struct):
        inner = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type)]
        yield path + field.encode_name, field.type
        for kind in inner:
            if issubclass(kind, msgspec.Struct):
                yield from _fields(kind, f"{path}{field.encode_name}.")


def _known(key: str) -> bool:
    """Whether there is such a field, or one that takes names of the user's below it."""
    return any(
        key == path or (get_origin(kind) is dict and key.startswith(f"{path}.")) for path, kind in _fields(Preset)
    )


def _unknown(data: dict[Any, Any], path: str = "") -> Iterator[str]:
    """Dotted paths in a backend file that no field has."""
    for key, value in data.items():
        if not _known(f"{path}{key}"):
            yield f"{path}{key}"
        elif isinstance(value, dict):
            yield from _unknown(value, f"{path}{key}.")


_DECODER = re.compile(r"(?P<what>.*) - at `\$\.(?P<field>.*)`")
_BOUND = re.compile(r"Expected `\w+` (?P<sign>[<>]=?) (?P<bound>\S+)")
_KIND = re.compile(r"Expected `(?P<kind>.*)`, got `(?P<got>.*)`")


def _explained(message: str) -> str:
    """What msgspec says of a value that does not fit, in the words of a backend file."""
    found = _DECODER.fullmatch(message)
    if found is None:
        return message.replace("`", "")
    what, field = found["what"], found["field"]
    if bound := _BOUND.fullmatch(what):
        return f"{field} must be {bound['sign']} {float(bound['bound']):g}"
    if kind := _KIND.fullmatch(what):
        return f"{field} must be {kind['kind'].replace(' | ', ' or ')}, not {kind['got']}"
    if what.startswith("Invalid enum value"):
        return f"{field} must be one of {', '.join(_choices(dict(_fields(Preset)).get(field)))}"
    return f"{field}: {what[:1].lower()}{what[1:].replace('`', '')}"


def _choices(kind: Any) -> list[str]:
    """The values of a `Literal`, also one within a union."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for inner in get_args(kind) for value in _choices(inner)]


def _nearest(key: str) -> str:
    paths = [path for path, _ in _fields(Preset)]
    near = get_close_matches(key, paths, n=1, cutoff=0.6)
    near = near or [path for path in paths if path.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"did you mean {' or '.join(near)}?" if near else "schemas/backend.schema.json has them all"


def _check(preset: Preset, where: str) -> Preset:
    if preset.lower() and preset.connector == "none":
        raise ReplayError(f"{where}: tiers below the GPU need a connector; set connector, e.g. to lmcache")
    if preset.chunk_tokens and preset.chunk_tokens % preset.block_tokens:
        raise ReplayError(f"{where}: chunk_tokens must be a multiple of block_tokens ({preset.block_tokens})")
    return preset


def dump(preset: Preset) -> str:
    """The preset as YAML, defaults left out."""
    return yaml.safe_dump(msgspec.to_builtins(preset), sort_keys=False)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a backend file; `schemas/backend.schema.json` holds it."""
    (preset,), components = definitions(Preset)
    del components["Preset"]["required"]  # `load` names a file without a name after itself
    return {"$schema": DIALECT, "title": "A replay backend preset", **preset, "$defs": components}
