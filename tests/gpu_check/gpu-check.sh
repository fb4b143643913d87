#!/usr/bin/env bash
# What only a GPU can tell about Backhaul, in one run of at most 8 minutes: gradients, waits, overhead, rates, memory.
#
#     bash tests/gpu_check/gpu-check.sh          on a machine with an NVIDIA GPU, Python 3.11 or newer and torch 2.11 or newer
#     bash tests/gpu_check/gpu-check.sh --device cpu --python .venv/bin/python        with the sizes of a toy, without a GPU
#
# It installs nothing: the code is that of the checkout, and packages that Python lacks are taken from the wheels in .whl/ if
# there are any. Results are JSON lines in $OUT/results.jsonl, one for each finding, and the table that is printed last is
# $OUT/summary.txt. $OUT is gpu-results unless it is set. Options: --device cuda|cpu, --repo DIRECTORY, --python PROGRAM,
# --budget SECONDS (470 unless given), --only PART,PART. The status is 1 if a finding failed.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) python=python3 rest=()
while (($#)); do
    case $1 in
        --repo) repo=$(cd "$2" && pwd) ;;
        --python) python=$2 ;;
        --device | --budget | --only) rest+=("$1" "$2") ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
export OUT=${OUT:-$PWD/gpu-results} PYTHONUNBUFFERED=1
mkdir -p "$OUT"
site=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check-XXXXXX")
trap 'rm -rf "$site"' EXIT
if compgen -G "$repo/.whl/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check --target "$site" "$repo"/.whl/*.whl ||
        echo "the wheels in .whl/ could not be installed"
fi
folders=$repo/proto:$repo/runtime:$repo/client:$repo/server:$repo/lab:$repo/tests
# Behind what is there: the simulated device of the tests is loaded from PYTHONPATH, and its sitecustomize.py must stay first.
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$folders:$site
"$python" "$repo/tests/gpu_check/entry_points.py" "$repo" "$site"
"$python" -m gpu_check --repo "$repo" "${rest[@]}"
