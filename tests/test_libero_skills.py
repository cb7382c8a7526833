"""The skills of the LIBERO-PRO world: each on one task, judged by LIBERO's predicates, honest physics in all of them.

Noise is 0. Only development states (11-49) are used; 1-10 are for evaluation. Needs requirements-libero.txt.
"""

import json
import random

import numpy as np
import pytest

from harness.libero_teacher import LiberoTeacher
from harness.world import make_world
from test_libero import point, state_of, task

pytestmark = pytest.mark.libero
HAND, THING = .04, .10                  # m in a step of 0.05 s: the arm follows a set point 5 cm ahead; farther is a jump


@pytest.fixture(scope="module")
def world():
    made = make_world("libero")
    yield made
    made.close()


class Watch:
    """Sees to it that nothing but the simulator's own steps changes the world, from a reset until `done`."""

    def __init__(self, world):
        self.world, self.step, self.written = world, world.env.step, []
        self.tracks, self.speeds = [self._places()], [self._speeds()]
        self.model, self.state = self._model(), world.state_hash()
        world.env.step, world.on_chunk = self._guarded, self._look

    def _places(self):
        return np.array([self.world._hand(), *(self.world._position(key) for key in self.world.movable)])

    def _speeds(self):
        """m/s of the same; the hand's is not looked at."""
        joints = [self.world.model.joint(self.world.env.env.objects_dict[key].joints[-1]) for key in self.world.movable]
        return np.array([0, *(np.linalg.norm(self.world.data.qvel[j.dofadr[0]:j.dofadr[0] + 3]) for j in joints)])

    def _model(self):
        """Bytes of what a cheat would change: weights, friction, gravity, limits, contacts, constraints, fixtures."""
        m = self.world.model
        assert m.neq == m.nmocap == 0, "nothing to weld or to drag with"
        parts = (m.body_mass, m.body_pos, m.body_quat, m.geom_friction, m.geom_contype, m.geom_conaffinity, m.geom_size,
                 m.opt.gravity, m.opt.disableflags, m.jnt_range, m.jnt_stiffness, m.dof_damping, m.dof_frictionloss,
                 m.actuator_gainprm, m.actuator_forcerange)
        return [np.array(part).tobytes() for part in parts]

    def _guarded(self, action):
        if self.world.state_hash() != self.state:       # of all that the next step depends on, qpos included
            self.written.append(self.world.steps)
        return self.step(action)

    def _look(self, world):
        self.state = world.state_hash()
        self.tracks.append(self._places())
        self.speeds.append(self._speeds())
        if world.data.qfrc_applied.any() or world.data.xfrc_applied.any():
            self.written.append(world.steps)

    def done(self):
        world = self.world
        del world.env.step
        world.on_chunk = None
        assert not self.written and world.state_hash() == self.state, f"state written at steps {self.written}"
        assert self._model() == self.model and len(self.tracks) == world.steps + 1
        tracks = np.array(self.tracks)
        away = np.linalg.norm(np.diff(tracks, axis=0), axis=2)
        speed = np.maximum(self.speeds[:-1], self.speeds[1:]) + .5      # m/s; gravity adds 0.5 in a step
        most = np.maximum(THING, .05 * speed)           # some things hang in the air at the start and fall
        most[:, 0] = HAND
        for step, k in np.argwhere(away > most):
            raise AssertionError(f"step {step}: {['hand', *world.movable][k]} jumped {away[step, k]:.3f} m")


@pytest.fixture
def begin(world):
    """begin(suite, index, init): resets and watches all that follows in the test."""
    watch = None

    def reset(suite, index, init):
        nonlocal watch
        world.disturb(0, "")
        world.reset(task(suite, index), init)
        watch = Watch(world)
    yield reset
    watch.done()


def do(world, skill, *arguments):
    """Runs a skill -> its receipt, looked through: a verdict, a text, facts that can be written down, steps told."""
    before, method = world.steps, {s.name: s.method for s in world.skills}[skill]
    receipt = getattr(world, method)(*arguments)
    assert receipt.ok in (True, False) and receipt.text.endswith(".") and "event" in receipt.facts, receipt
    json.dumps([receipt.ok, receipt.facts])
    assert receipt.facts.get("steps_used", 0) == world.steps - before or skill == "release", receipt
    return receipt


def well(world, text, skill, *arguments):
    """The same for a skill that must succeed, with the hand as it should be left: empty, open and clear of things."""
    receipt = do(world, skill, *arguments)
    assert receipt.ok and receipt.text == text, receipt
    if skill not in ("pick", "move_to", "move_pose"):
        free(world)
    return receipt.facts


