#!/usr/bin/env bash
# What only a GPU can show, in one go: the GPU tests, captures, the headline table, tuning.
#
#     bash bench/device_check.sh [FOLDER]
#
# Leaves report.md, headline.json, parameters.json, a log of each step in FOLDER (default: $OUT,
# else bench-records/device-check). Needs torch, triton, transformers, pytest; downloads nothing.
# With a GPU it takes at most eight minutes: each step has a limit, the last one gets what is left.
# Without one the same steps run at tiny sizes in Triton's interpreter, to show that they work.
#
#     PYTHON   the interpreter (default: python3)
#
# The exit status is 1 when a step failed or ran out of its time.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
FOLDER=${1:-${OUT:-bench-records/device-check}}
DEADLINE=460 # seconds since the start
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$FOLDER"
rm -f "$FOLDER"/{report.md,headline.json,parameters.json,*.log}

# Without the project's settings, which ask for a pytest that may not be there.
PYTEST=("$PYTHON" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --import-mode importlib
    --disable-warnings)
# N processes, each with its share of the tests.
SHARED='
seq 0 $(($1 - 1)) | xargs -P "$1" -I{} "${@:2}" --share "{}/$1"
'
VERIFIED='
import sys
from pathlib import Path
from bench.record import load
cells = [cell for cell in load(Path(sys.argv[1])).cells if cell.impl.startswith("cmoe:")]
for cell in cells:
    print(cell.shape, "T =", cell.tokens, cell.impl, cell.error or f"error {cell.relative_error:.2g}")
sys.exit(not cells or any(cell.error for cell in cells))
'
if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    WHERE=gpu
    ENVIRONMENT=(env CXX=none) # building the CPU kernels would take the time of a table
    WORKERS=12 # compiling is most of what the tests do
    TESTS=(tests/custom_ops/triton -k "not aot and not interpreter")
    CAPTURES=(tests/test_cudagraph.py tests/test_overlap.py tests/bench -m gpu)
    CUDAGRAPH=(--tokens 1 64 4096 --impl cmoe:auto)
    HEADLINE=(headline --seconds 0.25)
    TUNE=(--shape qwen3-30b-a3b)
else
    WHERE=interpreter
    ENVIRONMENT=()
    export TRITON_INTERPRET=1
    WORKERS=2
    TESTS=(tests/custom_ops/triton/test_route.py -k "ties or mistakes")
    CAPTURES=(tests/test_cudagraph.py tests/test_overlap.py -m gpu)
    CUDAGRAPH=()
    HEADLINE=(--shape E8K2H64I32 --tokens 1 8 --seconds 0.02
        --impl cmoe:triton torch:grouped_mm transformers:grouped_mm control:dense)
    TUNE=(--shape E4K2H32I16 --tokens 1 16)
fi

SUMMARY=()
FAILED=0

# step NAME LIMIT COMMAND...: runs the command for at most LIMIT seconds, into NAME.log.
step() {
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    if ((limit > DEADLINE - SECONDS)); then limit=$((DEADLINE - SECONDS)); fi
    if ((limit < 5)); then
        status="not run: no time was left"
    else
        printf '\n== %s, at most %s s: %s\n' "$name" "$limit" "$*"
        # An interrupt, so that what was measured until then is kept.
        timeout --signal=INT --kill-after=15 "$limit" "$@" 2>&1 | tee "$FOLDER/$name.log"
        case ${PIPESTATUS[0]} in
            0) status=ok ;;
            124 | 130 | 137) status="stopped after its $limit s" ;;
            *) status="failed" ;;
        esac
    fi
    if [[ $status != ok ]]; then FAILED=1; fi
    SUMMARY+=("| $name | $status | $((SECONDS - began)) s |")
}

step environment 60 "${ENVIRONMENT[@]}" "$PYTHON" -c 'from cmoe.cli import main; main(["env"])'
step tests 140 bash -c "$SHARED" shared "$WORKERS" "${PYTEST[@]}" "${TESTS[@]}"
step captures 100 "${PYTEST[@]}" "${CAPTURES[@]}"
step headline 220 "$PYTHON" -m bench run "${HEADLINE[@]}" --out "$FOLDER/headline.json"
step verified 20 "$PYTHON" -c "$VERIFIED" "$FOLDER/headline.json"
step cudagraph 40 "$PYTHON" -m bench cudagraph "${CUDAGRAPH[@]}"
LEFT=$((DEADLINE - SECONDS - 20))
step tune "$((LEFT + 15))" "$PYTHON" -m bench tune "${TUNE[@]}" \
    --seconds "$((LEFT < 110 ? LEFT : 110))" --out "$FOLDER/parameters.json"

{
    printf '# Device check (%s)\n\n' "$WHERE"
    printf '`bash bench/device_check.sh`, %s, commit %s, %s s in all.\n\n' \
        "$(date -u +%Y-%m-%dT%H:%MZ)" "$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)" \
        "$SECONDS"
    printf '| step | | took |\n|---|---|---|\n'
    printf '%s\n' "${SUMMARY[@]}"
    printf '\n## Environment\n\n```\n%s\n```\n' "$(cat "$FOLDER/environment.log")"
    for name in tests captures; do
        printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(tail -n 40 "$FOLDER/$name.log" 2>/dev/null)"
    done
    printf '\n## Headline\n\n'
    if [[ -f $FOLDER/headline.json ]]; then
        "$PYTHON" -m bench report "$FOLDER/headline.json"
    else
        printf 'Nothing was measured.\n'
    fi
    printf '\n## CUDA graphs\n\n%s\n' "$(grep -v '^\[' "$FOLDER/cudagraph.log" 2>/dev/null)"
    printf '\n## Tuning\n\n%s\n' "$(grep -v '^\[' "$FOLDER/tune.log" 2>/dev/null)"
} >"$FOLDER/report.md"
rm -f "$FOLDER"/{environment,verified}.log

printf '\n'
printf '%s\n' "${SUMMARY[@]}" "Report: $FOLDER/report.md"
exit "$FAILED"
