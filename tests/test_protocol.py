"""protocol.py: which suites and initial states a command may use, LIBERO's noise, and the refusals of the real commands."""

import argparse
import dataclasses
import json
import sys

import pytest
from test_rewrite import episode, play

import adapters
import collect
import protocol
import records
import rewrite
import rl
import rollout
from harness import world
from harness.teacher import ScriptedTeacher
from records import BadInput, Episode

TRAINING = (11, 44, 50, 100, 5000)
HELD_OUT = (0, 1, 5, 10, 45, 49)


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(module, *argv) runs a stage in this process, which must end with exit code 2 -> its one line on stderr."""
    def run(module, *argv):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            records.run_main(module.main)
        err = capsys.readouterr().err
        assert end.value.code == 2 and err.startswith("error: ") and len(err.strip().splitlines()) == 1, err
        return err
    return run


# ---------------------------------------------------------------------------------------------- suites

def test_an_unknown_suite_is_refused_with_the_valid_ones():
    assert list(protocol.parse_suites("tabletop_swap,tabletop_base")) == ["tabletop_swap", "tabletop_base"]
    assert len(protocol.parse_suites("tabletop_base")["tabletop_base"]) == 20
    with pytest.raises(BadInput, match="--suites: .*tabletop_bass.*tabletop_base, tabletop_swap, tabletop_task"):
        protocol.parse_suites("tabletop_base,tabletop_bass")


@pytest.mark.libero
def test_an_unknown_libero_suite_is_refused_with_the_valid_ones_of_both_worlds():
    with pytest.raises(BadInput, match="--suites: .*libero_objects.*libero_object_swap.*tabletop_base, tabletop_swap, tabletop_task"):
        protocol.parse_suites("libero_objects")


def test_robosuite_that_is_not_there_is_refused_at_start(monkeypatch):
    from harness import robosuite_world
    monkeypatch.setattr(robosuite_world.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="--suites: robosuite is not installed; run: pip install -r requirements-libero.txt"):
        protocol.parse_suites("robosuite")


def test_libero_plus_is_refused_by_name_to_a_command_that_trains_and_to_no_other(monkeypatch):
    monkeypatch.setattr(protocol.libero_plus, "SUITES", {"tabletop_swap": None})             # whatever is installed
    with pytest.raises(BadInput, match="--suites: rollout.py must not use tabletop_swap: .* evaluation alone"):
        protocol.parse_suites("tabletop_base,tabletop_swap", "rollout.py")
    assert list(protocol.parse_suites("tabletop_swap")) == ["tabletop_swap"]


@pytest.mark.parametrize("suites, fine", [(["tabletop_base", "tabletop_task"], True), (["libero_goal_swap", "libero_10_task"], True),
                                          (["tabletop_base", "libero_goal_swap"], False), (["robosuite", "tabletop_base"], False)])
def test_a_scripted_expert_runs_in_one_world(suites, fine):
    if fine:
        return protocol.one_world(suites)
    worlds = " and ".join(sorted(map(world.world_of, suites)))
    with pytest.raises(BadInput, match=f"--suites {','.join(suites)}: {worlds} .* a command of its own"):
        protocol.one_world(suites)


def test_collect_refuses_two_worlds_before_anything_is_written(refused, tmp_path, monkeypatch):
    task_list = world.task_list
    monkeypatch.setattr(world, "task_list", lambda s: task_list("tabletop_base"))             # LIBERO need not be installed
    assert "run each in a command of its own" in refused(collect, "--suites", "tabletop_base,libero_goal_swap", "--output", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------------------------------------- noise

def namespace(output, **changes):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    return argparse.Namespace(**{**vars(p.parse_args([])), "output": str(output), "workers": 1, "concurrency": 1, "turns": 12, **changes})


@pytest.mark.parametrize("given, suites, settled", [
    (None, {"libero_goal_swap"}, world.LIBERO_NOISE), (0.0, {"libero_goal_swap"}, 0.0), (3.0, {"libero_goal_swap", "tabletop_base"}, 3.0),
    (None, {"tabletop_base"}, None)])
def test_noise_that_is_not_given_is_liberos_default_where_libero_runs(given, suites, settled):
    args = argparse.Namespace(noise=given)
    protocol.settle_noise(args, suites)
    assert args.noise == settled


@pytest.mark.parametrize("noise", [0.0, 6.0])
def test_tabletop_alone_refuses_noise(noise):
    with pytest.raises(BadInput, match=f"--noise {noise:g}: tabletop_base, tabletop_swap have no noise; leave the option out"):
        protocol.settle_noise(argparse.Namespace(noise=noise), {"tabletop_swap", "tabletop_base"})


def test_a_run_on_tabletop_records_no_noise_and_refuses_any_before_it_writes(tmp_path):
    spec = {"suite": "tabletop_base", "index": 0, "init": 100, "attempt": 0}
    with pytest.raises(BadInput, match="--noise 5: tabletop_base have no noise"):
        adapters.run(namespace(tmp_path / "a", noise=5.0), [spec], "test", ScriptedTeacher())
    assert not (tmp_path / "a").exists()
    adapters.run(namespace(tmp_path / "b"), [spec], "test", ScriptedTeacher())
    assert records.read_json(tmp_path / "b/args.json")["noise"] is None


@pytest.mark.libero
def test_a_run_on_libero_records_the_default_noise_and_another_level_is_another_run(tmp_path):
    (tmp_path / "STOP").touch()                                                              # nothing is simulated
    spec = {"suite": "libero_object_swap", "index": 0, "init": 11, "attempt": 0}
    adapters.run(namespace(tmp_path), [spec], "test", ScriptedTeacher())
    assert records.read_json(tmp_path / "args.json")["noise"] == world.LIBERO_NOISE
    with pytest.raises(BadInput, match=f"holds a run with noise={world.LIBERO_NOISE}, this command says 0.0"):
        adapters.run(namespace(tmp_path, noise=0.0), [spec], "test", ScriptedTeacher())


def test_a_job_tells_noise_to_libero_alone_and_a_retry_meets_the_same_draws(tmp_path):
    def job(suite, episode_id, **changes):
        spec = {"suite": suite, "index": 3, "init": 12, "attempt": 1, "episode_id": episode_id}
        return adapters.SkillsAdapter().job(spec, "http://x", namespace(tmp_path, noise=6.0, **changes), "m")
    assert job("tabletop_base", "t-3.i12.a1.r0")["noise"] is None and job("libero_goal_swap", "g-3.i12.a1.r0")["noise"] == 6.0
    first, again, other = (job("libero_goal_swap", f"g-3.i12.{end}")["noise_seed"] for end in ("a1.r0", "a1.r12", "a2.r0"))
    assert first == again != other
    assert len({first, job("libero_goal_swap", "g-3.i12.a1.r0", seed=1)["noise_seed"],
                job("libero_goal_swap", "g-3.i12.a1.r0", round=2)["noise_seed"]}) == 3


# ---------------------------------------------------------------------------------------------- initial states

@pytest.mark.parametrize("init", HELD_OUT)
def test_episodes_of_held_out_states_are_never_trained_on(init):
    with pytest.raises(BadInput, match=f"^here: episode e starts from state {init} of tabletop_base/3; .* none of them is trained on"):
        protocol.refuse_held_out(Episode("e", "skills", "tabletop_base/3", init, 0, 1, True), "here")
    for fine in TRAINING:
        protocol.refuse_held_out(Episode("e", "skills", "tabletop_base/3", fine, 0, 1, True), "here")


@pytest.fixture
def round_from_state_5(tmp_path):
    """A run folder that rewrite.py and rl.py would take, but for the state that its second episode starts from."""
    calls = {name: play(name) for name in ("good", "held-out")}
    with records.JsonlWriter(tmp_path / "round/calls.jsonl") as w:
        for call in sum(calls.values(), []):
            w.append(records.to_line(call))
    with records.JsonlWriter(tmp_path / "round/episodes.jsonl") as w:
        for name, init in (("good", 11), ("held-out", 5)):
            w.append(records.to_line(dataclasses.replace(episode(name, calls[name]), init=init, valid=False, reward=None, reason="worker_lost")))
    return tmp_path / "round"


@pytest.mark.parametrize("stage, argv", [(rewrite, ["--student", "{model}", "--teacher", "{round}"]),
                                         (rl, ["--model", "{model}", "--rollouts", "{round}", "--rounds", "1"])])
def test_the_commands_that_train_refuse_a_folder_with_a_held_out_state(stage, argv, round_from_state_5, tiny_dir, tmp_path, refused):
    argv = [a.format(model=tiny_dir, round=round_from_state_5) for a in argv]
    err = refused(stage, *argv, "--output", tmp_path / "out")
    assert "round/episodes.jsonl: episode held-out starts from state 5 of " in err
    left = {p.name: p.stat().st_size for p in (tmp_path / "out").rglob("*")} if (tmp_path / "out").exists() else {}
    assert left.keys() <= {"args.json", ".lock", "sft.jsonl.part"} and not left.get("sft.jsonl.part"), left       # no row, nothing whole


@pytest.mark.parametrize("init", HELD_OUT)
@pytest.mark.parametrize("stage", [collect, rollout])
def test_the_commands_that_run_training_episodes_refuse_held_out_states(stage, init, tmp_path, refused):
    model = ["--model", "nowhere"] if stage is rollout else []
    err = refused(stage, *model, "--suites", "tabletop_base", "--inits", f"11,{init},44", "--output", tmp_path / "x")
    assert f"--inits: {stage.__name__}.py must not use states [{init}]" in err and not (tmp_path / "x").exists()


def test_the_split_of_states_is_whole_and_disjoint():
    parts = (protocol.MEMORY_STATES, protocol.EVALUATION_STATES, range(11, 45), protocol.VALIDATION_STATES)
    assert [i for part in parts for i in part] == list(range(50))
    protocol.refuse_evaluation_states(TRAINING, "x")


@pytest.mark.parametrize("init, there", [(0, True), (49, True), (50, False), (99, False), (100, True)])
def test_states_that_a_world_does_not_have_are_refused(init, there):
    spec = [{"suite": "tabletop_base", "index": 0, "init": init}]
    if there:
        return protocol.check_states(spec)
    with pytest.raises(BadInput, match=f"--inits: initial state {init} of tabletop_base/0 does not exist; valid: 0-49"):
        protocol.check_states(spec)


def test_a_pool_report_of_evaluation_states_chooses_no_tasks(tmp_path, refused):
    (tmp_path / "report.json").write_text(json.dumps({"inits": "10-11", "tasks": {"tabletop_base/0": {"success": 0.5}}}))
    err = refused(rollout, "--model", "nowhere", "--suites", "tabletop_base", "--inits", "11", "--pool-report", tmp_path / "report.json",
                  "--output", tmp_path / "x")
    assert "measured on evaluation states (10-11)" in err
