"""The LIBERO-PRO world on the real benchmark: suites, start states, the step and its latch, perception, noise, refusals.

Its skills are in test_libero_skills.py. Only development states (11-49) are used; 1-10 are for evaluation. Needs
requirements-libero.txt.
"""

import os
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import mujoco
import numpy as np
import pytest
from libero.libero import get_libero_path
from libero.libero.benchmark import BENCHMARK_MAPPING, libero_task_map
from PIL import Image

from harness.libero import Libero, suites
from harness.libero_motion import CLOSE
from harness.world import Receipt, make_world, world_of
from protocol import parse_tasks
from records import BadInput

pytestmark = pytest.mark.libero
ROOT = Path(__file__).resolve().parent.parent
PROTOCOL = [f"libero_{kind}_{shift}" for kind in ("spatial", "object", "goal", "10") for shift in ("swap", "task")]


@pytest.fixture(scope="module")
def shared():
    made = make_world("libero")
    yield made
    made.close()


@pytest.fixture
def world(shared):
    shared.disturb(0, "")
    return shared


def task(suite, index):
    return Libero.tasks(suite)[index]


def point(world, name):
    """x, y in mm as a planner reads them."""
    return [int(v) for v in re.search(r"x (-?\d+) y (-?\d+)", world.locate(name).text).groups()]


def state_of(world, name):
    """What perception says behind the numbers: "open", "on flat stove" …"""
    return next(row for row in world.objects() if row["name"] == name).get("state", "")


def write(world, joint, value):
    """Puts a joint somewhere. The test may write states; the skills never do."""
    world.data.qpos[world.model.joint(joint).qposadr[0]] = value
    mujoco.mj_forward(world.model, world.data)


def child(code, **env):
    """Runs Python code in a process of its own -> CompletedProcess."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """(finished process, its HOME): another history, then the start states that tests compare with."""
    home = tmp_path_factory.mktemp("home")
    return child("""
import logging, sys
import numpy
numpy.random.seed(7)
from harness.libero import Libero
w, t, goal = Libero(), Libero.tasks("libero_object_swap"), Libero.tasks("libero_goal_swap")[3]
print("robosuite" in sys.modules)
w.reset(t[3], 20); w.move_to(0, 100, 200); w.reset(t[0], 30); w.reset(t[0], 11)
print(w.state_hash())
w.pick(*next((o["x"], o["y"]) for o in w.objects() if o["name"] == "alphabet soup"), "top")
print(w.state_hash())
w.disturb(6, "a"); w.reset(goal, 45)
print(w.state_hash())
print(w.locate("plate").text)
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


def test_the_eight_suites_of_the_protocol_have_ten_tasks_of_all_six_predicates():
    predicates = set()
    for suite in PROTOCOL:
        tasks = Libero.tasks(suite)
        assert [t.id for t in tasks] == [f"{suite}/{k}" for k in range(10)]
        assert all(t.goal and t.instruction for t in tasks)
        predicates |= {predicate for t in tasks for predicate, *_ in t.goal}
    assert predicates == {"on", "in", "open", "close", "turnon", "turnoff"}
    assert task("libero_goal_swap", 0).goal == (("open", "wooden cabinet middle region"),)
    assert task("libero_10_swap", 3).goal == (("close", "white cabinet bottom region"),
                                              ("in", "akita black bowl", "white cabinet bottom region"))


