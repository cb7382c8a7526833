"""bench/soak.py, bench/proxy.py, bench/train.py and bench/rollout.py run from one command each; the soak's check sees every kind of damage
that it promises to see; the sides of bench/train.py do the same work; bench/rollout.py sees a step that is not exact."""

import argparse
import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch

import loss
import records
from batches import merge_prefix
from conftest import ROOT

sys.path.append(str(ROOT / "bench"))                       # at the end: bench/proxy.py must not hide proxy.py

import train
from soak import check


def run(*argv):
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """A folder of a small soak without faults, and what its clients would say they got (they say it in the asks' own words)."""
    out = tmp_path_factory.mktemp("soak") / "out"
    run("bench/soak.py", "--episodes", 3, "--turns", 4, "--service", 0.01, "--faults", 0, "--leavers", 0, "--pictures", 1, "--out", out)
    logs = {}
    for call in sorted(records.read_calls(out / "calls.jsonl"), key=lambda call: call.turn):
        ask = call.message["content"].removeprefix("answer to ")
        logs.setdefault(call.episode_id, []).append((ask, "received", (call.message["content"], call.token_ids, call.logprobs)))
    assert check(out, logs) == ([], {"calls": 12, "delivered": 12, "received": 12, "pictures": 12, "client gone": 0, "retries": 0,
                                     "delivered to a client that had left": 0})
    return out, logs


def lost(rows):
    return rows[1:]


def doubled(rows):
    return rows + rows[:1]


def doubled_under_a_new_id(rows):
    return rows + [{**rows[0], "call_id": "f" * 32}]


def another_episode(rows):
    other = next(row["episode_id"] for row in rows if row["episode_id"] != rows[0]["episode_id"])
    return [{**rows[0], "episode_id": other}, *rows[1:]]


def replies_exchanged(rows):
    a, b, *rest = rows
    fields = ("message", "token_ids", "logprobs")
    return [{**a, **{k: b[k] for k in fields}}, {**b, **{k: a[k] for k in fields}}, *rest]


def turns_exchanged(rows):
    a, b = (next(row for row in rows if row["episode_id"] == rows[0]["episode_id"] and row["turn"] == turn) for turn in (0, 1))
    return [{**row, "turn": 1 - row["turn"]} if row in (a, b) else row for row in rows]


def another_turn(rows):
    return [{**row, "turn": row["turn"] + 1} for row in rows]


def not_delivered(rows):
    return [{**rows[0], "delivered": False}, *rows[1:]]


@pytest.mark.parametrize("damage", [lost, doubled, doubled_under_a_new_id, another_episode, replies_exchanged, turns_exchanged, another_turn,
                                    not_delivered])
