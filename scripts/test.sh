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
# The pages' tests drive a browser, and the real engines have an environment of their own.
if ! command -v chromium >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq chromium >/dev/null
  else
    echo "test.sh: no chromium here, so the tests of the HTML pages in a browser will be skipped; install it" >&2
  fi
fi
PYTHON=$python scripts/engines.sh >/dev/null
export REPLAY_ENGINES=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest
