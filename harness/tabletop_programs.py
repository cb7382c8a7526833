"""What an expert knows of tabletop, as programs: steps of an instruction, where to grasp, texts in three styles.

Pure functions of text. A program prints one line per step, "<object> placed" or "<object> slipped", which it learns by looking at poses.
"""

from harness.teacher import OFFSETS, read_goal, RIGHT

STYLES = ("plain", "helpers", "loop")
HELPERS_STYLE = "helpers"
MANY = True             # a program may do several steps

PLAIN = """\
# {object} to {place}
p, q = sample_grasp_pose("{object}")
p[1] += {dy}
open_gripper()
goto_pose(p, q, 0.1)
close_gripper()
goto_pose(p + [0, 0, 0.2], q)
if get_object_pose("{object}")[0][2] > 0.1:
    t, _ = get_object_pose("{place}")
    goto_pose(t + [0, 0, 0.1], q, 0.1)
    open_gripper()
    goto_pose(t + [0, 0, 0.2], q)
    print("{object} placed")
else:
    print("{object} slipped")
"""
HELPERS = """\
def pick(name, dy):
    p, q = sample_grasp_pose(name)
    p[1] += dy
    open_gripper()
    goto_pose(p, q, z_approach=0.1)
    close_gripper()
    goto_pose(p + [0, 0, 0.2], q)
    held = get_object_pose(name)[0][2] > 0.1
    if not held:
        print(name, "slipped")
    return held

def put(name, place):
    t = get_object_pose(place)[0]
    q = sample_grasp_pose(name)[1]
    goto_pose(t + [0, 0, 0.1], q, z_approach=0.1)
    open_gripper()
    goto_pose(t + [0, 0, 0.2], q)
    print(name, "placed")
    return True

"""
LOOP = """\
for name, place, dy in [{rows}]:
    p, q = sample_grasp_pose(name)
    p[1] += dy
    open_gripper()
    goto_pose(p, q, 0.1)
    close_gripper()
    goto_pose(p + [0, 0, 0.2], q)
    if get_object_pose(name)[0][2] < 0.1:
        print(name, "slipped")
        break
    t = get_object_pose(place)[0]
    goto_pose(t + [0, 0, 0.1], q, 0.1)
    open_gripper()
    goto_pose(t + [0, 0, 0.2], q)
    print(name, "placed")
"""


def steps(instruction):
    """'Put the red mug on the blue tray, then …' -> [{"object": "red mug", "place": "blue tray"}, …]; None if it cannot be read."""
    return [{"object": o, "place": p} for o, p in read_goal(instruction)] or None


def choices(step):
    """Grasp offsets (m, as text) of a step's object, the right one first."""
    right = RIGHT.get(step["object"].split()[-1], 0)
    return [_metres(d) for d in (right, *(d for d in OFFSETS if d != right))]


def _metres(mm):
    return f"{mm / 1000:g}"


def defined(code):
    """The helpers of style "helpers" that programs so far have defined."""
    return [name for name in ("pick", "put") if f"def {name}(" in code]


def is_done(step, output):
    """Whether a block that did this step says so. Its output also says "slipped" where the grasp did not hold."""
    return f"{step['object']} placed" in output


def program(todo, chosen, style, rng, known):
    """Text for the steps `todo` with the offsets `chosen`. known: of `defined`. rng is not used: the styles are all there is to choose."""
    if style == "plain":
        return PLAIN.format(**todo[0], dy=chosen[0])
    if style == "loop":
        return LOOP.format(rows=", ".join(f'("{s["object"]}", "{s["place"]}", {dy})' for s, dy in zip(todo, chosen, strict=True)))
    calls = [f'pick("{s["object"]}", {dy}) and put("{s["object"]}", "{s["place"]}")' for s, dy in zip(todo, chosen, strict=True)]
    return ("" if known else HELPERS) + " and ".join(calls) + "\n"
