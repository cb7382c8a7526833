"""Scripted expert for LIBERO and LIBERO-PRO, behind the chat-completions API like harness/teacher.py, of which it is a kind.

It sees what any planner sees (messages and tools) and keeps nothing between calls. What it brings along is the meaning of LIBERO's
sentences (the goal that the BDDL files give them), not of its objects: which of the three grasps holds an object it finds by
trying, and what it found while exploring state 0 it writes to task memory. So the same expert without memory succeeds less often.

`grasp_skill` is its handicap, on purpose: the chance that it follows the grasp that memory names; else it tries another.
`perfect` gives it the right grasps: the plan of the executor's ceiling.
"""

import functools
import math
import re

from harness.teacher import ScriptedTeacher

GLOBAL_MEMORY = ("Each object holds by one or two of the three grasps: from the top, at the rim, by the handle. "
                 "A grasp that failed once fails again; look where the object is now and try another.")
GRASPS = ("top", "rim", "handle")
RIGHT = {"bowl": "rim", "plate": "rim", "ramekin": "rim", "mug": "rim", "frypan": "handle"}    # by the words of a name; else top


def right_grasp(name, where=""):
    """The grasp that holds `name` on its way to `where`. Held at its rim, a mug hangs beside the hand, which an oven's open
    door may leave no room for."""
    if name == "white yellow mug" and "microwave" in where:
        return "handle"
    return next((grasp for word, grasp in RIGHT.items() if word in name.split()), "top")


@functools.cache
def sentences():
    """{instruction: [goal, …]} of all suites, the eight of the protocol first: what LIBERO's BDDL files mean by a sentence."""
    from harness.libero import Libero, suites
    known, first = {}, [f"libero_{s}_{p}" for s in ("spatial", "object", "goal", "10") for p in ("swap", "task")]
    for suite in first + [s for s in suites() if s not in first]:
        for task in Libero.tasks(suite):
            goals = known.setdefault(task.instruction, [])
            if task.goal not in goals:
                goals.append(task.goal)
    return known


def steps_of(instruction, goal):
    """Goal predicates -> steps in the order in which they are done: ("open" | "close", what), ("turn", what, state),
    ("put" | "push", what, where)."""
    steps = [("open", what) for predicate, what, *_ in goal if predicate == "open"]
    steps += [("turn", what, predicate.removeprefix("turn")) for predicate, what, *_ in goal if predicate in ("turnon", "turnoff")]
    puts = [(what, where[0]) for predicate, what, *where in goal if predicate in ("on", "in")]
    if re.search(r"\bopen\b", instruction) and not steps:
        steps += [("open", where) for _, where in puts[:1]]
    steps += [("push" if re.search(r"\bpush\b", instruction) else "put", what, where) for what, where in puts]
    return steps + [("close", what) for predicate, what, *_ in goal if predicate == "close"]


DONE = {"open": ["Open: {0}."], "close": ["Closed: {0}."], "put": ["Placed: {0} at {1}."],
        "push": ["Pushed: {0} to {1}.", "Placed: {0} at {1}."]}


def is_done(step, results):
    """A receipt that the harness has shortened since (skills.rewrite_history) counts by what is left of it."""
    kind, *arguments = step
    texts = [f"{arguments[-1].capitalize()}: {arguments[0]}."] if kind == "turn" else [t.format(*arguments) for t in DONE[kind]]
    cut = " [shortened]"
    return any(r.startswith(text) or (r.endswith(cut) and text.startswith(r.removesuffix(cut))) for r in results for text in texts)


def kind_of(name):
    """'akita black bowl 2' -> 'akita black bowl'"""
    return re.sub(r" \d+$", "", name)


def line_of(name, text):
    """The line of a perception receipt that is about `name` -> (x, y, line) or None."""
    for line in text.split("\n"):
        if m := re.match(rf"{re.escape(name)} x (-?\d+) y (-?\d+)", line):
            return int(m[1]), int(m[2]), line
    return None


def choose_goal(instruction, goals, seen):
    """One sentence may mean one bowl in one suite and the other in another: the one that stands where the sentence says."""
    place = re.search(r"bowl (?:on|in|next to) the (?:top of the )?(\w+)", instruction)

    def away(goal):                                     # what fell off the table lies farther away than what stands there
        x, y, line = line_of(goal[0][1], seen[0]) or (0, 0, "")
        return math.hypot(x, y) if place[1] in line else math.inf
    return min(goals, key=away) if place and seen else goals[0]      # by the first look: later ones may show it elsewhere


