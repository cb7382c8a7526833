"""robosuite's tasks as CaP-Bench uses them: start states, the step, predicates, motions, the API and its events, expert programs.

Only development states (11-49) are used. Needs requirements-libero.txt, which brings robosuite 1.4.
"""

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

pytest.importorskip("libero.libero", reason="needs requirements-libero.txt")        # not robosuite: it would be loud

from PIL import Image

from harness.code_api import api_class, ApiError, DOWN, EpisodeOver
from harness.robosuite_api import api_of
from harness.robosuite_motion import CLOSE, OPEN, quaternion_of, rotation_of
from harness.robosuite_programs import PROGRAMS
from harness.robosuite_world import Robosuite, TASKS
from harness.world import make_world, world_of

pytestmark = pytest.mark.libero
ROOT = Path(__file__).resolve().parent.parent
LIFT, STACK, RESTACK, NUT, WIPE, POT, HANDOVER = TASKS
UP = np.array([0, 0, .15])


@pytest.fixture(scope="module")
def shared():
    made = make_world("robosuite")
    yield made
    made.close()


@pytest.fixture
def world(shared):
    shared.on_chunk = None
    return shared


def start(world, task, init=12):
    """Resets -> a caller of the API's functions as programs reach it: arrays become lists."""
    world.reset(task, init)
    api = api_of(task)(world)
    plain = lambda v: v if isinstance(v, str) else np.asarray(v).tolist()

    def call(name, *args, **kwargs):
        return api.call(name, [plain(a) for a in args], {k: plain(v) for k, v in kwargs.items()})
    call.api = api
    return call


def run(world, task, init, code):
    """Runs a program from the start state -> (success in the final state, its API's events)."""
    call = start(world, task, init)
    functions = {name: lambda *a, _name=name, **k: call(_name, *a, **k) for name in call.api.functions}
    exec(code, {"np": np, **functions})
    return world.success(), call.api.events


def put(world, name, position, quaternion=(1, 0, 0, 0)):
    """Puts an object somewhere in the frame. The test may write states; the world never does."""
    joint = world.model.joint(world.model.body_jntadr[world.movable[name]])
    address = joint.qposadr[0]
    world.data.qpos[address:address + 3] = world.origin + world.turned @ np.array(position, float)
    world.data.qpos[address + 3:address + 7] = quaternion_of(world.turned @ rotation_of(np.array(quaternion, float)))
    mujoco.mj_forward(world.model, world.data)


# ---------------------------------------------------------------------------------------------- tasks and start states

def test_seven_tasks_and_their_initial_states():
    tasks = Robosuite.tasks("robosuite")
    assert [t.id for t in tasks] == [f"robosuite/{k}" for k in range(7)] and tuple(tasks) == TASKS
    assert all(t.instruction and t.goal and world_of(t.suite) == "robosuite" for t in tasks)
    for init in (0, 49, 100, 12345):
        Robosuite.check_init(LIFT, init)
    for init in (-1, 50, 99):
        with pytest.raises(ValueError, match=f"initial state {init} of robosuite/0 does not exist; valid: 0-49, and 100 upwards"):
            Robosuite.check_init(LIFT, init)
    with pytest.raises(ValueError, match="unknown suite 'robosuite_pro'; valid: robosuite"):
        Robosuite.tasks("robosuite_pro")
    with pytest.raises(ValueError, match="has no noise"):
        Robosuite().disturb(4, "")


