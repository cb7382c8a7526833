"""CaP-X's privileged API on the LIBERO-PRO world: exact poses, straight moves of the hand, the gripper; nothing else.

Names and meaning are those of CaP-X's FrankaLiberoPrivilegedApi, without pictures and without goto_pose_interactive_cartesian (its
argument is a function of the program's, which would have to run here). Left out on purpose is CaP-X's fault that a reset discards the
benchmark's initial state: here trial k of CaP-X's numbering is initial state k-1, kept.

Frames: positions are relative to the robot's base (its axes are the world's: x ahead, y left, z up). The hand of the API has its
fingers along y, as the Panda's hand has; the grip site of libero_motion.py, which the controller moves, has them along x.
Grasps are not disturbed by the world's noise: this setting is exact.
"""

import numpy as np
from scipy.spatial.transform import Rotation

from harness.code_api import Api, ApiError, find, length, moves, point, quaternion, text
from harness.libero_grasps import BITE, MAX_WIDTH
from harness.libero_motion import axes, CLOSE, down, OPEN, STRAIGHT, TIP
from harness.libero_skills import LIFT, REACH, SNAP

WIDE = 0.08                             # m between the open fingers
SHUT = 16                               # steps from wide open to shut; a grip that has not its full force yet loses a bowl's rim
DROP = 8                                # steps that an opened hand stays where it is: what it let go falls 40 cm in them
SHOULDER = 0.333                        # m over the base
WRIST = 0.210, 0.088                    # m from the grip site back along the hand, and from there back towards the base, to the wrist
STRETCH = 0.690, 0.713                  # m from shoulder to wrist that an approach and a move go to: at 0.719 the elbow turns inside out
GENTLE = 0.66                           # m: beyond, moves are slow, else their momentum carries the wrist through
RISE = 0.10                             # m that a hand with a straight elbow is lifted, out of what stands there, before it is pulled in


def _wxyz(rotation):
    """(3, 3) -> (4,), w not negative"""
    x, y, z, w = Rotation.from_matrix(rotation).as_quat(canonical=True)
    return np.array([w, x, y, z])


def _hand(site):
    """(3, 3) grip site (fingers along x) -> (3, 3) hand of the API (fingers along y)"""
    return np.stack([site[:, 1], -site[:, 0], site[:, 2]], axis=1)


def _site(hand):
    """The inverse of `_hand`."""
    return np.stack([-hand[:, 1], hand[:, 0], hand[:, 2]], axis=1)