def test_all_other_suites_with_complete_files_are_known_and_the_rest_is_refused_with_the_valid_names():
    bddl, states = (Path(get_libero_path(kind)) for kind in ("bddl_files", "init_states"))
    complete = {suite for suite in BENCHMARK_MAPPING if libero_task_map.get(suite) and all(
        (bddl / suite / f"{name}.bddl").is_file() and (states / suite / f"{name}.pruned_init.npz").is_file()
        for name in libero_task_map[suite])}
    assert set(PROTOCOL) | {"libero_90", "libero_goal", "libero_spatial_lan"} <= complete
    assert {s for s in suites() if not s.startswith("libero_plus")} == complete
    assert len(Libero.tasks("libero_90")) == 90
    refused = {s: "the package lacks files of task 0" for s in BENCHMARK_MAPPING if s not in complete}
    assert {"libero_goal_env", "libero_spatial_temp", "libero_object_semantic_ood"} <= set(refused)
    for name, why in {**refused, "libero_100": "not registered", "libero_objects": "not registered"}.items():
        with pytest.raises(ValueError, match=f"{name}.*{why}.*valid: .*libero_object_swap"):
            Libero.tasks(name)


@pytest.mark.parametrize("text, unknown", [("10", 10), ("0-9,90", 90)])
def test_an_unknown_task_is_refused_with_the_range(text, unknown):
    with pytest.raises(BadInput, match=f"libero_goal_swap has no task {unknown}; valid: 0-9"):
        parse_tasks(text, {"libero_goal_swap": Libero.tasks("libero_goal_swap")})


@pytest.mark.parametrize("init", [-1, 50, 111])
def test_initial_states_never_wrap(world, init):
    first = task("libero_object_swap", 0)
    world.reset(first, 11)
    before = world.state_hash()
    for refusing in (world.reset, Libero.check_init):
        with pytest.raises(ValueError, match=f"initial state {init} of libero_object_swap/0 does not exist; valid: 0-49"):
            refusing(first, init)
    assert world.state_hash() == before
    assert all(Libero.check_init(first, k) is None for k in (0, 49))


# ---------------------------------------------------------------------------------------------- start states

def test_start_state_is_the_same_after_any_history_and_in_another_process(world, other_process):
    first = task("libero_object_swap", 0)
    world.reset(first, 11)
    start, qpos = world.state_hash(), world.data.qpos.copy()
    world.reset(first, 12)
    assert world.state_hash() != start and world.state_hash() == world.state_hash()
    world.pick(*point(world, "milk"), "top")            # leaves a warm start, a goal and a closed gripper behind
    assert world.state_hash() != start
    world.reset(first, 11)
    assert world.state_hash() == start and np.array_equal(world.data.qpos, qpos)
    trail = []
    for _ in range(2):                                  # and what follows is the same, bit for bit
        world.reset(first, 11)
        world.pick(*point(world, "alphabet soup"), "top")
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


def test_the_global_random_state_is_left_alone():
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    world = Libero()
    world.reset(task("libero_object_swap", 0), 11)
    world.close()
    assert np.random.rand() == expected


# ---------------------------------------------------------------------------------------------- the step

def test_the_fast_step_is_robosuites_own_bit_for_bit(world):
    rng, step, actions, fast = np.random.default_rng(0), world._step, [], []
    world.reset(task("libero_object_swap", 0), 11)
    d = world.data

    def all_of_it():
        return np.concatenate([[d.time], d.qpos, d.qvel, d.qacc_warmstart, d.sensordata, d.ctrl])

    def recorded(arm, grip):
        actions.append(np.append(arm, grip))
        step(arm, grip)
        fast.append(all_of_it())
    world._step = recorded
    try:
        assert world.pick(*point(world, "alphabet soup"), "top").ok
        picked = len(actions)
        for _ in range(30):                             # with the can between the fingers, then dropped on the rest
            world._step(rng.uniform(-.4, .4, 6), CLOSE)
        assert world._gripped() == "alphabet_soup_1"
        for _ in range(30):
            world._step(rng.uniform(-1, 1, 6), rng.choice([-1., 1.]))
    finally:
        del world._step
    assert len(actions) == picked + 60
    world.reset(world.task, 11)
    for k, action in enumerate(actions):
        world.env.step(action)                          # MuJoCo's own forward and step
        assert np.array_equal(all_of_it(), fast[k]), f"step {k}"


