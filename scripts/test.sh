#!/usr/bin/env bash
# Everything that must pass: style, types, tests, and the tests against real engines.
# Sets up .venv and the engines' own environment by itself; needs Python 3.10 to 3.13 and pip.
#   scripts/test.sh              all of it
#   scripts/test.sh -k driver    arguments go to pytest; the real engines are then left out
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --editable '.[test,lint]'
if [ $# -gt 0 ]; then
  exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest
