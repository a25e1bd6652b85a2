#!/usr/bin/env bash
# Every figure this project promises of itself on a CPU, measured into bench/results/*.json. About ten minutes on two
# quiet cores; a busy neighbour makes the numbers worthless, and the load average is written into each result.
#
#   PYTHON=.venv/bin/python bench/reference.sh [NAME...]     all, or only the named ones: see the last lines
#
# OUT: folder of the results. TOKENS: tokens of an answer. ROUNDS: of the soak. EAGLE3_HEAD: folder of an EAGLE-3 head
# for SmolLM2; without it the preset smollm2-135m-eagle3 is used where there is one, else that figure is left out.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
OUT=${OUT:-bench/results}
TOKENS=${TOKENS:-64}
ROUNDS=${ROUNDS:-10000}
BENCH=("$PYTHON" bench/bench.py --device cpu)
SMOL=("${BENCH[@]}" --model smollm2-135m --dtype bfloat16 --output-len "$TOKENS")
failed=()

measure() { # NAME FLAGS...: one run, one result; the others go on when it fails
  local name=$1
  shift
  echo "== $name: $*" >&2
  "$@" --json "$OUT/cpu-$name.json" --markdown "$OUT/cpu-$name.md" || failed+=("$name")
}

# decoding against transformers: at least 2.5 times as fast at batch 1 and at batch 8. Short prompts: where the CPU has
# no bf16 instructions, torch reads a prompt of a hundred tokens in seconds, and it is decoding that is compared
transformers() {
  measure transformers "${SMOL[@]}" --batch 1,8 --kinds chat --prompts 8 --repeat 2 --against transformers
}

# the engine's own time (own_ms): at most 1.0 ms a step at batch 1, 2.5 ms at batch 16
overhead() { measure overhead "${SMOL[@]}" --batch 1,16 --prompts 4 --repeat 2; }

# 32 streaming clients, none failing or starving; start to first token at most 25 s; memory at most 1.2 GB
clients() { measure clients "${SMOL[@]}" --clients 1,32 --prompts 8; }

# n-grams on a copying task: at least twice plain decoding
copying() { measure copying "${SMOL[@]}" --modes none,sd:ngram --kinds copy --prompts 8 --repeat 2; }

# n-grams on free text: never below 0.93 of plain decoding
free_text() { measure free_text "${SMOL[@]}" --modes none,sd:ngram --kinds code,chat,maths --prompts 4 --repeat 2; }

# the protocol by itself, with drafts that cost nothing: own_and_wait_ms at most 1.5, hit_answer_ms at most 0.3
protocol() {
  measure protocol "${SMOL[@]}" --modes none,ssd:ngram --kinds copy --prompts 4 --repeat 2 --threads 1 --draft-threads 1
}

# an EAGLE-3 head, five drafts: about 3 tokens a step on chat prompts, and sd at least 1.6 times plain decoding
eagle3() {
  local flags
  if [ -n "${EAGLE3_HEAD:-}" ]; then
    flags=("${SMOL[@]}" --draft "$EAGLE3_HEAD")
  elif [ -f models/smollm2-135m-eagle3.toml ]; then
    flags=("${BENCH[@]}" --model smollm2-135m-eagle3 --dtype bfloat16 --output-len "$TOKENS")
  else
    echo "== eagle3: left out, EAGLE3_HEAD is not set" >&2
    return
  fi
  measure eagle3 "${flags[@]}" --modes none,sd:eagle3 --lookahead 5 --chat --kinds chat,maths --prompts 6 --repeat 2
}

# all three speculators on one pair: the same tokens, hit rate, and where the time goes
speculators() {
  measure speculators "${SMOL[@]}" --modes none,sd:model,ssd:model --draft smollm2-135m --prompts 1 --repeat 1 \
    --threads 1 --draft-threads 1
}

# memory over many rounds: no growth
soak() { measure soak "${BENCH[@]}" --soak "$ROUNDS" --threads 1; }

if [ $# -eq 0 ]; then
  set -- transformers overhead clients copying free_text protocol eagle3 speculators soak
fi
for name in "$@"; do
  case $name in
    transformers | overhead | clients | copying | free_text | protocol | eagle3 | speculators | soak) "$name" ;;
    *) echo "error: no figure '$name'" >&2 && exit 2 ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
