"""Where the executor of the LIBERO-PRO world takes hold of an object: from above, at the rim or by the handle.

Grasps come from privileged poses and the boxes of the collision model. A grasp is (point, pose, closed): where the grip
site goes, (3,) m in the world frame; its orientation, (3, 3), x closes the fingers, z points out of the hand
(libero_motion.py); and how many steps the open fingers close before the hand goes in.
"""

import numpy as np

from harness.libero_motion import axes, down, PALM, tilted, TIP, top

KINDS = ("top", "rim", "handle")
MAX_WIDTH = 0.072                       # m between the fingers that a grasp accepts; the hand opens to 0.080
DEPTHS = (0.028, 0.018, 0.0055)         # m under the highest point, deepest first: the last is a moka pot's lid knob
BITE = 0.012                            # m under a rim
NEAR = 0.42                             # m from the base: nearer, an upright hand folds the elbow to its limit
LEAN_NEAR = np.radians(25)
CLOSED = 6                              # steps that the hand closes before a rim
HALF = 0.0205                           # m from each finger to the middle then
# a flat rim (plate) slopes so little that upright fingers wedge out of it: the hand leans outwards, the
# lower finger goes under the rim
UPRIGHT = 0.5                           # of an object's up axis in z: of less, the rim is taken to be level
FLAT_RIM = 0.030                        # m high
LEAN_FLAT = np.radians(18)
LEAN_OUT = 0.04                         # m: so far out this brings the back of the hand
INSIDE = 0.012                          # m from the lower finger to the rim
# handles: kind of object -> (grip site in the object's frame, m; the finger axis there)
HANDLES = {
    "porcelain mug": ((-.050, .000, .085), (0, 1, 0)),
    "red coffee mug": ((.047, .001, .106), (0, 1, 0)),
    "white yellow mug": ((.056, .000, .078), (0, 1, 0)),
    "moka pot": ((.000, .066, .056), (1, 0, 0)),
    "chefmate 8 frypan": ((.136, .000, .033), (0, 1, 0)),
}


def ray(corners, origin, direction):
    """Where a ray meets boxes (G, 8, 3): (G, 2) m along it, entry and exit; entry > exit where it misses."""
    centre = corners.mean(1)
    edges = np.stack([corners[:, k] - corners[:, 0] for k in (4, 2, 1)], axis=1)        # (G, 3, 3), see _corners
    half = np.linalg.norm(edges, axis=2) / 2
    frame = edges / np.maximum(2 * half[..., None], 1e-9)
    start = np.einsum("gij,gj->gi", frame, origin - centre)
    speed = np.einsum("gij,j->gi", frame, direction)
    speed = np.where(np.abs(speed) < 1e-9, 1e-9, speed)
    a, b = (-half - start) / speed, (half - start) / speed
    return np.stack([np.minimum(a, b).max(1), np.maximum(a, b).min(1)], axis=1)


