#!/bin/sh
# Makes small wrong changes to a module, one at a time, in a copy of the checkout, and prints those that tests miss.
# Usage: run.sh MODULE TEST... (paths from the root of the checkout). Called by `make mutants`.
set -eu
module=$1
shift
root=$PWD
copy=$root/build/mutants/checkout
rm -rf "$copy"
mkdir -p "$copy"
git ls-files -z | xargs -0 cp --parents --no-dereference --target-directory="$copy"
if [ -f kernels/cpu/libpenstock_cpu.so ]; then cp kernels/cpu/libpenstock_cpu.so "$copy/kernels/cpu/"; fi
cd "$copy"
cat >cosmic-ray.toml <<END
[cosmic-ray]
module-path = "$module"
timeout = 120.0
excluded-modules = []
test-command = "env PYTHONPATH=$copy/.typing PYTHONDONTWRITEBYTECODE=1 $root/.venv/bin/pytest -x -q --assert=plain -p no:cacheprovider --hypothesis-seed=0 -m 'not gpu and not slow' $*"

[cosmic-ray.distributor]
name = "local"
END
PATH=$root/build/mutants/bin:$PATH
cosmic-ray init cosmic-ray.toml session.sqlite
cosmic-ray baseline cosmic-ray.toml
cosmic-ray exec cosmic-ray.toml session.sqlite
cr-report --surviving-only --show-diff session.sqlite
