"""The stages in sequence with --harness code, small: the same trainer, fed by control code."""

import pytest

import records
from test_pipeline import script, WORDS

pytestmark = pytest.mark.slow
SMALL = ["--harness", "code", "--workers", 1, "--concurrency", 8]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """collect → tiny → reuse → sft → rollout."""
    folder = tmp_path_factory.mktemp("code")
    script("collect.py", "--suites", "tabletop_base", "--inits", "100-101", "--output", folder / "teacher", *SMALL)
    script("tiny.py", "--calls", folder / "teacher", "--output", folder / "base", "--isolate", *WORDS, "--hidden", 64, "--ff", 128)
    script("reuse.py", "--teacher", folder / "teacher", "--student", folder / "base", "--output", folder / "reuse")
    script("sft.py", "--model", folder / "base", "--data", folder / "reuse" / "sft.jsonl", "--output", folder / "sft", "--max-steps", 2,
           "--global-batch", 16, "--threads", 1)
    script("rollout.py", "--model", folder / "sft", "--suites", "tabletop_base", "--inits", "11-44", "--groups", 3, "--attempts", 2,
           "--turns", 3, "--max-tokens", 24, "--output", folder / "round-1", *SMALL)
    return folder


def test_the_teacher_writes_programs_that_work_and_its_replies_are_targets(run):
    episodes = list(records.read_episodes(run / "teacher" / "episodes.jsonl"))
    assert len(episodes) == 40 and all(e.valid and e.harness == "code" for e in episodes) and sum(e.reward for e in episodes) >= 38
    assert sum(bool(e.extra["errors"]) for e in episodes) >= 1                  # --mistakes: read, and repaired
    calls = {c.call_id: c for c in records.read_calls(run / "teacher" / "calls.jsonl")}
    rows = [row for _, row in records.read_jsonl(run / "reuse" / "sft.jsonl")]
    assert len(rows) == sum(len(e.calls) for e in episodes if e.reward)         # FINISH included
    for row in rows:
        assert row["message"]["content"] == calls[row["call_id"]].message["content"] and row["messages"] == calls[row["call_id"]].messages
        assert len(row["messages"]) == 2 and not row["tools"]
    assert sum(row["message"]["content"] == "FINISH" for row in rows) == sum(e.finished for e in episodes if e.reward)


def test_args_say_what_the_harness_made_of_them(run):
    saved = records.read_json(run / "teacher" / "args.json")
    assert (saved["harness"], saved["turns"], saved["max_tokens"], saved["no_memory"]) == ("code", 11, 32768, True)


def test_the_gate_finds_every_prompt_again(run):
    script("gate.py", "--calls", run / "round-1", "--model", run / "sft", "--output", run / "gate.json")
    report = records.read_json(run / "gate.json")
    assert report["mismatched"] == 0 and report["compared"] >= 6


def test_rl_trains_on_programs(run, tmp_path):
    """What a two-step planner writes succeeds nowhere; with one success in each group the round is a real update."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "calls.jsonl").write_bytes((run / "round-1" / "calls.jsonl").read_bytes())
    with records.JsonlWriter(mixed / "episodes.jsonl") as writer:
        for e in records.read_episodes(run / "round-1" / "episodes.jsonl"):
            e.reward = float(e.attempt)
            writer.append(records.to_line(e))
    out = script("rl.py", "--rollouts", mixed, "--model", run / "sft", "--output", tmp_path / "rl", "--steps-per-round", 2, "--lr", 1e-3, "--threads", 1).stdout
    assert "gate_mismatch 0" in out and records.policy_version(tmp_path / "rl") != records.policy_version(run / "sft")


def test_eval_reports_the_final_predicate_and_films_a_program(run, tmp_path):
    """--expert alone takes over the teacher's handicap; the perfect one solves all, in the report under the predicate that its reward is."""
    common = ["--suites", "tabletop_base", "--tasks", "12-13", "--inits", "45-46", *SMALL]
    script("eval.py", "run", "--expert", "perfect", *common, "--video", "tabletop_base/12:45", "--output", tmp_path / "perfect")
    report = records.read_json(tmp_path / "perfect" / "report.json")
    assert (report["harness"], report["n"], report["k"]) == ("code", 4, 4) and "final" in report["reward_is"]
    assert (tmp_path / "perfect" / "episode.gif").stat().st_size > 10_000
    out = script("eval.py", "run", "--expert", "alone", "--teacher-run", run / "teacher", *common, "--output", tmp_path / "alone").stdout
    assert "mistakes=0.1" in out
    skills = ["--suites", "tabletop_base", "--tasks", "12", "--inits", "45"]
    assert "--harness code" in script("eval.py", "run", "--expert", "alone", "--teacher-run", run / "teacher", *skills,
                                      "--output", tmp_path / "x", code=2).stderr


def test_single_turn_runs_one_program(run, tmp_path):
    script("eval.py", "run", "--expert", "perfect", "--suites", "tabletop_base", "--tasks", "0-3", "--inits", "45", "--single-turn", *SMALL,
           "--output", tmp_path / "one")
    episodes = list(records.read_episodes(tmp_path / "one" / "episodes.jsonl"))
    assert [(e.end, e.finished, len(e.calls), e.reward) for e in episodes] == [("finish", False, 1, 1.0)] * 4


def test_run_sh_quick_goes_through_every_stage(tmp_path):
    import subprocess

    from conftest import ROOT
    done = subprocess.run(["bash", "run.sh", "--quick", "--harness", "code", "--out", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    table = records.read_json(tmp_path / "run" / "eval" / "table.json")
    assert table and (tmp_path / "run" / "eval" / "episode" / "episode.gif").exists()
    assert all(records.read_json(tmp_path / "run" / "eval" / who / "report.json")["n"] == 60 for who in ("base", "sft", "rl"))
