"""Pictures through the whole path, by command lines, with a tiny random Qwen3.5-VL: collect → tiny → rewrite → sft → rollout → gate → rl.

The planner learns one state of twenty tasks by heart, so that it acts, and is shown pictures, in rollouts; at temperature 1 it also
slips, so that groups have both outcomes without anybody's help.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import gate
import records
from pictures import load_pictures
from test_pipeline import WORDS, script
from test_trainer import assert_equal_weights, run_script

pytestmark = pytest.mark.slow
POOL = ["--workers", 1, "--concurrency", 6]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    script("collect.py", "--suites", "tabletop_base", "--inits", 100, "--pictures", "--output", folder / "teacher", *POOL)
    script("tiny.py", "--calls", folder / "teacher", "--output", folder / "base", "--family", "qwen3_5", "--vision", "--ff", 256, "--isolate", *WORDS)
    script("rewrite.py", "--teacher", folder / "teacher", "--student", folder / "base", "--output", folder / "rewrite")
    script("sft.py", "--model", folder / "base", "--data", folder / "rewrite" / "sft.jsonl", "--output", folder / "sft", "--epochs", 22, "--threads", 2,
           "--global-batch", 24, "--optimizer", "muon", "--lr", 4e-3, "--schedule", "wsd", "--warmup", 10)
    script("rollout.py", "--model", folder / "sft", "--suites", "tabletop_base", "--inits", 100, "--groups", 8, "--attempts", 4, "--turns", 12,
           "--max-tokens", 48, "--pictures", "--output", folder / "round-1", *POOL)
    return folder


def shown(rows):
    return sum(bool(row["pictures"]) for row in rows)


def test_sft_rows_hold_expanded_placeholders_and_their_pictures(run):
    pictures, store = load_pictures(run / "base"), records.ImageStore(run / "rewrite" / "images")
    rows = [row for _, row in records.read_jsonl(run / "rewrite" / "sft.jsonl")]
    assert shown(rows) > 40
    for row in rows:
        expected = sum(pictures.count(store.get(sha)) for sha in row["pictures"])
        assert row["prompt_token_ids"].count(pictures.token) == expected and pictures.token not in row["token_ids"]


def test_sft_learns_and_leaves_the_frozen_tower_alone(run):
    log = [json.loads(line) for line in (run / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert log[0]["loss"] > 5 and log[-1]["loss"] < 0.2
    before, after = (load_file(run / name / "model.safetensors") for name in ("base", "sft"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("visual" in name for name in moved) and before.keys() == after.keys()
    assert (run / "sft" / "preprocessor_config.json").read_bytes() == (run / "base" / "preprocessor_config.json").read_bytes()


def test_rollouts_show_pictures_and_the_gate_rebuilds_them(run):
    calls = list(records.read_calls(run / "round-1" / "calls.jsonl"))
    assert sum(bool(gate.picture_hashes(call.messages)) for call in calls) > 40
    script("gate.py", "--calls", run / "round-1", "--model", run / "sft")
    report = json.loads((run / "round-1" / "gate-report.json").read_text())
    # the gate alone may refuse a response that babbles a placeholder; no prompt may mismatch
    assert report["compared"] > 100 and all("the response holds placeholder" in e["text"] for e in report["explanations"])


@pytest.mark.slow
def test_rl_trains_on_them_equally_on_one_and_two_ranks(run, tmp_path):
    args = ["--model", run / "sft", "--rollouts", run / "round-1", "--lr", 1e-4, "--global-batch", 16, "--max-mismatch", 0.03]
    script("rl.py", *args, "--output", tmp_path / "one")
    run_script("rl.py", *args, "--output", tmp_path / "two", ranks=2)
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "two"))
    assert one[0]["groups_used"] >= 2 and len(one) >= 2
    assert one[0]["gap_qb_abs_max"] < 1e-4 and one[0]["w_capped"] == 0 and one[0]["clip_low"] == one[0]["clip_high"] == 0     # ρ = b/q
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys() and a["loss"] == pytest.approx(b["loss"], abs=2e-4)
    assert_equal_weights(tmp_path / "one", tmp_path / "two", atol=2e-5)
    index = json.loads((tmp_path / "one" / "batch" / "batch.json").read_text())
    assert shown(index["responses"]) > 10


def test_a_lost_picture_gates_its_calls_and_stops_sft(run, tmp_path):
    shutil.copytree(run / "round-1", tmp_path / "round")
    shutil.copytree(run / "rewrite", tmp_path / "rewrite")
    calls = list(records.read_calls(tmp_path / "round" / "calls.jsonl"))
    sha = next(hashes[0] for call in calls if (hashes := gate.picture_hashes(call.messages)))
    (tmp_path / "round" / "images" / f"{sha}.png").unlink()
    script("gate.py", "--calls", tmp_path / "round", "--model", run / "sft", "--max-mismatch", 1)
    report = json.loads((tmp_path / "round" / "gate-report.json").read_text())
    assert report["mismatched"] >= sum(sha in gate.picture_hashes(call.messages) for call in calls) > 0
    next((tmp_path / "rewrite" / "images").iterdir()).unlink()
    done = script("sft.py", "--model", run / "base", "--data", tmp_path / "rewrite" / "sft.jsonl", "--output", tmp_path / "out", code=2)
    assert done.stderr.strip().splitlines()[-1].startswith("error: picture ") and not (tmp_path / "out" / "config.json").exists()
