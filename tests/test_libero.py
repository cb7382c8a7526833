"""The LIBERO-PRO world on the real benchmark: start states, predicate and latch, skills, refusals.

Only development states (11-49) are used; 1-10 are for evaluation. Needs requirements-libero.txt.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.libero import Libero, suites
from harness.world import Receipt, make_world, world_of

pytestmark = pytest.mark.libero
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def world():
    made = make_world("libero")
    yield made
    made.close()


def task(suite, index):
    return Libero.tasks(suite)[index]


def point(world, name):
    """x, y in mm as a planner reads them."""
    return [int(v) for v in re.search(r"x (-?\d+) y (-?\d+)", world.locate(name).text).groups()]


def child(code, **env):
    """Runs Python code in a process of its own -> CompletedProcess."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """(finished process, its HOME): another history, then state 11 of libero_object_swap/0 and one pick."""
    home = tmp_path_factory.mktemp("home")
    return child("""
import logging, sys
import numpy
numpy.random.seed(7)
from harness.libero import Libero
w, t = Libero(), Libero.tasks("libero_object_swap")
print("robosuite" in sys.modules)
w.reset(t[3], 20); w.move(0, 100); w.reset(t[0], 30); w.reset(t[0], 11)
print(w.state_hash())
w.pick(*next((o["x"], o["y"]) for o in w.objects() if o["name"] == "alphabet soup"), 0)
print(w.state_hash())
files = [h for h in logging.getLogger("robosuite_logs").handlers if isinstance(h, logging.FileHandler)]
print("OpenGL" in sys.modules, files)
""", HOME=str(home)), home


# ---------------------------------------------------------------------------------------------- tasks

def test_ten_tasks_each_with_the_sentence_of_the_bddl_file():
    swap, other = Libero.tasks("libero_object_swap"), Libero.tasks("libero_object_task")
    assert [t.index for t in swap] == [t.index for t in other] == list(range(10))
    assert swap[0].instruction == "pick the alphabet soup and place it in the basket"
    assert swap[0].goal == (("in", "alphabet soup", "basket"),)
    assert other[0].instruction == "pick the cream cheese and place it in the basket"     # file name: alphabet soup
    for t in swap + other:              # the sentence names the goal object
        assert t.goal[0][1] in t.instruction and world_of(t.suite) == "libero"


def test_other_pick_and_place_suites_are_known_and_the_rest_is_refused_with_the_valid_names():
    assert {"libero_object", "libero_spatial_swap", "libero_spatial_task"} <= set(suites())
    assert Libero.tasks("libero_spatial_swap")[0].goal == (("on", "akita black bowl 1", "plate"),)
    for name, why in (("libero_objects", "not registered"), ("libero_goal_swap", "open"), ("libero_goal_env", "lacks")):
        with pytest.raises(ValueError, match=f"{name}.*{why}.*valid: .*libero_object_swap"):
            Libero.tasks(name)


# ---------------------------------------------------------------------------------------------- start states

def test_start_state_is_the_same_after_any_history_and_in_another_process(world, other_process):
    first = task("libero_object_swap", 0)
    world.reset(first, 11)
    start, qpos = world.state_hash(), world.data.qpos.copy()
    world.reset(first, 12)
    assert world.state_hash() != start and world.state_hash() == world.state_hash()
    world.pick(*point(world, "milk"), 0)                # leaves a warm start, a goal and a closed gripper behind
    assert world.state_hash() != start
    world.reset(first, 11)
    assert world.state_hash() == start and np.array_equal(world.data.qpos, qpos)
    trail = []
    for _ in range(2):                                  # and what follows is the same, bit for bit
        world.reset(first, 11)
        world.pick(*point(world, "alphabet soup"), 0)
        trail.append(world.state_hash())
    assert trail[0] == trail[1]
    assert other_process[0].stdout.split()[1:3] == [start, trail[0]], other_process[0].stderr


def test_a_fixture_moved_by_hand_changes_the_hash(world):
    world.reset(task("libero_object_swap", 0), 11)
    before = world.state_hash()
    world.model.body_pos[1, 0] += 1e-6
    assert world.state_hash() != before
    world.reset(world.task, 11)
    assert world.state_hash() == before


@pytest.mark.parametrize("init", [-1, 50, 111])
def test_initial_states_never_wrap(world, init):
    with pytest.raises(ValueError, match=f"initial state {init} of libero_object_swap/0 does not exist; valid: 0-49"):
        world.reset(task("libero_object_swap", 0), init)


def test_the_global_random_state_is_left_alone():
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    world = Libero()
    world.reset(task("libero_object_swap", 0), 11)
    world.close()
    assert np.random.rand() == expected


# ---------------------------------------------------------------------------------------------- perception

def test_objects_are_in_integer_millimetres_of_the_world_frame(world):
    world.reset(task("libero_object_swap", 0), 11)
    rows = {r["name"]: r for r in world.objects()}
    assert set(rows) == {"alphabet soup", "basket", "salad dressing", "cream cheese", "milk", "tomato sauce", "butter"}
    for row in rows.values():
        assert all(type(row[k]) is int for k in "xyz") and abs(row["x"]) < 500 and abs(row["y"]) < 500
    p = world.data.xpos[world.env.env.obj_body_id["milk_1"]]
    assert [rows["milk"][k] for k in "xyz"] == pytest.approx(p * 1000, abs=.51)
    assert world.locate("milk").text == f"milk x {rows['milk']['x']} y {rows['milk']['y']}"
    assert world.list_objects().text.splitlines()[0] == world.locate(world.objects()[0]["name"]).text
    private = world.privileged()
    assert private["goal0_x"] == pytest.approx(rows["alphabet soup"]["x"] / 1000, abs=6e-4)
    assert private["success"] == private["holding"] == 0. and .3 < private["goal0_distance"] < .6


def test_perception_does_not_move_anything(world):
    world.reset(task("libero_object_swap", 0), 11)
    before = world.state_hash()
    world.list_objects(), world.locate("basket"), world.objects(), world.privileged(), world.success(), world.render()
    assert world.state_hash() == before and world.steps == 0


def test_a_picture_shows_the_scene(world):
    from io import BytesIO

    from PIL import Image
    world.reset(task("libero_object_swap", 0), 11)
    picture = np.asarray(Image.open(BytesIO(world.render(128, 96))))
    assert picture.shape == (96, 128, 3) and picture.std() > 20
    world.move(0, 0)
    moved = np.asarray(Image.open(BytesIO(world.render(128, 96))))
    assert np.abs(moved.astype(int) - picture).max() > 50       # the arm is elsewhere


# ---------------------------------------------------------------------------------------------- skills, predicate

@pytest.mark.parametrize("suite, index, init", [("libero_object_swap", 7, 37), ("libero_object_task", 0, 45)])
def test_scripted_pick_and_place_succeeds_by_liberos_predicate(world, suite, index, init):
    world.reset(task(suite, index), init)
    (_, name, basket), = world.task.goal
    key, seen, before = world.ids[name], [], world._position(world.ids[name])

    def look(w):
        seen.append((w.success(), w.latched, w._position(key), w._hand()))
    world.on_chunk = look
    try:
        picked = world.pick(*point(world, name), 0)
        assert picked.ok and picked.text == f"Held: {name}." and picked.facts["event"] == "held", picked
        assert world.held == name and not world.success() and not world.latched
        placed = world.place(basket)
        assert placed.ok and placed.text == f"Placed: {name} at basket." and placed.facts["event"] == "placed", placed
    finally:
        world.on_chunk = None
    assert world.success() and world.latched and world.env.check_success() and world.held is None
    assert world.steps == len(seen) == picked.facts["steps"] + placed.facts["steps"]
    held = [s for s, *_ in seen]
    first = held.index(True)
    assert [latched for _, latched, *_ in seen] == [False] * first + [True] * (len(seen) - first)
    objects, hands = np.array([before] + [s[2] for s in seen]), np.array([s[3] for s in seen])
    for track, most in ((objects, .10), (hands, .025)):         # nothing teleports: 0.05 s of a fall, of the arm
        assert np.linalg.norm(np.diff(track, axis=0), axis=1).max() < most


def test_picking_where_nothing_stands_holds_nothing(world):
    world.reset(task("libero_object_swap", 0), 11)
    rows = world.objects()
    x, y = next((x, y) for x in range(-150, 150, 10) for y in range(-200, 200, 10)
                if all(np.hypot(r["x"] - x, r["y"] - y) > 100 for r in rows if r["name"] != "basket")
                and np.hypot(rows[1]["x"] - x, rows[1]["y"] - y) > 200)
    done = world.pick(x, y, 0)
    assert not done.ok and done.facts["event"] == "empty"
    assert done.text == "Nothing held: the fingers closed on nothing."
    assert world.held is None and world._gripped() is None and not world.latched
    for a, b in zip(rows, world.objects(), strict=True):        # and nothing was pushed about
        assert np.hypot(a["x"] - b["x"], a["y"] - b["y"]) <= 3, (a, b)


def test_a_grasp_beside_the_object_fails_physically(world):
    world.reset(task("libero_object_swap", 0), 11)
    done = world.pick(*point(world, "alphabet soup"), 60)       # a can of 6 cm: the fingers close beside it
    assert not done.ok and done.facts["event"] in ("empty", "slip") and world.held is None


def test_refusals_are_receipts(world):
    world.reset(task("libero_object_swap", 0), 11)
    before = world.state_hash()
    cases = ((world.locate("soup"), "unknown_name", "There is no soup. There are: alphabet soup, basket,"),
             (world.place("tray"), "unknown_name", "There is no tray."),
             (world.place("basket"), "nothing_held", "holds nothing"),
             (world.pick(900, 0, 0), "unreachable", "1500 mm from the robot"),
             (world.move(-590, 0), "unreachable", "Out of reach"))
    for done, event, text in cases:
        assert isinstance(done, Receipt) and not done.ok and done.facts["event"] == event and text in done.text
    assert world.state_hash() == before
    assert world.pick(*point(world, "butter"), 0).ok
    assert world.pick(*point(world, "milk"), 0).facts["event"] == "busy" and world.held == "butter"
    let_go = world.release()
    assert let_go.text == "Let go: butter." and let_go.facts["event"] == "dropped" and world.held is None
    assert world.unrecoverable() is None and not world.latched


def test_a_target_out_of_reach_is_unrecoverable(world):
    world.reset(task("libero_object_swap", 0), 11)
    assert world.unrecoverable() is None
    joint = world.env.env.objects_dict["alphabet_soup_1"].joints[-1]
    address = world.model.joint(joint).qposadr[0]
    for place, phrase in (([.6, 0, .04], "is out of reach"), ([0, 0, -.5], "fell off the table")):
        world.data.qpos[address:address + 3] = place            # the test may write states; the skills never do
        world.env.sim.forward()
        assert world.unrecoverable() == f"alphabet soup {phrase}"


def test_the_tools_name_methods_and_argument_schemas(world):
    assert [s.name for s in world.skills] == ["locate", "list_objects", "pick", "move", "place", "release"]
    for skill in world.skills:
        assert callable(getattr(world, skill.method)) and skill.parameters["type"] == "object"
        assert set(skill.parameters.get("required", [])) == set(skill.parameters["properties"])
    assert [s.name for s in world.skills if not s.moves] == ["locate", "list_objects"]


# ---------------------------------------------------------------------------------------------- installation

def test_without_the_package_one_line_says_how_to_install():
    done = child("import sys; sys.modules['libero'] = None\n"
                 "try: import harness.libero\nexcept ImportError as e: print(e)")
    assert len(done.stdout.splitlines()) == 1 and "pip install -r requirements-libero.txt" in done.stdout


def test_quiet_light_and_nothing_written(other_process):
    done, home = other_process
    lines = done.stdout.splitlines()
    assert lines[0] == "False", "listing tasks must not import robosuite"
    assert lines[3] == "False []", "no OpenGL and no log file unless asked for"
    assert done.stderr == "" and len(lines) == 4                # no warnings, no prompts, no chatter
    assert [p for p in home.rglob("*") if p.is_file() and "matplotlib" not in str(p)] == []


def test_no_opengl_names_the_debian_packages():
    done = child("import sys; sys.modules['mujoco.egl'] = sys.modules['mujoco.osmesa'] = None\n"
                 "import mujoco; from harness.libero import Camera\n"
                 "try: Camera(mujoco.MjModel.from_xml_string('<mujoco/>'), 64, 64)\nexcept RuntimeError as e: print(e)")
    assert "libegl1" in done.stdout and "libosmesa6" in done.stdout, done.stderr
