"""How the arms of the robosuite world move: one servo for one or two Panda arms, in straight lines, and what they hold.

It acts through env.step with OSC_POSE actions (20 Hz) and nothing else: no state is written, nothing is welded to a hand.

Frames (metres): "the frame" of tasks and programs has its origin at the first robot's base at the height of the table, x away from
that robot, y to its left, z up. The controller's frame is the world's. The hand: z points out of it, the fingers close along y (CaP-X's
panda_hand); robosuite's grip site is turned by 90 degrees about z. Turned by 180 degrees about z the hand is the same tool: an open
hand takes whichever of both is nearer to its start, and a closed one keeps what it took, so what it holds turns as a rigid body does.
"""

import contextlib
from dataclasses import dataclass, field

import numpy as np
from scipy.spatial.transform import Rotation

OPEN, CLOSE = -1.0, 1.0                 # gripper actions: they move the fingers' set point
HAND = np.array([[0., 1, 0], [-1, 0, 0], [0, 0, 1]])        # grip site -> hand
FLIP = np.diag([-1., -1., 1.])          # the same hand with its fingers swapped
SPEED, TURN = .012, .08                 # m and rad a step (0.05 s) of the set point
GENTLE, END = .006, .05                 # m a step over the last so many m: at full speed the hand strays 1 cm from the line
WIPING = .005                           # m a step while pressed on the table: quicker, the sponge skips over spots
LAG = .10                               # m between set point and hand: something is in the way
TOLERANCE, TURN_TOLERANCE = .003, .03   # m, rad
STRAIGHT, BENT = -.35, -.8              # rad of the elbow: above the first, pulling at the hand does not bend it; below the second, it does
BACK, LEAN, BENDING = .15, .7, 30       # m, rad and steps: a move towards the base, leaning the hand there as well, bends it
CLEARLY = .5                            # rad by which the other turn of the hand must be nearer to its start to be taken
PATIENCE = 15                           # steps without getting nearer, then the motion ends
STROKE = 10                             # steps at least that the fingers are given; 8 move their set point from one end to the other
NEAR = .06                              # m from the grip site: what a closing hand is said to have been closed at


@dataclass
class Arm:
    """One arm. position, rotation: set point of its grip site, world frame. flip: the hand is turned by 180 degrees from what was asked."""
    robot: object
    site: int
    fingers: list                       # indices of qpos; empty for the sponge
    position: np.ndarray = None
    rotation: np.ndarray = None
    start: np.ndarray = None            # rotation at reset
    grip: float = OPEN
    flip: bool = False
    geoms: list = field(default_factory=list)       # two sets of geom ids: the finger pads


def _angle(a, b):
    """rad between two rotations."""
    return Rotation.from_matrix(a @ b.T).magnitude()


def quaternion_of(rotation):
    """(3, 3) -> w, x, y, z"""
    return np.roll(Rotation.from_matrix(rotation).as_quat(), 1)


def rotation_of(quaternion):
    """w, x, y, z -> (3, 3)"""
    return Rotation.from_quat(np.roll(quaternion, -1)).as_matrix()


