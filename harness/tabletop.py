"""Tabletop: our MuJoCo world. A free-flying parallel gripper, goblet-like objects, containers, real contact grasping.

An object is a head on a thin stem. The head is 80 mm long (its long axis is the world's y axis) and wider than the open gripper, except
for one narrow section right above the stem; which of the four sections that is depends on the object's shape. A pick chooses by `dy`:

    right section   the fingers straddle it, close, and lift by friction alone (nothing is welded to the hand)
    wrong section   the fingers press on the head. An object with a weighted foot stays up, and the planner may try again; one with a
                    light foot tips over for good. Half of the objects are light, drawn with the start state, and no skill tells which.

Units inside: metres, seconds, newtons, kilograms. Units of skills: integer millimetres. The table's top is z = 0.
Initial states: 0 memory, 1-10 evaluation, 11-44 teacher and RL, 45-49 validation, 100 and up: further training states.
Success is looked at when the hand lets go and after every call (not at every physics step), and latched.
A start state is a function of (task, init) alone, so attempts of a group and paired evaluations start alike in any process.
"""

import functools
import hashlib
import random

import mujoco
import numpy as np

from harness.world import Receipt, Skill, Task, World

COLOURS = {"red": (.8, .1, .1), "green": (.1, .6, .2), "blue": (.1, .3, .8), "white": (.9, .9, .9), "black": (.15, .15, .15),
           "yellow": (.9, .8, .1)}
GRASP = {"mug": 40, "pan": 40, "jug": 20, "jar": 0, "pot": -20}        # shape -> dy of its narrow section, mm
CONTAINERS = {"tray": .022, "bowl": .035, "box": .045}                 # kind -> wall height, m
SECTIONS = (-20, 0, 20, 40)                                            # mm
CELLS = [(x, y) for x in (.28, .45) for y in (-.27, -.09, .09, .27)]   # nominal object places, m
DOCKS = [(.68, -.20), (.68, .20)]                                      # nominal container places, m
JITTER = .03                                                           # uniform, +- m, of objects and containers
TRAVEL_Z = .30                                                         # finger-tip height of free travel, m
STEP = .002                                                            # physics step, s
PERCEPTION_SD = .0015                                                  # of a located position, m
DESCENT = .5                                                           # m/s
PRESS, REACTION = 1.5, .15                                             # N and s that the hand presses before it lets off
KP = 1500                                                              # N/m, of the servos that carry the hand
TILT = .7                                                              # cos of the tilt past which an object has toppled (45 deg)


# ---------------------------------------------------------------------------------------------- tasks

def _scene(rng):
    """Four objects of which two share the first one's shape or colour (names must be read in full), two containers, four cells."""
    colours, shapes = list(COLOURS), list(GRASP)
    c, s = rng.choice(colours), rng.choice(shapes)
    objects = [(c, s), (rng.choice([k for k in colours if k != c]), s), (c, rng.choice([k for k in shapes if k != s]))]
    while len(objects) < 4:
        extra = (rng.choice(colours), rng.choice(shapes))
        if extra not in objects:
            objects.append(extra)
    rng.shuffle(objects)
    kinds = list(CONTAINERS)
    first = (rng.choice(colours), rng.choice(kinds))
    second = first
    while second == first:
        second = (rng.choice([first[0], rng.choice(colours)]), rng.choice(kinds))
    return ([" ".join(o) for o in objects], [" ".join(k) for k in (first, second)], rng.sample(range(len(CELLS)), 4))


def _phrase(name, container):
    return f"put the {name} {'on' if container.endswith('tray') else 'in'} the {container}"


