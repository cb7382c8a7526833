"""The API of control code: checks of what programs send, names, documentation in prompts; tabletop's functions and the events they note."""

import argparse

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import adapters
from harness import code_api
from harness.code_api import Api, api_class, ApiError, DOWN, EpisodeOver, find, flag, length, moves, point, quaternion, text
from harness.tabletop import GRASP, Tabletop
from harness.tabletop_api import GRASP_Z, LOWEST, TabletopApi
from records import BadInput


class ToyApi(Api):
    """What the tests below vary."""
    functions = ("look", "push")
    notes = "Lengths are in metres."

    def look(self, name: text, twice: flag = False):
        """Sees a thing.
        Twice, if asked."""
        return [name, twice]

    @moves
    def push(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0) -> list:
        """Pushes."""
        self.world.n += 1
        return (position, quaternion_wxyz, z_approach)


class ToyWorld:
    def __init__(self):
        self.n, self.looked, self.solved, self.broken = 0, 0, False, None

    def success(self):
        self.looked += 1
        return self.solved

    def unrecoverable(self):
        return self.broken


@pytest.fixture
def toy():
    return ToyApi(ToyWorld())


def refused(api, name, /, *args, **kwargs):
    """The ApiError of a call -> (kind, text)"""
    with pytest.raises(ApiError) as e:
        api.call(name, list(args), kwargs)
    assert len(str(e.value)) < 400
    return e.value.kind, str(e.value)


UP = [1.0, 0.0, 0.0, 0.0]
NAN, INF = float("nan"), float("inf")


# ---------------------------------------------------------------------------------------------- checks

@pytest.mark.parametrize("position, kind, words", [
    ([0.1, 0.2], "TypeError", "push(): position must be 3 numbers, found a list of 2"),
    ([0.1] * 4, "TypeError", "found a list of 4"),
    (0.1, "TypeError", "found 0.1"),
    (None, "TypeError", "found None"),
    ("0.1 0.2 0.3", "TypeError", "found '0.1 0.2 0.3'"),
    (["a", "b", "c"], "TypeError", "found a list of 3"),
    ([[0.1, 0.2, 0.3]], "TypeError", "found a list of 1"),
    ([[0.1], [0.2], [0.3]], "TypeError", "found a list of 3"),
    ([0.1, None, 0.3], "TypeError", "3 numbers"),
    ([True, False, True], "TypeError", "3 numbers"),
    ({"x": 1, "y": 2, "z": 3}, "TypeError", "found a dict of 3"),
    ([NAN, 0, 0], "ValueError", "position must be finite"),
    ([INF, 0, 0], "ValueError", "must be finite"),
    ([0, -INF, 0], "ValueError", "must be finite"),
    ([10**400, 0, 0], "ValueError", "must be finite"),                          # no float is that big
    ([0, 0, 5.01], "ValueError", "within 5 m"),
    ([400, -133, 73], "ValueError", "within 5 m"),                              # millimetres
])
def test_points_are_checked(toy, position, kind, words):
    found = refused(toy, "push", position, UP)
    assert found[0] == kind and words in found[1] and toy.world.n == toy.motions == 0


@pytest.mark.parametrize("q, kind, words", [
    ([0, 1, 0], "TypeError", "4 numbers"), ([0, 0, 0, 0], "ValueError", "unit quaternion"), ([3, 0, 0, 0], "ValueError", "unit quaternion"),
    ([NAN, 1, 0, 0], "ValueError", "finite"), ("down", "TypeError", "4 numbers"), ([1e200] * 4, "ValueError", "finite")])
def test_quaternions_are_checked(toy, q, kind, words):
    found = refused(toy, "push", [0, 0, 0], q)
    assert found[0] == kind and words in found[1]


@pytest.mark.parametrize("z, kind", [(-0.01, "ValueError"), (5.01, "ValueError"), (NAN, "ValueError"), (INF, "ValueError"), (10**400, "ValueError"),
                                     ("0.1", "TypeError"), (None, "TypeError"), (True, "TypeError"), ([0.1], "ValueError"), ([], "TypeError")])
def test_lengths_are_checked(toy, z, kind):
    found = refused(toy, "push", [0, 0, 0], UP, z_approach=z)
    assert found[0] == kind and found[1].startswith("push(): z_approach must be")


@pytest.mark.parametrize("name", [1, None, ["red mug"], {"name": "red mug"}, True, 0.5])
def test_names_are_strings(toy, name):
    kind, words = refused(toy, "look", name)
    assert kind == "TypeError" and "look(): name must be a string" in words


