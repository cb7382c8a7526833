"""Expert programs for robosuite's tasks, as a planner would write them: functions of robosuite_api.py and numpy (np) alone.

Each is a whole episode, to be run once from the start state (tests/test_robosuite.py does), and all are meant to succeed on every state;
several styles a task, so that what is learned from them is not one wording. At the end: what code_teacher.py asks of such a module.
"""

_LIFT = ('''\
position, quaternion = sample_grasp_pose("red cube")
goto_pose(position, quaternion, z_approach=0.1)
close_gripper()
goto_pose(position + np.array([0, 0, 0.15]), quaternion)
''', '''\
# grasp the cube from straight above; whatever way it is turned, the diagonal fits between the fingers
cube, _ = get_object_pose("red cube")
down = np.array([0, 1, 0, 0])
open_gripper()
goto_pose(cube + np.array([0, 0, 0.1]), down)
goto_pose(cube, down)
close_gripper()
goto_pose(cube + np.array([0, 0, 0.2]), down)
cube, _ = get_object_pose("red cube")
print("the cube is now at height", round(float(cube[2]), 3))
''', '''\
for attempt in range(3):
    position, quaternion = sample_grasp_pose("red cube")
    open_gripper()
    goto_pose(position, quaternion, z_approach=0.12)
    close_gripper()
    goto_pose(position + np.array([0, 0, 0.15]), quaternion)
    height = get_object_pose("red cube")[0][2]
    if height > 0.1:
        print("lifted to", round(float(height), 3))
        break
    print("not held, once more")
''')

_STACK = ('''\
position, quaternion = sample_grasp_pose("red cube")
goto_pose(position, quaternion, z_approach=0.1)
close_gripper()
goto_pose(position + np.array([0, 0, 0.2]), quaternion)
# the red cube's middle goes half of both heights above the green cube's
place, _ = get_object_pose("green cube")
place[2] += (get_object_size("green cube")[2] + get_object_size("red cube")[2]) / 2
goto_pose(place, quaternion, z_approach=0.1)
open_gripper()
goto_pose(place + np.array([0, 0, 0.1]), quaternion)
''', '''\
def pick(name):
    position, quaternion = sample_grasp_pose(name)
    open_gripper()
    goto_pose(position, quaternion, z_approach=0.1)
    close_gripper()
    goto_pose(position + [0, 0, 0.2], quaternion)
    return quaternion

def put_on(name, below, quaternion):
    target = get_object_pose(below)[0]
    target[2] += get_object_size(below)[2] / 2 + get_object_size(name)[2] / 2
    goto_pose(target + [0, 0, 0.1], quaternion)
    goto_pose(target, quaternion)
    open_gripper()
    goto_pose(target + [0, 0, 0.15], quaternion)

put_on("red cube", "green cube", pick("red cube"))
poses = get_all_object_poses()
print("red", np.round(poses["red cube"][0], 3), "green", np.round(poses["green cube"][0], 3))
''', '''\
up = np.array([0, 0, 0.2])
height = get_object_size("green cube")[2] / 2 + get_object_size("red cube")[2] / 2
for attempt in range(3):
    grasp, turn = sample_grasp_pose("red cube")
    goto_pose(grasp, turn, z_approach=0.1)
    close_gripper()
    goto_pose(grasp + up, turn)
    red, green = get_object_pose("red cube")[0], get_object_pose("green cube")[0]
    if red[2] < 0.1:
        print("missed the red cube")
        open_gripper()
        continue
    # put the cube, not the hand, over the green one
    hand = get_observation()["robot_cartesian_pos"][:3]
    goal = green + np.array([0, 0, height]) + (hand - red)
    goto_pose(goal, turn, z_approach=0.08)
    open_gripper()
    goto_pose(goal + up, turn)
    break
''')