@functools.cache
def _suite(suite):
    """-> list of (Task, objects, containers, cells). Tasks 0-11 have one step, 12-19 two."""
    tasks = []
    for index in range(20):
        rng = random.Random(f"tabletop {index}")
        objects, containers, cells = _scene(rng)
        steps = 1 if index < 12 else 2
        targets, docks = rng.sample(range(4), 4), rng.sample(range(2), 2)
        if suite == "tabletop_task":                    # changed instruction: same scene, other objects, other containers
            targets, docks = targets[2:] + targets[:2], docks[::-1]
        goal = tuple(("in", objects[targets[k]], containers[docks[k]]) for k in range(steps))
        if suite == "tabletop_swap":                    # changed positions: the first target trades places, the containers too
            a, b = targets[0], targets[2]
            cells = list(cells)
            cells[a], cells[b] = cells[b], cells[a]
            containers = containers[::-1]
        sentence = ", then ".join(_phrase(o, c) for _, o, c in goal)
        tasks.append((Task(suite, index, sentence[0].upper() + sentence[1:] + ".", goal), objects, containers, cells))
    return tasks


SUITES = ("tabletop_base", "tabletop_swap", "tabletop_task")


# ---------------------------------------------------------------------------------------------- model

def _object_xml(name, number, weighted):
    colour, shape = name.split()
    rgba, y0 = " ".join(map(str, COLOURS[colour])) + " 1", GRASP[shape] / 1000
    geoms = [f'<geom type="box" size=".012 .0075 .035" pos="0 {y0} .035" mass=".070" rgba="{rgba}"/>']         # stem
    if weighted:
        geoms.append(f'<geom type="box" size=".014 .028 .006" pos="0 {y0} .006" mass=".14" rgba="{rgba}"/>')   # foot
    runs, last = [], None                                # neighbouring wide sections become one box
    for s in SECTIONS:
        if s == GRASP[shape]:
            last = None
        elif last is None:
            runs.append([s])
            last = s
        else:
            runs[-1].append(s)
    for run in runs:
        y, half = (run[0] + run[-1]) / 2000, (run[-1] - run[0] + 20) / 2000
        geoms.append(f'<geom type="box" size=".040 {half} .015" pos="0 {y} .085" mass="{.002 * len(run)}" rgba="{rgba}"/>')
    geoms.append(f'<geom type="box" size=".011 .010 .015" pos="0 {y0} .085" mass=".004" rgba="{rgba}"/>')
    return f'<body name="object{number}"><freejoint/>{"".join(geoms)}</body>'


def _container_xml(name, number):
    colour, kind = name.split()
    rgba, wall, half = " ".join(map(str, COLOURS[colour])) + " 1", CONTAINERS[kind] / 2, .075
    parts = [f'<geom type="box" size="{half} {half} .002" pos="0 0 .002" rgba="{rgba}"/>']
    for x, y, sx, sy in ((half, 0, .003, half), (-half, 0, .003, half), (0, half, half, .003), (0, -half, half, .003)):
        parts.append(f'<geom type="box" size="{sx} {sy} {wall}" pos="{x} {y} {wall}" rgba="{rgba}"/>')
    return f'<body name="container{number}" mocap="true">{"".join(parts)}</body>'