def test_flags_are_true_or_false(toy):
    assert toy.call("look", ["a", True], {}) == ["a", True]
    for value in (1, 0, "True", None, [True]):
        assert refused(toy, "look", "a", value)[0] == "TypeError"


def test_errors_and_names_are_never_long(toy):
    refused(toy, "push", "x" * 10_000, UP)
    refused(toy, "push", list(range(10_000)), UP)
    assert "a huge integer" in refused(toy, "look", 10**5000)[1]
    refused(toy, "push", 10**5000, UP)
    assert len(toy.call("look", ["x" * 10_000], {})[0]) == 200


def test_values_arrive_as_numbers(toy):
    position, q, z = toy.call("push", [[1, 2, 0.5]], {"quaternion_wxyz": [0, 1.5, 0, 0], "z_approach": 1})
    assert position.dtype == float and position.tolist() == [1, 2, 0.5] and q.tolist() == [0, 1, 0, 0] and z == 1.0
    assert toy.call("push", [[0, 0, 0], UP], {})[2] == 0.0


@pytest.mark.parametrize("args, kwargs, words", [
    ([], {}, "push() missing a required argument: 'position'"), ([[0, 0, 0]], {}, "missing a required argument: 'quaternion_wxyz'"),
    ([[0, 0, 0], UP, 0.1, 0.2], {}, "push() too many positional arguments"), ([[0, 0, 0], UP], {"speed": 1}, "unexpected keyword argument 'speed'"),
    ([[0, 0, 0], UP], {"position": [0, 0, 0]}, "multiple values"), ([[0, 0, 0], UP], {"self": 1}, "unexpected keyword argument 'self'")])
def test_missing_and_extra_arguments(toy, args, kwargs, words):
    kind, found = refused(toy, "push", *args, **kwargs)
    assert kind == "TypeError" and words in found and toy.motions == 0


@pytest.mark.parametrize("name", ["pull", "call", "world", "__init__", "prompt", "", "x" * 1000])
def test_only_listed_functions_can_be_called(toy, name):
    kind, words = refused(toy, name)
    assert kind == "NameError" and words == f"name {name[:60]!r} is not defined"


ANY = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                   lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)), max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["look", "push"]), st.lists(ANY, max_size=4), st.dictionaries(st.sampled_from(["name", "position", "z_approach", "args"]), ANY, max_size=2))
@example("push", [[10**400, 10**400, 10**400], UP], {})
def test_whatever_arrives_is_answered_or_refused(name, args, kwargs):
    try:
        value = ToyApi(ToyWorld()).call(name, args, kwargs)
    except ApiError as e:
        assert e.kind in ("TypeError", "ValueError") and len(str(e)) < 400
    else:
        assert name == "look" or np.isfinite(np.concatenate([*value[:2], [value[2]]])).all()


# ---------------------------------------------------------------------------------------------- motions

def test_motions_are_counted_looked_at_and_limited(toy, monkeypatch):
    monkeypatch.setattr(code_api, "MOTIONS", 2)
    for _ in range(5):
        toy.call("look", ["a"], {})
    assert (toy.motions, toy.world.looked) == (0, 0)                        # perception is free
    for k in (1, 2):
        toy.call("push", [[0, 0, 0], UP], {})
        assert (toy.motions, toy.world.looked) == (k, k)
    assert refused(toy, "push", [0, 0, 0])[0] == "TypeError"
    with pytest.raises(EpisodeOver, match="2 motions are used up") as e:
        toy.call("push", [[0, 0, 0], UP], {})
    assert e.value.end == "turns" and toy.world.n == 2


def test_a_world_that_broke_ends_the_episode_unless_the_task_is_solved(toy):
    toy.world.broken, toy.world.solved = "the mug fell", True
    toy.call("push", [[0, 0, 0], UP], {})
    toy.world.solved = False                                 # a success that is undone does not count
    with pytest.raises(EpisodeOver, match="the mug fell") as e:
        toy.call("push", [[0, 0, 0], UP], {})
    assert e.value.end == "unrecoverable"


# ---------------------------------------------------------------------------------------------- documentation

