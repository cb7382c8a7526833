"""CaP-X's privileged functions on robosuite's tasks: exact poses, straight motions, grippers. Each task has the functions it needs.

Frame and hand: see robosuite_motion.py. Not repeated of CaP-X: a horizon after which every call fails; poses that lag behind; a
quaternion "that may be unreliable".
"""

import numpy as np

from harness import code_api
from harness.code_api import ApiError, find, length, moves, point, quaternion, text
from harness.robosuite_motion import CLOSE, OPEN, quaternion_of, rotation_of

FRAME = ("Lengths are in metres; quaternions are w, x, y, z. Frame: origin at {base} at table height (the table's top is z = 0), x points "
         "away from it, y to its left, z up. Positions and quaternions are numpy arrays.\n")
HAND = ("The hand's z axis points out of it, its fingers close along its y axis and open 0.08; its position is between the finger tips, "
        "which reach 0.011 further. [0, 1, 0, 0] points straight down and closes along y of the frame; [0, 0.707, 0.707, 0] along x. "
        "A hand turned by 180 degrees about its z axis is the same hand.\n")
STRAIGHT = ("Motions are straight lines that avoid nothing: lift before you move sideways, and come from above. "
            "A hand reaches 0.8 from its base.\n")
LOW = .013                              # m: no grasp lower over the table than that, or the finger tips would stand on it
FINGER, ROOM = .05, .05                 # m: an open finger from the hand's middle; what it needs to the middle of a cube beside it
PRESSED = .01                           # m: positions of the sponge up to that height press on the table
DEPTH = .02                             # m under the table: set point of a pressing sponge


def _level(rotation, axis):
    """rad: direction in the plane of an axis of a rotation."""
    return np.arctan2(rotation[1, axis], rotation[0, axis])


def grasp_yaw(angle, turns):
    """rad about z by which code_api.DOWN is turned so that its fingers close along `angle` (rad, in the plane): at most half of
    the symmetry's step either way. turns: how many equal grasps there are in a full turn (2, or 4 for a cube)."""
    step = 2 * np.pi / turns
    return (angle - np.pi / 2 + step / 2) % step - step / 2


def down_at(yaw):
    """Quaternion of code_api.DOWN turned by `yaw` rad about the frame's z."""
    return np.array([0, np.cos(yaw / 2), np.sin(yaw / 2), 0])


class RobosuiteApi(code_api.Api):
    """What all tasks share. Subclasses name their functions, and what can be grasped.

    Events (see code_api.Api): {"tool": "close_gripper", "arm", "object": the nearest or None, "held": whether the next motion took it
    along}, {"tool": "open_gripper", "arm", "object": what was let go, "target": what it stands on then, or None}.
    """
    graspable = ()

    def __init__(self, world):
        super().__init__(world)
        self.closed = []                        # events of grasps that no motion has tried yet

    def _name(self, object_name):
        return find(object_name, self.world.names())

    def _pose(self, name):
        position, rotation = self.world.pose(name)
        return position, quaternion_of(rotation)

    def get_object_pose(self, object_name: text):
        """(position, quaternion_wxyz) of an object's middle."""
        return self._pose(self._name(object_name))

    def get_all_object_poses(self):
        """{name: (position, quaternion_wxyz)} of everything that has a name."""
        return {name: self._pose(name) for name in self.world.names()}

    def get_object_size(self, object_name: text):
        """(3,) full extents along the object's own axes."""
        return self.world.size(self._name(object_name))

    def sample_grasp_pose(self, object_name: text):
        """(position, quaternion_wxyz) of a hand that points down on the object, its fingers across it. Use both as they are."""
        name = self._name(object_name)
        position, rotation = self.world.pose(name)
        if name in ("red cube", "green cube"):
            side = 0 if abs(rotation[2, 0]) < .5 else 1         # an axis that lies in the plane
            yaw = grasp_yaw(_level(rotation, side), 4)
            yaw = max((yaw, yaw - np.copysign(np.pi / 2, yaw)), key=lambda y: self._room(name, position, y))
        elif name in ("square nut handle", "handle 0", "handle 1"):
            yaw = grasp_yaw(_level(rotation, 1), 2)             # their long axis is x
        elif name == "hammer":
            yaw = grasp_yaw(_level(rotation, 2) + np.pi / 2, 2)
        else:
            raise ApiError("ValueError", f"the {name} cannot be grasped; can be: {', '.join(self.graspable)}")
        return np.array([*position[:2], max(position[2], LOW)]), down_at(yaw)

    def _room(self, name, position, yaw):
        """m from where the open fingers would come down to the middle of the nearest other object as high; ROOM where that is enough."""
        fingers = [position + side * np.array([-np.sin(yaw), np.cos(yaw), 0]) for side in (-FINGER, FINGER)]
        others = [self.world.pose(other)[0] for other in self.world.movable if other != name]
        return min([ROOM, *(np.linalg.norm(f[:2] - p[:2]) for f in fingers for p in others if abs(p[2] - position[2]) < .04)])

    # ---- motion

    def _goto(self, targets, z_approach):
        """targets: {arm: (position, quaternion)}"""
        aims = {arm: (position, rotation_of(turn)) for arm, (position, turn) in targets.items()}
        if z_approach:
            self.world.go({arm: (position - z_approach * turn[:, 2], turn) for arm, (position, turn) in aims.items()})
        self.world.go(aims)
        for event in self.closed:               # the first motion after closing shows whether it holds
            event["held"] = event["object"] is not None and self.world.held_by(event["arm"]) == event["object"]
        self.closed = []

    def _open(self, arm):
        world = self.world
        held = world.held_by(arm)
        world.grip(arm, OPEN)
        if held:
            target = world.resting_on(held)
            goals = {goal[1:] for goal in world.task.goal}
            self.events.append({"tool": "open_gripper", "arm": arm, "object": held,
                                "target": None if target == "table" and (held, target) not in goals else target})

    def _close(self, arm):
        self.world.grip(arm, CLOSE)
        meant = self.world.held_by(arm) or self.world.nearest(arm)
        self.closed.append({"tool": "close_gripper", "arm": arm, "object": meant, "held": False})
        self.events.append(self.closed[-1])

    def _hand(self, arm):
        """(8,) hand position, quaternion, opening in m."""
        position, rotation = self.world.hand_pose(arm)
        return np.array([*position, *quaternion_of(rotation), self.world.opening(arm)])


