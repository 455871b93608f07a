"""The schema files match the code that reads such files, and what is bundled fits them."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from replay.backends import preset
from replay.resources import data_path
from replay.trace import format as trace_format
from replay.trace.files import open_input

SCHEMAS = {"trace.schema.json": trace_format.json_schema, "backend.schema.json": preset.json_schema}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(data_path("schemas", name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_file_is_what_the_code_generates(name):
    """After a change of the types, run scripts/write_schemas.py."""
    assert json.loads(data_path("schemas", name).read_text()) == SCHEMAS[name]()


@pytest.mark.parametrize("path", sorted(data_path("traces").glob("*.jsonl*")), ids=lambda path: path.name)
def test_every_line_of_a_bundled_trace_fits_the_schema(path):
    validate = validator("trace.schema.json")
    with open_input(path) as lines:
        for line in lines:
            validate.validate(json.loads(line))


@pytest.mark.parametrize("path", sorted(preset.PRESETS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_bundled_preset_fits_the_schema(path):
    validator("backend.schema.json").validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "line",
    [
        {"format": "other", "version": 1, "name": "t"},
        {"session": "s", "turn": -1},
        {"session": "s", "turn": 0, "append": [["a", 0]]},
        {"session": "s", "turn": 0, "pause": -0.5},
        {"session": "s", "turn": 0, "kept": 3},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(line):
    assert not validator("trace.schema.json").is_valid(line)


def test_every_field_of_the_trace_format_is_described():
    for definition in trace_format.json_schema()["$defs"].values():
        assert [name for name, field in definition["properties"].items() if not field.get("description")] == []
