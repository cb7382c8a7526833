"""The control-code side of the LIBERO-PRO world: CaP-X's API, and the programs of its scripted teacher.

Programs run in this process here; the sandbox that isolates them has tests of its own. Only development states (11-44) are used.
"""

import io
import json
import random
from contextlib import redirect_stdout

import numpy as np
import pytest

pytest.importorskip("libero")

from harness import libero_programs as teacher  # noqa: E402
from harness.code_api import ApiError, DOWN  # noqa: E402
from harness.libero import Libero  # noqa: E402
from harness.libero_api import LiberoApi  # noqa: E402
from harness.world import make_world  # noqa: E402

pytestmark = pytest.mark.libero
SOUP = ("libero_object_swap", 0, 11)
PUT = "pick the akita black bowl {} and place it on the plate"


@pytest.fixture(scope="module")
def world():
    made = make_world("libero")
    made.disturb(0, "")
    yield made
    made.close()


def start(world, suite, index, init):
    world.reset(Libero.tasks(suite)[index], init)
    return LiberoApi(world)


def run(api, *programs):
    """Runs programs as the session does, with arguments as they arrive there -> what they printed."""
    def stand_in(name):
        def call(*args, **kwargs):
            return api.call(name, *json.loads(json.dumps([args, kwargs], default=lambda v: v.tolist())))
        return call
    names, out = {name: stand_in(name) for name in api.functions}, io.StringIO()
    with redirect_stdout(out):
        for program in programs:
            exec(program, names)
    return out.getvalue()


def solve(world, suite, index, init, style="plain", choice=0):
    """One episode of the teacher -> (the task's predicate was met, what was printed, the API)."""
    api = start(world, suite, index, init)
    step, = teacher.steps(world.task.instruction)
    printed = run(api, teacher.program([step], [teacher.choices(step)[choice]], style, random.Random(0)))
    return world.latched, printed.strip(), api


# ---------------------------------------------------------------------------------------------- the API

def test_poses_are_the_worlds_in_the_robots_frame(world):
    api = start(world, *SOUP)
    poses = api.call("get_all_object_poses", [], {})
    assert set(poses) == set(world.ids) and "basket" in poses
    for row in world.objects():
        position, quaternion = poses[row["name"]]
        assert np.abs(1000 * (position + world.base) - [row["x"], row["y"], row["z"]]).max() <= .5, row["name"]
        assert abs(np.linalg.norm(quaternion) - 1) < 1e-6 and quaternion[0] >= 0
        assert np.array_equal(api.call("get_object_pose", [row["name"]], {})[0], position)
    assert np.linalg.norm(world.base) > .5                  # else the test could not tell the frames apart


def test_places_and_fixtures_have_poses(world):
    poses = start(world, "libero_goal_swap", 4, 11).call("get_all_object_poses", [], {})
    top, cabinet = poses["wooden cabinet top side"][0], poses["wooden cabinet"][0]
    assert np.linalg.norm((top - cabinet)[:2]) < .05 and top[2] - cabinet[2] > .2


def test_an_observation_is_the_hands_pose(world):
    api = start(world, *SOUP)
    seen = api.call("get_observation", [], {})
    hand = seen["robot_cartesian_pos"]
    assert hand.shape == (8,) and seen["robot_joint_pos"].shape == (7,)
    assert np.allclose(hand[:3], world._hand() - world.base) and hand[7] > .95
    assert abs(hand[3:7] @ DOWN) > .995                     # at the start it points down, fingers along y


@pytest.mark.parametrize("quaternion, fingers", [(DOWN, (0, 1, 0)), ((0, .7071, .7071, 0), (1, 0, 0))])
def test_goto_reaches_its_pose(world, quaternion, fingers):
    api = start(world, *SOUP)
    api.call("goto_pose", [[.5, .1, .2], list(quaternion), .1], {})
    hand = api.call("get_observation", [], {})["robot_cartesian_pos"]
    assert np.linalg.norm(hand[:3] - [.5, .1, .2]) < .005
    assert abs(hand[3:7] @ quaternion) > .997
    assert abs(abs(world._pose()[:, 0] @ fingers) - 1) < .01


def test_the_approach_comes_from_above(world):
    api, path = start(world, *SOUP), []
    target = np.array([.55, -.1, .12])
    world.on_chunk = lambda w: path.append(w._hand() - w.base)
    try:
        api.call("goto_pose", [target.tolist(), list(DOWN)], {"z_approach": .15})
    finally:
        world.on_chunk = None
    low = [p for p in path if p[2] < target[2] + .10]
    assert low and max(np.linalg.norm((p - target)[:2]) for p in low) < .02