def free(world):
    hand = world._hand()
    assert world.held is None and world._gripped() is None and world._opening() > .03
    assert hand[2] - world._over(hand[:2], hand[:2], half=.03) > .05, "the hand is not clear of what is under it"


# ---------------------------------------------------------------------------------------------- pick and place

@pytest.mark.parametrize("suite, index, init", [("libero_object_swap", 7, 37), ("libero_object_task", 0, 45)])
def test_top_pick_and_place_into_the_basket(world, begin, suite, index, init):
    begin(suite, index, init)
    (_, name, basket), = world.task.goal
    picked = well(world, f"Held: {name}.", "pick", *point(world, name), "top")
    assert picked["event"] == "held" and picked["object"] == name and picked["success"] is True
    assert picked["instruction"] == f"pick up the {name}" and picked["peak_lift_m"] > .02
    assert 0 < picked["min_gripper_opening"] <= picked["final_gripper_opening"] < .08
    assert world.held == name and not world.success() and not world.latched
    assert well(world, f"Placed: {name} at {basket}.", "place", basket)["event"] == "placed"
    assert world.success() and world.latched and world.env.check_success()


def test_a_pick_where_nothing_stands_holds_nothing(world, begin):
    begin("libero_object_swap", 0, 11)
    rows = world.objects()
    x, y = next((x, y) for x in range(-150, 150, 10) for y in range(-200, 200, 10)
                if all(np.hypot(r["x"] - x, r["y"] - y) > (200 if r["name"] == "basket" else 100) for r in rows))
    done = do(world, "pick", x, y, "top")
    assert not done.ok and done.facts["event"] == "empty" and done.facts["success"] is False
    assert done.text == "Nothing held: the fingers closed on nothing."
    free(world)
    assert not world.latched
    for a, b in zip(rows, world.objects(), strict=True):        # and nothing was pushed about
        assert np.hypot(a["x"] - b["x"], a["y"] - b["y"]) <= 3, (a, b)
    well(world, "Held: milk.", "pick", *point(world, "milk"), "top")


def test_a_bowl_holds_by_its_rim_and_not_by_wrong_grasps(world, begin):
    begin("libero_spatial_swap", 7, 45)
    bowl, at = "akita black bowl 1", point(world, "akita black bowl 1")
    wrong = do(world, "pick", *at, "top")
    assert not wrong.ok and wrong.text.startswith("Nothing held: ") and wrong.facts["event"] in ("empty", "slip")
    assert wrong.facts["object"] == bowl and wrong.facts["grasp"] == "top" and wrong.facts["min_gripper_opening"] < .01
    free(world)
    assert np.hypot(*np.subtract(point(world, bowl), at)) < 50 and state_of(world, bowl) == "on flat stove"
    before = world.state_hash()
    none = do(world, "pick", *at, "handle")
    assert none.text == f"Nothing held: the {bowl} has no handle." and none.facts["event"] == "no_handle"
    assert world.state_hash() == before
    well(world, f"Held: {bowl}.", "pick", *point(world, bowl), "rim")
    assert world.held == bowl and state_of(world, bowl) != "on flat stove"
    well(world, f"Placed: {bowl} at plate.", "place", "plate")
    assert world.success() and world.latched and state_of(world, bowl) == "on plate"


@pytest.mark.slow
def test_mugs_hold_by_their_handles(world, begin):
    begin("libero_10_swap", 4, 45)
    for mug, plate in (("porcelain mug", "plate 1"), ("white yellow mug", "plate 2")):
        facts = well(world, f"Held: {mug}.", "pick", *point(world, mug), "handle")
        assert facts["grasp"] == "handle" and world.held == mug
        assert facts["final_gripper_opening"] < .03             # m; a whole mug is wider
        well(world, f"Placed: {mug} at {plate}.", "place", plate)
    assert world.success() and world.latched


def test_release_lets_go_where_the_hand_is(world, begin):
    begin("libero_10_swap", 4, 45)
    mug, at = "red coffee mug", point(world, "red coffee mug")
    well(world, f"Held: {mug}.", "pick", *at, "handle")
    facts = well(world, f"Let go: {mug}.", "release")
    assert facts["event"] == "dropped" and np.hypot(*np.subtract(point(world, mug), at)) < 60
    assert well(world, "The hand is open.", "release")["event"] == "opened"
    assert not world.success() and world.unrecoverable() is None


@pytest.mark.slow
def test_two_objects_go_into_one_basket(world, begin):
    begin("libero_10_swap", 0, 45)
    for k, (_, name, basket) in enumerate(world.task.goal):
        assert not world.success() and not world.latched
        well(world, f"Held: {name}.", "pick", *point(world, name), "top")
        well(world, f"Placed: {name} at {basket}.", "place", basket)
        assert world.success() == (k == 1)
    assert world.latched


