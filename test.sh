#!/usr/bin/env bash
# Sets up everything (LIBERO-PRO too) and runs the tests but those marked slow. Arguments go to pytest:   bash test.sh -k loss
set -euo pipefail
cd "$(dirname "$0")"
. ./setup.sh dev templates libero libero-plus
ruff check .
exec python -m pytest -q "$@"
