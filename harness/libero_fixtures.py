"""Skills for what does not move about: drawers and doors open and close, a stove's knob is turned, objects are pushed.

All work in the fixture's own frame (its joint's axis, its boxes), since the suites move and turn the fixtures.
"""

import mujoco
import numpy as np

from harness.libero_motion import axes, CLOSE, down, HIGH, OPEN, STAY, STROKE, STRETCHED, tilted, TIP, top
from harness.world import Receipt, Skill

LEANS = ((80, 0), (60, -55), (60, 55))  # degrees, tried in this order: lean from the vertical, and roll
LOW = 0.09                              # m over the table: a lower handle leaves no room for an upright palm
BEYOND = 0.050                          # m that a push aims beyond where it should end: it must press firmly
PRESS = 0.009                           # m under an object's lowest point that the tips aim at to press on its inside
DRAG, ASTRAY = 0.037, 0.03              # m: stroke of a drag; off an object's middle, the tips are set anew
PATIENCE = 450                          # steps after which a push starts no further stretch
NEAR = 0.40                             # m from the base: nearer, a hand must lean outward
UP = np.array([0, 0, 1.])

_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_ON_OFF = {"type": "string", "enum": ["on", "off"]}
_TURN = {"type": "object", "properties": {"name": {"type": "string"}, "state": _ON_OFF}, "required": ["name", "state"]}
_PUSH = {"type": "object", "properties": {"name": {"type": "string"}, "target": {"type": "string"}},
         "required": ["name", "target"]}
FIXTURE_SKILLS = (
    Skill("open", "Open the named drawer or door. The hand must be empty.", _NAME, "open_"),
    Skill("close", "Close the named drawer or door. The hand must be empty.", _NAME, "close_"),
    Skill("turn", "Turn the knob of the named stove on or off. The hand must be empty.", _TURN, "turn"),
    Skill("push", "Push the named object over the table to the middle of the named target. The hand must be empty.",
          _PUSH, "push"),
)


def leaning(out, lean, roll):
    """(3, 3) orientation of a hand that comes from `out` (3,), leaning by `lean` rad from pointing straight down.

    At roll 0 the fingers are above and below, at 90 degrees side by side (rad).
    """
    z = -np.sin(lean) * out - np.cos(lean) * UP
    x = np.sin(lean) * UP - np.cos(lean) * out
    x = np.cos(roll) * x + np.sin(roll) * np.cross(z, x)
    return np.stack([x, np.cross(z, x), z], axis=1)