def test_a_stretched_arm_stops_short_of_turning_its_elbow_inside_out(world):
    """Without the limit the elbow passes through straight there, and nothing brings it back."""
    api = start(world, "libero_spatial_task", 3, 12)
    bowl, _ = api.call("get_object_pose", ["akita black bowl 2"], {})
    api.call("goto_pose", [[*(bowl[:2] + [0, .05]).tolist(), bowl[2] + .04], list(DOWN), .2], {})
    assert world._elbow() < -.8
    api.call("goto_pose", [[.75, 0, .9], list(DOWN)], {})
    assert world._elbow() < -.4
    api.call("goto_pose", [[.5, 0, .3], list(DOWN)], {})
    assert np.linalg.norm(world._hand() - world.base - [.5, 0, .3]) < .005


@pytest.mark.parametrize("name, args, kind, words", [
    ("get_object_pose", ["cocoa"], "KeyError", "there are: alphabet soup, basket"),
    ("get_object_pose", [3], "TypeError", "must be a string"),
    ("sample_grasp_pose", ["wooden spoon"], "KeyError", "there is no 'wooden spoon'"),
    ("goto_pose", [[.5, 0], list(DOWN)], "TypeError", "position must be 3 numbers, found a list of 2"),
    ("goto_pose", [[.5, 0, .2], [0, 0, 0, 0]], "ValueError", "must be a unit quaternion"),
    ("goto_pose", [[.95, 0, .2], list(DOWN)], "ValueError", "0.95 m from the base, which reaches 0.25 to 0.85 m"),
    ("goto_pose", [[.5, 0, .2], list(DOWN), -1], "ValueError", "z_approach must be a length"),
    ("open_gripper", [1], "TypeError", "too many positional arguments"),
])
def test_what_is_wrong_with_a_call_reads_well(world, name, args, kind, words):
    api = start(world, *SOUP)
    with pytest.raises(ApiError, match=words) as error:
        api.call(name, args, {})
    assert error.value.kind == kind and world.steps == 0


def test_the_prompt_documents_every_function():
    text = LiberoApi.prompt()
    assert "goto_pose(position, quaternion_wxyz, z_approach=0.0)" in text and "w, x, y, z" in text
    assert all(f"\n{name}(" in text for name in LiberoApi.functions)
    assert len(text) < 4500                                 # a tiny planner reads it in every turn


def test_a_program_picks_places_and_latches(world):
    met, printed, api = solve(world, *SOUP)
    assert met and printed == "alphabet soup placed" and world.held is None
    assert json.loads(json.dumps(api.events)) == [
        {"tool": "close_gripper", "object": "alphabet soup", "held": True},
        {"tool": "open_gripper", "object": "alphabet soup", "target": "basket"}]
    assert api.motions == 5


def test_held_follows_the_fingers(world):
    api = start(world, *SOUP)
    position, quaternion = (v.tolist() for v in api.call("sample_grasp_pose", ["alphabet soup"], {}))
    api.call("goto_pose", [position, quaternion, .2], {})
    api.call("close_gripper", [], {})
    assert api.events[-1] == {"tool": "close_gripper", "object": "alphabet soup", "held": False}       # not lifted yet
    api.call("goto_pose", [position[:2] + [position[2] + .15], quaternion], {})
    assert world.held == "alphabet soup" and api.events[-1]["held"]
    api.call("open_gripper", [], {})
    assert world.held is None and api.events[-1]["object"] == "alphabet soup"
    api.call("close_gripper", [], {})
    api.call("open_gripper", [], {})
    assert api.events[-1] == {"tool": "open_gripper", "object": None, "target": None} and not api.events[-2]["held"]


def test_a_second_episode_repeats_the_first(world):
    ends = []
    for _ in range(2):
        solve(world, *SOUP)
        ends.append(world.state_hash())
    assert ends[0] == ends[1]


# ---------------------------------------------------------------------------------------------- the teacher's programs