def test_the_soaks_check_sees_a_damaged_record(soaked, tmp_path, damage):
    out, logs = soaked
    shutil.copytree(out, tmp_path / "out")
    rows = damage([row for _, row in records.read_jsonl(out / "calls.jsonl")])
    (tmp_path / "out/calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if damage in (turns_exchanged, another_turn, doubled_under_a_new_id):   # damage that arrivals and calls share: the two files agree with each other
        arrivals = damage([row for _, row in records.read_jsonl(out / "arrivals.jsonl")])
        (tmp_path / "out/arrivals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in arrivals))
    wrong, _ = check(tmp_path / "out", logs)
    assert wrong


def test_the_soaks_check_sees_a_missing_and_a_broken_picture(soaked, tmp_path):
    out, logs = soaked
    shutil.copytree(out, tmp_path / "out")
    missing, broken, *_ = (tmp_path / "out/images").iterdir()
    missing.unlink()
    broken.write_bytes(broken.read_bytes()[:-1])
    wrong, _ = check(tmp_path / "out", logs)
    assert wrong == ["images/ has 11 files, the calls name 12 pictures", f"images/{broken.name}: wrong bytes"]


@pytest.mark.slow
def test_soak_5000_calls_of_100_episodes_before_a_failing_engine_none_lost_doubled_or_misattributed():
    said = run("bench/soak.py")
    assert said.rstrip().endswith("soak: ok")


@pytest.mark.slow
def test_the_overhead_bench_runs():
    said = run("bench/proxy.py", "--clients", 1, 2, "--calls", 2, "--rounds", 2, "--ids", 100, "--token-time", 0.0001)
    rows = [line for line in said.splitlines() if line.startswith(("| plain", "| pictures", "| long"))]
    assert len(rows) == 6 and said.splitlines()[-1].startswith("aim (")


# ---------------------------------------------------------------------------------------------- bench/train.py

@pytest.fixture
def case(tmp_path):
    """Two steps of three episodes of four turns, a checkpoint of the tiny model, and its recorded log-probs."""
    made = train.Case("rl", "tiny", turns=4, rows=12, longest=192, micro_tokens=400, trl_rows=4, steps=1, folder=str(tmp_path))
    train.tiny.make_model(seed=0, **train.MODELS["tiny"]).save_pretrained(tmp_path)
    train.record(made)
    return made


def test_bench_rows_are_a_quarter_targets_and_turns_extend_each_other(case):
    responses, batches = train.make_data(case)
    assert [len(batch) for batch in batches] == [12, 12]
    for batch in batches:
        rows = merge_prefix(responses, batch)
        assert len(rows) == 3 and [len(row.spans) for row in rows] == [4, 4, 4]
        for row in rows:
            assert 45 <= len(row.tokens) <= 192 and 0.2 < sum(last - first for first, last, _ in row.spans) / len(row.tokens) <= 0.25
    apart, batches = train.make_data(dataclasses.replace(case, turns=1))
    assert len(merge_prefix(apart, batches[0])) == 12
    again, _ = train.make_data(case)
    assert all((a == b).all() for a, b in zip(responses.outputs, again.outputs, strict=True))


def test_bench_plain_micro_batches_keep_order_and_budget(case):
    responses, batches = train.make_data(case)
    micros = train.plain_micro_batches(responses, batches[0], 400)
    assert [s for micro in micros for s in micro] == batches[0] and len(micros) > 3
    padded = [len(micro) * max(train.length(responses, s) for s in micro) for micro in micros]
    assert max(padded) <= 400
    for micro, after in zip(micros, micros[1:], strict=False):             # no micro-batch ends early
        assert (len(micro) + 1) * max(train.length(responses, s) for s in (*micro, after[0])) > 400


def test_bench_plain_rl_step_has_the_loss_and_the_gradient_of_ours(case):
    """Padded full logits and merged rows are two ways to one number; log q is far enough from π for every clip to act."""
    responses, batches = train.make_data(case)
    data = train.rl_data(case, responses)
    data["log_q"] = data["log_b"] + 2 * torch.sin(torch.arange(len(data["log_b"])))                  # (N,)
    run, batch = train.our_run(case), batches[1]
    total_u, ours, parts = float(data["u"][batch].sum()), 0.0, []
    assert total_u == 3                                                                             # three episodes
    for micro in run.micro_batches(responses, batch):
        i = micro.index
        part, metric = loss.rl_loss(run.logp(micro), *(data[k][i] for k in ("log_q", "log_b", "advantage", "weight")), total_u)
        run.backward(part)
        ours += float(part.detach())
        parts.append(metric)
    m = loss.merge_metrics(parts)
    assert min(m[k] for k in ("clip_low", "clip_high", "clip_dual", "w_capped")) > 0
    expected = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    run.model.zero_grad()
    plain = 0.0
    for micro in train.plain_micro_batches(responses, batch, case.micro_tokens):
        part = train.plain_loss(run.model, responses, micro, data, total_u)
        part.backward()
        plain += float(part.detach())
    assert abs(ours) > 0.01 and plain == pytest.approx(ours, rel=1e-5)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_bench_compare():
    side = lambda seconds, cpu, losses, level, peak: {"seconds": seconds, "cpu": cpu, "losses": losses, "level": level, "peak": peak}
    row = train.compare(side([1, 3], [2, 2], [4.0, 2.0], 100, 300), side([4, 6], [5, 7], [4.0, 2.1], 200, 700), [100, 300])
    assert (row["ours"], row["other"], row["ratio"]) == (100, 40, 2.5) and (row["least"], row["most"], row["cpu"]) == (2, 4, 3)
    assert row["memory"] == 2.5 and row["difference"] == pytest.approx(0.05)


def test_bench_ends_with_1_when_losses_differ(monkeypatch, capsys):
    def measured(case, threads):
        side = {"seconds": [1.0] * case.steps, "cpu": [1.0] * case.steps, "losses": [6.0] * (case.steps + 1), "level": 1, "peak": 2}
        return {"ours-rl": side, "plain": {**side, "losses": [*side["losses"][:-1], 6.0 * (1 + 2e-4)]}}
    monkeypatch.setattr(train, "measure", measured)
    args = argparse.Namespace(quick=True, without_trl=True, threads=0)
    assert train.bench(args) == 1
    assert capsys.readouterr().err.count("other losses than plain's") == 2
    monkeypatch.setattr(train, "TOLERANCE", 1e-3)
    assert train.bench(args) == 0


def test_bench_refusals_are_one_line(monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(records.BadInput, match="not installed: accelerate; see requirements-bench.txt, or give --without-trl"):
        train.bench(argparse.Namespace(quick=True, without_trl=False, threads=0))
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    with pytest.raises(records.BadInput, match="torch.cuda is not available here"):
        train.gpu(argparse.Namespace(layers=8, lengths=[64], steps=1))


def test_bench_gpu_stack_made_small_trains_on_a_cpu(tmp_path):
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=128,
                 linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, tie_word_embeddings=False)
    config = train.write_stack(tmp_path, 4, 64, shape)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    args, ranks = train.our_args(64), train.trainer.Ranks()
    run = train.trainer.Trainer(train.network.load_model(tmp_path, ranks, args), args, ranks)
    seconds, memory = train.one_length(run, config, 64, 2)
    assert len(seconds) == 2 and memory is None and run.steps == 3
    dense, whole = run.flops([1] * 64, 16), run.flops([64], 16)           # what the MFU column divides
    assert 6 * 16 * 128 * 32 < dense < whole and whole - dense == pytest.approx(6 * 64 * 63 * 2 * 16)


@pytest.mark.slow
def test_the_training_bench_runs():
    said = run("bench/train.py", "--quick", "--without-trl", "--threads", 1)
    rows = [line for line in said.splitlines() if line.startswith("| rl tiny")]
    assert len(rows) == 2 and all(float(line.split("|")[-2]) < 1e-5 for line in rows)


# ---------------------------------------------------------------------------------------------- bench/rollout.py

@pytest.mark.slow
@pytest.mark.libero
def test_the_rollout_bench_runs(tmp_path):
    said = run("bench/rollout.py", "--suites", "libero_object_swap", "--tasks", 4, "--states", 11, "--workers", 1, "--output", tmp_path / "x.json")
    lines = said.splitlines()
    assert lines[2].startswith("| libero_object_swap | 1 |") and lines[2].endswith("| 1 of 1 the same |") and lines[-1].startswith("aim (")
    told = json.loads((tmp_path / "x.json").read_text())
    rollout, = told["rollout"]
    assert rollout["successes"] == rollout["episodes"] == 1 and rollout["invalid"] == 0
    assert sum(rollout["shares"].values()) == pytest.approx(1) and min(rollout["shares"].values()) >= 0
    assert rollout["shares"]["simulation"] > 0.05 and rollout["shares"]["reset"] > 0.05 and rollout["shares"]["generation"] < 0.05


@pytest.mark.libero
def test_the_rollout_bench_sees_a_step_that_is_not_exact():
    import numpy as np

    from harness.libero import Libero
    spec = importlib.util.spec_from_file_location("bench_rollout", ROOT / "bench/rollout.py")        # rollout.py is the stage
    rollout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rollout)
    world = Libero()
    recorder = rollout.Recorder(world)
    world.reset(Libero.tasks("libero_object_swap")[4], 11)
    for k in range(5):
        world._step(np.full(6, 0.1 * k), -1.0)
    final, actions = world.state_hash(), recorder.actions
    assert len(actions) == 15                                                                       # ten of them settle the scene
    for observables, change, same in ((False, 0, True), (True, 0, True), (False, 1e-9, False)):
        recorder.actions = [[actions[0][0] + change, *actions[0][1:]], *actions[1:]]
        assert (rollout.repeat(world, recorder, observables)[1] == final) is same
    world.close()


@pytest.mark.parametrize("options, what", [
    (["--states", "1-10"], "must not use states"), (["--suites", "tabletop_base"], "no LIBERO suite"), (["--tasks", "10"], "valid: 0-9")])
@pytest.mark.libero
def test_the_rollout_bench_refuses(options, what):
    done = subprocess.run([sys.executable, "bench/rollout.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and what in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
