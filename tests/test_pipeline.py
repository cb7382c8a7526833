"""The stages in sequence by their command lines, small: each does its true job on the files of the one before."""

import json
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

import records
from conftest import ROOT

SCRIPTS = ["collect.py", "tiny.py", "rewrite.py", "reuse.py", "sft.py", "rollout.py", "rl.py", "eval.py", "gate.py", "proxy.py", "engine.py"]
WORDS = "red green blue white black yellow mug pan jug jar pot tray bowl box".split()


def script(*argv, code=0):
    result = subprocess.run([sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == code, f"{argv}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name):
    text = script(name, "--help").stdout
    assert "--" in text and len(text) > 600
    if name != "eval.py":                                   # eval.py's options stand under its subcommands
        assert "default:" in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """collect → tiny → rewrite → sft → rollout, with histories edited past a small budget so that the gate and the merge have work."""
    folder = tmp_path_factory.mktemp("run")
    limits = ["--turns", 8, "--max-tokens", 24, "--workers", 1, "--concurrency", 8]
    script("collect.py", "--suites", "tabletop_base", "--inits", "100-101", "--history-budget", 1200, "--output", folder / "teacher",
           "--workers", 1, "--concurrency", 8)
    script("tiny.py", "--calls", folder / "teacher", "--output", folder / "base", "--isolate", *WORDS, "--hidden", 64, "--ff", 128)
    script("rewrite.py", "--teacher", folder / "teacher", "--student", folder / "base", "--output", folder / "rewrite")
    script("sft.py", "--model", folder / "base", "--data", folder / "rewrite" / "sft.jsonl", "--output", folder / "sft", "--max-steps", 2,
           "--global-batch", 16, "--threads", 1)
    script("rollout.py", "--model", folder / "sft", "--suites", "tabletop_base", "--inits", "11-44", "--groups", 3, "--attempts", 2,
           "--history-budget", 500, "--output", folder / "round-1", *limits)
    return folder


def test_the_teacher_succeeds_with_memory_and_the_student_never_sees_it(run):
    episodes = list(records.read_episodes(run / "teacher" / "episodes.jsonl"))
    assert len(episodes) == 40 and sum(e.reward for e in episodes) >= 38
    assert (run / "teacher" / "memory" / "tabletop_base-0.md").read_text().startswith("In the first state")
    rows = [row for _, row in records.read_jsonl(run / "rewrite" / "sft.jsonl")]
    assert len(rows) > 100
    for row in rows:
        seen = json.dumps([row["messages"], row["tools"]])
        assert "memory" not in seen and "In the first state" not in seen


def test_every_stage_left_its_arguments_and_a_manifest(run):
    for name in ("teacher", "base", "rewrite", "sft", "round-1"):
        manifest = records.read_json(run / name / "manifest.json")
        assert manifest["counts"] and manifest["versions"]["torch"], name
    assert records.read_json(run / "sft" / "manifest.json")["counts"]["policy_version"] == records.policy_version(run / "sft")
    assert records.policy_version(run / "sft") != records.policy_version(run / "base")


def test_two_sft_steps_moved_the_weights(run):
    a, b = (load_file(run / name / "model.safetensors") for name in ("base", "sft"))
    assert a.keys() == b.keys() and any((a[k] != b[k]).any() for k in a)


def test_groups_share_their_start_state_and_no_seed(run):
    episodes = list(records.read_episodes(run / "round-1" / "episodes.jsonl"))
    assert len(episodes) == 6 and all(e.valid and e.policy_version == records.policy_version(run / "sft") for e in episodes)
    groups = {}
    for e in episodes:
        groups.setdefault((e.task, e.init), set()).add(e.start_state)
    assert len(groups) == 3 and all(len(states) == 1 for states in groups.values())
    calls = list(records.read_calls(run / "round-1" / "calls.jsonl"))
    assert all(records.call_problem(c) is None for c in calls)
    assert all({k: c.sampling[k] for k in records.TRAIN_SAMPLING} == records.TRAIN_SAMPLING for c in calls)
    assert len({c.sampling["seed"] for c in calls}) == len(calls)


def test_the_gate_raises_no_false_alarm_on_a_whole_run(run):
    out = script("gate.py", "--calls", run / "round-1", "--model", run / "sft", "--output", run / "gate.json").stdout
    assert json.loads((run / "gate.json").read_text())["mismatched"] == 0, out
    changed = run / "changed"
    changed.mkdir()
    lines = (run / "round-1" / "calls.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["messages"][1]["content"] += " "
    (changed / "calls.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    assert script("gate.py", "--calls", changed, "--model", run / "sft", code=3).stdout.count("user") >= 1


def test_rl_takes_the_round_or_says_why_not(run):
    """A two-step planner fails everything: all groups equal, so no new checkpoint, exit 0, and it says so."""
    result = script("rl.py", "--rollouts", run / "round-1", "--model", run / "sft", "--output", run / "rl-none", "--threads", 1)
    assert not (run / "rl-none" / "model.safetensors").exists() and "equal" in result.stdout
    # The same episodes with one success in each group: a real update from real recorded calls.
    mixed = run / "mixed"
    mixed.mkdir()
    (mixed / "calls.jsonl").write_bytes((run / "round-1" / "calls.jsonl").read_bytes())
    with records.JsonlWriter(mixed / "episodes.jsonl") as writer:
        for e in records.read_episodes(run / "round-1" / "episodes.jsonl"):
            e.reward = float(e.attempt)
            writer.append(records.to_line(e))
    script("rl.py", "--rollouts", mixed, "--model", run / "sft", "--output", run / "rl-1", "--steps-per-round", 2, "--lr", 1e-3, "--threads", 1)
    steps = [row for _, row in records.read_jsonl(run / "rl-1" / "metrics.jsonl")]
    assert len(steps) == 2 and records.policy_version(run / "rl-1") != records.policy_version(run / "sft")
    # a checkpoint that did not play the round is refused
    assert "policy" in script("rl.py", "--rollouts", mixed, "--model", run / "base", "--output", run / "rl-x", code=2).stderr


def test_eval_pairs_and_compares(run):
    for who in ("base", "sft"):
        script("eval.py", "run", "--model", run / who, "--suites", "tabletop_base", "--inits", "1", "--limit", 4, "--sampling", "train",
               "--turns", 3, "--max-tokens", 8, "--workers", 1, "--output", run / f"eval-{who}")
    out = script("eval.py", "compare", run / "eval-base", run / "eval-sft", "--output", run / "compare").stdout
    assert "p = 1" in out and (run / "compare" / "compare.png").exists()


def test_pictures_are_stored_once_and_stand_in_the_record_by_hash(tmp_path):
    script("collect.py", "--suites", "tabletop_base", "--tasks", "1", "--inits", "100", "--no-memory", "--pictures", "--workers", "1",
           "--output", tmp_path / "t")
    calls = sorted(records.read_calls(tmp_path / "t" / "calls.jsonl"), key=lambda c: c.turn)
    shown = [[p["sha256"] for m in c.messages if isinstance(m["content"], list) for p in m["content"]] for c in calls]
    assert [len(s) for s in shown] == [0, 0, 1, 2] and shown[3][0] == shown[2][0]     # locate shows nothing, pick and place a picture each
    store = records.ImageStore(tmp_path / "t" / "images")
    assert all(store.get(sha).startswith(b"\x89PNG") for sha in shown[3])
    assert len(list((tmp_path / "t" / "images").iterdir())) == 2 and "base64" not in (tmp_path / "t" / "calls.jsonl").read_text()


@pytest.mark.parametrize("stage", ["rollout.py", "eval.py"])
def test_rollout_and_eval_killed_and_repeated_lose_and_double_nothing(run, tmp_path, stage):
    common = ["--model", run / "sft", "--suites", "tabletop_base", "--turns", 2, "--max-tokens", 16, "--workers", 1, "--concurrency", 3]
    command = ["rollout.py", *common, "--groups", 10, "--attempts", 3] if stage == "rollout.py" else \
        ["eval.py", "run", *common, "--inits", "45-46", "--limit", 30, "--sampling", "train"]
    command += ["--output", tmp_path / "out"]
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    episodes = tmp_path / "out" / "episodes.jsonl"
    for _ in range(1200):
        if episodes.exists() and episodes.read_bytes().count(b"\n") >= 6:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = episodes.read_bytes().count(b"\n")
    assert 6 <= done < 30
    script(*command)
    rows = list(records.read_episodes(episodes))
    assert len({(e.task, e.init, e.attempt) for e in rows if e.valid}) == 30 == sum(e.valid for e in rows)
    calls = {c.call_id: c for c in records.read_calls(tmp_path / "out" / "calls.jsonl")}
    used = [c for e in rows for c in e.calls]
    assert len(used) == len(set(used)) and all(records.call_problem(calls[c]) is None for e in rows if e.valid for c in e.calls)


@pytest.mark.parametrize("argv, expected", [
    (["collect.py", "--inits", "1-10", "--output", "x"], "must not use states"),
    (["rollout.py", "--model", "nowhere", "--inits", "11", "--groups", "4", "--output", "x"], "not a checkpoint"),
    (["rewrite.py", "--teacher", "nowhere", "--student", "nowhere", "--output", "x"], "nowhere"),
    (["sft.py", "--model", "nowhere", "--data", "nowhere.jsonl", "--output", "x"], "nowhere"),
    (["rl.py", "--model", "nowhere", "--rollouts", "nowhere", "--output", "x"], "nowhere"),
    (["eval.py", "compare", "nowhere", "nowhere"], "nowhere"),
    (["tiny.py", "--calls", "nowhere", "--output", "x"], "nowhere"),
])
def test_bad_input_is_one_line_and_exit_code_2(argv, expected, tmp_path):
    argv = [tmp_path / a if a == "x" else a for a in argv]
    result = script(*argv, code=2)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and expected in lines[0] and "Traceback" not in result.stderr


def test_truncated_and_corrupt_lines(run, tmp_path):
    data = (run / "round-1" / "calls.jsonl").read_bytes()
    (tmp_path / "calls.jsonl").write_bytes(data + b'{"call_id": "half')
    assert "truncated" in script("gate.py", "--calls", tmp_path, "--model", run / "sft").stderr
    lines = data.splitlines(keepends=True)
    (tmp_path / "calls.jsonl").write_bytes(b"".join([*lines[:2], b'{"call_id": 7}\n', *lines[2:]]))
    assert "calls.jsonl:3: field" in script("gate.py", "--calls", tmp_path, "--model", run / "sft", code=2).stderr


@pytest.mark.slow
@pytest.mark.libero
def test_every_stage_runs_on_real_libero_pro(tmp_path):
    """collect → tiny → rewrite → sft → rollout → gate → rl → eval on the real benchmark; the teacher solves what it tries."""
    suites, one = "libero_object_swap,libero_object_task", ["--workers", 2, "--turns", 8]
    script("collect.py", "--suites", suites, "--tasks", "0-1", "--inits", "11-12", "--output", tmp_path / "teacher", *one)
    episodes = list(records.read_episodes(tmp_path / "teacher" / "episodes.jsonl"))
    assert len(episodes) == 8 and all(e.valid for e in episodes) and sum(e.reward for e in episodes) >= 7
    assert all(e.success_final for e in episodes if e.reward)
    script("tiny.py", "--calls", tmp_path / "teacher", "--output", tmp_path / "base", "--isolate", "basket", "--hidden", 64, "--ff", 128)
    script("rewrite.py", "--teacher", tmp_path / "teacher", "--student", tmp_path / "base", "--output", tmp_path / "rewrite")
    script("sft.py", "--model", tmp_path / "base", "--data", tmp_path / "rewrite" / "sft.jsonl", "--output", tmp_path / "sft",
           "--max-steps", 2, "--global-batch", 8, "--threads", 1)
    script("rollout.py", "--model", tmp_path / "sft", "--suites", "libero_object_swap", "--inits", "11-44", "--groups", 1, "--attempts", 2,
           "--max-tokens", 16, "--output", tmp_path / "round-1", *one)
    played = list(records.read_episodes(tmp_path / "round-1" / "episodes.jsonl"))
    assert len({e.start_state for e in played}) == 1 and all(e.valid for e in played)
    script("gate.py", "--calls", tmp_path / "round-1", "--model", tmp_path / "sft")
    script("rl.py", "--rollouts", tmp_path / "round-1", "--model", tmp_path / "sft", "--output", tmp_path / "rl-1", "--threads", 1)
    script("eval.py", "run", "--model", tmp_path / "sft", "--suites", "libero_object_task", "--inits", "45", "--limit", 2, "--sampling", "train",
           "--max-tokens", 16, "--output", tmp_path / "eval", *one)
    assert records.read_json(tmp_path / "eval" / "report.json")["n"] == 2