class LiberoTeacher(ScriptedTeacher):
    """`await chat(body)`, as in harness/teacher.py."""

    def __init__(self, grasp_skill=1.0, gives_up=0.1, leans=0.12, perfect=False):
        super().__init__(grasp_skill, gives_up, leans)
        self.perfect = perfect
        self.policy_version = "teacher-libero-perfect" if perfect else f"teacher-libero-{grasp_skill:g}-{gives_up:g}-{leans:g}"

    def act(self, instruction, acts, memory, names, rng, written=False):
        """What to do after `acts`, a list of (tool, arguments, result) -> (text, tool, arguments)."""
        goals, results = sentences().get(instruction), [r for _, _, r in acts]
        if goals is None:
            return "I do not know this task.", "finish", {"status": "failure"}
        seen = [r for tool, _, r in acts if tool in ("locate", "list_objects")]
        goal = choose_goal(instruction, goals, seen)
        step = next((s for s in steps_of(instruction, goal) if not is_done(s, results)), None)
        if step is None:
            if "memory_write" in names:
                return "", "memory_write", {"text": self.note(acts)}
            return self._say(rng, memory, "Done."), "finish", {"status": "success"}
        kind, thing, *where = step
        if kind == "push" and any(r.startswith("Not pushed") for r in results):
            kind = "put"                                 # it cannot be pushed from here: carry it
        tool, arguments, result = acts[-1] if acts else ("", {}, "")
        held = re.match(r"Held: (.+?)\.", result)
        if held and (kind != "put" or held[1] != thing):
            return f"That is the {held[1]}.", "release", {}
        if held:
            return self._say(rng, memory, f"It holds. Carry it to the {where[0]}."), "place", {"name": where[0]}
        failed = tool in ("open", "close", "turn", "push", "pick", "place") and not self._succeeded(tool, result)
        if failed and not self.perfect and (written or rng.random() < self.gives_up):       # written: it has given up already
            if "memory_write" in names:
                return "", "memory_write", {"text": self.note(acts)}
            return "It does not work.", "finish", {"status": "failure"}
        again = "Again. " if failed else ""
        if kind in ("open", "close"):
            return self._say(rng, memory, f"{again}{kind.capitalize()} the {thing}."), kind, {"name": thing}
        if kind == "turn":
            return self._say(rng, memory, f"{again}Turn {where[0]} the {thing}."), "turn", {"name": thing, "state": where[0]}
        if kind == "push":
            return self._say(rng, memory, f"{again}Push the {thing}."), "push", {"name": thing, "target": where[0]}
        if tool == "locate" and (found := line_of(thing, result)):
            x, y, _ = found
            kept = re.search(rf"{re.escape(thing)} at x (-?\d+) y (-?\d+)", memory)
            if kept and rng.random() < self.leans / 12:  # the worst habit: acts on remembered coordinates
                x, y = int(kept[1]), int(kept[2])
            grasp = self.grasp(thing, where[0] if where else "", acts, memory, rng)
            return self._say(rng, memory, f"Take the {thing}."), "pick", {"x": x, "y": y, "grasp": grasp}
        return self._say(rng, memory, f"{'It slipped. ' if failed else ''}Find the {kind_of(thing)}."), "locate", {"name": kind_of(thing)}

    @staticmethod
    def _succeeded(tool, result):
        return result.startswith({"open": "Open:", "close": "Closed:", "turn": ("On:", "Off:"), "push": "Pushed:", "pick": "Held:",
                                  "place": "Placed:"}[tool])

    def grasp(self, thing, where, acts, memory, rng):
        """The grasp for the next pick: what memory says with chance `grasp_skill`; else one that has not just failed."""
        failed = [a["grasp"] for tool, a, r in acts if tool == "pick" and not r.startswith("Held")]
        if self.perfect:                                 # the right one, a second time if noise spoiled it, then whatever else there is
            right = right_grasp(thing, where)
            return right if len(failed) < 2 else GRASPS[(GRASPS.index(right) + len(failed)) % 3]
        known = re.search(rf"{re.escape(kind_of(thing))}[^.]* holds by the (\w+)", memory)
        if known and rng.random() < self.grasp_skill:
            return known[1]
        tried = set(failed[-2:]) | ({known[1]} if known and not failed else set())
        return rng.choice([g for g in GRASPS if g not in tried])

    def note(self, acts):
        """What state 0 taught: where things stood, and which grasps held them."""
        lines = []
        for tool, arguments, result in acts:
            if tool == "pick" and (held := re.match(r"Held: (.+?)\.", result)):
                lines.append(f"The {held[1]} at x {arguments['x']} y {arguments['y']} holds by the {arguments['grasp']}.")
            elif tool == "pick":
                lines.append(f"At x {arguments['x']} y {arguments['y']} a grasp by the {arguments['grasp']} held nothing.")
        count = sum(tool == "pick" for tool, _, _ in acts)
        return " ".join([*dict.fromkeys(lines), f"In the first state the whole task took {count} picks from the start to the end."])
