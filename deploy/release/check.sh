#!/usr/bin/env bash
# Builds all distributions into build/dist, installs the wheel and the sdist of the project in empty environments, and
# trains one step in each.
#
# Without arguments, pip downloads what the distributions need, as for a user. With --borrow, the environments see the
# packages of the Python that runs this script instead, which takes seconds and no network. PYTHON is that Python.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
borrow=${1:-}
dist=build/dist
rm -rf "$dist" build/empty
"$PYTHON" -m hatchling build -d "$PWD/$dist"
(cd lab && "$PYTHON" -m hatchling build -d "../$dist") # the extra "lab" needs it

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
for file in "$dist/backhaul-$version-py3-none-any.whl" "$dist/backhaul-$version.tar.gz"; do
    rm -rf build/empty
    options=()
    if [ "$borrow" = --borrow ]; then
        "$PYTHON" -m venv --without-pip build/empty
        packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        own=$(build/empty/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        for package in "$packages"/*; do
            case $(basename "$package") in
                *backhaul* | __pycache__) ;; # the project itself must come from the file
                *) ln -s "$package" "$own/" ;;
            esac
        done
        options=(--no-deps --no-index --no-build-isolation)
    else
        "$PYTHON" -m venv build/empty
    fi
    build/empty/bin/python -m pip install --disable-pip-version-check "${options[@]}" "$file[server]"

    # From another folder, so that nothing is imported from this one.
    bin=$PWD/build/empty/bin
    (
        cd build/empty
        "$bin/backhaul" --version | grep --fixed-strings "$version"
        "$bin/backhaul" worker --help > /dev/null
        "$bin/python" - <<'PROGRAM'
import sys

import torch

import backhaul

assert backhaul.__file__.startswith(sys.prefix), backhaul.__file__
layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
with backhaul.connect() as session:
    session.checkpoint(layer, torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert session.report().remote == 1, session.report()
PROGRAM
    )
    echo "$file: one step was trained"
done
rm -rf build/empty