@pytest.mark.slow
def test_task_and_init_fix_the_start_state_in_any_process_after_any_history(world):
    other = subprocess.run([sys.executable, "-c", """
import numpy, random
numpy.random.seed(7); random.seed(7)
from harness.robosuite_world import Robosuite, TASKS
w = Robosuite()
for task in reversed(TASKS):
    if task.index in (0, 6):
        w.reset(task, 23); w.step()
    w.reset(task, 11)
    print(w.state_hash())
"""], cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ours = []
    for task in TASKS:
        call = start(world, task, 11)
        ours.append(world.state_hash())
        if task in (STACK, WIPE, HANDOVER):                 # another episode in between
            name = next(n for n in call.api.functions if n.startswith("goto_pose"))
            call(name, [.45, .05, .2], DOWN)
            assert world.state_hash() != ours[-1]
            world.reset(task, 11)
            assert world.state_hash() == ours[-1] and world.steps == 0 and not world.latched
    assert other.stdout.split() == ours[::-1], other.stderr
    assert len(set(ours)) == 7


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_initial_states_differ_in_layout_and_their_objects_are_told(world, task):
    layouts = []
    for init in (12, 100):
        world.reset(task, init)
        layouts.append(np.array([[row[k] for k in "xyz"] for row in world.objects()] + [world.hand_pose(0)[0] * 1000]))
        assert not world.success() and world.unrecoverable() is None
        assert world.held is None
    moved = np.abs(layouts[0] - layouts[1]).max(axis=1)
    assert moved[:-1].max() >= 3 and moved[-1] >= 1         # mm: objects, and the hand
    assert world.names() == [row["name"] for row in world.objects()]
    assert all(name in api_of(task).notes for name in world.names()) and set(api_of(task).graspable) <= set(world.names())


def test_the_global_random_states_are_left_alone(world):
    np.random.seed(3)
    random.seed(3)
    world.reset(HANDOVER, 11)
    world.step()
    assert np.random.rand() == np.random.RandomState(3).rand() and random.random() == random.Random(3).random()


def test_restack_starts_with_the_green_cube_on_the_red_one(world):
    for init in (11, 14):
        world.reset(RESTACK, init)
        assert world.resting_on("green cube") == "red cube" and world.resting_on("red cube") == "table"


# ---------------------------------------------------------------------------------------------- the step and the predicates

@pytest.mark.parametrize("task, steps", [(LIFT, 60), (WIPE, 60), (HANDOVER, 60)], ids=lambda v: getattr(v, "id", v))
def test_the_fast_step_is_robosuites_own_bit_for_bit(world, task, steps):
    """With contact: the cube is grasped, the sponge wipes, the hammer is grasped."""
    start(world, task)
    two, own, actions, fast, d = task is HANDOVER, world.env.step, [], [], world.data

    def state():
        return np.concatenate([[d.time], d.qpos, d.qvel, d.qacc_warmstart, d.ctrl, world.wiped()])

    def recorded(action):
        actions.append(action)
        out = own(action)
        fast.append(state())
        return out
    world.env.step = recorded
    call = api_of(task)(world)
    go = call.goto_pose_arm0 if two else call.goto_pose
    if task is WIPE:
        go(np.array([*call.get_spill_points()[0][:2], 0]), np.array(DOWN))
    else:
        go(*call.sample_grasp_pose("hammer" if two else "red cube"))
        world.grip(0, CLOSE)
        assert world.held
    assert len(actions) > 30
    world.reset(task, 12)
    d = world.data
    for k, action in enumerate(actions[:steps]):
        world.env.step(action)                              # MuJoCo's own forward and step
        assert np.array_equal(state(), fast[k]), f"step {k}"
    if task is WIPE:
        assert world.wiped().any()


def test_success_is_robosuites_and_latched(world):
    call = start(world, LIFT)
    seen = []
    world.on_chunk = lambda w: seen.append((bool(w.env._check_success()), w.latched))
    grasp, turn = call("sample_grasp_pose", "red cube")
    call("goto_pose", grasp, turn, .1)
    call("close_gripper")
    assert world.held == "red cube" and not world.latched
    call("goto_pose", grasp + UP, turn)
    assert world.success() and world.latched
    call("open_gripper")
    assert not world.success() and world.latched and world.held is None
    first = [now for now, _ in seen].index(True)
    assert [latched for _, latched in seen] == [False] * first + [True] * (len(seen) - first)
    assert len(seen) == world.steps
    assert world.privileged()["success"] == 0 and world.privileged()["latched"] == 1
    world.reset(LIFT, 12)
    assert not world.latched


def test_restacking_needs_the_green_cube_on_the_table(world):
    start(world, RESTACK)
    stack = type(world.env).__mro__[1]
    for height, ok in ((.025, True), (.20, False)):
        put(world, "green cube", [.55, .1, height])
        put(world, "red cube", [.55, .1, height + .0445])       # half a millimetre into it: contact
        assert stack._check_success(world.env)                  # robosuite's own
        assert world.success() is ok
    start(world, STACK)
    assert type(world.env).__name__ == "Stack"


def test_what_fell_is_unrecoverable_and_ends_the_episode_unless_the_task_is_solved(world, monkeypatch):
    call = start(world, STACK)
    put(world, "green cube", [.5, 0, -.3])
    assert world.unrecoverable() == "the green cube fell off the table"
    with pytest.raises(EpisodeOver, match="the green cube fell off the table") as over:
        call("open_gripper")
    assert over.value.end == "unrecoverable"
    monkeypatch.setattr(world, "success", lambda: True)
    call("open_gripper")


# ---------------------------------------------------------------------------------------------- motions

def test_a_hand_arrives_where_it_is_sent_and_says_so(world):
    call = start(world, STACK)
    for position, yaw in (([.5, .2, .25], 0), ([.62, -.15, .1], 1.2), ([.4, 0, .3], -1.5)):
        turn = np.array([0, np.cos(yaw / 2), np.sin(yaw / 2), 0])
        assert call("goto_pose", position, turn) is None
        found = call("get_observation")["robot_cartesian_pos"]
        assert found[:3] == pytest.approx(position, abs=.004)
        assert abs(found[3:7] @ turn) > .999 and found[7] == pytest.approx(.08, abs=.002)


def test_an_approach_comes_back_along_the_hand(world):
    call = start(world, STACK)
    seen = []
    world.on_chunk = lambda w: seen.append(w.hand_pose(0)[0])
    tilted = np.array([0, np.cos(.25), 0, np.sin(.25)])         # leans by 0.5 rad
    ahead = rotation_of(tilted)[:, 2]
    goal = np.array([.5, .1, .2])
    call("goto_pose", goal, tilted, .1)
    assert min(np.linalg.norm(np.array(seen) - (goal - .1 * ahead), axis=1)) < .005
    assert np.linalg.norm(seen[-1] - goal) < .004


def test_a_blocked_way_and_a_far_goal_end_the_motion(world):
    call = start(world, STACK)
    assert call("goto_pose", [.45, -.2, .1], DOWN) is None
    before = world.steps
    assert call("goto_pose", [.45, -.2, -.2], DOWN) is None     # through the table
    assert -.005 < world.hand_pose(0)[0][2] < .02 and world.steps - before < 100
    before = world.steps
    call("goto_pose", [2., 0, .5], DOWN)
    elbow = world.data.qpos[world.arms[0].robot._ref_joint_pos_indexes[3]]
    assert world.steps - before < 100 and elbow > -.3           # straight
    call("goto_pose", [.5, 0, .2], DOWN)                        # and it comes back all the same
    assert np.linalg.norm(world.hand_pose(0)[0] - [.5, 0, .2]) < .004


def test_a_hand_turned_by_half_a_turn_is_the_same_hand_but_what_is_held_turns(world):
    call = start(world, LIFT)
    twin = np.array([0, 0, 1, 0])
    call("goto_pose", [.45, 0, .2], DOWN)
    joints = world.data.qpos[:7].copy()
    call("goto_pose", [.45, 0, .2], twin)
    assert np.abs(world.data.qpos[:7] - joints).max() < .2      # rad: it did not turn round
    assert abs(call("get_observation")["robot_cartesian_pos"][3:7] @ twin) > .999
    grasp, turn = call("sample_grasp_pose", "red cube")
    call("goto_pose", grasp, turn, .1)
    call("close_gripper")
    call("goto_pose", grasp + UP, turn)
    before = world.pose("red cube")[1]
    quarter = np.array([np.cos(np.pi / 4), 0, 0, np.sin(np.pi / 4)])
    hand = rotation_of(quarter) @ rotation_of(np.array(turn))
    call("goto_pose", grasp + UP, quaternion_of(hand))
    assert world.held == "red cube"
    turned = world.pose("red cube")[1] @ before.T
    assert np.trace(turned.T @ rotation_of(quarter)) > 2.95     # the same quarter turn


def test_the_other_arm_stays_where_it_is(world):
    call = start(world, POT)
    before = world.hand_pose(1)[0]
    call("goto_pose_arm0", [.3, .1, .3], DOWN)
    assert np.linalg.norm(world.hand_pose(0)[0] - [.3, .1, .3]) < .004
    assert np.linalg.norm(world.hand_pose(1)[0] - before) < .002
    seen = []
    world.on_chunk = lambda w: seen.append([np.linalg.norm(w.hand_pose(k)[0] - goal) for k, goal in enumerate(goals)])
    goals = np.array([[.35, -.1, .35], [.75, .1, .3]])
    call("goto_pose_both", goals[0], DOWN, goals[1], DOWN)
    assert max(seen[-1]) < .004
    half = seen[len(seen) // 3]                                 # on the way: both, not one after the other
    assert all(.2 < now / first < .9 for now, first in zip(half, seen[0], strict=True))


# ---------------------------------------------------------------------------------------------- the API

@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_every_function_is_documented(task):
    cls = api_class(task)
    assert cls is api_of(task) and cls.check() is None
    assert all(f"\n{name}(" in cls.prompt() for name in cls.functions)
    assert "{" not in cls.notes and len(cls.prompt()) < 3500


def test_poses_and_sizes_are_exact(world):
    call = start(world, NUT)
    poses = call("get_all_object_poses")
    assert list(poses) == ["square nut", "square nut handle", "square peg"]
    nut, turn = poses["square nut"]
    p = world.data.xpos[world.env.obj_body_id["SquareNut"]]
    assert nut == pytest.approx(p - [-.56, 0, .82], abs=1e-9)
    handle, _ = call("get_object_pose", "nut handle")
    assert handle - nut == pytest.approx(.0615 * rotation_of(turn)[:, 0], abs=1e-6)
    assert call("get_object_pose", "peg")[0] == pytest.approx([.79, .1, .13], abs=1e-6)
    assert call("get_object_size", "peg") == pytest.approx([.032, .032, .13], abs=1e-6)
    rows = {r["name"]: r for r in world.objects()}
    assert [rows["square nut"][k] for k in "xyz"] == pytest.approx(nut * 1000, abs=.51)
    call = start(world, LIFT)
    assert call("get_object_size", "cube") == pytest.approx(2 * world.model.geom_size[min(world.geoms)], abs=1e-9)


def test_mistakes_read_well(world):
    call = start(world, NUT)
    for error, text, name, *args in (
            ("KeyError", "there is no 'bolt'; there are: square nut, square nut handle, square peg", "get_object_pose", "bolt"),
            ("KeyError", "'square' could be square nut, square nut handle, square peg", "get_object_pose", "square"),
            ("ValueError", "the square peg cannot be grasped; can be: square nut handle", "sample_grasp_pose", "peg"),
            ("ValueError", "goto_pose(): position must be within 5 m", "goto_pose", [9, 0, 0], DOWN),
            ("TypeError", "goto_pose() missing a required argument: 'quaternion_wxyz'", "goto_pose", [.5, 0, .2]),
            ("NameError", "name 'get_hammer_pose' is not defined", "get_hammer_pose")):
        with pytest.raises(ApiError) as found:
            call(name, *args)
        assert found.value.kind == error and text in str(found.value)
    assert world.steps == 0


def test_a_grasp_leaves_room_for_the_fingers(world):
    call = start(world, STACK)
    put(world, "red cube", [.55, 0, .02])
    put(world, "green cube", [.8, .3, .025])
    assert abs(call("sample_grasp_pose", "red cube")[1] @ np.array(DOWN)) > .999        # free: along y, no turn
    put(world, "green cube", [.55, .06, .025])                  # in the way of a finger there
    turn = call("sample_grasp_pose", "red cube")[1]
    assert abs(rotation_of(turn)[0, 1]) > .999                  # along x


def test_wiping_needs_contact_and_what_is_wiped_is_gone(world):
    call = start(world, WIPE)
    points = call("get_spill_points")
    assert points.shape == (100, 3) and np.abs(points[:, 2]).max() < 1e-6
    middle, _ = call("get_object_pose", "spill")
    assert middle == pytest.approx(points.mean(0))
    call("goto_pose", [*points[0][:2], .03], DOWN)
    call("goto_pose", [*points[9][:2], .03], DOWN)
    assert len(call("get_spill_points")) == 100                 # above it
    call("goto_pose", [*points[0][:2], 0], DOWN)
    call("goto_pose", [*points[9][:2], 0], DOWN)
    left = call("get_spill_points")
    assert 5 < len(left) < 95 and world.privileged()["wiped"] == pytest.approx(1 - len(left) / 100)
    assert np.linalg.norm(left - points[4], axis=1).min() > .005 and not world.success()


# ---------------------------------------------------------------------------------------------- programs and events

@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_an_expert_program_solves_the_task(world, task, capsys):
    ok, events = run(world, task, 12, PROGRAMS[task.index][task is WIPE])
    assert ok and world.latched and world.unrecoverable() is None and world.env._check_success()
    assert json.loads(json.dumps(events)) == events
    found = [(e["tool"][:5], e["arm"], e["object"], e.get("held", e.get("target"))) for e in events]
    assert found == {
        0: [("close", 0, "red cube", True)],
        1: [("close", 0, "red cube", True), ("open_", 0, "red cube", "green cube")],
        2: [("close", 0, "green cube", True), ("open_", 0, "green cube", "table"),
            ("close", 0, "red cube", True), ("open_", 0, "red cube", "green cube")],
        3: [("close", 0, "square nut", True), ("open_", 0, "square nut", "square peg")],
        4: [],
        5: [("close", 0, "pot", True), ("close", 1, "pot", True)],
        6: [("close", 0, "hammer", True), ("close", 1, "hammer", True), ("open_", 0, "hammer", None)]}[task.index]
    assert "Joint limit" not in capsys.readouterr().out         # robosuite's own chatter


@pytest.mark.slow
@pytest.mark.parametrize("index, style", [(k, s) for k in PROGRAMS for s in range(len(PROGRAMS[k]))])
def test_all_styles_solve_several_states(world, index, style):
    assert sum(run(world, TASKS[index], init, PROGRAMS[index][style])[0] for init in (13, 21, 31, 44)) >= 3


def test_a_grasp_beside_the_object_is_noted_as_none(world):
    call = start(world, STACK)
    red = world.pose("red cube")[0]
    call("goto_pose", red + [0, 0, .05], DOWN, .05)             # over it, and closed there
    call("close_gripper")
    assert call.api.events == [{"tool": "close_gripper", "arm": 0, "object": "red cube", "held": False}]
    call("goto_pose", red + UP, DOWN)
    assert not call.api.events[0]["held"] and world.held is None
    call("open_gripper")
    assert len(call.api.events) == 1                            # nothing was let go
    call("goto_pose", [.4, .25, .2], DOWN)
    call("close_gripper")
    assert call.api.events[1]["object"] is None
    assert world.arms[0].grip == CLOSE and call("open_gripper") is None and world.arms[0].grip == OPEN


def test_a_picture_shows_the_scene_and_changes_nothing(world):
    world.reset(WIPE, 12)
    before = world.state_hash()
    picture = np.asarray(Image.open(io.BytesIO(world.render(128, 96))))
    assert picture.shape == (96, 128, 3) and picture.std() > 20
    assert world.state_hash() == before
    world.reset(LIFT, 12)                                       # another model: another camera
    other = np.asarray(Image.open(io.BytesIO(world.render(128, 96))))
    assert np.abs(other.astype(int) - picture).max() > 50