class OneArmApi(RobosuiteApi):
    functions = ("get_object_pose", "get_all_object_poses", "get_object_size", "sample_grasp_pose", "goto_pose", "open_gripper",
                 "close_gripper", "get_observation")
    graspable = ("red cube", "green cube")
    notes = FRAME.format(base="the robot's base") + HAND + STRAIGHT

    @moves
    def goto_pose(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """Move the hand in a straight line; with z_approach first to the point that far back along the hand's z axis (above, for a
        hand that points down), then on. Returns None where the way is blocked too: get_observation tells where the hand is."""
        self._goto({0: (position, quaternion_wxyz)}, z_approach)

    @moves
    def open_gripper(self):
        """Open the gripper where it is; what it holds falls."""
        self._open(0)

    @moves
    def close_gripper(self):
        """Close the gripper where it is."""
        self._close(0)

    def get_observation(self):
        """{"robot_cartesian_pos": 8 numbers: hand position, quaternion_wxyz, opening between the fingers (0 to 0.08)}"""
        return {"robot_cartesian_pos": self._hand(0)}


class LiftApi(OneArmApi):
    graspable = ("red cube",)
    notes = OneArmApi.notes + "There is one object: red cube. It has to be 0.04 higher than on the table."


class StackApi(OneArmApi):
    notes = (OneArmApi.notes + "There are: red cube, green cube. The red cube has to lie on the green one without being held; let go where "
             "it touches, not above.")


class RestackApi(OneArmApi):
    notes = StackApi.notes + " The green cube has to stand on the table."


class NutApi(OneArmApi):
    graspable = ("square nut handle",)
    notes = (OneArmApi.notes + "There are: square nut, square nut handle, square peg (its position is the middle of its top). The nut is a "
             "ring with a handle on its own +x side; grasp it by the handle. It holds on to the hand as one rigid body. The peg is 0.032 "
             "wide and 0.13 high, its sides along x and y; the nut's hole is 0.045 wide, so it fits in four directions. The nut's middle "
             "has to be at the peg and less than 0.05 over the table.")


class WipeApi(OneArmApi):
    graspable = ()
    functions = ("get_object_pose", "get_all_object_poses", "get_object_size", "get_spill_points", "goto_pose", "get_observation")
    notes = (FRAME.format(base="the robot's base") +
             "A sponge takes the gripper's place: 0.12 long along its y axis, 0.05 wide along its x axis; [0, 1, 0, 0] presses it on the "
             "table with its long side along y of the frame. Its position is the middle of its lower face. "
             f"At z up to {PRESSED:g} it is pressed on the table and wipes what it passes over. Motions are straight lines. "
             "There is one object: brown spill, made of spots, all of which have to be wiped.")

    def get_spill_points(self):
        """(n, 3) array of the brown spots not yet wiped, each 0.04 wide. A spot is wiped once the sponge has passed over its middle."""
        return self.world.spill()

    @moves
    def goto_pose(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """Move the sponge in a straight line; with z_approach first to that height above the position, then down. z = 0 presses it on
        the table. Returns None where the way is blocked too: get_observation tells where the sponge is."""
        world, turn, pressed = self.world, rotation_of(quaternion_wxyz), position[2] <= PRESSED
        if pressed and world.hand_pose(0)[0][2] > 3 * PRESSED:
            z_approach = max(z_approach, 2 * PRESSED)       # else it would come down as slowly as it wipes
        if z_approach:
            world.go({0: (position + [0, 0, z_approach], turn)})
        world.go({0: (np.array([*position[:2], -DEPTH]) if pressed else position, turn)}, press=pressed)

    def get_observation(self):
        """{"robot_cartesian_pos": 7 numbers: position of the sponge's lower face, quaternion_wxyz}"""
        return {"robot_cartesian_pos": self._hand(0)[:7]}


class TwoArmApi(RobosuiteApi):
    functions = ("get_object_pose", "get_all_object_poses", "get_object_size", "sample_grasp_pose", "goto_pose_arm0", "goto_pose_arm1",
                 "goto_pose_both", "open_gripper_arm0", "open_gripper_arm1", "close_gripper_arm0", "close_gripper_arm1",
                 "get_arm0_gripper_pose", "get_arm1_gripper_pose", "get_observation")
    notes = (FRAME.format(base="arm 0's base") + "All functions use this one frame, arm 1's too.\n" + HAND + STRAIGHT + "An arm that is "
             "not moved stays where it is. The arms face each other: arm 1's base is at x = {far}.\n")

    @moves
    def goto_pose_arm0(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """Move the hand of arm 0 in a straight line; with z_approach first to the point that far back along the hand's z axis (above,
        for a hand that points down), then on. Returns None where the way is blocked too: get_observation tells where the hand is."""
        self._goto({0: (position, quaternion_wxyz)}, z_approach)

    @moves
    def goto_pose_arm1(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """The same for arm 1."""
        self._goto({1: (position, quaternion_wxyz)}, z_approach)

    @moves
    def goto_pose_both(self, position0: point, quaternion_wxyz0: quaternion, position1: point, quaternion_wxyz1: quaternion,
                       z_approach: length = 0.0):
        """Move both hands at once: they arrive together, each in a straight line."""
        self._goto({0: (position0, quaternion_wxyz0), 1: (position1, quaternion_wxyz1)}, z_approach)

    @moves
    def open_gripper_arm0(self):
        """Open the gripper of arm 0 where it is."""
        self._open(0)

    @moves
    def open_gripper_arm1(self):
        """Open the gripper of arm 1 where it is."""
        self._open(1)

    @moves
    def close_gripper_arm0(self):
        """Close the gripper of arm 0 where it is."""
        self._close(0)

    @moves
    def close_gripper_arm1(self):
        """Close the gripper of arm 1 where it is."""
        self._close(1)

    def get_arm0_gripper_pose(self):
        """(position, quaternion_wxyz) of the hand of arm 0."""
        return self._hand(0)[:3], self._hand(0)[3:7]

    def get_arm1_gripper_pose(self):
        """(position, quaternion_wxyz) of the hand of arm 1."""
        return self._hand(1)[:3], self._hand(1)[3:7]

    def get_observation(self):
        """{"robot0_cartesian_pos", "robot1_cartesian_pos": 8 numbers each: hand position, quaternion_wxyz, opening (0 to 0.08)}"""
        return {f"robot{k}_cartesian_pos": self._hand(k) for k in (0, 1)}


class TwoArmLiftApi(TwoArmApi):
    functions = (*TwoArmApi.functions[:4], "get_handle0_pos", "get_handle1_pos", *TwoArmApi.functions[4:])
    graspable = ("handle 0", "handle 1")
    notes = (TwoArmApi.notes.format(far=1.12) +
             "There are: pot, handle 0, handle 1. A handle is a bar 0.11 long and 0.02 thick that stands out from the pot's side. The pot "
             "has to be more than 0.10 over the table: lift both handles at once with goto_pose_both.")

    def get_handle0_pos(self):
        """(3,) middle of the bar of handle 0, the one for arm 0."""
        return self.world.pose("handle 0")[0]

    def get_handle1_pos(self):
        """(3,) middle of the bar of handle 1, the one for arm 1."""
        return self.world.pose("handle 1")[0]


class HandoverApi(TwoArmApi):
    functions = (*TwoArmApi.functions[:4], "get_hammer_pose", *TwoArmApi.functions[4:])
    graspable = ("hammer",)
    notes = (TwoArmApi.notes.format(far=1.62) +
             "There are: hammer (its position is the middle of its handle), hammer head. The table reaches from x = 0.21 to 0.51 alone; "
             "what falls beyond it is lost. The hammer lies on its side; its handle is 0.03 to 0.04 thick and 0.1 to 0.25 long. In the "
             "end arm 1 alone holds the handle, well over the table: 0.3 is enough. A hand is 0.2 wide along its own y axis and 0.07 "
             "along x, an arm is behind it: keep the hands apart.")

    def get_hammer_pose(self):
        """(position, quaternion_wxyz) of the middle of the hammer's handle; its own z axis points along the handle to the head, its x
        axis along the head."""
        return self._pose("hammer")


_APIS = (LiftApi, StackApi, RestackApi, NutApi, WipeApi, TwoArmLiftApi, HandoverApi)


def api_of(task):
    """Task of this world -> its Api class."""
    return _APIS[task.index]