class LiberoApi(Api):
    functions = ("get_observation", "get_object_pose", "get_all_object_poses", "sample_grasp_pose", "goto_pose", "open_gripper",
                 "close_gripper")
    notes = """\
Frame: the robot's base; x ahead, y left, z up; metres. Quaternions are w, x, y, z. The table is at z 0 (object tasks) or -0.012.
A position of the hand is the point between its fingers: their tips reach 0.011 beyond it, the palm is 0.04 behind it. Open, the fingers
are 0.08 apart. (0, 1, 0, 0) points straight down with the fingers closing along y; (0, cos(a/2), sin(a/2), 0) is the same turned by
the angle a, so (0, 0.7071, 0.7071, 0) closes along x."""

    def __init__(self, world):
        super().__init__(world)
        self.grip, self.closed, self.ready = OPEN, None, False     # closed: event of the last close_gripper, until "held" is known

    def call(self, name, args, kwargs):
        if not self.ready:
            self.world._settled()       # in some initial states bottles and cartons hang in the air
            self.ready = True
        return super().call(name, args, kwargs)

    # ---- looking

    def _pose(self, key):
        """Object, fixture or place -> (position (3,) m from the base, quaternion (4,))."""
        w = self.world
        if key in w.env.env.obj_body_id:
            rotation = w._rotation(key)
        else:
            rotation = w.data.site_xmat[w.model.site(key).id].reshape(3, 3)
        return w._position(key) - w.base, _wxyz(rotation)

    def get_observation(self):
        """Returns a dict: "robot_cartesian_pos", 8 numbers: position of the hand (3), its quaternion (4), opening of the gripper from
        0 (closed) to 1 (open); "robot_joint_pos", 7 angles."""
        w = self.world
        opening = np.clip(w._opening() / WIDE, 0, 1)
        return {"robot_cartesian_pos": np.concatenate([w._hand() - w.base, _wxyz(_hand(w._pose())), [opening]]),
                "robot_joint_pos": np.array(w.data.qpos[w.robot._ref_joint_pos_indexes])}

    def get_object_pose(self, object_name: text):
        """Returns (position, quaternion) of an object or place. The position is the middle of cans, bottles of sauce and cartons, and
        the foot of bowls, plates, baskets and wine bottles. KeyError names all there are."""
        return self._pose(self.world.ids[find(object_name, list(self.world.ids))])

    def get_all_object_poses(self):
        """Returns {name: (position, quaternion)} of all objects, fixtures and places. Alike things are numbered ("bowl 1", "bowl 2")."""
        return {name: self._pose(key) for name, key in self.world.ids.items()}

    def sample_grasp_pose(self, object_name: text):
        """Returns (position, quaternion) for goto_pose: a hand from above at the object's middle, fingers across its narrow side,
        leaning a little near the robot. A bowl or plate is wider than the hand: its middle with fingers along y is returned, and you
        must add an offset along y to the position to reach its rim (the radius: bowl 0.05, plate 0.065)."""
        w = self.world
        grasped = [n for n, k in w.ids.items() if k in w.movable]
        try:
            key = w.ids[find(object_name, grasped)]
        except ApiError:
            name = find(object_name, list(w.ids))
            if name in grasped:
                raise
            raise ApiError("ValueError", f"the {name} cannot be grasped") from None
        corners = w._corners(key).reshape(-1, 3)
        if min(np.ptp(corners[:, :2] @ axes(yaw)[0]) for yaw in np.radians(np.arange(0, 180, 7.5))) > MAX_WIDTH:
            low, high = corners.min(0), corners.max(0)
            where, yaw = np.array([*(low + high)[:2] / 2, max(low[2] + TIP + .003, high[2] - BITE)]), -np.pi / 2
        else:
            where, yaw = w._from_above(key)
            yaw -= np.pi * (yaw > 0)        # the same grasp, the quaternion nearer to (0, 1, 0, 0)
        return where - w.base, _wxyz(_hand(w._lean(where, down(yaw))))

    # ---- moving

    @moves
    def goto_pose(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """Moves the hand to a pose in a straight line, without a look at what is in the way. z_approach > 0: first to that height above
        the position, then straight down. Stops where it is blocked
        or the arm is stretched (0.75 m from the base that is at z 0.35); get_observation() tells where that is."""
        w = self.world
        far = float(np.linalg.norm(position[:2]))
        if not REACH[0] <= far <= REACH[1]:
            raise ApiError("ValueError", f"goto_pose(): {np.round(position, 3).tolist()} is {far:.2f} m from the base, which reaches "
                                         f"{REACH[0]:g} to {REACH[1]:g} m")
        target, pose = position + w.base, _site(Rotation.from_quat(np.roll(quaternion_wxyz, -1)).as_matrix())
        self._free_elbow(target)
        here = w._hand()
        if z_approach > 0:
            high = next(d for d in np.linspace(z_approach, 0, 41) if d <= .03 or self._stretch(target + [0, 0, d], pose) < STRETCH[0])
            here = target + [0, 0, high]
            self._move(here, pose, .015)
        if self._stretch(here, pose) < STRETCH[1]:          # else there is no way but on
            target = next(p for p in np.linspace(target, here, 41) if self._stretch(p, pose) < STRETCH[1])
        self._move(target, pose, .004)
        self._look()

    def _move(self, target, pose, tolerance):
        w = self.world
        slow = self._stretch(target, pose) > GENTLE
        # quicker, what hangs in the fingers swings out
        w._go(target, pose, self.grip, tolerance=.005 if slow else tolerance, limit=120, speed=LIFT if slow or w._gripped() else 1.0)

    def _stretch(self, point, pose):
        """m from the shoulder to the wrist of a hand at `point` (3,), world frame, in `pose` (3, 3)."""
        wrist = point - self.world.base - WRIST[0] * pose[:, 2]
        wrist[:2] *= 1 - WRIST[1] / np.linalg.norm(wrist[:2])
        return np.linalg.norm(wrist - [0, 0, SHOULDER])

    def _free_elbow(self, target):
        """A straight elbow lets no move towards the base through: lifts the hand out of what stands there and bends it."""
        w = self.world
        if w._elbow() > STRAIGHT and np.linalg.norm((target - w._hand())[:2]) > .05:
            w._go(w._hand() + [0, 0, RISE], w._pose(), self.grip, tolerance=.02, limit=30)
            w._bend(self.grip)

    @moves
    def open_gripper(self):
        """Opens the fingers; what they held drops."""
        w = self.world
        self._look()
        held, self.grip = w.held, OPEN
        w._open()
        w._hold(DROP, OPEN)
        w.held = None
        kind, _, target = (w._relation(w.ids[held]) if held else "").partition(" ")
        self.events.append({"tool": "open_gripper", "object": held, "target": target if kind in ("in", "on") else None})

    @moves
    def close_gripper(self):
        """Closes the fingers on what is between them."""
        w = self.world
        w._close(SHUT)
        self.grip, self.closed = CLOSE, {"tool": "close_gripper", "object": self._nearest(), "held": False}
        self.events.append(self.closed)

    def _nearest(self):
        """Name of the object between the fingers, or whose boxes are within SNAP of them, or None."""
        w = self.world
        if key := w._gripped():
            return w.label[key]
        away = {}
        for key in w.movable:
            corners = w._corners(key).reshape(-1, 3)
            away[key] = np.linalg.norm(w._hand() - np.clip(w._hand(), corners.min(0), corners.max(0)))
        near = min(away, key=away.get, default=None)
        return w.label[near] if near and away[near] < SNAP else None

    def _look(self):
        """Notes what the hand holds, and of the last close_gripper whether it held."""
        w = self.world
        key = w._gripped() if self.grip == CLOSE else None
        w.held = w.label[key] if key else None
        if self.closed:
            self.closed |= {"held": key is not None, "object": w.held or self.closed["object"]}
            self.closed = None
