#!/usr/bin/env bash
# Two real models alone and as an ensemble, from a clean clone: `bash examples/quickstart.sh`.
# Makes an environment in .venvs/quickstart and converts the models in the cache (1.6 GB) once; after that it just runs.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/environment.sh

# By default, threads spin while they wait, which is many times slower when anything else runs on the machine.
export OMP_WAIT_POLICY=passive

echo "The first time this makes an environment and converts two models (1.6 GB): some minutes. Later: half a minute."
make_environment .venvs/quickstart
.venvs/quickstart/bin/python examples/demo_models.py --install >/dev/null
exec .venvs/quickstart/bin/python examples/quickstart.py "$@"
