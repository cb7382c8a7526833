"""Scripted expert of the code harness: its programs solve tasks, it repairs its mistakes, gives up, repeats itself by seed; and the stages
that run it: adapters end to end, collect.py's arguments."""

import argparse
import asyncio
import random
import sys
import types
from collections import Counter

import pytest

import adapters
import collect
import records
from harness import code
from harness.code_teacher import CodeTeacher, ERRORS
from harness.sandbox import Sandbox
from harness.tabletop import GRASP, SUITES, Tabletop
from harness import tabletop_programs as programs
from harness.teacher import expert_for
from records import BadInput


@pytest.fixture(scope="module")
def episode():
    """episode(teacher, suite, index, init, seed) -> (outcome, user messages, replies): the teacher asked in this process, the rest real."""
    world, box = Tabletop(), Sandbox(weak=sys.platform != "linux")

    def go(teacher, suite="tabletop_base", index=0, init=12, seed=0, **job):
        base = {"suite": suite, "index": index, "init": init, "base_url": "http://nowhere", "request_timeout": 1, "max_tokens": 100, "turns": 11,
                "seconds": 100, "history_budget": 60_000, "model": "m", "single_turn": False, "pictures": False}
        e, users, replies = code.Episode(world, {**base, **job}, None, box), [], []

        class Client:
            def choice(self, body):
                users.append(body["messages"][1]["content"])
                answer = asyncio.run(teacher.chat({**body, "seed": f"{seed}/{len(users)}"}))["choices"][0]
                replies.append(answer["message"]["content"])
                return answer
        e.client = Client()
        return e.run(), users, replies
    yield go
    box.close()


def one_style(style):
    """tabletop_programs with one style."""
    return types.SimpleNamespace(**{**vars(programs), "STYLES": (style,)})


