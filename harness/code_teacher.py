"""Scripted expert of the code harness, behind the chat-completions API: it writes programs. It sees what any planner sees (two messages),
keeps nothing between calls, and draws its chances from the request's seed.

Its knowledge lies in one module a world (tabletop_programs.py, libero_programs.py, robosuite_programs.py), of pure functions of text:
    steps(instruction) -> [{"object", …}] or None       choices(step) -> grasps, the right one first       MANY: a program may do several
    program(steps, choices, style, rng, known) -> text in one of STYLES           defined(code) -> helpers that HELPERS_STYLE has defined
    is_done(step, output) -> whether a block's output says that the step is done
Handicaps, on purpose: `grasp_skill`, the chance that a grasp is the right one; `gives_up`, the chance to FINISH after a slip; `mistakes`,
the chance that a first program holds a programming error, which it repairs once it has read the message.
"""

import random
import re

from harness.world import world_of

ERRORS = (("sample_grasp_pose(", "get_grasp_pose("), ("close_gripper()", "close_gripper(0)"), ("open_gripper()", "open_gripper("))
_PROGRAM = re.compile(r"^Program so far:\n```python\n(.*)\n```$", re.M | re.S)
_OUTPUT = re.compile(r"^Output of block \d+:\n(.*?)(?=^Errors:$|\Z)", re.M | re.S)


class CodeTeacher:
    """`await chat(body)` -> chat.completion dict without token ids (it has none). programs: the module of its world."""
    model = "scripted-teacher"

    def __init__(self, programs, grasp_skill=1.0, gives_up=0.1, mistakes=0.1):
        self.programs, self.grasp_skill, self.gives_up, self.mistakes = programs, grasp_skill, gives_up, mistakes
        self.policy_version = f"code-teacher-{grasp_skill:g}-{gives_up:g}-{mistakes:g}"
        self.requests = 0

    async def ready(self):
        pass

    async def close(self):
        pass

    async def chat(self, body, episode_id=""):
        self.requests += 1
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
        message = {"role": "assistant", "content": self.answer(text, random.Random(body.get("seed", 0)))}
        return {"id": f"teacher-{self.requests}", "object": "chat.completion", "created": 0, "model": self.model,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}

    def answer(self, text, rng):
        """The harness's user message -> reply."""
        instruction = re.match(r"Task: (.*)", text)[1]
        goal, found = self.programs.steps(instruction), _PROGRAM.search(text)
        if not goal:
            return "FINISH"                              # no program of this expert does that task
        if not found:
            return self._write("", goal, [], None, rng)
        code, output = found[1], _OUTPUT.search(text)[1]
        last = re.split(r"^# block \d+$", code, flags=re.M)[-1]
        failed = "\nErrors:\n" in text
        mentioned = [k for k, s in enumerate(goal) if f'"{s["object"]}"' in last] or [0]
        done = set(range(mentioned[0]))                                      # it goes on once a step is done
        done |= {k for k in mentioned if not failed and self.programs.is_done(goal[k], output)}
        todo = [s for k, s in enumerate(goal) if k not in done]
        if not todo:
            return "FINISH"
        if not failed and "slipped" in output and rng.random() < self.gives_up:
            return "FINISH"
        return "REGENERATE\n" + self._write(code, todo, self._tried(todo[0], last), failed, rng)

    def _tried(self, step, last):
        """The choices with which the last block, seen without its comments, did this step."""
        bare = lambda text: re.sub(r"^\s*#.*\n?", "", text, flags=re.M).strip()
        return [c for c in self.programs.choices(step)
                if any(bare(last).endswith(bare(self.programs.program([step], [c], style, random.Random(0), self.programs.defined(last))))
                       for style in self.programs.STYLES)]

    def _write(self, code, todo, tried, failed, rng):
        """A fenced program for the first of the steps `todo`, or (some styles) for all. failed: the last one raised."""
        programs = self.programs
        known = [] if failed else programs.defined(code)                     # after an error it defines them again
        style = programs.HELPERS_STYLE if programs.defined(code) else rng.choice(programs.STYLES)
        todo = todo[:1] if style == "plain" or not programs.MANY or rng.random() < .3 else todo
        chosen = [self._choose(s, tried if k == 0 else [], rng) for k, s in enumerate(todo)]
        text = programs.program(todo, chosen, style, rng, known)
        if failed is None and rng.random() < self.mistakes:                  # in the first program alone: repaired in the second
            right, wrong = rng.choice([e for e in ERRORS if e[0] in text] or [("", "")])
            text = text.replace(right, wrong, 1)
        return f"```python\n{text.rstrip()}\n```"

    def _choose(self, step, tried, rng):
        right, *wrong = self.programs.choices(step)
        if not wrong or rng.random() < self.grasp_skill:
            return right
        return rng.choice([c for c in wrong if c not in tried] or wrong)


def programs_of(suite):
    """Suite name -> the module that knows its world's programs."""
    world = world_of(suite)
    if world == "tabletop":
        from harness import tabletop_programs as programs
    elif world == "libero":
        from harness import libero_programs as programs
    else:
        from harness import robosuite_programs as programs
    return programs