@functools.cache
def _model(objects, containers, weighted):
    """MjModel of a scene; cached, shared read-only between worlds."""
    return mujoco.MjModel.from_xml_string(f"""
<mujoco>
 <option timestep="{STEP}" integrator="implicitfast" cone="pyramidal" noslip_iterations="5" iterations="30" ls_iterations="8">
  <flag sleep="enable"/></option>
 <default><geom friction="1.0 .02 .001" solref=".006 1"/>
  <default class="pad"><geom type="box" mass=".05" condim="4" friction="1.8 .05 .001" priority="1" rgba=".5 .5 .55 1"/></default>
  <default class="tip"><geom type="box" mass=".002" condim="1" priority="1" rgba=".8 .8 .8 1"/></default>
 </default>
 <worldbody>
  <geom name="table" type="box" size=".42 .48 .05" pos=".48 0 -.05" rgba=".75 .65 .5 1"/>
  {"".join(_container_xml(c, i) for i, c in enumerate(containers))}
  {"".join(_object_xml(o, i, weighted[i]) for i, o in enumerate(objects))}
  <body name="hand" gravcomp="1">
   <joint name="x" type="slide" axis="1 0 0"/><joint name="y" type="slide" axis="0 1 0"/><joint name="z" type="slide" axis="0 0 1"/>
   <geom type="box" size=".055 .02 .02" pos="0 0 .09" mass=".15" rgba=".3 .3 .35 1"/>
   <body gravcomp="1"><joint name="left" type="slide" axis="-1 0 0" range="0 .030" limited="true" damping="2"/>
    <geom class="pad" size=".004 .005 .031" pos="-.004 0 .039"/>
    <geom class="tip" size=".004 .002 .004" pos="-.004 0 .004"/></body>
   <body gravcomp="1"><joint name="right" type="slide" axis="1 0 0" range="0 .030" limited="true" damping="2"/>
    <geom class="pad" size=".004 .005 .031" pos=".004 0 .039"/>
    <geom class="tip" size=".004 .002 .004" pos=".004 0 .004"/></body>
  </body>
 </worldbody>
 <equality><joint joint1="left" joint2="right"/></equality>
 <actuator>
  <position joint="x" kp="{KP}" kv="40" forcerange="-40 40"/><position joint="y" kp="{KP}" kv="40" forcerange="-40 40"/>
  <position joint="z" kp="{KP}" kv="40" forcerange="-25 25"/>
  <position joint="left" kp="2500" kv="16" forcerange="-70 70"/>
 </actuator>
</mujoco>""")


# ---------------------------------------------------------------------------------------------- the world

_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NOTHING = {"type": "object", "properties": {}}
_MM = {"type": "integer", "minimum": -5000, "maximum": 5000}
_XY = {"x": _MM, "y": _MM}
SKILLS = (
    Skill("locate", "Position of one object or container, in millimetres.", _NAME, "locate", moves=False),
    Skill("list_objects", "Positions of everything on the table, in millimetres.", _NOTHING, "list_objects", moves=False),
    Skill("pick", "Pick up what stands at (x, y); dy is the grasp offset along its long axis in mm: -20, 0, 20 or 40.",
          {"type": "object", "properties": {**_XY, "dy": _MM}, "required": ["x", "y", "dy"]}, "pick"),
    Skill("move", "Move the hand above (x, y), in millimetres.", {"type": "object", "properties": _XY, "required": ["x", "y"]}, "move"),
    Skill("place", "Carry what is held to the named container and let it go there.", _NAME, "place"),
    Skill("release", "Open the hand where it is.", _NOTHING, "release"),
)