def test_prompt_and_signatures():
    assert ToyApi.signature("push") == "push(position, quaternion_wxyz, z_approach=0.0)"
    assert ToyApi.signature("look") == "look(name, twice=False)"
    assert ToyApi.specs() == [("look", "look(name, twice=False)", "Sees a thing.\nTwice, if asked."), ("push", ToyApi.signature("push"), "Pushes.")]
    assert ToyApi.prompt() == ("Lengths are in metres.\nlook(name, twice=False)\n    Sees a thing.\n    Twice, if asked.\n"
                               "push(position, quaternion_wxyz, z_approach=0.0)\n    Pushes.")


def settle(**changes):
    p = argparse.ArgumentParser()
    adapters.add_rollout_arguments(p, sampling="train")
    args = p.parse_args(["--harness", "code"])
    for k, v in changes.items():
        setattr(args, k, v)
    adapters.settle(args, {"tabletop_base", "tabletop_task"})
    return args


def test_a_function_without_docstring_or_check_is_refused_at_start(monkeypatch):
    args = settle()
    assert (args.turns, args.max_tokens, args.noise) == (11, 32_768, None)
    assert settle(turns=3, max_tokens=5).turns == 3
    with monkeypatch.context() as m:
        m.setattr(TabletopApi.get_observation, "__doc__", "  ")
        with pytest.raises(BadInput, match=r"tabletop_\w+/0: TabletopApi.get_observation has no docstring.*write one"):
            settle()
        with pytest.raises(ValueError, match="no docstring"):
            TabletopApi(Tabletop())
    with monkeypatch.context() as m:
        m.delitem(TabletopApi.goto_pose.__annotations__, "z_approach")
        with pytest.raises(BadInput, match=r"TabletopApi.goto_pose: argument z_approach has no check"):
            settle()
    with monkeypatch.context() as m:
        m.setattr(TabletopApi, "functions", (*TabletopApi.functions, "fly"))
        with pytest.raises(BadInput, match="TabletopApi.fly has no docstring"):
            settle()
    with pytest.raises(BadInput, match="--noise 4: --harness code reads exact poses"):
        settle(noise=4.0)
    monkeypatch.setattr("harness.confine.layers", lambda: {"seccomp": False})           # told before a run, not as crashes of it
    with pytest.raises(BadInput, match="cannot filter system calls"):
        settle()


def test_names_are_found():
    names = ["red mug", "red pan", "Blue_Tray", "akita_black_bowl_1", "akita_black_bowl_10"]
    assert find("red mug", names) == "red mug"
    assert find("RED_MUG ", names) == find("redmug", names) == "red mug"
    assert find("tray", names) == find("blue tray", names) == "Blue_Tray"
    assert find("akita black bowl 1", names) == "akita_black_bowl_1"                   # the same before one that contains it
    for wrong, words in (("red", "could be red mug, red pan"), ("bowl_1", "could be akita_black_bowl_1, akita_black_bowl_10"),
                         ("jug", "there is no 'jug'; there are: red mug, red pan, Blue_Tray"), ("", "there is no ''"), (" _", "there is no")):
        with pytest.raises(ApiError, match=words) as e:
            find(wrong, names)
        assert e.value.kind == "KeyError"
    with pytest.raises(ApiError, match="could be Mug, mug$"):
        find("MUG", ["Mug", "mug", "mug 2"])
    assert find("mug", ["Mug", "mug"]) == "mug"


def test_tabletop_has_its_api():
    for suite in ("tabletop_base", "tabletop_swap", "tabletop_task"):
        assert {api_class(t) for t in Tabletop.tasks(suite)} == {TabletopApi}
    TabletopApi.check()


# ---------------------------------------------------------------------------------------------- tabletop

@pytest.fixture(scope="module")
def world():
    return Tabletop()


def start(world, index=0, init=12, suite="tabletop_base"):
    world.reset(Tabletop.tasks(suite)[index], init)
    return TabletopApi(world)


def call(api, name, *args, **kwargs):
    return api.call(name, [a.tolist() if isinstance(a, np.ndarray) else list(a) if isinstance(a, tuple) else a for a in args], kwargs)


def pick(api, name, dy):
    """A grasp `dy` (mm) along y from the middle of the head, and a lift."""
    p, q = call(api, "sample_grasp_pose", name)
    p = p + [0, dy / 1000, 0]
    call(api, "open_gripper")
    call(api, "goto_pose", p, q, 0.1)
    call(api, "close_gripper")
    call(api, "goto_pose", p + [0, 0, 0.2], q)


