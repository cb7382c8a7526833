"""The skills of the LIBERO-PRO world that a planner may call: perception, picks, motion and places on privileged poses.

They stand in place of a real harness's VLA and perception; motion is libero_motion.py, grasps libero_grasps.py, drawers
and knobs libero_fixtures.py.
Units of skills: integer millimetres in the world frame, degrees. Facts of a receipt bear RPent's field names where it
has one; those are in metres.
"""

import numpy as np

from harness.libero_fixtures import FIXTURE_SKILLS, LiberoFixtures
from harness.libero_grasps import KINDS, LiberoGrasps
from harness.libero_motion import CLOSE, down, LiberoMotion, OPEN, PALM, STAY, STROKE, tilted, TIP, top
from harness.world import Receipt, Skill

SNAP = 0.060                            # m: a pick takes the object nearest to its point, within this
STACKED = 0.015                         # m: of objects as near as that to the nearest, a pick takes the topmost
REACH = (0.25, 0.85)                    # m from the robot's base, horizontally: outside nothing is tried
FALLING = 0.05                          # m/s up or down: a pick waits for objects that move faster
LIFT = 0.3                              # share of the full speed at which a pick lifts
MAX_STEPS = 150                         # of move_to and move_pose
BLOCKED = 0.030                         # m from the target: such a move has failed
TALL = 0.120                            # m: taller things are laid into drawers and leaned on the rack
LAID, LEANED, LEVEL, STEEP = np.radians(45), np.radians(35), np.radians(10), np.radians(63)
EDGE = 0.010                            # m: so far from a region's edges things are put
FLAT = 0.050                            # m: objects lie "on" regions that are lower and "in" those that are higher


# ---------------------------------------------------------------------------------------------- the executor

def _schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


_NAME = {"type": "string"}
_MM = {"type": "integer", "minimum": -5000, "maximum": 5000}
_DEGREES = {"type": "integer", "minimum": -360, "maximum": 360}
_KIND = {"type": "string", "enum": list(KINDS)}
SKILLS = (
    Skill("locate", "Position, size and state of one object or place, in millimetres.", _schema(name=_NAME), "locate",
          moves=False),
    Skill("list_objects", "Positions of all objects and places, in millimetres.", _schema(), "list_objects",
          moves=False),
    Skill("pick", "Pick up the object at (x, y): grasp 'top' from above across it, 'rim' with one finger inside its "
          "rim, 'handle' by its handle.", _schema(x=_MM, y=_MM, grasp=_KIND), "pick"),
    Skill("place", "Carry what is held to the named object or place and let it go there.", _schema(name=_NAME),
          "place"),
    Skill("release", "Open the hand where it is.", _schema(), "release"),
    Skill("move_to", "Move the hand to (x, y, z), in millimetres.", _schema(x=_MM, y=_MM, z=_MM), "move_to"),
    Skill("move_pose", "Move the hand to (x, y, z), leaned by pitch degrees away from straight down, its finger axis "
          "turned to yaw degrees.", _schema(x=_MM, y=_MM, z=_MM, pitch=_DEGREES, yaw=_DEGREES), "move_pose"),
    *FIXTURE_SKILLS,
)


def _metres(point):
    return [round(float(v), 4) for v in point]