class Tabletop(World):
    name = "tabletop"
    threads_ok = True
    skills = SKILLS

    def __init__(self):
        self.task = self.model = self.data = None
        self.on_chunk = None                    # called after every piece of motion with the world: video, tests

    @classmethod
    def tasks(cls, suite):
        if suite not in SUITES:
            raise ValueError(f"unknown suite {suite!r}; valid: {', '.join(SUITES)}")
        return [t for t, *_ in _suite(suite)]

    @classmethod
    def check_init(cls, task, init):
        if init < 0 or 50 <= init < 100:
            raise ValueError(f"initial state {init} of {task.id} does not exist; valid: 0-49, and 100 upwards (training)")

    def reset(self, task, init):
        self.check_init(task, init)
        self.task, self.init = task, init
        _, self.names, self.containers, cells = _suite(task.suite)[task.index]
        rng = np.random.default_rng([int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:4], "big"), init])
        self.noise = np.random.default_rng([init, task.index, 1])
        weighted = tuple(bool(v) for v in rng.integers(0, 2, len(self.names)))
        self.model = _model(tuple(self.names), tuple(self.containers), weighted)
        self.data = mujoco.MjData(self.model)
        qpos = self.data.qpos
        for i, cell in enumerate(cells):
            qpos[7 * i:7 * i + 2] = np.array(CELLS[cell]) + rng.uniform(-JITTER, JITTER, 2)
            qpos[7 * i + 2] = 2e-4
            yaw = rng.normal(0, .02)                     # rad; small, so that the long axis stays y
            qpos[7 * i + 3:7 * i + 7] = np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)
        for i in range(len(self.containers)):
            self.data.mocap_pos[i, :2] = np.array(DOCKS[i]) + rng.uniform(-JITTER, JITTER, 2)
        self.hand = self.model.joint("x").qposadr[0]
        self.home = np.array([.30, 0, TRAVEL_Z])
        qpos[self.hand:self.hand + 3] = self.home
        qpos[self.hand + 3:self.hand + 5] = .030
        self.data.ctrl[:] = [*self.home, .030]
        mujoco.mj_forward(self.model, self.data)
        self.held, self.latched = None, False
        self.bodies = np.array([self.model.body(f"object{i}").id for i in range(len(self.names))])

    # ---- state

    def state_hash(self):
        d = self.data
        state = np.concatenate([d.qpos, d.qvel, d.mocap_pos.ravel(), d.ctrl, self.model.body_mass, [self.init]])
        return hashlib.sha256(self.task.id.encode() + np.ascontiguousarray(state).tobytes()).hexdigest()[:16]

    def _position(self, name):
        """(3,) m: base of an object's stem axis, or a container's centre."""
        if name in self.containers:
            return self.data.mocap_pos[self.containers.index(name)].copy()
        i = self.names.index(name)
        return self.data.xpos[self.bodies[i]].copy()

    def _inside(self, name, container):
        c, p = self._position(container), self.data.xipos[self.bodies[self.names.index(name)]]
        return bool(np.all(np.abs(p[:2] - c[:2]) < .075) and p[2] < .09)

    def success(self):
        ok = all(self._inside(o, c) and self.held != o for _, o, c in self.task.goal)
        self.latched |= ok
        return ok

    def _upright(self, i):
        return self.data.xmat[self.bodies[i]][8] > TILT

    def unrecoverable(self):
        goal = {o: c for _, o, c in self.task.goal}
        for i, name in enumerate(self.names):
            if self.data.xpos[self.bodies[i]][2] < -.02:
                return f"{name} fell off the table"
            if self._upright(i) or name == self.held:
                continue
            place = next((c for c in self.containers if self._inside(name, c)), None)
            if place is None or (name in goal and place != goal[name]):
                return f"{name} tipped over"
        return None

    def objects(self):
        found = []
        for name in self.names + self.containers:
            p = self._position(name) * 1000
            found.append({"name": name, "x": round(float(p[0])), "y": round(float(p[1])), "z": round(float(p[2]))})
        return found

    def privileged(self):
        d, h = self.data, self.hand
        values = {"hand_x": d.qpos[h], "hand_y": d.qpos[h + 1], "hand_z": d.qpos[h + 2], "opening": 2 * d.qpos[h + 3],
                  "holding": float(self.held is not None), "success": float(self.success())}
        for k, (_, name, container) in enumerate(self.task.goal):
            p, c = self._position(name), self._position(container)
            values |= {f"goal{k}_{a}": p["xyz".index(a)] for a in "xyz"} | {f"goal{k}_distance": np.linalg.norm(p[:2] - c[:2])}
        return {k: float(v) for k, v in values.items()}

    # ---- motion: targets are moved along straight lines, contact does the rest

    def _run(self, seconds):
        steps = max(1, round(seconds / STEP))
        while steps > 0:
            chunk = min(steps, 15)
            mujoco.mj_step(self.model, self.data, nstep=chunk)      # releases the interpreter lock
            steps -= chunk
            if self.on_chunk:
                self.on_chunk(self)

    def _go(self, target, speed, settle=6):
        """Moves the hand's set point to `target` (3,) m at `speed` m/s; returns the shortfall of the hand itself, m."""
        start = self.data.ctrl[:3].copy()
        target = np.asarray(target, float)
        pieces = max(2, int(np.ceil(np.linalg.norm(target - start) / speed / (5 * STEP))))
        for k in range(1, pieces + 1):
            s = k / pieces
            self.data.ctrl[:3] = start + (target - start) * s * s * (3 - 2 * s)      # smooth start and end
            self._run(5 * STEP)
        short = float(np.linalg.norm(self._hand() - target))
        for _ in range(settle):                          # lag of the servo; contact keeps a shortfall
            if short < .003:
                break
            self._run(5 * STEP)
            short = float(np.linalg.norm(self._hand() - target))
        return short

    def _descend(self, target):
        """Guarded descent: ends when the arm has to push, PRESS newtons for REACTION seconds more; -> True if it stands on something."""
        z = float(self.data.ctrl[2])
        while z > target[2]:
            z = max(target[2], z - DESCENT * 3 * STEP)
            self.data.ctrl[:3] = *target[:2], z
            self._run(3 * STEP)
            if z < .13 and self.data.actuator_force[2] < -1:             # N; free descent at constant speed needs none
                for _ in range(round(REACTION / (5 * STEP))):
                    self.data.ctrl[2] = self._hand()[2] - PRESS / KP     # a servo's set point that far below pushes that hard
                    self._run(5 * STEP)
                return True
        self._run(.04)
        return False

    def _hand(self):
        return self.data.qpos[self.hand:self.hand + 3].copy()

    def _grip(self, opening):
        self.data.ctrl[3] = opening

    def _gripped(self):
        """Name of the object between both fingers, or None: fingers not fully closed, and an object moved up with the hand."""
        if self.data.qpos[self.hand + 3] < .004:
            return None
        hand = self._hand()
        for i, name in enumerate(self.names):
            p = self.data.xpos[self.bodies[i]]
            if p[2] > .05 and np.linalg.norm(p[:2] - hand[:2]) < .09:
                return name
        return None

    # ---- skills

    def _noisy(self, name):
        p = (self._position(name)[:2] + self.noise.normal(0, PERCEPTION_SD, 2)) * 1000
        return f"{name} x {round(float(p[0]))} y {round(float(p[1]))}"

    def _known(self, name):
        return None if name in self.names + self.containers else \
            Receipt(False, f"There is no {name}. There are: {', '.join(self.names + self.containers)}.", {"event": "unknown_name"})

    def locate(self, name):
        return self._known(name) or Receipt(True, self._noisy(name), {"event": "seen", "object": name})

    def list_objects(self):
        return Receipt(True, "\n".join(self._noisy(n) for n in self.names + self.containers), {"event": "seen"})

    def move(self, x, y):
        spot = self._reach(x, y)
        far = self._go([*spot, TRAVEL_Z], 2.)
        return Receipt(True, f"Hand at x {round(spot[0] * 1000)} y {round(spot[1] * 1000)}.", {"event": "moved", "shortfall": far})

    @staticmethod
    def _reach(x, y):
        """mm -> m, clipped to what the hand reaches: the table."""
        return min(max(x / 1000, .05), .9), min(max(y / 1000, -.48), .48)

    def pick(self, x, y, dy):
        if self.held:
            return Receipt(False, f"The hand already holds the {self.held}.", {"event": "busy"})
        x, y = self._reach(x, y + max(-60, min(60, dy)))
        self._grip(.030)
        self._go([x, y, TRAVEL_Z], 2.5)
        pressed = self._descend([x, y, .073])
        target = self._nearest(x, y)
        if not pressed:
            self._grip(0.)
            self._run(.16)
        self._go([x, y, TRAVEL_Z], .8)
        self.held = None if pressed else self._gripped()
        meant = self.held or target
        facts = {"object": meant, "dy": dy, "right": bool(meant) and GRASP[meant.split()[1]] == dy}
        if self.held:
            return Receipt(True, f"Held: {self.held}.", {**facts, "event": "held"})
        self._grip(.030)
        if pressed:
            return Receipt(False, "Nothing held: the fingers met the body.", {**facts, "event": "slip"})
        return Receipt(False, "Nothing held: the fingers closed on nothing.", {**facts, "event": "empty"})

    def _nearest(self, x, y):
        d = [np.linalg.norm(self._position(n)[:2] - [x, y]) for n in self.names]
        return self.names[int(np.argmin(d))] if min(d) < .08 else None

    def place(self, name):
        if bad := self._known(name):
            return bad
        if name not in self.containers:
            return Receipt(False, f"The {name} is no container.", {"event": "no_container"})
        if not self.held:
            return Receipt(False, "The hand holds nothing.", {"event": "nothing_held"})
        held, i = self.held, self.names.index(self.held)
        c = self._position(name)
        offset = self.data.xipos[self.bodies[i]][:2] - self._hand()[:2]         # what hangs in the hand goes to the centre
        spot = c[:2] - offset
        self._go([*spot, TRAVEL_Z], 1.)
        self._run(.08)
        low = TRAVEL_Z - (self.data.xpos[self.bodies[i]][2] - .012)
        self._go([*spot, low], .8)
        self._run(.04)
        return self._let_go(held, name)

    def release(self):
        if not self.held:
            self._grip(.030)
            self._run(.06)
            return Receipt(True, "The hand is open.", {"event": "opened"})
        return self._let_go(self.held, None)

    def _let_go(self, held, container):
        self._grip(.030)
        self._run(.10 if container else .40)             # a container is close below; otherwise it falls to the table
        self.held = None
        hand = self._hand()
        self._go([hand[0], hand[1], TRAVEL_Z], 1.5)
        self.success()
        if container and self._inside(held, container):
            return Receipt(True, f"Placed: {held} at {container}.", {"event": "placed", "object": held, "container": container})
        return Receipt(container is None, f"Let go: {held}.", {"event": "dropped", "object": held})

    # ---- pictures, only when asked. Every geom is a box, so a painter's algorithm draws the scene without OpenGL on any machine.

    def render(self, width=256, height=256):
        import io

        from PIL import Image, ImageDraw
        eye, look = np.array([1.30, 0., .85]), np.array([.46, 0., .06])
        forward = (look - eye) / np.linalg.norm(look - eye)
        right = np.cross(forward, [0, 0, 1.])
        right /= np.linalg.norm(right)
        up, focal = np.cross(right, forward), 1.15 * min(width, height)
        image = Image.new("RGB", (width, height), (214, 222, 230))
        draw, faces = ImageDraw.Draw(image), []
        for g in range(self.model.ngeom):
            centre, R, half = self.data.geom_xpos[g], self.data.geom_xmat[g].reshape(3, 3), self.model.geom_size[g]
            for axis in range(3):
                for sign in (-1, 1):
                    normal = sign * R[:, axis]
                    middle = centre + normal * half[axis]
                    if normal @ (eye - middle) <= 0:
                        continue                                                    # faces away
                    a, b = R[:, (axis + 1) % 3] * half[(axis + 1) % 3], R[:, (axis + 2) % 3] * half[(axis + 2) % 3]
                    corners = np.array([middle + a + b, middle + a - b, middle - a - b, middle - a + b]) - eye      # (4, 3)
                    depth = corners @ forward
                    xy = np.stack([width / 2 + focal * (corners @ right) / depth, height / 2 - focal * (corners @ up) / depth], 1)
                    shade = .55 + .35 * max(0., normal[2]) + .10 * max(0., normal[0])
                    colour = tuple(int(255 * min(1., c * shade)) for c in self.model.geom_rgba[g][:3])
                    faces.append((0 if g == 0 else 1, -np.linalg.norm(middle - eye), [tuple(p) for p in xy], colour))
        for _, _, polygon, colour in sorted(faces, key=lambda f: f[:2]):            # the table first, then far to near
            draw.polygon(polygon, fill=colour, outline=tuple(int(c * .7) for c in colour))
        out = io.BytesIO()
        image.save(out, "PNG")
        return out.getvalue()
