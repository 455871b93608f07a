"""Writes the JSON Schemas in schemas/ from the types that read those files."""

from __future__ import annotations

import json
from pathlib import Path

from replay.backends import preset
from replay.engine import profiles
from replay.trace import format as trace_format

SCHEMAS = {
    "trace.schema.json": trace_format.json_schema,
    "backend.schema.json": preset.json_schema,
    "profile.schema.json": profiles.json_schema,
}

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent.parent / "schemas"
    for name, make in SCHEMAS.items():
        (folder / name).write_text(json.dumps(make(), indent=2) + "\n")
