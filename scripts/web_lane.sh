#!/bin/sh
# The lane of real clients: the page in headless Chromium, and the clients people have, against live servers.
#
#   scripts/web_lane.sh [extra arguments of pytest]
#   knobs: VENV=.venv-web  BASE=.venv  CHROMIUM=/usr/bin/chromium
#
# The environment is a thin one over BASE (which `make setup` makes), so that these packages reach nobody who does not
# ask for them. What a machine lacks (Chromium: `apt-get install chromium`; Node.js) is skipped, with one line each.
set -eu
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv-web}"
BASE="${BASE:-.venv}"
STAMP="$VENV/.ready-$(cat "$0" requirements/web.txt | cksum | cut -d' ' -f1)"

if [ ! -e "$STAMP" ]; then
  "$BASE/bin/python" -m venv "$VENV"
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  base=$("$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements/web.txt
  # last, and behind the lane's own packages on the path: what pip finds there it must not take for its own
  echo "$base" >"$site/base.pth"
  if command -v npm >/dev/null; then
    mkdir -p "$VENV/node"
    npm install --silent --no-fund --no-audit --prefix "$VENV/node" "openai@6.49.0"
  fi
  rm -f "$VENV"/.ready-*
  touch "$STAMP"
fi
exec "$VENV/bin/python" -m pytest -q -m "slow or not slow" tests/web "$@"
