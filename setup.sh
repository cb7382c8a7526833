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
case " $* " in *" libero "*)      # OpenCV (robosuite imports it) and pictures need these libraries of the system
  if ! ldconfig -p | grep -q libGL.so.1 || ! ldconfig -p | grep -q libEGL.so.1 || ! ldconfig -p | grep -q libgthread-2.0; then
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || {
      echo "error: LIBERO-PRO needs libgl1 libglib2.0-0 libegl1 libgles2 libgl1-mesa-dri (Debian names): install them, then again" >&2; exit 2; }
    apt-get update -qq && apt-get install -qq -y libgl1 libglib2.0-0 libegl1 libgles2 libgl1-mesa-dri > /dev/null
  fi ;;
esac
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
