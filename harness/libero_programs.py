"""What the scripted teacher of the LIBERO-PRO world knows for the "code" harness: sentences -> steps -> programs for libero_api.py.

Pure text to text: nothing here touches a simulator. A program reads poses, moves, and prints what became of the object by its poses;
no reward is looked at. Which of several bowls a sentence means, the program finds by the poses.
Metres in the robot's base frame.

`choices(step)` are the grasps to choose from, the right one first; the others look plausible and mostly fail. A handicapped teacher
takes one of those at times, and reinforcement learning has to find out.
"""

import re

STYLES = ("plain", "helper", "loop")
HELPERS_STYLE, MANY = "helper", False   # a program does one step
BOWL, RAMEKIN, STOVE, CABINET = "akita black bowl", "glazed rim porcelain ramekin", "flat stove", "wooden cabinet"
# words of a sentence -> name in the world
OBJECTS = {n: n for n in ("alphabet soup", "bbq sauce", "butter", "chocolate pudding", "cream cheese", "ketchup", "milk", "orange juice",
                          "plate", "salad dressing", "tomato sauce", "wine bottle", BOWL)} | {"bowl": BOWL}
PLACES = {"basket": "basket", "plate": "plate", "stove": "flat stove cook region", "bowl": BOWL,
          "top of the drawer": "wooden cabinet top side", "rack": "wine rack top region",
          "front of the stove": "table stove front region"}
# words that tell one bowl from the other -> what it is nearest to
LANDMARKS = {"ramekin": RAMEKIN, "cookie": "cookies", "stove": STOVE, "cabinet": CABINET, "plate": "plate"}
ALONG_X = "[0, 0.707, 0.707, 0]"        # a hand that points down, its fingers closing along x
# how far the hand is over the place's position when it lets go
HANGS = {BOWL: .04, "plate": .02, "cream cheese": .02, "wine bottle": .14}
# how far what is put there will be over the place's position; else .01
RISES = {"flat stove cook region": .03, "wine rack top region": .02}
LIFTS = {BOWL: .12, "plate": .12}       # else 0.25: over the rim of a basket
# object and place -> lift, height of the approach, and how far along x from the place's middle it is put: past the wine rack
AROUND = {(BOWL, "flat stove cook region"): (.4, .35, .04)}


def steps(instruction):
    """Instruction -> list of steps, dicts with "do", "object", "place" and perhaps "which" (the words that tell it from others of its
    kind); None where this teacher has no program."""
    text = " ".join(instruction.lower().split())
    m = (re.fullmatch(r"pick the (.+?)(?: ((?:not )?(?:between|next to|on|in|from) .+))? and place it (?:in|on) the (?P<place>.+)", text)
         or re.fullmatch(r"(?:put|push) the (.+?)( )?(?:on|in|to) the (?P<place>.+)", text))
    if not m or m[1] not in OBJECTS or m["place"] not in PLACES:
        return None
    step = {"do": "put", "object": OBJECTS[m[1]], "place": PLACES[m["place"]]}
    # upright fingers wedge out of a plate's rim sooner or later: only the low way to the stove it survives
    if step["object"] == "plate" and m["place"] != "stove":
        return None
    return [step | ({"which": m[2]} if m[2] and m[2].strip() else {})]


def choices(step):
    """[(label, (x, y, z) offset in m from what sample_grasp_pose gives, quaternion as text or "" for the given one)], the right first."""
    if step["object"] in (BOWL, "plate"):
        r = .048 if step["object"] == BOWL else .065
        rims = {"left rim": ((0, r, 0), ""), "right rim": ((0, -r, 0), ""), "far rim": ((r, 0, 0), ALONG_X)}
        which = step.get("which", "")
        right = "far rim" if which.startswith("on the ramekin") else "right rim" if re.match("on .*(cook|cabinet)", which) else "left rim"
        wrong = [("middle", (0, 0, 0), ""), ("outside the rim", (0, r + .04, 0), ""), ("along the rim", (r, 0, 0), "")]
        return [(right, *rims[right]), *wrong]
    return [("middle", (0, 0, 0), ""), ("too high", (0, 0, .05), ""), ("beside", (0, .05, 0), ""), ("at its end", (-.05, 0, 0), "")]


def defined(code):
    """Those of HELPERS that programs so far have defined."""
    return [name for name in HELPERS if f"def {name}(" in code]


def is_done(step, output):
    """Whether a block that did this step says so."""
    return outcomes(step)[0] in output


def outcomes(step):
    """The lines that a program of this step may print last: (done, not done)."""
    return f"{step['object']} placed", f"{step['object']} slipped"


# ---------------------------------------------------------------------------------------------- programs