def perfect(style=None):
    return CodeTeacher(one_style(style) if style else programs, 1.0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------- what it knows

def test_steps_and_choices():
    for suite in SUITES:
        for task in Tabletop.tasks(suite):
            assert [(s["object"], s["place"]) for s in programs.steps(task.instruction)] == [g[1:] for g in task.goal]
    assert programs.steps("Wipe the table.") is None
    for shape, dy in GRASP.items():
        found = programs.choices({"object": f"red {shape}", "place": "tray"})
        assert float(found[0]) == dy / 1000 and sorted(map(float, found)) == [-0.02, 0, 0.02, 0.04]


@pytest.mark.parametrize("style", programs.STYLES)
def test_every_style_is_python_and_solves_one_and_two_steps(episode, style):
    for suite, index, init in (("tabletop_base", 0, 12), ("tabletop_swap", 5, 20), ("tabletop_base", 13, 12), ("tabletop_task", 17, 30)):
        for seed in range(2):
            out, users, replies = episode(perfect(style), suite, index, init, seed)
            assert (out["end"], out["success_final"], out["errors"], out["failure"]) == ("finish", True, {}, None), (suite, index, replies[-2:])
            assert out["picks"] == out["picks_right"] == out["goals_done"] == len(Tabletop.tasks(suite)[index].goal)
            assert replies[-1] == "FINISH" and out["success_turn"] == out["turns"] - 2
            for reply in replies[:-1]:
                compile(reply.split("```python\n")[1].removesuffix("```"), "<reply>", "exec")
    first = {"plain": 'p, q = sample_grasp_pose("', "helpers": "def pick(name, dy):", "loop": "for name, place, dy in [("}[style]
    assert first in replies[0]


def test_helpers_are_written_once_and_used_again(episode):
    seen = 0
    for seed in range(8):
        _, users, replies = episode(perfect("helpers"), "tabletop_base", 13, 12, seed)
        assert "def pick(" in replies[0] and not any("def pick(" in r for r in replies[1:])
        seen += len(replies) == 3
    assert seen                                             # some of them did one step a program


def test_all_suites_mixed_styles(episode):
    for suite in SUITES:
        for index in (2, 9, 12, 19):
            assert episode(perfect(), suite, index, 15, index)[0]["success_final"], (suite, index)


def test_prompts_with_pictures_and_a_small_history_budget_are_read(episode):
    assert episode(perfect(), index=13, pictures=True)[0]["success_final"]
    for seed in range(4):
        assert episode(perfect(), index=13, seed=seed, history_budget=1)[0]["success_final"]


def test_a_task_without_a_program_is_given_up():
    assert perfect().answer("Task: Wipe the table.\nReply with one ```python block.", random.Random(0)) == "FINISH"


# ---------------------------------------------------------------------------------------------- handicaps

def test_mistakes_are_repaired_after_the_message_was_read(episode):
    kinds, wrong = Counter(), {w: r for r, w in ERRORS}
    for seed in range(12):
        out, users, replies = episode(CodeTeacher(programs, 1.0, 0.0, 1.0), index=(0, 13)[seed % 2], seed=seed)
        assert out["success_final"] and sum(out["errors"].values()) == 1, (seed, replies)
        assert "\nErrors:\n" in users[1] and all("\nErrors:\n" not in u for u in users[2:])
        assert any(w in replies[0] for w in wrong) and not any("get_grasp_pose(" in r or "close_gripper(0)" in r for r in replies[1:])
        kinds.update(out["errors"].keys())
    assert set(kinds) == {"NameError", "TypeError", "SyntaxError"}


def test_wrong_grasps_slip_and_others_are_tried(episode):
    for seed in range(4):
        out, users, replies = episode(CodeTeacher(one_style("plain"), 0.0, 0.0, 0.0), init=12, seed=seed)        # a heavy foot: it stays up
        assert (out["end"], out["success_latched"], out["picks_right"], out["failure"]) == ("turns", False, 0, "grasp")
        offsets = [r.split("p[1] += ")[1].split("\n")[0] for r in replies]
        assert len(offsets) == 11 and all(a != b for a, b in zip(offsets, offsets[1:])) and set(offsets) == {"-0.02", "0", "0.02"}
    ends = Counter()
    for seed in range(20):
        out, *_ = episode(CodeTeacher(programs, 0.3, 0.0, 0.0), index=seed % 6, init=11 + seed, seed=seed)
        ends[out["end"], out["success_final"]] += 1
    assert ends["finish", True] >= 4 and ends["unrecoverable", False] >= 2 and not ends["finish", False], ends


def test_giving_up(episode):
    out, _, replies = episode(CodeTeacher(programs, 0.0, 1.0, 0.0))
    assert (out["end"], out["finished"], out["programs"], replies[-1]) == ("finish", True, 1, "FINISH")
    out, _, replies = episode(CodeTeacher(programs, 1.0, 1.0, 1.0))              # an error is no slip
    assert out["success_final"] and out["programs"] >= 2


def test_a_seed_decides_everything(episode):
    teacher = lambda: CodeTeacher(programs, 0.4, 0.1, 0.5)
    runs = [episode(teacher(), index=13, seed=seed)[2] for seed in (1, 1, *range(2, 8))]
    assert runs[0] == runs[1] and len({str(r) for r in runs}) > 4
    one = teacher()
    assert one.answer("Task: Put the red mug on the blue tray.\nx", random.Random(3)) == one.answer("Task: Put the red mug on the blue tray.\nx", random.Random(3))


def test_versions_tell_handicaps_apart():
    assert expert_for(["tabletop_base"], 0.3, 0.1, 0.0, harness="code", mistakes=0.2).policy_version == "code-teacher-0.3-0.1-0.2"
    assert expert_for(["tabletop_base"], 0.3, 0.1, 0.0, perfect=True, harness="code", mistakes=0.2).policy_version == "code-teacher-1-0-0"


# ---------------------------------------------------------------------------------------------- end to end

def test_a_run_records_episodes_of_the_code_harness(tmp_path):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args(["--harness", "code", "--workers", "1", "--concurrency", "4"])
    args.output = str(tmp_path)
    specs = [{"suite": "tabletop_base", "index": i, "init": init, "attempt": 0} for i in (0, 13) for init in (100, 101, 102)]
    teacher = lambda: CodeTeacher(programs, 0.5, 0.3, 0.3)
    episodes, folder = adapters.run(args, specs, "test", teacher())
    calls = Counter(c.episode_id for c in records.read_calls(folder / "calls.jsonl"))
    assert len(episodes) == 6 and 0 < sum(e.reward for e in episodes) < 6
    for e in records.read_episodes(folder / "episodes.jsonl"):
        assert (e.harness, e.valid, e.reason, e.policy_version) == ("code", True, None, "code-teacher-0.5-0.3-0.3")
        assert e.reward == float(e.success_final) and e.end in ("finish", "unrecoverable", "turns")
        assert calls[e.episode_id] == len(e.calls) == e.extra["turns"] and (e.success_turn is None) == (not e.success_final)
        assert e.extra["programs"] >= 1 and e.extra["motions"] >= 2 and e.extra["sandbox_seconds"] >= 0
    for c in records.read_calls(folder / "calls.jsonl"):
        assert [m["role"] for m in c.messages] == ["system", "user"] and c.messages[1]["content"].startswith("Task: Put the ") and not c.tools
    saved = records.read_json(folder / "args.json")
    assert (saved["harness"], saved["turns"], saved["max_tokens"], saved["noise"], saved["single_turn"]) == ("code", 11, 32_768, None, False)
    before = (folder / "episodes.jsonl").read_bytes()
    adapters.run(args, specs, "test", teacher())                                 # repeated: nothing more to do
    assert (folder / "episodes.jsonl").read_bytes() == before
    args.single_turn = True
    with pytest.raises(BadInput, match="single_turn"):
        adapters.run(args, specs, "test", teacher())


# ---------------------------------------------------------------------------------------------- collect.py

def arguments(monkeypatch, folder, *argv):
    monkeypatch.setattr(sys, "argv", ["collect.py", "--output", str(folder), *argv])
    return collect.parse_args()


@pytest.mark.parametrize("argv, words", [
    (["--harness", "code", "--leans", "0.1"], "--leans: --harness code does not honour it"),
    (["--harness", "code", "--leans", "0"], "--leans: --harness code does not honour it"),
    (["--harness", "skills", "--mistakes", "0.1"], "--mistakes: --harness skills does not honour it"),
    (["--harness", "code", "--mistakes", "1.1"], "--mistakes is a chance"),
    (["--harness", "capx"], "invalid choice"),
])
def test_collect_refuses_options_of_the_other_harness(monkeypatch, tmp_path, capsys, argv, words):
    with pytest.raises(SystemExit) as e:
        arguments(monkeypatch, tmp_path, *argv)
    assert e.value.code == 2 and words in capsys.readouterr().err


def test_collect_settles_its_own_defaults(monkeypatch, tmp_path):
    args = arguments(monkeypatch, tmp_path, "--harness", "code")
    assert (args.leans, args.mistakes, args.no_memory) == (0.0, 0.1, True)
    args = arguments(monkeypatch, tmp_path)
    assert (args.leans, args.mistakes, args.no_memory) == (0.12, 0.0, False)


@pytest.mark.parametrize("argv, words", [
    (["--harness", "skills", "--single-turn"], "--single-turn belongs to --harness code"),
    (["--harness", "code", "--noise", "0"], "--noise 0: --harness code"),
    (["--harness", "code", "--inits", "5"], "must not use states"),
    pytest.param(["--harness", "skills", "--suites", "robosuite"], "--harness skills: does not run on robosuite; valid suites are of tabletop, libero",
                 marks=pytest.mark.libero),
    pytest.param(["--harness", "code", "--suites", "robosuite", "--grasp-skill", "0.5"], "--grasp-skill 0.5: .* one grasp each", marks=pytest.mark.libero),
])
def test_collect_refuses_before_it_does_anything(monkeypatch, tmp_path, argv, words):
    if "robosuite" in argv:
        pytest.importorskip("robosuite")                     # else --suites is refused
    monkeypatch.setattr(sys, "argv", ["collect.py", "--output", str(tmp_path / "out"), "--tasks", "0", *argv])
    with pytest.raises(BadInput, match=words):
        collect.main()
    assert not (tmp_path / "out" / "memory").exists()                            # global memory is written before exploring


def test_collect_with_code_has_neither_memory_nor_exploration(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["collect.py", "--output", str(tmp_path), "--harness", "code", "--suites", "tabletop_base", "--tasks", "0-1",
                                      "--inits", "100", "--workers", "1", "--concurrency", "2", "--mistakes", "1"])
    collect.main()
    episodes = list(records.read_episodes(tmp_path / "episodes.jsonl"))
    assert [e.harness for e in episodes] == ["code"] * 2 and all(e.valid and e.reward == 1.0 and e.extra["errors"] for e in episodes)
    assert (tmp_path / "manifest.json").exists() and not (tmp_path / "memory").exists() and not (tmp_path / "explore").exists()
