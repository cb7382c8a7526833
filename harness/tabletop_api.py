"""CaP-X's privileged functions on tabletop: exact poses, straight motions, a gripper. What a program has to know is where to grasp."""

import numpy as np

from harness import code_api
from harness.code_api import ApiError, DOWN, find, length, moves, point, quaternion, text
from harness.tabletop import GRASP, TRAVEL_Z

GRASP_Z = .073                  # m: hand height at which the fingers are around a head's narrow section
LOWEST = .03                    # m: the hand goes no lower
TURNED = .98                    # |q . DOWN| below which a pose is not that of a hand that points down (0.4 rad)
OPENED = .030                   # m: half of the open gripper's width
NEAR = .09                      # m: a grasp farther from every object is of none
HALF_WIDTH = 8                  # mm: a grasp that near to the narrow section's middle is at that section


class TabletopApi(code_api.Api):
    """See code_api.Api. Frame: the table's; x points away from the robot, y to its left, z up, z = 0 is the table's top."""
    functions = ("get_object_pose", "get_all_object_poses", "sample_grasp_pose", "goto_pose", "open_gripper", "close_gripper",
                 "get_observation")
    notes = "Lengths are in metres, z is up, the table is at z = 0. Positions are numpy arrays."

    def get_object_pose(self, object_name: text):
        """(position, quaternion_wxyz) of an object or container; an object's position is at its foot."""
        name = find(object_name, self.world.names + self.world.containers)
        return self._pose(name)

    def get_all_object_poses(self):
        """{name: (position, quaternion_wxyz)} of everything on the table."""
        return {name: self._pose(name) for name in self.world.names + self.world.containers}

    def sample_grasp_pose(self, object_name: text):
        """(position, quaternion_wxyz) of the hand at the middle of an object's head. A head fits between the fingers at one
        section alone: -0.02, 0, 0.02 or 0.04 along y from there, depending on the shape."""
        name = find(object_name, self.world.names + self.world.containers)
        if name in self.world.containers:
            raise ApiError("ValueError", f"the {name} cannot be grasped")
        x, y, z = self.world._position(name)
        return np.array([x, y, z + GRASP_Z]), np.array(DOWN)

    @moves
    def goto_pose(self, position: point, quaternion_wxyz: quaternion, z_approach: length = 0.0):
        """Move the hand in a straight line; with z_approach first to that height above the position, then down."""
        if abs(quaternion_wxyz @ DOWN) < TURNED:
            raise ApiError("ValueError", "the hand points straight down and cannot turn; use the quaternion of sample_grasp_pose")
        world = self.world
        target = np.array([*world._reach(*position[:2] * 1000), min(max(position[2], LOWEST), TRAVEL_Z)])
        holding = world.data.ctrl[3] == 0 and world.held is not None
        speed = 1.0 if holding or target[2] > world._hand()[2] + .02 else 2.0       # m/s: gently with an object, and when lifting one
        if z_approach:
            world._go([*target[:2], min(target[2] + z_approach, TRAVEL_Z)], speed)
        if z_approach and not holding:
            if world._descend(target):                       # it pressed on something: no section of a head fits there
                self._grasped("goto_pose")
        else:
            world._go(target, speed)
        self._look()

    @moves
    def open_gripper(self):
        """Open the gripper where it is; what it holds falls."""
        world, held = self.world, self.world.held
        world._grip(OPENED)
        world._run(.25 if held else .06)
        world.held = None
        if held:
            place = next((c for c in world.containers if world._inside(held, c)), None)
            self.events.append({"tool": "open_gripper", "object": held, "target": place})

    @moves
    def close_gripper(self):
        """Close the gripper."""
        self.world._grip(0.)
        self.world._run(.16)
        self._grasped("close_gripper")

    def get_observation(self):
        """{"robot_cartesian_pos": hand position, quaternion_wxyz and gripper opening (0 to 1), 8 numbers}"""
        world = self.world
        opening = min(1., max(0., float(world.data.qpos[world.hand + 3]) / OPENED))
        return {"robot_cartesian_pos": np.array([*world._hand(), *DOWN, opening])}

    def _pose(self, name):
        world = self.world
        turned = np.array([1., 0, 0, 0]) if name in world.containers else world.data.xquat[world.bodies[world.names.index(name)]].copy()
        return world._position(name), turned

    def _grasped(self, tool):
        """Notes a grasp, for reports: of the object whose narrow section is nearest. A descent that met a head (tool "goto_pose")
        is one, too: the object may have tipped over before the gripper closes."""
        world, hand = self.world, self.world._hand()
        middles = {n: world._position(n)[:2] + [0, GRASP[n.split()[1]] / 1000] for n in world.names}
        nearest = min(middles, key=lambda n: np.linalg.norm(middles[n] - hand[:2]))
        if np.linalg.norm(middles[nearest] - hand[:2]) > NEAR:
            return
        if self.events and self.events[-1]["tool"] == "goto_pose":
            self.events.pop()                                # the same grasp, now closing
        right = bool(np.all(np.abs(middles[nearest] - hand[:2]) * 1000 < HALF_WIDTH))
        self.events.append({"tool": tool, "object": nearest, "held": False, "right": right})

    def _look(self):
        """After a motion: what the closed hand holds, and whether the last grasp held."""
        world, hand = self.world, self.world._hand()
        closed = world.data.ctrl[3] == 0 and world.data.qpos[world.hand + 3] > .004          # on something
        reach = lambda n: world._position(n) + [0, 0, GRASP_Z] - hand
        world.held = next((n for n in world.names if closed and abs(reach(n)[2]) < .04 and np.linalg.norm(reach(n)[:2]) < NEAR), None)
        if world.held and self.events and self.events[-1]["tool"] == "close_gripper":
            self.events[-1] |= {"object": world.held, "held": True}