@pytest.mark.slow
def test_a_wine_bottle_goes_on_the_rack(world, begin):
    begin("libero_goal_swap", 9, 45)
    well(world, "Held: wine bottle.", "pick", *point(world, "wine bottle"), "top")
    placed = do(world, "place", "wine rack top region")
    free(world)
    assert placed.text in ("Placed: wine bottle at wine rack top region.",      # it may roll off again
                           "Let go: wine bottle; it is not at wine rack top region.")
    assert world.latched and placed.ok == world.success()


# ---------------------------------------------------------------------------------------------- moves

def test_moves_reach_their_target_and_tell_rpents_fields(world, begin):
    begin("libero_object_swap", 0, 11)
    for xyz in ([0, 0, 150], [-150, 150, 300], [80, -150, 200]):
        facts = do(world, "move_to", *xyz).facts
        assert set(facts) == {"target_xyz", "final_eef_pos", "final_dist_m", "steps_used", "max_steps", "event"}
        assert facts["target_xyz"] == [v / 1000 for v in xyz] and facts["event"] == "moved"
        assert facts["final_eef_pos"] == pytest.approx(world._hand(), abs=6e-5)
        away = np.linalg.norm(np.subtract(facts["target_xyz"], facts["final_eef_pos"]))
        assert facts["final_dist_m"] == pytest.approx(away, abs=2e-4) and away < .013
        assert facts["steps_used"] <= facts["max_steps"]
    well(world, "Held: alphabet soup.", "pick", *point(world, "alphabet soup"), "top")
    moved = do(world, "move_to", 0, 0, 250)
    assert moved.ok and moved.text.startswith("Hand at x ") and world.held == "alphabet soup"
    assert np.hypot(*point(world, "alphabet soup")) < 40        # it came along
    low = do(world, "move_to", 0, 0, -100)
    assert not low.ok and low.facts["event"] == "blocked" and low.facts["final_dist_m"] > .03
    assert low.text.startswith(f"The hand stopped {round(1000 * low.facts['final_dist_m'])} mm short")


@pytest.mark.parametrize("pitch, yaw", [(0, 90), (30, 0), (45, 90), (-30, 60)])
def test_poses_are_reached_and_told_as_they_would_be_asked_for(world, begin, pitch, yaw):
    begin("libero_object_swap", 0, 11)
    moved = do(world, "move_pose", -100, 0, 250, pitch, yaw)
    assert moved.ok and moved.facts["final_dist_m"] < .013
    if pitch < 0:                       # a hand leans to the other side where its fingers are swapped
        pitch, yaw = -pitch, yaw + 180
    turned = (moved.facts["final_yaw"] - yaw + 90) % (360 if pitch else 180) - 90
    assert abs(moved.facts["final_pitch"] - pitch) < 4 and abs(turned) < 4, moved


def test_refused_skills_do_no_step(world, begin):
    begin("libero_goal_swap", 3, 45)
    bowl, top = "akita black bowl", "wooden cabinet top region"

    def refused(event, *call):
        before, steps = world.state_hash(), world.steps
        receipt = do(world, *call)
        assert not receipt.ok and receipt.facts["event"] == event, receipt
        assert world.state_hash() == before and world.steps == steps
    for skill, *more in (("locate",), ("open",), ("close",), ("turn", "on"), ("push", "plate")):
        refused("unknown_name", skill, "spoon", *more)
    refused("unknown_name", "push", "plate", "spoon")
    refused("unknown_name", "turn", "flat stove", "half")
    refused("unknown_name", "place", "spoon")
    refused("nothing_held", "place", "plate")
    refused("not_openable", "open", "plate")
    refused("not_openable", "open", "wooden cabinet")           # it has three drawers
    refused("not_closable", "close", "flat stove")
    refused("not_turnable", "turn", top, "on")
    refused("not_pushable", "push", "flat stove", "plate")
    refused("unreachable", "pick", 900, 0, "top")
    refused("unreachable", "move_to", -650, 0, 1100)
    refused("unreachable", "move_pose", 0, 900, 1100, 0, 0)
    well(world, f"Held: {bowl}.", "pick", *point(world, bowl), "rim")
    for call in (("pick", 0, 0, "top"), ("open", top), ("close", top), ("turn", "flat stove", "on"),
                 ("push", "plate", "table stove front region")):
        refused("busy", *call)
    receipt = do(world, "place", bowl)
    assert not receipt.ok and receipt.text == f"The {bowl} is in the hand." and world.held == bowl


# ---------------------------------------------------------------------------------------------- drawers, doors, knobs