HELPER = {"nearest": """\
def nearest(kind, r, best=min):
    poses = get_all_object_poses()
    away = lambda n: (poses[n][0][0] - r[0]) ** 2 + (poses[n][0][1] - r[1]) ** 2
    return best([n for n in poses if kind in n], key=away)
""", "pick": """\
def pick(name, offset, up, q=None):
    p, given = sample_grasp_pose(name)
    q = given if q is None else q
    p = [a + b for a, b in zip(p, offset)]
    goto_pose(p, q, z_approach=0.2)
    close_gripper()
    goto_pose([p[0], p[1], p[2] + up], q)
    return q
""", "put": """\
def put(q, place, offset, over=0.25):
    t, _ = get_object_pose(place)
    goto_pose([a + b for a, b in zip(t, offset)], q, z_approach=over)
    open_gripper()
    return t
"""}
HELPERS = tuple(HELPER)                 # what the programs in style "helper" define, to be used by later blocks


def program(todo, chosen, style, rng, known=()):
    """The Python text of one step (todo: [step]) in one of STYLES; it prints one of `outcomes(step)` at its end. chosen: [one of
    `choices(step)`]. known: which of HELPERS earlier blocks have defined. rng: random.Random, for the wording of comments."""
    (step,), ((_, offset, quat),) = todo, chosen
    name = step["object"]
    comment = rng.choice(["# Put the {} on the {}.", "# Take the {}, put it on the {}.", "# Next: {} to {}."])
    lines, ref, place = [comment.format(name, step["place"])], f'"{name}"', step["place"]
    up, over, ahead = AROUND.get((name, place), (LIFTS.get(name, .25), .25, 0))
    high = HANGS.get(name, .02) + RISES.get(place, .01) + .01
    drop = (0, 0, .15) if place == "basket" else (offset[0] + ahead, offset[1], high)
    if style == "helper":
        wanted = [h for h in HELPERS if h not in known and (h != "nearest" or "which" in step and "layer" not in step["which"])]
        lines += [HELPER[h] for h in wanted]
    if "which" in step:
        lines += _find(step["which"], style == "helper")
        ref = "bowl"
    if style == "helper":
        lines.append(f"q = pick({ref}, {_text(offset)}, {up:g}{', ' + quat if quat else ''})")
        lines.append(f't = put(q, "{place}", {_text(drop)}{f", {over:g}" if over != .25 else ""})')
    else:
        take = [f"p, q = sample_grasp_pose({ref})", *([f"q = {quat}"] if quat else []),
                *([f"p = {_moved('p', offset)}"] if any(offset) else []),
                "goto_pose(p, q, z_approach=0.2)", "close_gripper()", f"goto_pose({_moved('p', (0, 0, up))}, q)"]
        if style == "loop":
            take += [f"o, _ = get_object_pose({ref})", "if o[2] > p[2] + 0.05:  # it came along", "    break", "open_gripper()"]
            take = ["for attempt in range(3):", *("    " + line for line in take)]
        lines += [*take, f't, _ = get_object_pose("{place}")', f"goto_pose({_moved('t', drop)}, q, z_approach={over:g})"]
        lines.append("open_gripper()")
    near = .04 if name == BOWL and place == "plate" else .1
    lines += [f"o, _ = get_object_pose({ref})",
              f'print("{name}", "placed" if abs(o[0] - t[0]) + abs(o[1] - t[1]) < {near:g} else "slipped")']
    return "\n".join(lines) + "\n"


def _text(offset):
    """"(0, 0.048, 0.08)" """
    return "(" + ", ".join(f"{round(d, 4):g}" for d in offset) + ")"


def _moved(v, offset):
    """"[p[0], p[1] + 0.05, p[2]]" """
    sums = (f" {'+' if d > 0 else '-'} {abs(round(d, 4)):g}" if d else "" for d in offset)
    return "[" + ", ".join(f"{v}[{k}]{plus}" for k, plus in enumerate(sums)) + "]"


def _find(which, helper):
    """Lines that set `bowl` to the name of the bowl that is meant."""
    if "layer" in which:
        return ["poses = get_all_object_poses()", 'bowls = [n for n in poses if "bowl" in n]',
                "bowl = min(bowls, key=lambda n: poses[n][0][2])  # the lower one"]
    best = "max" if which.startswith("not") else "min"
    if "center" in which:
        lines = ["r = [0.585, 0]  # the middle of the table"]
    elif "between" in which:
        lines = ['a, _ = get_object_pose("plate")', f'b, _ = get_object_pose("{RAMEKIN}")', "r = [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2]"]
    else:
        lines = [f'r, _ = get_object_pose("{next(name for word, name in LANDMARKS.items() if word in which)}")']
    if helper:
        return [*lines, f'bowl = nearest("bowl", r{", max" if best == "max" else ""})']
    return [*lines, "poses = get_all_object_poses()", 'bowls = [n for n in poses if "bowl" in n]',
            f"bowl = {best}(bowls, key=lambda n: (poses[n][0][0] - r[0]) ** 2 + (poses[n][0][1] - r[1]) ** 2)"]