# ---------------------------------------------------------------------------------------------- perception

def test_objects_are_in_integer_millimetres_of_the_world_frame(world):
    world.reset(task("libero_object_swap", 0), 11)
    rows = {r["name"]: r for r in world.objects()}
    assert set(rows) == {"alphabet soup", "basket", "salad dressing", "cream cheese", "milk", "tomato sauce", "butter"}
    for row in rows.values():
        assert all(type(row[k]) is int for k in "xyz") and abs(row["x"]) < 500 and abs(row["y"]) < 500
        assert all(10 < row[f"size_{k}"] < 350 for k in "xyz")
    p = world.data.xpos[world.env.env.obj_body_id["milk_1"]]
    milk = rows["milk"]
    assert [milk[k] for k in "xyz"] == pytest.approx(p * 1000, abs=.51)     # exact: no noise here
    assert world.locate("milk").text == ("milk x {x} y {y} z {z} size {size_x} {size_y} {size_z} {state}".format(**milk))
    assert world.list_objects().text.splitlines() == ["{name} x {x} y {y} z {z} {state}".format(**{"state": "", **r}).strip()
                                                      for r in rows.values()]
    private = world.privileged()
    assert private["goal0_x"] == pytest.approx(rows["alphabet soup"]["x"] / 1000, abs=6e-4)
    assert private["success"] == private["holding"] == private["latched"] == 0. and .3 < private["goal0_distance"] < .6


def test_perception_does_not_move_anything(world):
    world.reset(task("libero_object_swap", 0), 11)
    before = world.state_hash()
    world.list_objects(), world.locate("basket"), world.objects(), world.privileged(), world.success(), world.render()
    world.unrecoverable(), world.disturb(6, "z"), world.locate("milk")
    assert world.state_hash() == before and world.steps == 0 and not world.latched


def test_a_picture_shows_the_scene(world):
    world.reset(task("libero_object_swap", 0), 11)
    picture = np.asarray(Image.open(BytesIO(world.render(128, 96))))
    assert picture.shape == (96, 128, 3) and picture.std() > 20
    assert world.move_to(0, 0, 200).ok
    moved = np.asarray(Image.open(BytesIO(world.render(128, 96))))
    assert np.abs(moved.astype(int) - picture).max() > 50       # the arm is elsewhere


# ---------------------------------------------------------------------------------------------- noise

def test_noise_is_seeded_and_no_part_of_the_start_state(world):
    first, starts = task("libero_object_swap", 0), []

    def episode(noise, seed):
        world.disturb(noise, seed)
        world.reset(first, 11)
        starts.append(world.state_hash())
        texts = [world.locate("milk").text for _ in range(3)] + [world.list_objects().text]
        return texts + [world.pick(*point(world, "alphabet soup"), "top").text, world.state_hash(), world.locate("milk").text]
    a, again, b, none, exact = (episode(*x) for x in ((6, "a"), (6, "a"), (6, "b"), (0, "a"), (None, "b")))
    assert a == again and len(set(a[:3])) == 3
    assert b[:3] != a[:3] and b[5] != a[5]                      # other receipts, and the hand goes elsewhere
    assert none == exact and none[0] == none[1] == none[2]      # without noise the seed does nothing
    assert len(set(starts)) == 1


def test_noise_has_the_size_that_was_asked_for(world):
    world.disturb(0, "")
    world.reset(task("libero_object_swap", 0), 11)
    exact = next(r for r in world.objects() if r["name"] == "milk")
    world.disturb(6, "size")
    world.reset(world.task, 11)
    numbers = [re.findall(r"-?\d+", world.locate("milk").text) for _ in range(200)]
    assert all(found[2:] == [str(exact[k]) for k in ("z", "size_x", "size_y", "size_z")] for found in numbers)
    x, y = (np.array([[int(v) for v in found[:2]] for found in numbers]) - [exact["x"], exact["y"]]).T
    for errors in (x, y):               # of 200 draws: the deviation's own is 0.3 mm, the mean's 0.42 mm
        assert 5 < errors.std() < 7 and abs(errors.mean()) < 1.5
    assert abs(np.corrcoef(x, y)[0, 1]) < .25