class LiberoSkills(LiberoFixtures, LiberoGrasps, LiberoMotion):
    """Mixin of harness.libero.Libero, which owns the simulator.

    It supplies what its `_index` and `reset` set (`data`, `ids`, `movable`, `table`, `held`, `steps` …), `_step`, and
    the poses: `_position`, `_corners`, `_opening`, `objects`.
    """

    # ---- perception

    def _known(self, name):
        if name in self.ids:
            return None
        text = f"There is no {name}. There are: {', '.join(self.ids)}."
        return Receipt(False, text, {"event": "unknown_name"})

    def _text(self, row, size):
        extent = " size {size_x} {size_y} {size_z}".format(**row) if size else ""
        return "{name} x {x} y {y} z {z}".format(**row) + extent + (f" {row['state']}" if "state" in row else "")

    def locate(self, name):
        """One line for each thing of that name, or of that kind: "bowl" finds "bowl 1" and "bowl 2"."""
        rows = [r for r in self.objects() if name in (r["name"], r["name"].rstrip(" 0123456789"))]
        if not rows:
            return self._known(name)
        return Receipt(True, "\n".join(self._text(row, True) for row in rows), {"event": "seen", "object": name})

    def list_objects(self):
        return Receipt(True, "\n".join(self._text(row, False) for row in self.objects()), {"event": "seen"})

    # ---- pick

    def _reachable(self, xy):
        far = np.linalg.norm(xy - self.base[:2])
        if REACH[0] <= far <= REACH[1]:
            return None
        x, y, far, near, limit = (round(1000 * float(v)) for v in (*xy, far, *REACH))
        text = f"Out of reach: x {x} y {y} is {far} mm from the robot, which reaches {near} to {limit}."
        return Receipt(False, text, {"event": "unreachable"})

    def _nearest(self, spot):
        """id of the movable object nearest to spot (2,) within SNAP, the topmost of a stack; None if there is none."""
        away = {key: np.linalg.norm(self._position(key)[:2] - spot) for key in self.movable}
        near = [key for key in away if away[key] <= min(SNAP, min(away.values()) + STACKED)]
        return max(near, key=lambda key: self._corners(key)[..., 2].max(), default=None)

    def pick(self, x, y, grasp):
        if self.held:
            return Receipt(False, f"The hand already holds the {self.held}.", {"event": "busy"})
        spot, start = np.array([x, y]) / 1000, self.steps
        if bad := self._reachable(spot):
            return bad
        self._settled()
        if target := self._nearest(spot):
            found = self._grasp(target, grasp)
            if found is None:
                text = f"Nothing held: the {self.label[target]} has no handle."
                return Receipt(False, text, {"event": "no_handle", "object": self.label[target], "grasp": grasp})
        else:
            found = np.array([*spot, self.table + TIP + .01]), down(self._yaw()), 0
        return self._take(target, grasp, *found, start)

    def _settled(self):
        """Waits while objects fall: in some initial states bottles and cartons hang in the air."""
        env = self.env.env
        for _ in range(60):
            if all(abs(self.data.cvel[env.obj_body_id[key]][5]) < FALLING for key in self.movable):
                return
            self._hold(1, STAY)

    def _take(self, target, grasp, point, pose, closed, start):
        """Takes hold of `target` by a grasp of libero_grasps.py and lifts. The receipt of `pick`."""
        point = point + self._error()
        before = -pose[:, 2] * .05              # from here the hand comes in along its own axis
        bottom = self._corners(target)[..., 2].min() if target else self.table
        self._travel((point + before)[:2], pose, OPEN)
        self._go(point + before, pose, OPEN, tolerance=.008)
        if closed:
            self._close(closed)
        short = self._go(point, pose, STAY if closed else OPEN, tolerance=.003, limit=40)
        self._close(STROKE + 1)
        closed, touched = self._opening(), self._gripped()
        for height in (.10, .20):               # a plate hangs down; quicker, bowls swing out
            self._go(point + [0, 0, height], pose, CLOSE, tolerance=.02, limit=60, speed=LIFT)
            key = self._gripped()
            lift = self._corners(key)[..., 2].min() - bottom if key else 0.
            if key is None or lift > .02:
                break
        held = bool(key is not None and lift > .02)
        name = self.label.get(key or touched or target)
        facts = {"instruction": f"pick up the {name}", "success": held, "peak_lift_m": round(float(lift), 4),
                 "min_gripper_opening": round(min(closed, self._opening()), 4),
                 "final_gripper_opening": round(self._opening(), 4), "object": name, "grasp": grasp, "shortfall": short}
        if held:
            self.held = name
            return Receipt(True, f"Held: {name}.", {**facts, "steps_used": self.steps - start, "event": "held"})
        self._open()
        self._clear()
        facts["steps_used"] = self.steps - start
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
                       {"event": "slip", "object": name, "steps_used": self.steps - start})

    # ---- moves

    def move_to(self, x, y, z):
        return self._move([x, y, z], self._pose(), ())

    def move_pose(self, x, y, z, pitch, yaw):
        axis = np.array([np.cos(np.radians(yaw)), np.sin(np.radians(yaw)), 0])
        return self._move([x, y, z], tilted(down(np.radians(yaw)), axis, np.radians(pitch)), ("pitch", "yaw"))

    def _move(self, xyz, pose, report):
        """Up, across and down to xyz mm; `report` names the angles that the receipt's facts tell."""
        target, start = np.array(xyz) / 1000, self.steps
        if bad := self._reachable(target[:2]):
            return bad
        grip = CLOSE if self.held else OPEN
        self._travel(target[:2], pose, grip)
        self._go(target, pose, grip, tolerance=.012, limit=MAX_STEPS, turn_tolerance=.05)
        if self.held and (lost := self._lost(start)):
            return lost
        hand, rotation = self._hand(), self._pose()
        away = float(np.linalg.norm(target - hand))
        lean = rotation[:2, 2]                                  # where it points, seen from above
        finger = rotation[:2, 0] if rotation[0, 0] * lean[1] >= rotation[1, 0] * lean[0] else -rotation[:2, 0]
        angles = {"pitch": np.arccos(np.clip(-rotation[2, 2], -1, 1)), "yaw": np.arctan2(finger[1], finger[0])}
        facts = {"target_xyz": _metres(target), "final_eef_pos": _metres(hand), "final_dist_m": round(away, 4),
                 "steps_used": self.steps - start, "max_steps": MAX_STEPS}
        facts |= {f"final_{name}": round(float(np.degrees(angles[name])), 1) for name in report}
        where = "x {} y {} z {}".format(*(round(1000 * float(v)) for v in hand))
        if away > BLOCKED:
            text = f"The hand stopped {round(away * 1000)} mm short, at {where}."
            return Receipt(False, text, {**facts, "event": "blocked"})
        return Receipt(True, f"Hand at {where}.", {**facts, "event": "moved"})

    def _clear(self):
        """Lifts the hand away from things, out of a lean along its own axis; an elbow that is straight then is bent."""
        if self._pose()[2, 2] > -.85:
            self._go(self._hand() - self._pose()[:, 2] * .10, self._pose(), STAY, tolerance=.02, limit=20)
            self._leave(self._hand() + [0, 0, .05])
        else:
            self._go(self._hand() + [0, 0, .08], self._pose(), STAY, tolerance=.02, limit=20)
            self._bend(STAY)

    # ---- place

    def place(self, name):
        if bad := self._known(name):
            return bad
        if not self.held:
            return Receipt(False, "Nothing held: there is nothing to place.", {"event": "nothing_held"})
        if name == self.held:
            return Receipt(False, f"The {name} is in the hand.", {"event": "no_container"})
        start, key, container = self.steps, self.ids[self.held], self.ids[name]
        region, centre, box = self._container(container)
        if region and "heating" not in region and not self._drawer(region):
            centre = self._free(key, region, centre)
        if bad := self._reachable(centre[:2]):
            return bad
        if region and "heating" in region:
            return self._insert(key, region, start)
        if self._drawer(region) and self._size(key)[2] > TALL:
            return self._lay(key, region, start)
        if self._overhung(region):              # past the handles above, along the outer wall
            inwards = self._rotation(self.parent[region])[:, 1]
            room = self._size(region) @ np.abs(inwards) - np.ptp(self._corners(key).reshape(-1, 3) @ inwards)
            centre = centre - inwards * max(room, 0) / 2
        upright = self._pose()[2, 2] < -.97     # what is held upright is not to lean by the servo's error
        pose = self._nearer(self._turn(key, region) @ (down(self._yaw()) if upright else self._pose()))
        _, origin = self._hanging(key, pose)
        self._travel(centre[:2] - origin[:2], pose, CLOSE)
        if lost := self._lost(start):
            return lost
        corners, origin = self._hanging(key, pose)
        xy = centre[:2] - origin[:2]
        self._go([*xy, self._low(xy, centre, box, corners, pose)], pose, CLOSE, tolerance=.006, limit=40)
        slipped = self._gripped() != key
        done = self._let_go(key, container, start)
        if slipped and not done.ok:             # what slipped may still have come to where it belongs
            text = f"Nothing held: the {self.label[key]} slipped on the way."
            return Receipt(False, text, {**done.facts, "event": "slip"})
        return done

    def _free(self, key, region, centre):
        """(3,) m: where in a region what is held goes: its centre, if that is in reach and nothing sticks out there.

        Else the best free point in reach: nearest to the centre, or if that is out of reach, to where the object comes
        from, which leaves room for a second one.
        """
        site = self.model.site(region).id
        frame, half = self.data.site_xmat[site].reshape(3, 3), self.model.site_size[site]
        owner = self.parent[region]
        others = self._corners(*[k for k in self.movable if k not in (key, owner)])
        others = others[others[..., 2].max(1) > centre[2] + self._size(region)[2] / 2 + .02]
        body = (self._corners(key).reshape(-1, 3) - self._position(key))[:, :2]
        low, high = body.min(0), body.max(0)

        def taken(point):       # by how many boxes of other objects
            beyond = np.maximum(others[..., :2].min(1) - point[:2] - high, point[:2] + low - others[..., :2].max(1))
            return int((beyond.max(1) < 0).sum())
        in_reach = self._reachable(centre[:2]) is None
        if in_reach and not taken(centre):
            return centre
        steps = np.linspace(-1, 1, 13)
        spots = [centre + frame @ (np.array([u, v, 0]) * np.maximum(half - EDGE, 0)) for u in steps for v in steps]
        spots = [spot for spot in spots if self._reachable(spot[:2]) is None]
        goal = centre if in_reach else self._hand()
        return min(spots, key=lambda spot: (taken(spot), np.linalg.norm((spot - goal)[:2])), default=centre)

    def _hanging(self, key, pose):
        """Boxes (G, 8, 3) and origin (3,) of what is held as they will be with the hand at 0 in `pose`, m."""
        change, hand = self._nearer(pose) @ self._pose().T, self._hand()
        corners = (self._corners(key) - hand) @ change.T
        return corners, change @ (self._position(key) - hand)

    def _low(self, xy, centre, box, corners, pose):
        """m: height of the hand at xy (2,) at which it lets go what hangs from it as `corners` over `centre`.

        The object's bottom is just above its support, the opening fingers above a rim in their way, the palm above all.
        """
        yaw, sweep = self._yaw(), self._opening() / 2 + .030
        support = max(self.table, top(box, centre[:2], yaw, -.012, .012, .012))
        low = support - corners[..., 2].min() + .006
        rim, under_palm = top(box, xy, yaw, -sweep, sweep, .016), top(box, xy, yaw, -.11, .11, .036)
        return max(low, under_palm - PALM + .01, rim + TIP + .003 if rim > support + .02 else 0)

    def _turn(self, key, region):
        """(3, 3): how what is held is turned, from how it hangs now, to fit into a region.

        A bottle leans on its rack; else it is about the vertical, as little as need be for the outline to be within the
        region's.
        """
        size, still = self._size(key), np.eye(3)
        if not region:
            return still
        if size[2] > TALL and "rack" in region:
            return tilted(still, self._rotation(self.parent[region])[:, 0], -LEANED)
        room, flat = self._size(region), (self._corners(key).reshape(-1, 3) - self._hand())[:, :2]
        overhung, fingers, best = self._overhung(region), self._pose()[:, 0], None
        for angle in np.radians([0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75, 89]):
            turn = tilted(still, [0, 0, 1], angle)
            beyond = np.maximum(np.ptp(flat @ turn[:2, :2].T, axis=0) - room[:2], 0).sum()
            cost = beyond + .01 * abs(angle)
            if overhung:                        # the wide side of the palm along the cabinet
                cost += .05 * abs(turn @ fingers @ self._rotation(self.parent[region])[:, 1])
            if best is None or cost < best[0] - .002:
                best = cost, turn
        return best[1]

    def _drawer(self, region):
        """Whether this region is a drawer."""
        return bool(getattr(self.env.env.object_sites_dict.get(region), "joints", None))

    def _overhung(self, region):
        """Whether this region is a drawer with others above it, whose handles stand out over it."""
        if not self._drawer(region):
            return False
        upper = self._position(region)[2] + self._size(region)[2] / 2
        return self._corners(self.parent[region])[..., 2].max() > upper + .03

    def _lay(self, key, region, start):
        """What is too high for a drawer: leaned along its long side at the outer wall and let go, it falls into it."""
        along, inwards, _ = self._rotation(self.parent[region]).T
        along = along * np.sign(along @ (self._position(region) - self.base))
        pose = self._nearer(tilted(self._pose(), np.cross([0, 0, -1.], -along), LAID))
        # the drawers above have handles: what stands nearer to the cabinet hits them
        centre = self._position(region) - inwards * .6 * self._size(region)[1] / 2
        floor = centre[2] - self._size(region)[2] / 2

        def spot():
            corners, _ = self._hanging(key, pose)
            low, high = corners.min((0, 1)), corners.max((0, 1))
            return np.array([*(centre - (low + high) / 2)[:2], floor + .014 - low[2]])
        self._travel(spot()[:2], pose, CLOSE)
        if lost := self._lost(start):
            return lost
        self._go(spot(), pose, CLOSE, tolerance=.006, limit=50)
        if lost := self._lost(start):
            return lost
        return self._let_go(key, region, start)

    def _insert(self, key, region, start):
        """Into an oven through its front: bottom first, the fingers side by side.

        It is laid in by a level hand. Where the front faces away from the robot, which no level hand reaches, it is
        stood in by a hand that comes from above.
        """
        across, inwards, _ = self._rotation(self.parent[region]).T
        centre, half = self._position(region), self._size(region) / 2
        side = np.sign(self._pose()[:, 0] @ across) or 1.
        pose = np.stack([side * across, np.cross(inwards, side * across), inwards], axis=1)
        away = inwards @ (centre - self.base) < 0
        pose = self._nearer(tilted(pose, across, -(STEEP if away else LEVEL)))
        entrance = centre - inwards * half[1]
        if away:
            entrance = self._between_walls(region, entrance, across, inwards)

        def spot(depth, up):            # the object's origin `depth` m behind the entrance, its bottom over the floor
            corners, origin = self._hanging(key, pose)
            middle = (corners.min((0, 1)) + corners.max((0, 1))) / 2
            xy = entrance + inwards * (depth - origin @ inwards) - across * (middle @ across)
            return np.array([*xy[:2], centre[2] - half[2] + up - corners[..., 2].min()])
        rise = self.table + .30
        if away:                        # over the oven
            self._travel(spot(-.10, 0)[:2], pose, CLOSE)
        elif self._hand()[2] < rise:
            self._go([*self._hand()[:2], rise], self._pose(), CLOSE, tolerance=.03, limit=30)
        # m: before the entrance, over the floor, behind the entrance; a mug stood in fits under the roof by a few mm
        front, up, deep = (-.08, .014, .03) if away else (-.05, .016, .09)
        for depth, height in ((front, .15), (front, up), (deep, up)):
            for _ in range(2):          # what swings in the fingers is aimed again
                self._go(spot(depth, height), pose, CLOSE, tolerance=.012, limit=60, speed=.5)
                if depth < 0 and (lost := self._lost(start)):
                    return lost
        self._open()
        self._go(self._hand() - (pose[:, 2] if away else inwards) * .12, pose, OPEN, tolerance=.02, limit=30)
        if not away and self._stands(key, region):      # what still sticks out a little, the door pushes in
            return self._let_go(key, region, start)
        # the palm does not fit in: the closed fingers push
        middle = self._corners(key)
        middle = (middle.min((0, 1)) + middle.max((0, 1))) / 2
        end = entrance + across * ((middle - entrance) @ across)
        end[2] = centre[2] - half[2] + .065
        for depth in (-.10, -.005, -.10):       # back out closed: fingers that opened inside a mug would hold it
            self._go(end + inwards * depth, pose, CLOSE, tolerance=.01, limit=40)
        return self._let_go(key, region, start)

    def _between_walls(self, region, point, across, inwards):
        """`point` (3,) m of an oven's entrance, moved along `across` to midway between the walls.

        The microwave's region is not: it reaches into the wall with the buttons.
        """
        boxes = self._corners(self.parent[region]) - point
        boxes = boxes[(boxes[..., 2].max(1) > 0) & (boxes[..., 2].min(1) < 0)]
        deep, wide = boxes @ inwards, boxes @ across
        beside = (deep.max(1) > .02) & (deep.min(1) < .02)
        low, high = wide.min(1)[beside], wide.max(1)[beside]
        middle = (low + high) / 2
        return point + across * (high[middle < 0].max() + low[middle > 0].min()) / 2

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
        self._clear()
        self._hold(3, OPEN)             # it comes to rest
        if container is not None and not self._stands(key, container):
            self._hold(STROKE, OPEN)    # wedged between the fingers, it may still drop
        facts = {"object": name, "container": self.label.get(container), "steps_used": self.steps - start}
        if container is None:
            return Receipt(True, f"Let go: {name}.", {**facts, "event": "dropped"})
        if self._stands(key, container):
            return Receipt(True, f"Placed: {name} at {self.label[container]}.", {**facts, "event": "placed"})
        text = f"Let go: {name}; it is not at {self.label[container]}."
        return Receipt(False, text, {**facts, "event": "dropped"})

    def _stands(self, key, container):
        """LIBERO's own relation of the two: what the goal asks, else "in" for high regions, "on" for all else."""
        region = container if container in self.parent else self.region_of.get(container)
        for predicate, *pair in self.env.env.parsed_problem["goal_state"]:
            if pair in ([key, container], [key, region]):
                return bool(self.env.env._eval_predicate([predicate, *pair]))
        predicate = "in" if region and self._size(region)[2] > FLAT else "on"
        return bool(self.env.env._eval_predicate([predicate, key, region or container]))