@pytest.mark.parametrize("suite, index", [("libero_goal_swap", 0), ("libero_goal_task", 0)])       # middle, bottom
def test_a_drawer_opens(world, begin, suite, index):
    begin(suite, index, 45)
    (_, drawer), = world.task.goal
    assert state_of(world, drawer) == "ajar" and not world.success()
    facts = well(world, f"Open: {drawer}.", "open", drawer)
    assert facts["event"] == "opened" and facts["joint"]["after"] < -.14 < facts["joint"]["before"]
    assert state_of(world, drawer) == "open" and world.success() and world.latched
    steps = world.steps
    assert well(world, f"Open: {drawer}.", "open", drawer)["steps_used"] == 0 and world.steps == steps      # it is open
    well(world, "Held: wine bottle.", "pick", *point(world, "wine bottle"), "top")


@pytest.mark.slow
def test_a_bowl_goes_into_a_drawer_that_was_opened(world, begin):
    begin("libero_goal_swap", 3, 45)
    (_, bowl, drawer), = world.task.goal
    well(world, f"Open: {drawer}.", "open", drawer)
    well(world, f"Held: {bowl}.", "pick", *point(world, bowl), "rim")
    assert not world.latched
    well(world, f"Placed: {bowl} at {drawer}.", "place", drawer)
    assert world.success() and world.latched and state_of(world, bowl) == f"in {drawer}"


@pytest.mark.slow
def test_a_bowl_goes_into_a_drawer_and_it_closes(world, begin):
    begin("libero_10_swap", 3, 45)
    bowl, drawer = "akita black bowl", "white cabinet bottom region"
    assert state_of(world, drawer) == "open"
    well(world, f"Held: {bowl}.", "pick", *point(world, bowl), "rim")
    well(world, f"Placed: {bowl} at {drawer}.", "place", drawer)
    assert state_of(world, bowl) == f"in {drawer}" and not world.success()
    facts = well(world, f"Closed: {drawer}.", "close", drawer)
    assert facts["event"] == "closed" and facts["joint"]["after"] > 0
    assert state_of(world, drawer) == "closed" and state_of(world, bowl) == f"in {drawer}"      # it went in with it
    assert world.success() and world.latched


@pytest.mark.slow
def test_a_microwave_closes_and_stays_so(world, begin):
    begin("libero_10_swap", 9, 45)
    assert state_of(world, "microwave") == "open"
    well(world, "Closed: microwave.", "close", "microwave")
    assert world.env.env._eval_predicate(["close", "microwave_1"]) and state_of(world, "microwave") == "closed"
    steps = world.steps
    stuck = do(world, "open", "microwave")              # no task asks for it, and no skill does it
    assert not stuck.ok and stuck.text == "Not open: microwave is closed." and world.steps == steps


@pytest.mark.parametrize("suite, state", [("libero_goal_swap", "on"), ("libero_goal_task", "off")])
def test_a_knob_turns(world, begin, suite, state):
    begin(suite, 7, 45)
    assert state_of(world, "flat stove") == "between" and not world.success()
    facts = well(world, f"{state.capitalize()}: flat stove.", "turn", "flat stove", state)
    assert facts["event"] == "turned" and (facts["joint"]["after"] > .5 if state == "on" else facts["joint"]["after"] < 0)
    assert state_of(world, "flat stove") == state and world.success() and world.latched
    well(world, "Held: wine bottle.", "pick", *point(world, "wine bottle"), "top")


@pytest.mark.slow
def test_a_box_is_pushed_in_front_of_the_stove(world, begin):
    begin("libero_goal_task", 5, 45)
    (_, box, place), = world.task.goal
    facts = well(world, f"Pushed: {box} to {place}.", "push", box, place)
    assert facts["event"] == "pushed" and facts["off"] < .03 < facts["way"]
    assert world.success() and world.latched
    well(world, f"Held: {box}.", "pick", *point(world, box), "top")


# ---------------------------------------------------------------------------------------------- whole plans

@pytest.mark.parametrize("suite, index", [("libero_goal_swap", 6), ("libero_goal_task", 2), ("libero_goal_task", 3),
                                          ("libero_10_swap", 2), ("libero_10_swap", 6), ("libero_10_task", 8)])
@pytest.mark.slow
def test_a_perfect_plan_solves_the_task(world, begin, suite, index):
    begin(suite, index, 45)
    teacher, acts, rng = LiberoTeacher(perfect=True), [], random.Random(0)
    names = {s.name for s in world.skills}
    for _ in range(12):
        _, tool, arguments = teacher.act(world.task.instruction, acts, "", names, rng)
        if tool == "finish":
            break
        receipt = getattr(world, {s.name: s.method for s in world.skills}[tool])(**arguments)
        acts.append((tool, arguments, receipt.text))
    assert tool == "finish" and arguments == {"status": "success"}, acts
    assert world.latched and world.success(), acts