@pytest.mark.parametrize("index, name", [(0, "green mug"), (1, "yellow jar"), (4, "red pan")])
def test_the_right_grasp_holds_and_a_wrong_one_slips(world, index, name):
    for dy in (-20, 0, 20, 40):
        api, right = start(world, index, 12 if index == 0 else 11), GRASP[name.split()[1]] == dy
        try:
            pick(api, name, dy)
        except EpisodeOver as e:
            assert e.end == "unrecoverable" and not right
        assert (world.held == name) == right and (world._position(name)[2] > 0.1) == right
        assert api.events == [{"tool": api.events[0]["tool"], "object": name, "held": right, "right": right}]      # one grasp, noted once


def test_put_notes_its_target_and_a_drop_none(world):
    api = start(world)
    pick(api, "green mug", 40)
    p, q = call(api, "get_object_pose", "blue bowl")
    call(api, "goto_pose", p + [0, 0, 0.1], DOWN, z_approach=0.1)
    assert not world.success()
    call(api, "open_gripper")
    assert world.success() and world.held is None
    assert api.events[1:] == [{"tool": "open_gripper", "object": "green mug", "target": "blue bowl"}]
    call(api, "open_gripper")
    assert len(api.events) == 2                                              # it held nothing
    pick(api, "green mug", 40)
    call(api, "goto_pose", [0.4, 0, 0.1], DOWN)
    call(api, "open_gripper")
    assert api.events[-1] == {"tool": "open_gripper", "object": "green mug", "target": None} and world.latched and not world.success()


def test_a_grasp_far_from_everything_is_no_event(world):
    api = start(world)
    call(api, "goto_pose", [0.15, 0.4, 0.2], DOWN)
    call(api, "close_gripper")
    assert api.events == [] and api.motions == 2


@pytest.mark.parametrize("q", [[1, 0, 0, 0], [0, 0.7071, 0.7071, 0], [0, 0.9239, 0, 0.3827], [0.5, 0.5, 0.5, 0.5]])
def test_a_turned_hand_is_refused(world, q):
    api = start(world)
    before = world.state_hash()
    assert refused(api, "goto_pose", [0.4, 0, 0.2], q) == ("ValueError", "the hand points straight down and cannot turn; use the quaternion of sample_grasp_pose")
    assert world.state_hash() == before


def test_the_same_turn_with_the_other_sign_is_accepted_and_the_hand_arrives(world):
    api = start(world)
    call(api, "goto_pose", [0.4, 0.05, 0.2], [0, -1, 0, 0])
    seen = call(api, "get_observation")["robot_cartesian_pos"]
    assert seen.shape == (8,) and np.allclose(seen[:3], [0.4, 0.05, 0.2], atol=0.004) and seen[3:7].tolist() == list(DOWN) and seen[7] > 0.9
    call(api, "close_gripper")
    assert call(api, "get_observation")["robot_cartesian_pos"][7] < 0.1
    call(api, "goto_pose", [5, 5, -5], DOWN)                                  # as far as it goes
    assert np.allclose(call(api, "get_observation")["robot_cartesian_pos"][:3], [0.9, 0.48, LOWEST], atol=0.01)


def test_poses_are_those_of_the_world(world):
    api = start(world)
    poses = call(api, "get_all_object_poses")
    assert list(poses) == world.names + world.containers
    for name, (p, q) in poses.items():
        one = call(api, "get_object_pose", name.upper())
        assert np.array_equal(one[0], p) and np.array_equal(one[1], q) and abs(np.linalg.norm(q) - 1) < 1e-6 and abs(p[2]) < 0.05
    p, q = call(api, "sample_grasp_pose", "green mug")
    assert np.allclose(p - poses["green mug"][0], [0, 0, GRASP_Z]) and q.tolist() == list(DOWN)
    p[:] = 9                                                                  # a copy: nothing of the simulator's
    poses["green mug"][0][:] = 9
    assert abs(call(api, "get_object_pose", "green mug")[0][0]) < 1
    assert refused(api, "sample_grasp_pose", "blue bowl") == ("ValueError", "the blue bowl cannot be grasped")
    kind, words = refused(api, "get_object_pose", "mug")
    assert kind == "KeyError" and "could be" in words


def test_the_same_calls_give_the_same_state(world):
    hashes = []
    for _ in range(2):
        api = start(world, 3, 30)
        pick(api, "red jar", 0)
        hashes.append((world.state_hash(), str(api.events)))
    assert hashes[0] == hashes[1]