class LiberoGrasps:
    """Mixin of harness.libero.Libero: uses `bodies`, `label`, `base`, `_corners` and `_position`."""

    def _grasp(self, key, kind):
        """The grasp (point, pose, closed) of an object; None: it has no handle."""
        if kind == "handle":
            return self._by_handle(key)
        if kind == "top":
            point, yaw = self._from_above(key)
        else:
            point, yaw, out = self._by_rim(key)
            if np.ptp(self._corners(key)[..., 2]) < FLAT_RIM:
                return self._by_flat_rim(key, out)
            return point, self._lean(point, down(yaw)), CLOSED
        return point, self._lean(point, down(yaw)), 0

    def _lean(self, point, pose):
        """`pose`, leaned about its finger axis, back to the base, where an upright hand would fold the elbow."""
        radial = point[:2] - self.base[:2]
        if np.linalg.norm(radial) > NEAR:
            return pose
        axis = pose[:, 0]
        back = np.sign(axis[1] * radial[0] - axis[0] * radial[1])
        return tilted(pose, back * axis, LEAN_NEAR)

    def _from_above(self, key):
        """From above across the narrowest horizontal extent at the height of the finger pads, away from neighbours.

        Returns (point (3,) m, yaw of the finger axis, rad). As deep as the width allows; over the middle of what is too
        wide everywhere.
        """
        corners = self._corners(key)
        low, high = corners[..., 2].min(), corners[..., 2].max()
        others = self._corners(*[k for k in self.bodies if k != key])
        for depth in DEPTHS:
            z, best = max(low + TIP + .004, high - depth), None
            at_pads = (corners[..., 2].max(1) > z - TIP) & (corners[..., 2].min(1) < z + .012)
            if not at_pads.any():               # a gap between its boxes
                continue
            band = corners[at_pads].reshape(-1, 3)
            for yaw in np.radians(np.arange(0, 180, 7.5)):
                axis, across = axes(yaw)
                u, v = band[:, :2] @ axis, band[:, :2] @ across
                width, centre = np.ptp(u), axis * (u.max() + u.min()) / 2 + across * (v.max() + v.min()) / 2
                if width <= MAX_WIDTH:
                    best = self._better(best, width, centre, z, yaw, others)
            if best:
                _, centre, z, yaw = best
                return np.array([*centre, z]), yaw
        middle = corners.reshape(-1, 3)
        middle = (middle.max(0) + middle.min(0)) / 2
        return np.array([*middle[:2], max(low + TIP + .004, high - DEPTHS[0])]), self._yaw()

    def _by_rim(self, key):
        """At the rim from above, one finger inside.

        Returns (point (3,) m, yaw of the finger axis, rad, outward direction (3,)).
        """
        corners, up = self._corners(key), self._rotation(key)[:, 2]
        low = corners[..., 2].min()
        if up[2] < UPRIGHT:
            up = np.array([0, 0, 1.])
        along = corners @ up                                            # a tilted bowl has a tilted rim
        walls = corners[along.max(1) > along.max() - .010]              # a mug's handle ends lower
        flat = walls.reshape(-1, 3)[:, :2]
        middle = (flat.max(0) + flat.min(0)) / 2
        middle = np.append(middle, (along.max() - BITE - middle @ up[:2]) / up[2])
        others = self._corners(*[k for k in self.bodies if k != key])
        back, best = LEAN_OUT if np.ptp(corners[..., 2]) < FLAT_RIM else 0, None
        for yaw in np.radians(np.arange(0, 360, 15)):
            axis = np.array([np.cos(yaw), np.sin(yaw), 0])
            axis -= up * (up @ axis)
            axis /= np.linalg.norm(axis)
            crossed = ray(walls, middle, axis)
            far = np.where(crossed[:, 0] < crossed[:, 1], crossed[:, 1], -1).argmax()
            hit = crossed[far, 0] < crossed[far, 1]
            outwards = crossed[far].mean() if hit else ((flat - middle[:2]) @ axis[:2]).max() - .006
            *point, z = middle + axis * outwards
            z = max(low + TIP + .003, z)
            # nearer to the base is easier: beyond the middle the arm may be stretched; the fingers close level
            cost = .05 * np.linalg.norm(point - self.base[:2]) + .2 * abs(axis[2])
            best = self._better(best, cost, np.array(point), z, yaw, others, HALF, back)
        _, centre, z, yaw = best
        return np.array([*centre, z]), yaw, np.array([np.cos(yaw), np.sin(yaw), 0])

    def _by_flat_rim(self, key, out):
        """The grasp of a plate at its rim in the direction `out` (3,): leaned, half closed."""
        points = self._corners(key).reshape(-1, 3)
        middle = (points.max(0) + points.min(0)) / 2
        rim = middle + out * ((points - middle) @ out).max()
        rim[2] = points[:, 2].max() - .005
        pose = tilted(down(np.arctan2(out[1], out[0])), np.cross(out, [0, 0, 1.]), -LEAN_FLAT)
        return rim - pose[:, 2] * (TIP - .010) - pose[:, 0] * (HALF - INSIDE), pose, CLOSED

    def _by_handle(self, key):
        """The grasp of a handle, which is taken from above; None if there is none."""
        kind = next((k for k in HANDLES if self.label[key].startswith(k)), None)
        if kind is None:
            return None
        place, axis = map(np.array, HANDLES[kind])
        rotation = self._rotation(key)
        axis = rotation @ axis
        point = self._position(key) + rotation @ place
        return point, self._lean(point, down(np.arctan2(axis[1], axis[0]))), 0

    def _rotation(self, key):
        """(3, 3) orientation of an object or fixture, object frame to world."""
        return self.data.xmat[self.env.env.obj_body_id[key]].reshape(3, 3).copy()

    def _better(self, best, size, centre, z, yaw, others, half=.040, back=0):
        """The cheaper of `best` and this, (cost m, centre (2,), z, yaw): size, turn of the wrist, obstacles.

        half: m from each finger to the middle as the hand goes in; back: m that the palm reaches further along the
        finger axis, of a hand that leans.
        """
        fingers, palm = ((half - .010, half + .028, .014), (-half - .028, -half + .010, .014)), (-.11, .11 + back, .036)
        blocked = sum(top(others, centre, yaw, *finger) > z - TIP for finger in fingers)
        blocked += top(others, centre, yaw, *palm) > z + PALM - .01
        turn = abs(yaw % np.pi - np.pi / 2)     # away from the wrist's start, where the fingers close along y
        cost = size + .004 * turn + .05 * blocked
        radial = centre - self.base[:2]
        if np.linalg.norm(radial) < NEAR:       # there the hand leans about its finger axis, best across its way
            cost += .03 * abs(axes(yaw)[0] @ radial) / np.linalg.norm(radial)
        return (cost, centre, z, yaw) if best is None or cost < best[0] else best