_RESTACK = ('''\
# the green cube first: down to the table, a hand's width nearer to the robot
green, turn = sample_grasp_pose("green cube")
goto_pose(green, turn, z_approach=0.1)
close_gripper()
goto_pose(green + np.array([0, 0, 0.1]), turn)
free = np.array([green[0] - 0.15, green[1], get_object_size("green cube")[2] / 2])
goto_pose(free, turn, z_approach=0.1)
open_gripper()
goto_pose(free + np.array([0, 0, 0.15]), turn)

# then the red cube on it
red, turn = sample_grasp_pose("red cube")
goto_pose(red, turn, z_approach=0.1)
close_gripper()
goto_pose(red + np.array([0, 0, 0.2]), turn)
place, _ = get_object_pose("green cube")
place[2] += (get_object_size("green cube")[2] + get_object_size("red cube")[2]) / 2
goto_pose(place, turn, z_approach=0.1)
open_gripper()
goto_pose(place + np.array([0, 0, 0.1]), turn)
''', '''\
def move(name, target):
    """Takes an object by its middle to where its middle should be, from above."""
    grasp, turn = sample_grasp_pose(name)
    goto_pose(grasp, turn, z_approach=0.1)
    close_gripper()
    goto_pose(np.array([grasp[0], grasp[1], 0.25]), turn)
    goto_pose(np.array([target[0], target[1], 0.25]), turn)
    goto_pose(target, turn)
    open_gripper()
    goto_pose(np.array([target[0], target[1], 0.25]), turn)

half = {name: get_object_size(name)[2] / 2 for name in ("red cube", "green cube")}
red, _ = get_object_pose("red cube")
side = -0.15 if red[1] > 0 else 0.15        # to the side with more room
move("green cube", np.array([red[0], red[1] + side, half["green cube"]]))
green, _ = get_object_pose("green cube")
move("red cube", green + np.array([0, 0, half["green cube"] + half["red cube"]]))
print({name: np.round(pose[0], 3) for name, pose in get_all_object_poses().items()})
''')

_NUT = ('''\
def down(yaw):
    return np.array([0, np.cos(yaw / 2), np.sin(yaw / 2), 0])

def heading(q):
    """Direction of an object's own x axis in the plane."""
    w, x, y, z = q
    return np.arctan2(2 * (x * y + w * z), 1 - 2 * (y * y + z * z))

grasp, turn = sample_grasp_pose("square nut handle")
goto_pose(grasp, turn, z_approach=0.1)
close_gripper()
lifted = grasp + np.array([0, 0, 0.25])
goto_pose(lifted, turn)

# the nut fits on the peg in four directions, but beyond the peg the handle is out of reach: turn it to the nearest of the others
angle = heading(get_object_pose("square nut")[1])
turns = [(goal - angle + np.pi) % (2 * np.pi) - np.pi for goal in (np.pi / 2, -np.pi / 2, np.pi)]
turn = down(2 * np.arctan2(turn[2], turn[1]) + min(turns, key=abs))
goto_pose(lifted, turn)

# hand and nut move as one body
offset = get_observation()["robot_cartesian_pos"][:3] - get_object_pose("square nut")[0]
peg, _ = get_object_pose("square peg")
above = peg + np.array([0, 0, 0.05]) + offset
goto_pose(above, turn)
above[:2] += peg[:2] - get_object_pose("square nut")[0][:2]        # what is left of the error
goto_pose(above, turn)
goto_pose(np.array([above[0], above[1], 0.02 + offset[2]]), turn)
open_gripper()
goto_pose(above + np.array([0, 0, 0.1]), turn)
''', '''\
def nut_state():
    position, q = get_object_pose("square nut")
    angle = np.arctan2(2 * (q[1] * q[2] + q[0] * q[3]), 1 - 2 * (q[2] ** 2 + q[3] ** 2))
    return position, angle

def hand():
    return get_observation()["robot_cartesian_pos"][:3]

peg, _ = get_object_pose("square peg")
p, q = sample_grasp_pose("square nut handle")
yaw = 2 * np.arctan2(q[2], q[1])            # of the hand, which points down
open_gripper()
goto_pose(p, q, z_approach=0.15)
close_gripper()
goto_pose(np.array([0.5, 0.1, 0.3]), q)

_, angle = nut_state()
goal = np.pi if abs(angle) > 3 * np.pi / 4 else np.sign(angle) * np.pi / 2      # handle to the robot or to a side, never away
for _ in range(2):
    _, angle = nut_state()
    yaw += (goal - angle + np.pi) % (2 * np.pi) - np.pi
    q = np.array([0, np.cos(yaw / 2), np.sin(yaw / 2), 0])
    goto_pose(hand(), q)
for height in (0.08, 0.03):
    nut, _ = nut_state()
    goto_pose(hand() + peg + np.array([0, 0, height]) - nut, q)
nut, _ = nut_state()
print("over the peg by", np.round(nut - peg, 4))
goto_pose(hand() + np.array([peg[0] - nut[0], peg[1] - nut[1], 0.015 - nut[2]]), q)
open_gripper()
goto_pose(hand() + np.array([0, 0, 0.25]), q)
''')