# ---------------------------------------------------------------------------------------------- refusals

def test_refusals_are_receipts(world):
    world.reset(task("libero_object_swap", 0), 11)
    before = world.state_hash()
    cases = ((world.locate("soup"), "unknown_name", "There is no soup. There are: alphabet soup, basket,"),
             (world.place("tray"), "unknown_name", "There is no tray."),
             (world.place("basket"), "nothing_held", "Nothing held"),
             (world.pick(900, 0, "top"), "unreachable", "1500 mm from the robot"),
             (world.move_to(-590, 0, 200), "unreachable", "Out of reach"),
             (world.move_pose(0, 900, 200, 0, 0), "unreachable", "Out of reach"),
             (world.open_("basket"), "not_openable", "The basket cannot be opened"))
    for done, event, text in cases:
        assert isinstance(done, Receipt) and not done.ok and done.facts["event"] == event and text in done.text
    assert world.state_hash() == before and world.steps == 0
    assert world.pick(*point(world, "butter"), "top").ok
    assert world.pick(*point(world, "milk"), "top").facts["event"] == "busy" and world.held == "butter"
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
        world.held = "alphabet soup"                            # what is in the hand may be far out
        assert (world.unrecoverable() is None) == (phrase == "is out of reach")
        world.held = None
    world.latched = True                                        # nor does it matter once the task is solved
    assert world.unrecoverable() is None
    world.reset(world.task, 11)
    assert world.unrecoverable() is None and not world.latched


def test_the_tools_name_methods_and_argument_schemas(world):
    assert [s.name for s in world.skills] == ["locate", "list_objects", "pick", "place", "release", "move_to", "move_pose",
                                              "open", "close", "turn", "push"]
    for skill in world.skills:
        assert callable(getattr(world, skill.method)) and skill.parameters["type"] == "object"
        assert set(skill.parameters.get("required", [])) == set(skill.parameters["properties"])
    assert [s.name for s in world.skills if not s.moves] == ["locate", "list_objects"]


# ---------------------------------------------------------------------------------------------- scenes with fixtures

def test_fixtures_latch_and_noise_start_anew_too(world, other_process):
    goal = task("libero_goal_swap", 3)
    world.disturb(6, "a")
    world.reset(goal, 45)
    start, qpos = world.state_hash(), world.data.qpos.copy()
    looks = [world.locate("plate").text for _ in range(3)]
    assert state_of(world, "flat stove") == "between" and state_of(world, "wooden cabinet top region") == "ajar"
    assert other_process[0].stdout.splitlines()[3:5] == [start, looks[0]], other_process[0].stderr

    world.disturb(0, "")                                # an eventful episode, in between
    assert world.turn("flat stove", "on").ok and world.open_("wooden cabinet top region").ok
    assert world.pick(*point(world, "akita black bowl"), "rim").ok
    assert state_of(world, "flat stove") == "on" and state_of(world, "wooden cabinet top region") == "open"
    assert world.held == "akita black bowl" and world.steps > 200
    world.latched = True

    world.disturb(6, "a")
    world.reset(goal, 45)
    assert world.state_hash() == start and np.array_equal(world.data.qpos, qpos)
    assert (world.held, world.latched, world.steps) == (None, False, 0)
    assert [world.locate("plate").text for _ in range(3)] == looks
    assert state_of(world, "flat stove") == "between" and state_of(world, "wooden cabinet top region") == "ajar"


