#!/usr/bin/env bash
# Other people's servers by the same ruler: the same prompts, clients and numbers, through bench.py --openai-url.
#
#   PYTHON=.venv/bin/python bench/rivals.sh          llama-cpp-python's server on the embedded model, then ours
#
# RIVALS: folder of a virtual environment for the rival, made on the first run, which compiles llama.cpp (5 to 20
# minutes). OUT: folder of the results. THREADS: of either server. The .gguf holds 4-bit weights: llama.cpp computes
# with them as they are, we with what they stand for in bfloat16, four times the bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
RIVALS=${RIVALS:-$HOME/.cache/ssd-ascend-rivals}
OUT=${OUT:-bench/results}
THREADS=${THREADS:-2}
ASKED=(--kinds chat --prompts 4 --output-len 64 --repeat 2 --clients 1,4)

if [ ! -x "$RIVALS/bin/python" ]; then
  "$PYTHON" -m venv "$RIVALS"
  "$RIVALS/bin/python" -m pip install --quiet --disable-pip-version-check 'llama-cpp-python[server]'
fi
model=$("$PYTHON" -c 'from ssd_ascend import catalogue; print(catalogue.resolve_model("smollm2-135m"))')
port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# without the flag, a new request ends the one under way
"$RIVALS/bin/python" -m llama_cpp.server --model "$model" --host 127.0.0.1 --port "$port" --n_ctx 4096 \
  --n_threads "$THREADS" --interrupt_requests false >"$OUT/rival.log" 2>&1 &
rival=$!
trap 'kill "$rival" 2>/dev/null || true' EXIT
for _ in $(seq 120); do
  "$PYTHON" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/v1/models', timeout=2)" 2>/dev/null && break
  kill -0 "$rival" || { tail -5 "$OUT/rival.log" >&2 && exit 1; }
  sleep 1
done
echo "== llama-cpp-python: ${ASKED[*]}" >&2
"$PYTHON" bench/bench.py --openai-url "http://127.0.0.1:$port" "${ASKED[@]}" --json "$OUT/cpu-rival-llamacpp.json" || true
kill "$rival"
wait "$rival" 2>/dev/null || true
trap - EXIT
rm -f "$OUT/rival.log"
echo "== ours: ${ASKED[*]}" >&2
"$PYTHON" bench/bench.py --model smollm2-135m --device cpu --dtype bfloat16 --threads "$THREADS" "${ASKED[@]}" \
  --json "$OUT/cpu-rival-ours.json"
