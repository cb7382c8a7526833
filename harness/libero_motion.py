"""How the frozen executor of the LIBERO-PRO world moves: servoing, travelling, and the geometry that it plans with.

It acts through env.step with OSC_POSE actions (20 Hz) and nothing else: no state is written, nothing is welded to the
hand.

Frames and hand (measured; metres, radians): the controller moves the gripper's grip site. Its x axis is the axis along
which the fingers close, its z axis points out of the hand. The finger tips are 11 mm beyond the site, the palm is 40 mm
before it and 10 cm wide to each side along x. The hand is symmetric: turned by 180 degrees about z it does the same.
"""

import numpy as np
from scipy.spatial.transform import Rotation

OPEN, STAY, CLOSE = -1.0, 0.0, 1.0      # gripper actions: they move the fingers' set point, or leave it
STROKE = 8                              # steps that the gripper's set point takes from one end to the other
TIP, PALM = 0.0108, 0.040               # m from the grip site to finger tips, ahead, and to the palm, behind
STRAIGHT = -0.35                        # rad of the elbow: above, it is nearly at its limit of -0.07
STRETCHED = 0.72                        # m from the base: beyond, a low arm has its elbow nearly straight
HIGH = 0.45                             # m over the base: where a stretched arm can be pulled back in
BACK, LEAN_BACK = 0.15, np.radians(40)  # m and rad: such a move towards the base bends a straight elbow
CLEAR = 0.025                           # m of free height over whatever is passed
FLIP = np.diag([-1., -1., 1.])          # the same grasp with the fingers swapped


# ---------------------------------------------------------------------------------------------- geometry

def axes(yaw):
    """Unit vectors (2,) along the finger axis and across it, of a hand that points down."""
    return np.array([np.cos(yaw), np.sin(yaw)]), np.array([-np.sin(yaw), np.cos(yaw)])


def down(yaw):
    """(3, 3) orientation of the grip site: pointing down, fingers closing along `yaw` (rad)."""
    x = np.array([np.cos(yaw), np.sin(yaw), 0])
    return np.stack([x, np.cross([0, 0, -1.], x), [0, 0, -1.]], axis=1)


def tilted(rotation, axis, angle):
    """(3, 3) `rotation` turned by `angle` (rad) about `axis` (3,) of the world."""
    axis = np.asarray(axis, float)
    return Rotation.from_rotvec(axis / np.linalg.norm(axis) * angle).as_matrix() @ rotation


def top(corners, centre, yaw, u0, u1, half):
    """Height (m) of the tallest of the boxes (G, 8, 3) inside a rectangle around centre (2,); -inf if none.

    The rectangle reaches from u0 to u1 along the finger axis and `half` to both sides of it.
    """
    axis, across = axes(yaw)
    flat = corners[..., :2] - centre
    u, v = flat @ axis, flat @ across
    inside = (u.max(1) > u0) & (u.min(1) < u1) & (v.max(1) > -half) & (v.min(1) < half)
    # a turned rectangle and an upright box may overlap in its axes and still be apart in the world's
    middle, reach = axis * (u0 + u1) / 2, np.abs(axis) * (u1 - u0) / 2 + np.abs(across) * half
    inside &= np.all((flat.max(1) > middle - reach) & (flat.min(1) < middle + reach), axis=1)
    return float(corners[inside][..., 2].max(initial=-np.inf))


# ---------------------------------------------------------------------------------------------- the executor