_WIPE = ('''\
# lanes along x over all of the spill; the sponge is 0.12 wide
down = np.array([0, 1, 0, 0])
points = get_spill_points()
low, high = points.min(axis=0), points.max(axis=0)
forward = True
for y in np.arange(low[1] + 0.02, high[1] + 0.06, 0.08):
    ends = [low[0] - 0.03, high[0] + 0.03]
    if not forward:
        ends.reverse()
    for x in ends:
        goto_pose(np.array([x, y, 0]), down)
    forward = not forward
print(len(get_spill_points()), "spots left")
''', '''\
down = np.array([0, 1, 0, 0])
for sweep in range(12):
    points = get_spill_points()
    if len(points) == 0:
        break
    # the lane at the lowest y in which something is left
    y = points[:, 1].min() + 0.045
    lane = points[np.abs(points[:, 1] - y) < 0.05]
    goto_pose(np.array([lane[:, 0].min() - 0.03, y, 0]), down, z_approach=0.05)
    goto_pose(np.array([lane[:, 0].max() + 0.03, y, 0]), down)
print("left:", len(get_spill_points()))
''', '''\
# along the spill itself: the spots come in the order in which they were spilt
down = np.array([0, 1, 0, 0])
goto_pose(get_spill_points()[0], down, z_approach=0.05)
for point in get_spill_points()[::6]:
    goto_pose(np.array([point[0], point[1], 0]), down)
for again in range(20):
    left = get_spill_points()
    if not len(left):
        break
    goto_pose(left[0] - np.array([0.03, 0, left[0][2]]), down)
    goto_pose(left[0] + np.array([0.03, 0, -left[0][2]]), down)
''')

_LIFT_POT = ('''\
p0, q0 = sample_grasp_pose("handle 0")
p1, q1 = sample_grasp_pose("handle 1")
goto_pose_both(p0, q0, p1, q1, z_approach=0.1)
close_gripper_arm0()
close_gripper_arm1()
up = np.array([0, 0, 0.2])
goto_pose_both(p0 + up, q0, p1 + up, q1)
''', '''\
# both hands point down, their fingers close along the line between the handles
handle0, handle1 = get_handle0_pos(), get_handle1_pos()
between = handle1 - handle0
yaw = np.arctan2(between[1], between[0]) - np.pi / 2
down = np.array([0, np.cos(yaw / 2), np.sin(yaw / 2), 0])
open_gripper_arm0()
open_gripper_arm1()
goto_pose_arm0(handle0, down, z_approach=0.12)
goto_pose_arm1(handle1, down, z_approach=0.12)
close_gripper_arm0()
close_gripper_arm1()
for height in (0.1, 0.2):
    lift = np.array([0, 0, height])
    goto_pose_both(handle0 + lift, down, handle1 + lift, down)
print("pot at", np.round(get_object_pose("pot")[0], 3))
''')

