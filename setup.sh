# Makes .venv with what this project needs; sourced by run.sh, test.sh and .ci/run.   . ./setup.sh [dev] [libero]
# Python 3.11; a finished installation leaves a stamp, so that a second call costs nothing.
PY=${PYTHON:-python3.11}
command -v "$PY" > /dev/null || { echo "error: $PY not found: install Python 3.11, or set PYTHON" >&2; exit 2; }
[ -x .venv/bin/python ] || "$PY" -m venv .venv
for extra in "" "$@"; do
  file=requirements${extra:+-$extra}.txt
  stamp=.venv/.installed-$file
  if ! cmp -s "$file" "$stamp"; then
    echo "setup: installing $file"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file"
    cp "$file" "$stamp"
  fi
done
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