class LiberoFixtures:
    """Mixin of harness.libero.Libero, which owns the simulator; it moves by harness.libero_motion.LiberoMotion."""

    # ---- what there is to move

    def _joint(self, key):
        """Id of the one joint of a drawer, door or knob."""
        env = self.env.env
        name, = (env.object_sites_dict.get(key) or env.get_object(key)).joints
        return self.model.joint(name).id

    def _q(self, joint):
        """Position of a joint: m or rad."""
        return float(self.data.qpos[self.model.jnt_qposadr[joint]])

    def _parts(self, joint):
        """Ids of the collision geoms that move with a joint."""
        m = self.model
        return np.flatnonzero((m.geom_bodyid == m.jnt_bodyid[joint]) & (self.owner >= 0))

    def _reach_of(self, geoms, direction):
        """(G,) m: how far each geom's box reaches along a direction (3,) of the world."""
        m, d = self.model, self.data
        half = np.abs(np.einsum("gij,i->gj", d.geom_xmat[geoms].reshape(-1, 3, 3), direction)) * m.geom_aabb[geoms, 3:]
        return d.geom_xpos[geoms] @ direction + half.sum(1)

    def _handle(self, joint, out):
        """Centre (3,) m of a drawer's handle, the part that reaches farthest out, and half its thickness, m."""
        geoms = self._parts(joint)
        reach = self._reach_of(geoms, out)
        centre = self.data.geom_xpos[geoms[reach.argmax()]].copy()
        return centre, reach.max() - centre @ out

    # ---- motion

    def _approach(self, point, pose, grip):
        """To `point` (3,) m from straight above, so high that a leaning hand clears all on the way."""
        here = self._hand()
        height = max(self._over(here[:2], point[:2]) + .12, point[2] + .05)
        if np.linalg.norm(here[:2] - self.base[:2]) > STRETCHED:
            height = max(height, self.base[2] + HIGH)
        if here[2] < height - .03:
            self._go(np.array([*here[:2], height]), self._pose(), grip, tolerance=.03)
        self._go(np.array([*point[:2], height]), pose, grip, tolerance=.02, turn_tolerance=.3)
        return self._go(point, pose, grip, tolerance=.008)

    def _steep(self, point, yaw):
        """(3, 3) orientation of a hand that points down at `point` (3,) m; near the base, leaning out: it must."""
        outward = (point - self.base)[:2]
        lean = np.radians(25) if np.linalg.norm(outward) < NEAR else 0
        return tilted(down(yaw), [-outward[1], outward[0], 0], lean)

    def _along(self, end, pose, grip, stroke=.045, done=lambda: False):
        """Pushes or pulls on a straight line to `end` (3,) m in short strokes: so no load can push it off the line.

        Stops where `done()` says so, or when it gets no farther.
        """
        begin = self._hand()
        length = np.linalg.norm(end - begin)
        ahead = (end - begin) / length
        best, since = 0, 0
        while since < 6 and best < length - .006 and not done():
            far = (self._hand() - begin) @ ahead
            best, since = (far, 0) if far > best + .002 else (best, since + 1)
            self._go(begin + ahead * min(far + stroke, length + stroke / 2), pose, grip, tolerance=.002, limit=2)

    def _leave(self, away):
        """From `away` (3,) m up and, when the arm is stretched, back; then the hand points down, empty and open."""
        inward = away[:2] - self.base[:2]
        far = np.linalg.norm(inward)
        if far > .60:                       # before the elbow is straight
            away = away - np.append(inward / far, 0) * .08
        self._go(away, self._pose(), STAY, tolerance=.015, limit=25)
        height = max(self._over(away[:2], away[:2]) + .10, self.table + .25)
        if np.linalg.norm(away[:2] - self.base[:2]) > .60:
            height = max(height, self.base[2] + HIGH)       # the elbow may be straight: only up there it comes free
        self._go(np.array([*away[:2], height]), self._pose(), OPEN, tolerance=.03, limit=40)
        offset = away[:2] - self.base[:2]
        offset *= np.clip(np.linalg.norm(offset), .45, .50) / np.linalg.norm(offset)
        self._go(np.array([*(self.base[:2] + offset), max(height, self.table + .25)]), np.pi / 2, OPEN, tolerance=.03,
                 turn_tolerance=.3, limit=60)

    # ---- receipts

    def _refuse(self, name, verb, able):
        """Receipt if `verb` (opened, closed, turned, pushed) cannot be tried on a thing, else None.

        It needs an empty hand and a thing for whose id `able` is true.
        """
        if bad := self._known(name):
            return bad
        if self.held:
            return Receipt(False, f"The hand holds the {self.held}.", {"event": "busy", "object": name})
        if not able(self.ids[name]):
            return Receipt(False, f"The {name} cannot be {verb}.", {"event": f"not_{verb[:-2]}able", "object": name})
        return None

    def _done(self, key, words, state, before, start):
        """Receipt of a skill that should bring a fixture to `state`; words: texts of success and failure, event."""
        name, joint = self.label[key], self._joint(key)
        good, bad, event = words
        ok = self._state(key) == state
        facts = {"event": event if ok else "stuck", "object": name, "steps_used": self.steps - start,
                 "joint": {"before": round(before, 4), "after": round(self._q(joint), 4)}}
        return Receipt(ok, f"{good}: {name}." if ok else f"{bad}: {name} is {self._state(key)}.", facts)

    # ---- drawers and doors

    def _is_door(self, key):
        """A drawer or a door."""
        return self._state(key) in ("open", "closed", "ajar")

    def _slides(self, joint):
        """A drawer's joint, no door's."""
        return self.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE

    def open_(self, name):
        """Pulls a drawer open. Doors on hinges it leaves as they are: no task asks for one to be opened."""
        if bad := self._refuse(name, "opened", self._is_door):
            return bad
        key, start = self.ids[name], self.steps
        joint = self._joint(key)
        before = self._q(joint)
        if self._state(key) != "open" and self._slides(joint):
            error = self._error()
            out = -self.data.xaxis[joint]
            low = self._handle(joint, out)[0][2] < self.table + LOW
            for lean, roll in 2 * LEANS[1:] if low else LEANS:
                self._pull(joint, np.radians(lean), np.radians(roll), error)
                if self._state(key) == "open":
                    break
        return self._done(key, ("Open", "Not open", "opened"), "open", before, start)

    def _pull(self, joint, lean, roll, error):
        """Grips a drawer's handle with a leaning hand, one finger above it and one below, and pulls."""
        out = -self.data.xaxis[joint]       # drawers open towards negative positions
        bar, _ = self._handle(joint, out)
        bar += error
        pose = leaning(out, lean, roll)
        self._approach(bar + .05 * out, pose, OPEN)
        self._go(bar - .005 * pose[:, 2], pose, OPEN, tolerance=.004, limit=40)
        self._hold(STROKE + 1, CLOSE)
        left = .16 + self._q(joint)
        self._along(self._hand() + (left + .03) * out, pose, CLOSE, .03)
        self._open()
        self._leave(self._hand() + .05 * out)

    def close_(self, name):
        if bad := self._refuse(name, "closed", self._is_door):
            return bad
        key, start = self.ids[name], self.steps
        joint = self._joint(key)
        before = self._q(joint)
        if self._state(key) != "closed":
            error = self._error()
            for _ in range(2):
                (self._push_drawer if self._slides(joint) else self._swing)(joint, error)
                if self._state(key) == "closed":
                    break
        return self._done(key, ("Closed", "Not closed", "closed"), "closed", before, start)

    def _push_drawer(self, joint, error):
        """Pushes on a drawer's handle with closed fingers: steep at first, flat under the handles above at the end."""
        out = -self.data.xaxis[joint]
        bar, half = self._handle(joint, out)
        steep, flat = leaning(out, *np.radians((30, -55))), leaning(out, *np.radians((65, -70)))
        point, q = bar + (half + TIP) * out - .015 * UP + error, self._q(joint)
        self._approach(point + .05 * out, steep, CLOSE)
        self._along(point + (q + .06) * out, steep, CLOSE)
        self._along(point + (q - BEYOND) * out, flat, CLOSE, done=lambda: self._q(joint) > .001)
        self._hold(2, CLOSE)                # the drawer comes to rest: a hand that left at once would draw it along
        self._leave(self._hand() - .08 * self._pose()[:, 2])

    def _swing(self, joint, error):
        """Pushes a door shut from its outside with closed fingers, around its hinge.

        The hand leans back from the front of what the door closes, so that its palm meets no roof.
        """
        hinge, parts, q = self.data.xanchor[joint], self._parts(joint), self._q(joint)
        door = parts[np.argmax(np.prod(self.model.geom_aabb[parts, 3:], axis=1))]
        height = self._reach_of(parts, UP).max() - .03
        arm = (self.data.geom_xpos[door] - hinge)[:2]
        sign, at = np.sign(self.data.xaxis[joint][2]), np.arctan2(arm[1], arm[0])

        def outside(angle):         # unit vectors along the door and out of its outside when it stands at `angle`
            along, across = axes(at + sign * (angle - q))
            return along, -sign * across

        def spot(angle, gap):       # where the hand is when the door stands at `angle`, `gap` m before its middle plane
            along, out = outside(angle)
            return np.array([*(hinge[:2] + 1.2 * np.linalg.norm(arm) * along + gap * out), height]) + error
        pose = leaning(np.append(outside(0)[1], 0), np.radians(30), 0)
        self._approach(spot(q, .10), pose, CLOSE)
        for angle in np.arange(q, .1, .2):
            self._go(spot(angle, .025), pose, CLOSE, tolerance=.03, limit=20)
        self._along(spot(0, -.01), pose, CLOSE, .03, done=lambda: self._q(joint) > -.001)
        self._leave(spot(0, .10))

    # ---- knob

    def turn(self, name, state):
        if state not in ("on", "off"):
            return Receipt(False, f"A knob is turned on or off, not {state}.", {"event": "unknown_name"})
        if bad := self._refuse(name, "turned", lambda k: self._state(k) in ("on", "off", "between")):
            return bad
        key, start = self.ids[name], self.steps
        joint = self._joint(key)
        before = self._q(joint)
        if self._state(key) != state:
            self._twist(joint, .8 if state == "on" else -.2, self._error())
        word = state.capitalize()
        return self._done(key, (word, f"Not {state}", "turned"), state, before, start)

    def _twist(self, joint, goal, error):
        """Grips a knob's ridge from above and turns the hand with it until the joint is at `goal` rad."""
        parts, d, m = self._parts(joint), self.data, self.model
        tops = self._reach_of(parts, UP)
        ridge = parts[tops.argmax()]
        rotation, half = d.geom_xmat[ridge].reshape(3, 3), m.geom_aabb[ridge, 3:]
        flat = [k for k in range(3) if abs(rotation[2, k]) < .7]
        across = rotation[:, min(flat, key=lambda k: half[k])]
        yaw = np.arctan2(across[1], across[0])
        point = np.array([*d.xanchor[joint][:2], tops.max() - .018]) + error
        self._travel(point[:2], self._steep(point, yaw), OPEN)
        self._go(point, self._steep(point, yaw), OPEN, tolerance=.004)
        self._hold(STROKE + 1, CLOSE)
        way, begin = goal - self._q(joint), yaw
        for turn in np.arange(.25, abs(way) + .5, .25):
            if abs(goal - self._q(joint)) < .02 or (goal - self._q(joint)) * way < 0 or self._opening() < .008:
                break                   # there, past it, or the ridge is no longer between the fingers
            yaw = begin + turn * np.sign(way)
            self._go(point, self._steep(point, yaw), CLOSE, tolerance=.01, turn_tolerance=.08, limit=8)
        self._open()
        self._go(self._hand() + .06 * UP, self._pose(), STAY, tolerance=.015, limit=15)
        self._leave(self._hand())

    # ---- pushing

    def push(self, name, target):
        if bad := self._known(target):
            return bad
        if bad := self._refuse(name, "pushed", lambda k: k in self.movable):
            return bad
        key, start, goal = self.ids[name], self.steps, self._position(self.ids[target])
        if bad := self._reachable(goal[:2]):
            return bad
        before, error = self._position(key), self._error()
        while self._off(key, goal) >= .02 and self.steps - start < PATIENCE:
            self._slide(key, goal, error)
        if self.steps > start:
            self._leave(self._hand() + .08 * UP)
        off = self._off(key, goal)
        facts = {"event": "pushed" if off < .03 else "stuck", "object": name, "target": target, "off": off,
                 "way": float(np.linalg.norm((self._position(key) - before)[:2])), "steps_used": self.steps - start}
        if off < .03:
            return Receipt(True, f"Pushed: {name} to {target}.", facts)
        return Receipt(False, f"Not pushed: {name} is {round(off * 1000)} mm from {target}.", facts)

    def _off(self, key, goal):
        """m from an object's origin to a point, horizontally."""
        return float(np.linalg.norm((goal - self._position(key))[:2]))

    def _slide(self, key, goal, error):
        """Slides an object over the table: gripped across if it is narrow enough, else pressed on in its middle."""
        corners = self._corners(key)
        low, high = corners[..., 2].min(), corners[..., 2].max()
        flat = corners.reshape(-1, 3)[:, :2]
        middle = (flat.max(0) + flat.min(0)) / 2
        widths = {yaw: np.ptp(flat @ axes(yaw)[0]) for yaw in np.radians(np.arange(0, 180, 7.5))}
        yaw, grip, z = min(widths, key=widths.get), OPEN, max(low + TIP + .003, high - .028)
        if widths[yaw] > .065:
            others = self._corners(*[k for k in self.bodies if k != key])
            yaw = min(np.pi / 2 + np.radians([0, 45, -45, -90]),
                      key=lambda yaw: max(top(others, middle, yaw, -.12, .12, .04), high + .02))
            grip, z = CLOSE, low + TIP - PRESS
        point = np.array([*middle, z]) + error
        pose = self._steep(point, yaw)
        if np.linalg.norm((point - self._hand())[:2]) > .08 or self._hand()[2] > z + .08:
            self._travel(point[:2], pose, grip)
        else:                           # anew from right above
            self._go(point + .03 * UP, pose, grip, tolerance=.008, limit=20)
        self._go(point, pose, grip, tolerance=.004, limit=60)
        self._hold(STROKE + 1 if grip == OPEN else 0, CLOSE)

        def done():
            astray = np.linalg.norm((self._hand() - self._position(key))[:2]) > ASTRAY
            return self._off(key, goal) < .01 or astray
        for _ in range(3):
            left = (goal - self._position(key))[:2]
            if done():
                break
            end = np.array([*(self._hand()[:2] + left), z])
            self._along(end, pose, CLOSE, DRAG, done)
            pose = self._steep(self._hand(), yaw)
        if grip == OPEN:
            self._open()
        self._go(self._hand() + .05 * UP, pose, grip, tolerance=.02, limit=20)