def test_the_latch_stays_when_success_has_gone_again(world):
    world.reset(task("libero_goal_swap", 7), 45)        # turn on the stove
    seen = []
    world.on_chunk = lambda w: seen.append((w.success(), w.latched))
    try:
        assert not world.success() and world.turn("flat stove", "on").ok
        assert world.success() and world.latched and world.env.check_success()
        assert world.turn("flat stove", "off").ok
    finally:
        world.on_chunk = None
    assert not world.success() and not world.env.check_success() and world.latched
    assert world.privileged()["success"] == 0. and world.privileged()["latched"] == 1.
    first = [success for success, _ in seen].index(True)
    assert [latched for _, latched in seen] == [False] * first + [True] * (len(seen) - first)
    assert len(seen) == world.steps and not seen[-1][0]


def test_states_of_drawers_and_knobs_are_liberos_predicates(world):
    world.reset(task("libero_goal_swap", 7), 45)
    drawer = world.env.env.object_sites_dict["wooden_cabinet_1_middle_region"].joints[0]
    for q, state in ((-.15, "open"), (-.05, "ajar"), (.005, "closed")):
        write(world, drawer, q)
        assert state_of(world, "wooden cabinet middle region") == state
        assert world.locate("wooden cabinet middle region").text.endswith(f" {state}")
    knob, = world.env.env.get_object("flat_stove_1").joints
    for q, state in ((.8, "on"), (.2, "between"), (-.004, "off")):
        write(world, knob, q)
        assert state_of(world, "flat stove") == state
    assert state_of(world, "wooden cabinet") == state_of(world, "wine rack") == ""      # nothing of its own to open


def test_relations_and_two_of_a_kind(world):
    world.reset(task("libero_spatial_swap", 7), 45)
    text = world.locate("akita black bowl").text.splitlines()
    assert [re.match("(.*) x ", line)[1] for line in text] == ["akita black bowl 1", "akita black bowl 2"]
    assert text[0].endswith(" on flat stove") and text[1].endswith(" on wooden cabinet")
    assert world.locate("akita black bowl 2").text == text[1]
    rows = {r["name"]: r for r in world.objects()}
    loose = [world.label[key] for key in world.movable]
    assert set(loose) == {"akita black bowl 1", "akita black bowl 2", "cookies", "glazed rim porcelain ramekin", "plate"}
    for name in ("cookies", "plate", "glazed rim porcelain ramekin"):       # on the table: near the nearest other thing
        away = {other: np.hypot(rows[name]["x"] - rows[other]["x"], rows[name]["y"] - rows[other]["y"])
                for other in loose if other != name}
        assert rows[name]["state"] == f"near {min(away, key=away.get)}"
    world.reset(task("libero_spatial_task", 4), 45)
    assert state_of(world, "glazed rim porcelain ramekin") == "near plate"


# ---------------------------------------------------------------------------------------------- installation

def test_without_the_package_one_line_says_how_to_install():
    done = child("import sys; sys.modules['libero'] = None\n"
                 "try: import harness.libero\nexcept ImportError as e: print(e)")
    assert len(done.stdout.splitlines()) == 1 and "pip install -r requirements-libero.txt" in done.stdout


def test_quiet_light_and_nothing_written(other_process):
    done, home = other_process
    lines = done.stdout.splitlines()
    assert lines[0] == "False", "listing tasks must not import robosuite"
    assert lines[5] == "False []", "no OpenGL and no log file unless asked for"
    assert done.stderr == "" and len(lines) == 6                # no warnings, no prompts, no chatter
    assert [p for p in home.rglob("*") if p.is_file() and "matplotlib" not in str(p)] == []


def test_no_opengl_names_the_debian_packages():
    done = child("import sys; sys.modules['mujoco.egl'] = sys.modules['mujoco.osmesa'] = None\n"
                 "import mujoco; from harness.libero import Camera\n"
                 "try: Camera(mujoco.MjModel.from_xml_string('<mujoco/>'), 64, 64)\nexcept RuntimeError as e: print(e)")
    assert "libegl1" in done.stdout and "libosmesa6" in done.stdout, done.stderr
