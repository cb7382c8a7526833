"""bench/soak.py and bench/proxy.py run from one command each; and the soak's check sees every kind of damage that it promises to see."""

import json
import shutil
import subprocess
import sys

import pytest

import records
from conftest import ROOT

sys.path.append(str(ROOT / "bench"))                       # at the end: bench/proxy.py must not hide proxy.py

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