@pytest.mark.parametrize("instruction, step", [
    ("pick the alphabet soup and place it in the basket", {"object": "alphabet soup", "place": "basket"}),
    (PUT.format("next to the ramekin"), {"object": teacher.BOWL, "place": "plate", "which": "next to the ramekin"}),
    (PUT.format("not between the plate and the ramekin"),
     {"object": teacher.BOWL, "place": "plate", "which": "not between the plate and the ramekin"}),
    (PUT.format("from table center"), {"object": teacher.BOWL, "place": "plate", "which": "from table center"}),
    ("put the wine bottle on the top of the drawer", {"object": "wine bottle", "place": "wooden cabinet top side"}),
    ("put the bowl on the stove", {"object": teacher.BOWL, "place": "flat stove cook region"}),
    ("push the cream cheese to the front of the stove", {"object": "cream cheese", "place": "table stove front region"}),
    ("put the plate on the stove", {"object": "plate", "place": "flat stove cook region"}),
])
def test_a_sentence_becomes_a_step(instruction, step):
    assert teacher.steps(instruction) == [{"do": "put", **step}]


@pytest.mark.parametrize("instruction", ["turn on the stove", "open the middle layer of the drawer", "put the plate on the top of the drawer",
                                         "put both the alphabet soup and the tomato sauce in the basket", "sing", ""])
def test_other_sentences_have_no_program(instruction):
    assert teacher.steps(instruction) is None


def test_every_put_of_the_suites_has_short_programs():
    found = 0
    for suite in ("object_swap", "object_task", "spatial_swap", "spatial_task", "goal_swap", "goal_task"):
        for task in Libero.tasks(f"libero_{suite}"):
            for step in teacher.steps(task.instruction) or ():
                found += 1
                texts = {s: teacher.program([step], [teacher.choices(step)[0]], s, random.Random(0)) for s in teacher.STYLES}
                for text in texts.values():
                    compile(text, task.id, "exec")
                    assert all(o.split()[-1] in text for o in teacher.outcomes(step)), text
                assert len(texts["plain"]) < (520 if "which" not in step else 800), task.id
                assert len({*texts.values()}) == 3 and len(teacher.choices(step)) == 4
    assert found == 52


def test_helpers_are_defined_once():
    step, = teacher.steps(PUT.format("next to the ramekin"))
    first = teacher.program([step], [teacher.choices(step)[0]], "helper", random.Random(0))
    later = teacher.program([step], [teacher.choices(step)[0]], "helper", random.Random(0), known=teacher.HELPERS)
    assert all(f"def {name}(" in first for name in teacher.HELPERS) and "def " not in later
    assert first.endswith(later.split("\n", 1)[1]) and len(later) < 400


def test_the_bowl_is_found_by_the_poses():
    """Pure: the program's own lines on made-up poses."""
    poses = {"bowl 1": ([.6, .2, 0], None), "bowl 2": ([.5, .3, 0], None), "plate": ([.7, .2, 0], None),
             teacher.RAMEKIN: ([.5, .2, 0], None), "table next to plate region": ([.7, .2, 0], None)}
    for which, bowl in (("between the plate and the ramekin", "bowl 1"), ("not between the plate and the ramekin", "bowl 2"),
                        ("next to the plate", "bowl 1"), ("from table center", "bowl 1")):
        step, = teacher.steps(PUT.format(which))
        for style in ("plain", "helper"):
            text = teacher.program([step], [teacher.choices(step)[0]], style, random.Random(0))
            names = {"get_all_object_poses": lambda: poses, "get_object_pose": lambda n: poses[n], "sample_grasp_pose": None}
            text = text.split("p, q =")[0] if style == "plain" else text.split("q = pick(")[0]
            exec(text, names)
            assert names["bowl"] == bowl, (which, style)


@pytest.mark.parametrize("style", ["helper", "loop"])
def test_other_styles_solve_it_too(world, style):
    met, printed, _ = solve(world, "libero_spatial_task", 2, 11, style)
    assert met and printed == "akita black bowl placed"


@pytest.mark.parametrize("choice", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_wrong_grasp_says_that_it_slipped(world, choice):
    met, printed, _ = solve(world, *SOUP, choice=choice)
    assert not met and printed == "alphabet soup slipped"


@pytest.mark.slow
@pytest.mark.parametrize("suite, index", [("libero_spatial_swap", 5), ("libero_spatial_task", 3), ("libero_goal_swap", 1),
                                          ("libero_goal_task", 8)])
def test_hard_places(world, suite, index):
    """A bowl that leans on the ramekin, one on the cabinet at the end of the reach, a stove beside the rack, a bottle on the plate."""
    assert [solve(world, suite, index, init)[0] for init in (14, 15)] == [True, True]
