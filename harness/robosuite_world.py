"""robosuite's own tasks as CaP-Bench uses them (robosuite 1.4, Panda arms) as a World for programs: no skills.

What decides is robosuite's: scenes, placements, predicates. Ours is that (task, init) fixes everything. robosuite 1.4 draws placements,
object sizes and joint noise from numpy's global generator, never seeded in CaP-X; here an environment is built anew for each reset (0.1 s)
under a seed of (task, init), and the global generators are put back.

Task 2 is CaP-X's: robosuite's Stack with the green cube on the red one at the start; success is Stack's and not both cubes in the air.
Ours differs in that the green cube keeps robosuite's 5 cm.

Listing tasks imports no robosuite, but looks whether it is there. Needs `pip install -r requirements-libero.txt`.
"""

import contextlib
import hashlib
import importlib.util
import io
import random

import mujoco
import numpy as np

from harness.camera import Camera
from harness.robosuite_motion import Arm, RobosuiteMotion
from harness.world import Task, World

SUITE = "robosuite"
SETTLE = 20                             # steps after reset: robosuite drops its objects from 1 to 2 cm
BELOW = .10                             # m under the table's top: fell off
IN_AIR = .04                            # m over the table: centre of a cube that does not stand on it (restack)

# instruction, goal, environment, number of arms
_TASKS = (
    ("Pick up the red cube and lift it.", (("lifted", "red cube", None),), "Lift", 1),
    ("Stack the red cube on the green cube and let it go.", (("on", "red cube", "green cube"),), "Stack", 1),
    ("The green cube stands on the red cube. Stack them the other way round: the green cube on the table, the red cube on the green "
     "cube, and let go.", (("on", "green cube", "table"), ("on", "red cube", "green cube")), "Restack", 1),
    ("Put the square nut over the square peg, down to the table, and let it go.", (("on", "square nut", "square peg"),),
     "NutAssemblySquare", 1),
    ("Wipe up the brown spill with the sponge.", (("wiped", "brown spill", None),), "Wipe", 1),
    ("Lift the pot with both arms: arm 0 by handle 0 and arm 1 by handle 1, both at the same height.", (("lifted", "pot", None),),
     "TwoArmLift", 2),
    ("Arm 0 picks up the hammer and hands it over to arm 1: in the end arm 1 alone holds it, by its handle, in the air.",
     (("handed over", "hammer", None),), "TwoArmHandover", 2),
)
TASKS = tuple(Task(SUITE, k, sentence, goal) for k, (sentence, goal, *_) in enumerate(_TASKS))