class RobosuiteMotion:
    """Mixin of harness.robosuite_world.Robosuite, which owns the simulator.

    It uses what Robosuite's `reset` sets (`env`, `quick`, `data`, `arms`, `origin`, `turned`, `geoms`, `latched`, `steps`) and `success`.
    """

    # ---- frames and poses

    def to_frame(self, position, rotation):
        """Pose in the world -> in the frame."""
        return self.turned.T @ (position - self.origin), self.turned.T @ rotation

    def hand_pose(self, arm):
        """(position, (3, 3) rotation) of a hand in the frame, turned as goto was asked for it."""
        arm = self.arms[arm]
        position, rotation = self.to_frame(*self._site(arm))
        return position, (rotation @ FLIP if arm.flip else rotation) @ HAND

    def opening(self, arm):
        """m between the fingers; 0 for the sponge."""
        return float(np.abs(self.data.qpos[self.arms[arm].fingers]).sum())

    def _site(self, arm):
        return self.data.site_xpos[arm.site].copy(), self.data.site_xmat[arm.site].reshape(3, 3).copy()

    # ---- one step

    def _servo(self, arm):
        """(6,) action of an arm towards its set point."""
        position, rotation = self._site(arm)
        move = 1.6 * (arm.position - position) / .05        # 1.6: quicker than the controller's own critical damping
        turn = 1.5 * Rotation.from_matrix(arm.rotation @ rotation.T).as_rotvec() / .5
        return np.concatenate([move / max(1., np.abs(move).max()), np.clip(turn, -1, 1)])

    def step(self):
        """One environment step (0.05 s) towards all set points. The latch looks at every step."""
        action = np.concatenate([part for arm in self.arms for part in (self._servo(arm), [arm.grip] if arm.fingers else [])])
        sim = self.env.sim
        sim.forward, sim.step = self.quick      # for this step; whatever else calls them gets MuJoCo's own
        with contextlib.redirect_stdout(None):  # robosuite's Wipe prints when a joint is near its limit
            self.env.step(action)
        del sim.forward, sim.step
        self.steps += 1
        self.success()
        if self.on_chunk:
            self.on_chunk(self)

    # ---- motions

    def go(self, targets, press=False):
        """Moves hands in straight lines, all arriving together. targets: {arm: (position, (3, 3) rotation) of the hand in the frame}.

        Ends when all are there, or when they come no nearer (contact, joint limit, out of reach): then they stay where they are.
        press: the table stops the sponge, so heights do not count.
        """
        goals = []
        for index, (position, rotation) in targets.items():
            arm, want = self.arms[index], self.turned @ rotation @ HAND.T
            same, other = (want @ FLIP, want) if arm.flip else (want, want @ FLIP)
            if arm.grip == OPEN and _angle(same, arm.start) > _angle(other, arm.start) + CLEARLY:
                arm.flip, same = not arm.flip, other
            goals.append((arm, self.origin + self.turned @ position, same))
        if not self._drive(goals, press):
            bent = [self._bend(arm, goal) for arm, goal, _ in goals]
            if any(bent):
                self._drive(goals, press)

    def _drive(self, goals, press):
        """Moves the set points to (arm, position, rotation), world frame; -> False if hands could not follow: they stay where they are."""
        arms = [arm for arm, *_ in goals]
        ways = [(arm.position, goal - arm.position, arm.rotation, Rotation.from_matrix(want @ arm.rotation.T).as_rotvec())
                for arm, goal, want in goals]
        for share in self._shares(max(np.linalg.norm(way[1]) for way in ways), max(np.linalg.norm(way[3]) for way in ways), press):
            for arm, (here, way, rotation, turn) in zip(arms, ways, strict=True):
                arm.position = here + way * share
                arm.rotation = Rotation.from_rotvec(turn * share).as_matrix() @ rotation
            self.step()
            if blocked := self._away(arms, press)[0] > LAG:
                break
        else:
            blocked = not self._settle(arms, press)
        if blocked:
            for arm in arms:
                height = arm.position[2]
                arm.position, arm.rotation = self._site(arm)
                if press:
                    arm.position[2] = height
        return not blocked

    def _bend(self, arm, goal):
        """Bends an elbow that is straight, if the goal (3,) is nearer to the base than the hand; -> whether it did so."""
        base = np.array(arm.robot.base_pos)
        elbow = arm.robot._ref_joint_pos_indexes[3]
        if self.data.qpos[elbow] < STRAIGHT or np.linalg.norm(goal - base) > np.linalg.norm(arm.position - base):
            return False
        for _ in range(BENDING):
            here, _ = self._site(arm)
            inward = (base - here) * [1, 1, 0]
            inward /= np.linalg.norm(inward)
            arm.position = here + BACK * inward
            arm.rotation = Rotation.from_rotvec(LEAN * np.cross(inward, [0, 0, 1])).as_matrix() @ arm.start
            self.step()
            if self.data.qpos[elbow] < BENT:
                break
        arm.position, arm.rotation = self._site(arm)
        return True

    @staticmethod
    def _shares(way, turn, press):
        """Shares of a motion (0 to 1) at which the set point stands after each step. way m, turn rad: the largest of all arms."""
        slow = way if press else min(way, END)
        fast, gentle = int(np.ceil((way - slow) / SPEED)), int(np.ceil(slow / (WIPING if press else GENTLE)))
        marks = [*np.linspace(0, 1 - slow / way, fast + 1), *np.linspace(1 - slow / way, 1, gentle + 1)[1:]] if way else [0, 1]
        steps = max(len(marks) - 1, int(np.ceil(turn / TURN)))
        return np.interp(np.arange(1, steps + 1) / steps, np.linspace(0, 1, len(marks)), marks)

    def _away(self, arms, press):
        """(m, rad): largest distances of hands from their set points."""
        parts = slice(0, 2) if press else slice(0, 3)
        return (max(np.linalg.norm((a.position - self.data.site_xpos[a.site])[parts]) for a in arms),
                max(_angle(a.rotation, self._site(a)[1]) for a in arms))

    def _settle(self, arms, press):
        """Waits until the hands are at their set points; -> False if they come no nearer."""
        best, since = np.inf, 0
        while True:
            far, turned = self._away(arms, press)
            if far < TOLERANCE and turned < TURN_TOLERANCE:
                return True
            progress = far + .05 * turned
            best, since = (progress, 0) if progress < best - 3e-4 else (best, since + 1)
            if since >= PATIENCE:
                return False
            self.step()

    def grip(self, arm, action):
        """Opens or closes a hand where it is, until its fingers stand still."""
        arm = self.arms[arm]
        arm.grip = action
        for k in range(40):
            before = self.data.qpos[arm.fingers].copy()
            self.step()
            if k >= STROKE and np.abs(self.data.qpos[arm.fingers] - before).max() < 2e-4:
                break

    # ---- what is held

    def _pads(self, arm):
        """Names of the objects that each finger pad touches: two sets."""
        pairs = self.data.contact.geom[:self.data.ncon]
        touch = []
        for pad in arm.geoms:
            a, b = np.isin(pairs[:, 0], pad), np.isin(pairs[:, 1], pad)
            touch.append({self.geoms[g] for g in (*pairs[a, 1], *pairs[b, 0]) if g in self.geoms})
        return touch

    def held_by(self, arm):
        """Name of the object that both fingers of a hand touch while it is closed, or None."""
        arm = self.arms[arm]
        if arm.grip == OPEN or not arm.fingers:
            return None
        left, right = self._pads(arm)
        return min(left & right, default=None)

    @property
    def held(self):
        return next((name for k in range(len(self.arms)) if (name := self.held_by(k))), None)

    def nearest(self, arm):
        """Name of the object nearest to a hand, or None if none is within NEAR of the grip site (m; of its geoms' boxes)."""
        site, best = self.data.site_xpos[self.arms[arm].site], (NEAR, None)
        for geom, name in self.geoms.items():
            local = self.data.geom_xmat[geom].reshape(3, 3).T @ (site - self.data.geom_xpos[geom]) - self.model.geom_aabb[geom, :3]
            away = float(np.linalg.norm(np.maximum(np.abs(local) - self.model.geom_aabb[geom, 3:], 0)))
            best = min(best, (away, name), key=lambda pair: pair[0])
        return best[1]