_HANDOVER = ('''\
def multiply(a, b):
    w, x, y, z = a
    return np.array([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]) @ b

def about(axis, degrees):
    half = np.radians(degrees) / 2
    return np.array([np.cos(half), *(np.sin(half) * np.array(axis))])

def to_head():
    """Unit vector along the handle, and its middle."""
    middle, (w, x, y, z) = get_hammer_pose()
    return np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)]), middle

# arm 0 takes the handle next to the head
reach = get_object_size("hammer")[2] / 2 - 0.025
axis, _ = to_head()
grasp, down = sample_grasp_pose("hammer")
grasp = grasp + axis * reach
goto_pose_arm0(grasp, down, z_approach=0.12)
close_gripper_arm0()
goto_pose_arm0(np.array([grasp[0], grasp[1], 0.4]), down)

# the hammer along y, the hand leaning forward by 45 degrees; to whichever side is nearer
side = 90 if np.arctan2(down[2], down[1]) > 0 else -90
across = multiply(about([0, 0, 1], side), np.array([0, 1, 0, 0]))
start = np.array([0.45, 0, 0.4])
goto_pose_arm0(start, across)
lean = multiply(about([0, 1, 0], -45), across)
goto_pose_arm0(start, lean)
axis, _ = to_head()
goto_pose_arm0(np.array([0.81, 0, 0.4]) + axis * reach, lean)

# arm 1 comes from the other side, to the other end of the handle
axis, middle = to_head()
other = multiply(about([0, 1, 0], 45), multiply(about([0, 0, 1], 90), np.array([0, 1, 0, 0])))
goto_pose_arm1(middle - axis * reach, other, z_approach=0.15)
close_gripper_arm1()
open_gripper_arm0()
hand, turn = get_arm0_gripper_pose()
goto_pose_arm0(hand + np.array([-0.15, 0, 0.15]), turn)
''', '''\
def quaternion(x_axis, y_axis, z_axis):
    """Of a hand with these axes."""
    m = np.stack([x_axis, y_axis, z_axis], axis=1)
    q = np.sqrt(np.maximum(0, [1 + m[0, 0] + m[1, 1] + m[2, 2], 1 + m[0, 0] - m[1, 1] - m[2, 2],
                               1 - m[0, 0] + m[1, 1] - m[2, 2], 1 - m[0, 0] - m[1, 1] + m[2, 2]])) / 2
    k = int(np.argmax(q))
    pairs = [[1, m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]], [m[2, 1] - m[1, 2], 1, m[0, 1] + m[1, 0], m[0, 2] + m[2, 0]],
             [m[0, 2] - m[2, 0], m[0, 1] + m[1, 0], 1, m[1, 2] + m[2, 1]], [m[1, 0] - m[0, 1], m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], 1]]
    return np.array([q[j] if j == k else pairs[k][j] / (4 * q[k]) for j in range(4)])

def hammer():
    middle, (w, x, y, z) = get_hammer_pose()
    return middle, np.array([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)])

def across(handle, pointing):
    """Hand that points along `pointing` with its fingers across the handle."""
    return quaternion(handle, np.cross(pointing, handle), pointing)

x, y, z = np.eye(3)
end = get_object_size("hammer")[2] / 2 - 0.025
middle, handle = hammer()
handle = handle - handle[2] * z
handle /= np.linalg.norm(handle)
along = handle if handle[0] > 0 else -handle            # the hand's own x axis, pointing away from the robot
grip = middle + handle * end
grip[2] = max(grip[2], 0.015)
goto_pose_arm0(grip, across(along, -z), z_approach=0.12)
close_gripper_arm0()
goto_pose_arm0(np.array([grip[0], grip[1], 0.4]), across(along, -z))

# turn the handle along y, lean forward, carry it to the middle between the arms
along = y if along[1] > 0 else -y
forward, backward = (x - z) / np.sqrt(2), (-x - z) / np.sqrt(2)
goto_pose_arm0(np.array([0.45, 0, 0.4]), across(along, -z))
goto_pose_arm0(np.array([0.45, 0, 0.4]), across(along, forward))
_, handle = hammer()
goto_pose_arm0(np.array([0.81, 0, 0.4]) + handle * end, across(along, forward))

middle, handle = hammer()
print("hammer at", np.round(middle, 3), "along", np.round(handle, 2))
goto_pose_arm1(middle - handle * end, across(y, backward), z_approach=0.15)
close_gripper_arm1()
open_gripper_arm0()
goto_pose_arm0(np.array([0.65, 0, 0.55]) + handle * end, across(along, forward))
''')

PROGRAMS = dict(enumerate((_LIFT, _STACK, _RESTACK, _NUT, _WIPE, _LIFT_POT, _HANDOVER)))

# What code_teacher.py asks for. One program does a task; which of several styles it has is all there is to choose.

MANY, HELPERS_STYLE = False, None
STYLES = (0, 1, 2)
_KEYS = ("lift it", "red cube on the green cube and let it go", "other way round", "square nut", "spill", "pot", "hammer")


def steps(instruction):
    """Instruction -> [{"object": words that tell the task, "task": its index}], None for an unknown one."""
    found = [{"object": key, "task": k} for k, key in enumerate(_KEYS) if key in instruction]
    return found if len(found) == 1 else None


def choices(step):
    """There is one way to grasp, and the programs know it."""
    return ["right"]


def defined(code):
    return []


def is_done(step, output):
    """A program that ran to its end is believed; nothing here looks at a reward."""
    return True


def program(todo, chosen, style, rng, known):
    """One of the task's programs."""
    (step,) = todo
    texts = PROGRAMS[step["task"]]
    return texts[style % len(texts)]
