"""eval.py: statistics against known values, reports and pairs on synthetic episodes, and what bad input gets."""

import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

import collect
import eval as ev
import figures
import records
import stats
from records import BadInput, Episode

SUITES = ("tabletop_base", "tabletop_swap")


def episode(n, reward, valid=True, attempt=0, start=None, **extra):
    """The n-th start: suites take turns, ten initial states a task."""
    task, init, ok = f"{SUITES[n % 2]}/{n // 20}", 1 + n // 2 % 10, bool(reward and valid)
    return Episode(f"{task}-{init}-{attempt}", "skills", task, init, attempt, reward if valid else None, valid,
                   reason=None if valid else "worker_lost", start_state=start or f"state{n}", success_latched=ok,
                   success_final=ok, end="finish" if valid else "infrastructure", calls=["a", "b"], seconds=1.0,
                   extra=extra)


def write(folder, episodes, **header):
    with records.JsonlWriter(folder / "episodes.jsonl") as out:
        for e in episodes:
            out.append(records.to_line(e))
    records.write_json(folder / "report.json", {"policy_version": "aaa", "sampling": {"profile": "eval"}, **header})
    records.write_json(folder / "manifest.json", {})
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """command("compare", A, B) -> returncode, stdout, stderr of that command line, run in this process."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            records.run_main(ev.main)
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=shown.out, stderr=shown.err)
    return run


@pytest.fixture
def refused(command):
    """The one line that a command line ends with, with exit code 2."""
    def run(*args):
        done = command(*args)
        assert done.returncode == 2, done.stdout + done.stderr
        line, = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line
    return run


@pytest.fixture
def won_121_lost_74(tmp_path):
    """800 starts: 121 only b solves, 74 only a, 300 both, 305 neither, of which one is invalid in a and one in b."""
    a = [1] * 74 + [0] * 121 + [1] * 300 + [0] * 305
    b = [0] * 74 + [1] * 121 + [1] * 300 + [0] * 305
    left = [episode(n, r, valid=n != 799) for n, r in enumerate(a)]
    right = [episode(n, r, valid=n != 798) for n, r in enumerate([*b, 0])]
    return write(tmp_path / "sft", left), write(tmp_path / "rl", right)


# ------------------------------------------------------------------------------------------ statistics

@pytest.mark.parametrize("k, n, low, high", [
    (81, 263, .2553, .3662), (15, 148, .0624, .1605), (0, 20, .0, .1611), (1, 29, .0061, .1718),   # Newcombe (1998)
    (8, 10, .4902, .9433), (0, 0, 0, 1)])
def test_wilson(k, n, low, high):
    assert stats.wilson(k, n) == pytest.approx((low, high), abs=6e-5)


def test_wilson_is_exact_at_the_ends_so_that_no_error_bar_is_negative(tmp_path):
    for n in range(1, 1200):
        assert stats.wilson(0, n)[0] == 0 and stats.wilson(n, n)[1] == 1
        assert all(0 <= v <= 1 for v in (*stats.wilson(0, n), *stats.wilson(n, n)))
    figures.bar_figure(tmp_path / "bars.png", ["base"], {"all": [stats.rate([0] * 800)]})         # matplotlib refuses negative bars


def test_wilson_against_scipy():
    for k, n in ((0, 1), (1, 1), (3, 7), (50, 100), (799, 800)):
        known = binomtest(k, n).proportion_ci(method="wilson")
        assert stats.wilson(k, n) == pytest.approx((known.low, known.high), abs=1e-12)


@given(st.integers(0, 300), st.integers(0, 300))
def test_wilson_is_an_interval_around_the_rate_and_symmetric(k, more):
    n = k + more
    low, high = stats.wilson(k, n)
    assert 0 <= low <= high <= 1
    if n:
        assert low <= k / n + 1e-12 and k / n <= high + 1e-12
    assert stats.wilson(more, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize("wins, losses, p", [(0, 0, 1.0), (5, 5, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (6, 1, 16 / 128),
                                             (121, 74, 0.000938708)])
def test_sign_test(wins, losses, p):
    assert stats.sign_test(wins, losses) == pytest.approx(p, abs=1e-9)


def test_sign_test_by_counting():
    # all 2^9 outcomes that are at most as likely as 7 of 9
    likely = [math.comb(9, k) for k in range(10)]
    assert stats.sign_test(7, 2) == pytest.approx(sum(c for c in likely if c <= likely[7]) / 2 ** 9)


# ------------------------------------------------------------------------------------------ reports

def test_invalid_episodes_leave_every_rate():
    episodes = [episode(0, 1, failure=None), episode(1, 0, failure="grasp"), episode(2, 1, valid=False),
                episode(3, 0, failure="language"), episode(4, 0)]
    s = ev.summarize(episodes)
    assert (s["k"], s["n"], s["success"], s["invalid"]) == (1, 4, .25, 1)
    assert s["invalid_reasons"] == {"worker_lost": 1} and s["starts"] == 4
    assert s["failures"] == {"grasp": 1, "language": 1, "second_step": 0, "format": 0, "other": 1}
    assert s["suites"]["tabletop_base"] == {**ev.rate([1, 0]), "invalid": 1}
    assert s["suites"]["tabletop_swap"] == {**ev.rate([0, 0]), "invalid": 0}
    assert s["ends"]["finish"] == 4 and s["ends"]["infrastructure"] == 0
    assert s["tasks"] == {f"{suite}/0": part for suite, part in s["suites"].items()}
    assert ev.percent(s, s["invalid"]) == "25.0 % [4.6, 69.9] (n 4, 1 invalid)"
    none = ev.summarize([episode(0, 1, valid=False)])
    assert none["success"] is None and none["mean_calls"] is None
    assert ev.percent(none, 1) == "no valid episode (1 invalid)"


def test_an_attempt_that_was_run_again_counts_once():
    lost, again, never = episode(0, 1, valid=False), episode(0, 1), episode(2, 0, valid=False)
    kept, replaced = ev.one_per_attempt([lost, again, never, never], "here")
    assert list(kept.values()) == [again, never] and replaced == 2
    assert list(ev.one_per_attempt([again, lost], "here")[0].values()) == [again]
    s = ev.summarize(kept.values())
    assert (s["k"], s["n"], s["invalid"]) == (1, 1, 1)


def test_a_report_names_its_predicate():
    kept, undone = episode(0, 1), episode(1, 1)
    undone.success_final = False                    # it held at some step, and no longer at the end
    assert ev.summarize([kept])["reward_is"] == "success_latched_and_final"
    s = ev.summarize([kept, undone])
    assert s["reward_is"] == "success_latched" and s["success_latched"]["k"] == 2 and s["success_final"]["k"] == 1
    undone.reward = 0                               # CaP-X's rule
    assert ev.summarize([kept, undone])["reward_is"] == "success_final"
    kept.reward = 0
    assert ev.summarize([kept, undone])["reward_is"].startswith("neither")


def test_counts_by_decision():
    episodes = [episode(0, 1, steps=1, picks=1, picks_right=1),
                episode(1, 0, steps=2, picks=3, picks_right=1, failure="grasp"),
                episode(3, 0, steps=2, picks=0, picks_right=0, failure="second_step"), episode(5, 0, valid=False)]
    s = ev.summarize(episodes)
    assert s["picks_right"] == 2 / 4
    assert s["steps"]["1"]["k"] == 1 and s["steps"]["2"]["n"] == 2
    assert (s["steps"]["1"]["invalid"], s["steps"]["2"]["invalid"]) == (0, 1)      # by its task: a crash tells none
    with pytest.raises(BadInput, match=r"unknown failure 'gripper'; valid: grasp, language"):
        ev.summarize([episode(0, 0, failure="gripper")])


def test_gains_by_decision_add_to_the_gain():
    before = ev.summarize([episode(n, 0, failure=f) for n, f in enumerate(("grasp", "grasp", "language", "format"))])
    after = ev.summarize([episode(0, 1), episode(1, 1), *(episode(n, 0, failure="language") for n in (2, 3))])
    gain, = ev.gains([before, after])
    assert gain == {"grasp": 50, "language": -25, "second_step": 0, "format": 25, "other": 0}
    assert sum(gain.values()) == 100 * (after["success"] - before["success"])


# ------------------------------------------------------------------------------------------ compare

def test_compare(won_121_lost_74):
    a, b = map(ev.load, won_121_lost_74)
    result = ev.compare(a, b)
    row = result["suites"]["all"]
    assert (row["wins"], row["losses"], row["ties"], row["pairs"]) == (121, 74, 603, 798)
    assert row["a"]["n"] == 799 and row["b"]["n"] == 800 and row["invalid_a"] == row["invalid_b"] == 1
    assert result["unpaired"] == {"only_in_a": 0, "only_in_b": 1, "invalid_on_a_side": 2}
    parts = [result["suites"][s] for s in SUITES]
    for field in ("wins", "losses", "ties", "pairs"):
        assert sum(p[field] for p in parts) == row[field]
    other_way = ev.compare(b, a)["suites"]["all"]
    assert (other_way["wins"], other_way["losses"], other_way["p"]) == (74, 121, row["p"])


def test_compare_command(won_121_lost_74, tmp_path):
    done = subprocess.run([sys.executable, ev.__file__, "compare", *won_121_lost_74, "--output", tmp_path / "out"],
                          check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rl against sft: 121 won, 74 lost, 603 tied of 798 pairs" in done.stdout
    assert "exact two-sided sign test p = 0.00094" in done.stdout
    assert "(n 799, 1 invalid)" in done.stdout and "tabletop_swap" in done.stdout and "1 only in rl" in done.stdout
    saved = json.loads((tmp_path / "out/compare.json").read_text())
    assert round(saved["suites"]["all"]["p"], 5) == 0.00094
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")


def test_report_files_and_the_default_output(won_121_lost_74, command):
    again = command("compare", *(f / "report.json" for f in won_121_lost_74))
    assert again.returncode == 0 and "p = 0.00094" in again.stdout
    assert (won_121_lost_74[1] / "against-sft/compare.json").exists()


def test_attempts_pair_by_number(tmp_path):
    # start 0: a solves attempt 0, b solves attempt 1: one loss and one win, no tie
    a = write(tmp_path / "a", [episode(0, 1, attempt=0), episode(0, 0, attempt=1)])
    b = write(tmp_path / "b", [episode(0, 1, attempt=1), episode(0, 0, attempt=0)])
    result = ev.compare(ev.load(a), ev.load(b))
    assert (result["suites"]["all"]["wins"], result["suites"]["all"]["losses"]) == (1, 1) and result["starts"] == 1


def test_measure_chooses_the_predicate(tmp_path):
    undone = episode(0, 1)
    undone.success_final = False
    a, b = ev.load(write(tmp_path / "a", [episode(0, 1)])), ev.load(write(tmp_path / "b", [undone]))
    assert ev.compare(a, b)["suites"]["all"]["losses"] == 0
    assert ev.compare(a, b, "final")["suites"]["all"]["losses"] == 1


def test_different_sampling_is_said(tmp_path, command):
    a = write(tmp_path / "a", [episode(0, 1)])
    b = write(tmp_path / "b", [episode(0, 1)], sampling={"profile": "greedy"})
    assert "sampled differently" in command("compare", a, b).stdout
    assert "sampled differently" not in command("compare", a, a).stdout


def test_different_harnesses_are_said_and_no_shards_of_one_report(tmp_path, command):
    write(tmp_path / "e/shard-0-of-2", [episode(0, 1)], harness="skills")
    write(tmp_path / "e/shard-1-of-2", [episode(1, 1)], harness="code")
    with pytest.raises(BadInput, match="harness 'code' is not that of the other shards, 'skills'"):
        ev.load(tmp_path / "e")
    a, b = (write(tmp_path / h, [episode(0, 1)], harness=h) for h in ("skills", "code"))
    assert "played in different harnesses" in command("compare", a, b).stdout
    assert "different harnesses" not in command("compare", a, a).stdout


def test_shards_are_one_report(tmp_path):
    write(tmp_path / "e/shard-0-of-2", [episode(0, 1), episode(2, 0)])
    with pytest.raises(BadInput, match="1 of 2 shards"):
        ev.load(tmp_path / "e")
    write(tmp_path / "e/shard-1-of-2", [episode(1, 1)])
    assert len(ev.load(tmp_path / "e").episodes) == 3 and ev.load(tmp_path / "e").name == "e"
    write(tmp_path / "e/shard-1-of-2", [], policy_version="bbb")
    with pytest.raises(BadInput, match="policy_version 'bbb' is not that of the other shards"):
        ev.load(tmp_path / "e")


def test_table(tmp_path, command):
    names = ("base", "sft", "rl")
    for name, solved in zip(names, (0, 20, 35), strict=True):
        write(tmp_path / name, [episode(n, int(n < solved), failure=None if n < solved else "grasp", steps=1 + n // 20,
                                        picks=2, picks_right=1) for n in range(40)])
    for r in (2, 10, 1):
        write(tmp_path / f"round-{r}", [episode(n, int(n < 2 * r)) for n in range(40)])
    done = command("table", *(tmp_path / n for n in names), "--names", "base", "SFT", "RL", "--output", tmp_path / "t",
                   "--rounds", *(tmp_path / f"round-{r}" for r in (10, 1, 2)))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "t/table.md").read_text()
    assert "| SFT | 50.0 % [35.2, 64.8] (n 40, 0 invalid) | 50.0 | 2.0 | 50.0 | 50.0 | 0.0 |" in text
    assert "| base → SFT | +50.0 | +0.0 | +0.0 | +0.0 | +0.0 | +50.0 |" in text
    assert "- RL against SFT: 15 won, 0 lost, 25 tied of 40 pairs, exact two-sided sign test p = 6.1e-05" in text
    assert "- RL against base" in text
    saved = json.loads((tmp_path / "t/table.json").read_text())
    assert list(saved["rounds"]) == ["round-1", "round-2", "round-10"]
    assert saved["rounds"]["round-10"]["success"] == 0.5 and saved["reports"]["RL"]["k"] == 35
    for name in ("success.png", "learning.png"):
        assert (tmp_path / "t" / name).read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------ run

def test_run_stop_resume_and_compare(tiny_dir, tmp_path, command):
    common = ["--model", tiny_dir, "--suites", ",".join(SUITES), "--tasks", "0", "--inits", "1-2", "--turns", 2,
              "--max-tokens", 12, "--workers", 1, "--concurrency", 4, "--retries", 0]
    out = tmp_path / "whole"
    out.mkdir()
    (out / "STOP").touch()
    done = command("run", *common, "--output", out)
    assert done.returncode == records.STOPPED and "ended by a STOP file" in done.stdout and not (out / "report.json").exists()
    (out / "STOP").unlink()
    done = command("run", *common, "--output", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["n"] + report["invalid"] == 4 and report["n"] >= 1 and sorted(report["suites"]) == sorted(SUITES)
    assert report["sampling"] == {"profile": "eval", **records.PROFILES["eval"]} and report["held_out"]
    assert report["policy_version"] == records.policy_version(tiny_dir) and "success_latched" in report["reward_is"]
    assert sum(report["ends"].values()) == report["n"] and report["success"] == 0.0      # random weights
    before = (out / "episodes.jsonl").read_bytes()
    assert command("run", *common, "--output", out).returncode == 0
    assert (out / "episodes.jsonl").read_bytes() == before                 # nothing is lost or doubled
    assert json.loads((out / "report.json").read_text()) == report
    for shard in ("0/2", "1/2"):                                           # the same starts in two parts
        assert command("run", *common, "--output", tmp_path / "parts", "--shard", shard).returncode == 0
    done = command("compare", out, tmp_path / "parts")
    assert done.returncode == 0 and f"0 won, 0 lost, {report['n']} tied of {report['n']} pairs" in done.stdout


def test_run_refuses(tiny_dir, tmp_path, refused):
    common = ["run", "--model", tiny_dir, "--suites", "tabletop_base", "--output", tmp_path / "x"]
    assert "expected SUITE/INDEX:INIT" in refused(*common, "--video", "tabletop_base/0:77")
    assert "no episode is left" in refused(*common, "--limit", 0)
    assert "valid: tabletop_base, tabletop_swap" in refused(*common, "--suites", "tabletop_base,tabletop_kitchen")
    assert "not a checkpoint folder" in refused(*common, "--model", tmp_path)
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------ run: the scripted expert

HANDICAP = ["--grasp-skill", "0.5", "--gives-up", "0.2", "--leans", "0"]
ONE_TASK = ["--suites", "tabletop_base", "--tasks", "1", "--workers", "1", "--concurrency", "2"]


def collected(folder, *options):
    """Runs collect.py -> folder: exploration of state 0 and two episodes."""
    done = subprocess.run([sys.executable, collect.__file__, *ONE_TASK, "--inits", "100-101", *HANDICAP, "--output", str(folder), *options],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return collected(tmp_path_factory.mktemp("teacher") / "t")


def test_the_expert_with_and_without_memory_is_measured_with_the_teachers_handicap(teacher, tmp_path, command):
    memory = (teacher / "memory/tabletop_base-1.md").read_text()
    for expert in ("memory", "alone"):
        argv = ["run", "--expert", expert, "--teacher-run", teacher, *ONE_TASK, "--inits", "1-2", "--output", tmp_path / expert]
        done = command(*argv)
        assert done.returncode == 0, done.stderr
        assert f"expert: grasp_skill=0.5 gives_up=0.2 leans=0.0 mistakes=0.0, inherited from {teacher}" in done.stdout
        report = json.loads((tmp_path / expert / "report.json").read_text())
        assert (report["policy_version"], report["model"], report["noise"]) == ("teacher-0.5-0.2-0", expert, None)
        assert report["n"] == 2 and report["invalid"] == 0 and report["held_out"]
        calls = [json.dumps(c.messages) + json.dumps(c.tools) for c in records.read_calls(tmp_path / expert / "calls.jsonl")]
        assert any("memory_read" in c for c in calls) is (expert == "memory") is any(memory[:40] in c for c in calls)
        assert not any("memory_write" in c for c in calls)
        assert command(*argv).returncode == 0                                   # repeated, it changes nothing
        assert json.loads((tmp_path / expert / "report.json").read_text()) == report
    assert (teacher / "memory/tabletop_base-1.md").read_text() == memory
    assert command("compare", tmp_path / "alone", tmp_path / "memory").returncode == 0


def test_the_perfect_expert_needs_no_teacher_and_solves_tabletop(tmp_path, command):
    done = command("run", "--expert", "perfect", *ONE_TASK, "--inits", "1-2", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["k"], report["n"], report["policy_version"], report["model"]) == (2, 2, "teacher-1-0-0", "perfect")


@pytest.mark.parametrize("options, says", [
    ([], "give --model CHECKPOINT or --expert {memory,alone,perfect}, one of them"),
    (["--model", "m", "--expert", "perfect"], "give --model CHECKPOINT or --expert {memory,alone,perfect}, one of them"),
    (["--expert", "memory"], "--teacher-run DIR (an output folder of collect.py) belongs to --expert memory and --expert alone"),
    (["--expert", "alone"], "--teacher-run DIR (an output folder of collect.py) belongs to --expert memory and --expert alone"),
    (["--expert", "perfect", "--teacher-run", "t"], "--teacher-run DIR (an output folder of collect.py) belongs to"),
    (["--model", "m", "--teacher-run", "t"], "--teacher-run DIR (an output folder of collect.py) belongs to"),
    (["--expert", "perfect", "--engine", "vllm"], "--engine vllm: --expert perfect does not honour it"),
    (["--expert", "memory", "--teacher-run", "t", "--batch", "8"], "--batch 8: --expert memory does not honour it"),
    (["--expert", "alone", "--teacher-run", "t", "--engine-url", "http://x"], "--engine-url http://x: --expert alone does not honour it"),
    (["--expert", "perfect", "--chat-template-kwargs", '{"enable_thinking": false}'], "the scripted expert has no chat template"),
    (["--expert", "best"], "invalid choice: 'best'")])
def test_options_that_do_not_go_together_are_refused(options, says, tmp_path, command):
    done = command("run", "--suites", "tabletop_base", "--output", tmp_path / "x", *options)
    usage, error = done.stderr.split("eval.py", 1)[0], done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and usage == "usage: " and "error: " in error and says in error, done.stderr
    assert done.stdout == "" and not (tmp_path / "x").exists()


def test_a_teacher_folder_of_another_kind_is_refused(teacher, tmp_path, refused, command):
    def says(folder, expert="memory"):
        line = refused("run", "--expert", expert, "--teacher-run", folder, *ONE_TASK, "--inits", "1", "--output", tmp_path / "x")
        assert not (tmp_path / "x").exists()
        return line
    assert "args.json: no such file; run the stage that writes it first" in says(tmp_path / "nowhere")
    assert command("run", "--expert", "perfect", *ONE_TASK, "--inits", "1", "--output", tmp_path / "eval").returncode == 0
    for folder in (tmp_path / "eval", teacher / "explore"):
        for expert in ("memory", "alone"):
            assert f"--teacher-run {folder}: its args.json is of no collect.py run with --teacher scripted" in says(folder, expert)
    bare = shutil.copytree(teacher, tmp_path / "bare")
    shutil.rmtree(bare / "memory")
    assert "bare: has no memory/; it was collected with --no-memory" in says(bare)
    asked = shutil.copytree(teacher, tmp_path / "asked")
    records.write_json(asked / "args.json", {**records.read_json(asked / "args.json"), "teacher": "http://x/v1"})
    assert "is of no collect.py run with --teacher scripted" in says(asked)


def test_memory_of_other_suites_is_refused_in_place_of_going_on_without_any(teacher, tmp_path, refused):
    line = refused("run", "--expert", "memory", "--teacher-run", teacher, "--suites", "tabletop_base,tabletop_swap", "--tasks", "1", "--inits", "1",
                   "--output", tmp_path / "x")
    assert f"--teacher-run {teacher}: explored tabletop_base, so it has no memory of tabletop_swap" in line and not (tmp_path / "x").exists()


def test_a_teacher_that_was_collected_in_parts_is_one_teacher(tmp_path, command):
    for i in range(2):
        collected(tmp_path / "t", "--shard", f"{i}/2")
    done = command("run", "--expert", "memory", "--teacher-run", tmp_path / "t", *ONE_TASK, "--inits", "1", "--output", tmp_path / "e")
    assert done.returncode == 0 and "grasp_skill=0.5" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------ bad input

def test_missing_and_unfinished(tmp_path, refused):
    good = write(tmp_path / "good", [episode(0, 1)])
    assert "no such folder" in refused("compare", good, tmp_path / "gone")
    (tmp_path / "killed").mkdir()
    assert "not finished; repeat its `eval.py run` command" in refused("compare", good, tmp_path / "killed")
    (good / "episodes.jsonl").unlink()
    assert "episodes.jsonl: no such file" in refused("compare", good, good)


def test_corrupt_line_is_named(tmp_path, refused):
    good, bad = write(tmp_path / "good", [episode(0, 1)]), write(tmp_path / "bad", [episode(0, 1)])
    with open(bad / "episodes.jsonl", "a") as f:
        f.write("{nonsense\n")
    assert "bad/episodes.jsonl:2: not JSON" in refused("compare", good, bad)


def test_other_start_state_is_refused(tmp_path, refused):
    a, b = write(tmp_path / "a", [episode(0, 1)]), write(tmp_path / "b", [episode(0, 1, start="elsewhere")])
    assert "task tabletop_base/0 init 1 has start state elsewhere, but state0 in" in refused("compare", a, b)


def test_doubled_episode_is_refused(tmp_path, refused):
    a = write(tmp_path / "a", [episode(0, 1), episode(0, 1)])
    assert "init 1 attempt 0 is there twice, both valid" in refused("compare", a, a)


def test_names_must_fit(tmp_path, refused):
    a = write(tmp_path / "a", [episode(0, 1)])
    assert "--names gives 2 names for 1 reports" in refused("table", a, "--names", "x", "y", "--output", tmp_path / "t")
    assert "two reports have one name" in refused("table", a, a, "--output", tmp_path / "t")


def test_unknown_subcommand_lists_the_valid_ones(command):
    done = command("measure")
    assert done.returncode == 2 and "invalid choice: 'measure'" in done.stderr
    assert all(name in done.stderr for name in ("run", "compare", "table"))
    assert command().returncode == 2


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["compare", "--help"], ["table", "--help"]])
def test_help(args, command):
    done = command(*args)
    assert done.returncode == 0 and "usage: eval.py" in done.stdout
