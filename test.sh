#!/usr/bin/env bash
# Sets up everything (LIBERO-PRO too) and runs the tests. Arguments go to pytest:   bash test.sh -k loss
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh dev libero
ruff check .
exec python -m pytest -q "$@"