def _seed(task, init, what):
    digest = hashlib.sha256(f"{task.id} {init} {what}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


@contextlib.contextmanager
def _seeded(task, init, what):
    """numpy's and Python's global generators seeded, and put back afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()
    np.random.seed(_seed(task, init, what))
    random.seed(_seed(task, init, what))
    try:
        yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def _environment(name):
    """Name -> environment class of robosuite, or ours."""
    from robosuite.environments import REGISTERED_ENVS
    return _restack(REGISTERED_ENVS["Stack"]) if name == "Restack" else REGISTERED_ENVS[name]


def _restack(stack):
    class Restack(stack):
        """Stack that starts with the green cube (B) on the red one (A), 1 cm off in x, each turned at random; ranges as in CaP-X."""

        def _reset_internal(self):
            super()._reset_internal()
            x, y = self.table_offset[:2] + np.random.uniform((-.12, -.12), (.16, .12))
            low = self.table_offset[2] + .02 + .001
            for cube, place in ((self.cubeA, (x, y, low)), (self.cubeB, (x - .01, y, low + .02 + .025 + .001))):
                yaw = np.random.uniform(0, 2 * np.pi)
                self.sim.data.set_joint_qpos(cube.joints[0], [*place, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)])

        def _check_success(self):
            heights = [self.sim.data.body_xpos[k][2] - self.table_offset[2] for k in (self.cubeA_body_id, self.cubeB_body_id)]
            return super()._check_success() and min(heights) <= IN_AIR
    return Restack


class Robosuite(RobosuiteMotion, World):
    name = "robosuite"
    threads_ok = False                  # robosuite draws from numpy's global generator
    skills = ()

    def __init__(self):
        self.env = self.task = self.camera = None
        self.on_chunk = None            # called with the world after every environment step: video, tests

    @classmethod
    def tasks(cls, suite):
        if suite != SUITE:
            raise ValueError(f"unknown suite {suite!r}; valid: {SUITE}")
        if importlib.util.find_spec("robosuite") is None:       # told at start, not by every episode
            raise ImportError("robosuite is not installed; run: pip install -r requirements-libero.txt")
        return list(TASKS)

    @classmethod
    def check_init(cls, task, init):
        if init < 0 or 50 <= init < 100:
            raise ValueError(f"initial state {init} of {task.id} does not exist; valid: 0-49, and 100 upwards (training)")

    # ---- reset and state

    def reset(self, task, init):
        self.check_init(task, init)
        from harness.libero import control_env, forward_once
        control_env()                  # imports robosuite without its log file, warnings and OpenGL context
        from robosuite.controllers import load_controller_config
        self.close()
        *_, name, arms = _TASKS[task.index]
        with _seeded(task, init, "build"), contextlib.redirect_stdout(io.StringIO()):
            self.env = _environment(name)(
                robots=["Panda"] * arms, controller_configs=load_controller_config(default_controller="OSC_POSE"),
                has_renderer=False, has_offscreen_renderer=False, use_camera_obs=False, ignore_done=True, horizon=10 ** 9,
                hard_reset=False)
            self.env.reset()
        for observable in self.env._observables.values():
            observable.set_enabled(False)       # nobody reads them, and they cost 7 % of a step
        self.task, self.init = task, init
        self.model, self.data = self.env.sim.model._model, self.env.sim.data._data
        self.quick = forward_once(self.env.sim)
        self._index()
        self.latched, self.steps = False, 0
        on_chunk, self.on_chunk = self.on_chunk, None
        for _ in range(SETTLE):
            self.step()
        self.on_chunk = on_chunk
        self.latched, self.steps = False, 0

    def _index(self):
        """The frame, the arms, and what has a name."""
        env, m = self.env, self.model
        base = env.robots[0].robot_model.root_body
        self.origin = np.array([*env.robots[0].base_pos[:2], env.table_offset[2]])
        self.turned = self.data.xmat[m.body(base).id].reshape(3, 3).copy()
        self.arms = []
        for robot in env.robots:
            fingers = [int(k) for k in robot._ref_gripper_joint_pos_indexes] if robot.gripper.dof else []
            arm = Arm(robot, robot.eef_site_id, fingers)
            arm.position, arm.rotation = self._site(arm)
            arm.start = arm.rotation
            pads = ("left_fingerpad", "right_fingerpad") if fingers else ()
            arm.geoms = [[m.geom(g).id for g in robot.gripper.important_geoms[pad]] for pad in pads]
            self.arms.append(arm)
        self.things, self.movable = self._things()
        self.geoms = {}                         # geom -> name of the movable object it belongs to
        for name, body in self.movable.items():
            for geom in range(m.ngeom):
                if m.body_rootid[m.geom_bodyid[geom]] == m.body_rootid[body] and m.geom_contype[geom]:
                    self.geoms[geom] = name

    def _things(self):
        """({name: (kind, id of body, site or geom; body that says how it is turned)}, {name of movable object: body})"""
        env, m = self.env, self.model
        index = self.task.index
        if index == 0:
            movable = {"red cube": env.cube_body_id}
        elif index in (1, 2):
            movable = {"red cube": env.cubeA_body_id, "green cube": env.cubeB_body_id}
        elif index == 3:
            movable = {"square nut": env.obj_body_id["SquareNut"]}
        elif index == 4:
            movable = {}
        elif index == 5:
            movable = {"pot": env.pot_body_id}
        else:
            movable = {"hammer": env.hammer_body_id}
        things = {name: ("body", body, body) for name, body in movable.items()}
        if index == 3:
            nut = movable["square nut"]
            things["square nut handle"] = ("site", env.object_site_ids[0], nut)
            things["square peg"] = ("geom", m.body_geomadr[env.peg1_body_id], env.peg1_body_id)
        if index == 5:
            things |= {f"handle {k}": ("site", m.site(env.pot.important_sites[f"handle{k}"]).id, env.pot_body_id) for k in (0, 1)}
        if index == 6:
            body = env.hammer_body_id
            things = {"hammer": ("geom", env.hammer_handle_geom_id, body), "hammer head": ("geom", m.geom("hammer_head").id, body)}
        return things, movable

    def state_hash(self):
        """16 hex digits of all that the next step depends on: MuJoCo's state, what was drawn into the model, controllers, grippers."""
        kind, m = mujoco.mjtState.mjSTATE_INTEGRATION, self.model
        state = np.empty(mujoco.mj_stateSize(m, kind))
        mujoco.mj_getState(m, self.data, state, kind)
        parts = [state, m.body_pos, m.body_quat, m.body_mass, m.body_inertia, m.geom_size, m.geom_friction, self.wiped()]
        for arm in self.arms:
            controller = arm.robot.controller
            parts += [controller.goal_pos, controller.goal_ori, controller.initial_joint, arm.position, arm.rotation, [arm.grip, arm.flip]]
            parts += [arm.robot.gripper.current_action] if arm.fingers else []
        digest = hashlib.sha256(self.task.id.encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part, float).tobytes())
        return digest.hexdigest()[:16]

    def success(self):
        """robosuite's predicate, now; looked at after every environment step too."""
        now = bool(self.env._check_success())
        self.latched |= now
        return now

    def unrecoverable(self):
        for name, body in self.movable.items():
            if self.data.xpos[body][2] < self.origin[2] - BELOW:
                return f"the {name} fell off the table"
        return None

    def close(self):
        if self.camera:
            self.camera.close()
        if self.env:
            self.env.close()
        self.env = self.camera = self.task = None

    # ---- perception with privileged poses

    def wiped(self):
        """(n,) bool per dirt marker: wiped up already. Empty but for Wipe."""
        markers = getattr(self.env.model.mujoco_arena, "markers", [])
        return np.array([marker in self.env.wiped_markers for marker in markers], bool)

    def spill(self):
        """(n, 3) m in the frame: dirt markers that are left."""
        markers = self.env.model.mujoco_arena.markers
        left = [marker.root_body for marker, gone in zip(markers, self.wiped(), strict=True) if not gone]
        return np.array([self.to_frame(self.data.body(name).xpos, np.eye(3))[0] for name in left]).reshape(-1, 3)

    def names(self):
        return [*self.things, *(["brown spill"] if self.task.index == 4 else [])]

    def pose(self, name):
        """(position, (3, 3) rotation) in the frame. Of the peg: the middle of its top; of the hammer: of its handle; of the spill:
        of what is left of it (of nothing: the table below the robot's start)."""
        if name == "brown spill":
            points = self.spill()
            return (points.mean(0) if len(points) else np.array([.56, 0, 0])), np.eye(3)
        kind, thing, body = self.things[name]
        position = {"body": self.data.xpos, "site": self.data.site_xpos, "geom": self.data.geom_xpos}[kind][thing].copy()
        if name == "square peg":
            position[2] += self.model.geom_size[thing][2]
        if name == "square nut handle":         # its site is where the handle leaves the ring
            position += .0075 * self.data.xmat[body].reshape(3, 3)[:, 0]
        return self.to_frame(position, self.data.xmat[body].reshape(3, 3))

    def size(self, name):
        """(3,) m: full extent along its own axes."""
        if name == "brown spill":
            points = self.spill()
            return np.ptp(points, axis=0) + [.04, .04, 0] if len(points) else np.zeros(3)       # a marker is 4 cm wide
        kind, thing, body = self.things[name]
        if kind == "site":
            return np.array([.0355, .03175, .02] if name == "square nut handle" else [.11, .02, .02])
        if kind == "geom":
            size = 2 * self.model.geom_size[thing]
            return np.array([*size[:2], self.pose(name)[0][2]]) if name == "square peg" else size
        m, corners = self.model, []
        for geom in [g for g, owner in self.geoms.items() if owner == name]:
            local = m.geom_aabb[geom, :3] + m.geom_aabb[geom, 3:] * np.array([[-1.] * 3, [1.] * 3])
            here = self.data.geom_xpos[geom] + local @ self.data.geom_xmat[geom].reshape(3, 3).T
            corners.append((here - self.data.xpos[body]) @ self.data.xmat[body].reshape(3, 3))
        return np.ptp(np.concatenate(corners), axis=0)

    def resting_on(self, name):
        """What an object stands on: another object's name, "square peg", "table", or None in the air."""
        if name == "square nut" and self.env.on_peg(self.data.xpos[self.movable[name]], 0):
            return "square peg"
        pairs = self.data.contact.geom[:self.data.ncon]
        touching = {int(b) for pair in pairs for a, b in (pair, pair[::-1]) if self.geoms.get(a) == name}
        for other in {self.geoms[g] for g in touching if g in self.geoms} - {name}:
            if self.pose(other)[0][2] < self.pose(name)[0][2] - .01:
                return other
        return "table" if any(self.model.geom(g).name == "table_collision" for g in touching) else None

    def objects(self):
        rows = []
        for name in self.names():
            p = self.pose(name)[0] * 1000
            rows.append({"name": name} | {k: round(float(v)) for k, v in zip("xyz", p, strict=True)})
        return rows

    def privileged(self):
        values = {"holding": self.held is not None, "success": self.success(), "latched": self.latched}
        for k in range(len(self.arms)):
            hand = self.hand_pose(k)[0]
            values |= {f"hand{k}_{a}": hand["xyz".index(a)] for a in "xyz"} | {f"opening{k}": self.opening(k)}
        for k, (_, name, target) in enumerate(self.task.goal):
            p = self.pose(name)[0]
            values |= {f"goal{k}_{a}": p["xyz".index(a)] for a in "xyz"}
            if target and target != "table":
                values[f"goal{k}_distance"] = np.linalg.norm((p - self.pose(target)[0])[:2])
        if self.task.index == 4:
            values["wiped"] = self.wiped().mean()
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