class LiberoMotion:
    """Mixin of harness.libero.Libero, which owns the simulator.

    It uses what Libero's `_index` and `reset` set (`data`, `model`, `ids`, `bodies`, `movable`, `table`, `base`,
    `held`, `steps`, `noise`, `rng` …), `_step`, `_corners` and `_position`.
    """

    # ---- imperfection

    def _error(self):
        """(3,) m: one draw of the executor's imperfection, horizontal, normal with `noise` mm in x and in y; seeded."""
        return np.append(self.rng.normal(0, 1, 2) * self.noise / 1000, 0)

    # ---- where the hand is

    def _hand(self):
        """(3,) m, world frame."""
        return self.data.site_xpos[self.site].copy()

    def _pose(self):
        """(3, 3) orientation of the grip site."""
        return self.data.site_xmat[self.site].reshape(3, 3).copy()

    def _yaw(self):
        """rad in [0, pi): direction of the finger axis in the plane (it has no sign)."""
        axis = self._pose()[:, 0]
        return np.arctan2(axis[1], axis[0]) % np.pi

    # ---- motion

    def _nearer(self, pose):
        """(3, 3): of the two orientations that grasp alike, `pose` and its FLIP, the one nearer to the hand's own."""
        now = self._pose()
        return pose @ FLIP if np.trace((pose @ FLIP).T @ now) > np.trace(pose.T @ now) else pose

    def _go(self, target, pose, grip, tolerance=.004, limit=90, turn_tolerance=None, speed=1.0):
        """Servoes the grip site to `target` (3,) m and `pose` (yaw in rad of a hand that points down; or (3, 3)).

        Returns the distance left, m. Gives up when it has come no nearer for 15 steps (contact, joint limit).
        tolerance m, turn_tolerance rad, limit in steps of 0.05 s, speed as a share of the controller's 5 cm a step.
        """
        want = self._nearer(down(pose) if np.ndim(pose) == 0 else np.asarray(pose))
        turn_tolerance = max(.06, 4 * tolerance) if turn_tolerance is None else turn_tolerance
        best, since = np.inf, 0
        for _ in range(limit):
            turn = Rotation.from_matrix(want @ self._pose().T).as_rotvec()
            away = target - self._hand()
            left = float(np.linalg.norm(away))
            if left < tolerance and np.linalg.norm(turn) < turn_tolerance:
                return left
            progress = left + .05 * np.linalg.norm(turn)
            best, since = (progress, 0) if progress < best - .001 else (best, since + 1)
            if since >= 15:
                return left
            move = 1.6 * away / .05     # above 1: quicker than the controller's own critical damping
            for part in (slice(0, 2), slice(2, 3)):     # apart: else far targets leave the height to sag under a load
                move[part] /= max(1., np.abs(move[part]).max() / speed)
            self._step(np.concatenate([move, np.clip(1.5 * turn / .5, -1, 1)]), grip)
        return float(np.linalg.norm(target - self._hand()))

    def _hold(self, steps, grip):
        for _ in range(steps):
            self._step(np.zeros(6), grip)

    def _close(self, steps):
        """Closes the hand for so many steps; it is held where it is meanwhile, against its swing and contact."""
        self._go(self._hand(), self._pose(), CLOSE, tolerance=-1, limit=steps)

    def _open(self):
        """Opens the hand until the fingers are 12 mm wider than now, or fully open; it stays where it is meanwhile."""
        wide, here, pose = min(self._opening() + .012, .076), self._hand(), self._pose()
        for _ in range(STROKE + 2):
            self._go(here, pose, OPEN, tolerance=-1, limit=1)
            if self._opening() > wide:
                break

    def _over(self, a, b, but=None, half=.12):
        """Height (m) of the tallest thing within `half` m of the way from a to b (2,), object `but` aside."""
        corners = self._corners(*[k for k in self.bodies if k != but])
        lo, hi = np.minimum(a, b) - half, np.maximum(a, b) + half
        near = np.all((corners[..., :2].max(1) > lo) & (corners[..., :2].min(1) < hi), axis=1)
        return max(self.table, float(corners[near][..., 2].max(initial=self.table)))

    def _travel(self, xy, pose, grip):
        """Up, then across to above xy (2,), clear of all on the way. Returns the distance left, m."""
        here = self._hand()
        key = self.ids[self.held] if self.held else None
        hang = here[2] - self._corners(key)[..., 2].min() if key else TIP
        height = max(self._over(here[:2], xy, key) + hang + CLEAR, self.table + .15)
        self._bend(grip)
        if self._hand()[2] < height - .02:
            self._go([*self._hand()[:2], height], self._pose() if key else pose, grip, tolerance=.02)
            self._bend(grip)
        return self._go(np.array([*xy, height]), pose, grip, tolerance=.012)

    def _bend(self, grip):
        """Bends a straight elbow: pulling leaves it at its limit, leaning the hand to the base as well frees it."""
        if self._elbow() > STRAIGHT:
            inward = self.base - self._hand()
            inward[2] = 0
            inward /= np.linalg.norm(inward)
            pose = tilted(down(self._yaw()), np.cross(inward, [0, 0, 1.]), LEAN_BACK)
            self._go(self._hand() + inward * BACK, pose, grip, tolerance=.03, turn_tolerance=.5, limit=30)

    def _elbow(self):
        """rad: 0 is straight."""
        return self.data.qpos[self.robot._ref_joint_pos_indexes[3]]

    def _gripped(self):
        """id of the movable object that touches both fingers, or None."""
        pairs = self.data.contact.geom[:self.data.ncon]
        touch = []
        for finger in (self.left, self.right):
            a, b = pairs[finger[pairs[:, 0]], 1], pairs[finger[pairs[:, 1]], 0]
            touch.append({self.bodies[k] for k in self.owner[np.concatenate([a, b])] if k >= 0})
        both = [k for k in touch[0] & touch[1] if k in self.movable]
        return both[0] if both else None

    def _opening(self):
        """m between the fingers."""
        return float(self.data.qpos[self.fingers_q[0]] - self.data.qpos[self.fingers_q[1]])
