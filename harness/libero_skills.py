"""The frozen executor of the LIBERO-PRO world: motion, top-down grasps, and the skills that a planner may call.

It stands in place of a real harness's VLA and perception, on privileged poses. The skills act through env.step with
OSC_POSE actions (20 Hz) and nothing else: no state is written, nothing is welded to the hand.

Frames and hand (measured; metres): the controller moves the gripper's grip site; the x axis of that site is the
axis along which the fingers close, z points out of the hand. The finger tips are 11 mm beyond the site, the palm
is 40 mm before it and 10 cm wide to each side. Units of skills: integer millimetres in the world frame.
"""

import numpy as np

from harness.world import Receipt, Skill

OPEN, STAY, CLOSE = -1.0, 0.0, 1.0      # gripper actions: they move the fingers' set point, or leave it
STROKE = 8                              # steps that the gripper's set point takes from one end to the other
TIP, PALM = 0.0108, 0.040               # m from the grip site to finger tips, ahead, and to the palm, behind
MAX_WIDTH = 0.072                       # m between the fingers that a pick accepts; the hand opens to 0.080
SNAP = 0.060                            # m: a pick takes the object nearest to its point, within this
REACH = (0.25, 0.85)                    # m from the robot's base, horizontally: outside nothing is tried
CLEAR = 0.025                           # m of free height over whatever is passed


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


# ---------------------------------------------------------------------------------------------- the executor

_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_MM = {"type": "integer", "minimum": -5000, "maximum": 5000}
_XY = {"x": _MM, "y": _MM}
_NONE = {"type": "object", "properties": {}}
_PICK = {"type": "object", "properties": {**_XY, "dy": _MM}, "required": ["x", "y", "dy"]}
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


class LiberoSkills:
    """Mixin of harness.libero.Libero, which owns the simulator.

    It supplies what its `_index` and `reset` set (`data`, `ids`, `movable`, `table`, `held`, `steps` …), `_step`, and the
    poses: `_position`, `_corners`, `_opening`, `objects`.
    """

    # ---- motion

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
