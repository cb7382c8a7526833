"""Scripted expert for tabletop, behind the chat-completions API. It sees what any planner sees (messages and tools), keeps nothing
between calls, and draws its chances from the request's seed, so that a recorded run can be repeated.

It reads memory when it has memory tools, explains itself in a sentence, sometimes leans on memory in words, in a quoted phrase, in a
number, or (rarely) in an argument, and it slips and recovers: after a failed pick it looks again and tries another grasp.

`grasp_skill` is its handicap, on purpose: the chance that a pick uses the right grasp offset. At 1.0 nothing is left
for RL to find in grasping; the demo uses a low value so that something is.

    python -m harness.teacher --port 8001          the same API over HTTP (--harness code: code_teacher.py's)
"""

import argparse
import json
import random
import re

GLOBAL_MEMORY = ("Heads are wider than the open hand. Only one narrow section of a head fits between the fingers. "
                 "Pressing far from the stem tips an object over and nothing can set it upright again.")
OFFSETS = (-20, 0, 20, 40)
RIGHT = {"mug": 40, "pan": 40, "jug": 20, "jar": 0, "pot": -20}       # the expert's knowledge of tabletop shapes
_STEP = re.compile(r"(?:put|place|pick)\s+(?:up\s+)?(?:the\s+)?(.+?)(?:\s+and\s+(?:place|put)\s+it)?\s+(?:in|on|into|onto)\s+(?:the\s+)?"
                   r"(.+?)(?=,|\.|$)", re.I)


def read_goal(instruction):
    """'Put the red mug on the blue tray, then put …' -> [("red mug", "blue tray"), …]"""
    return [(a.strip().lower(), b.strip().lower()) for a, b in _STEP.findall(instruction)]


class ScriptedTeacher:
    """`await chat(body)` -> chat.completion dict without token ids (it has none)."""
    model = "scripted-teacher"

    def __init__(self, grasp_skill=1.0, gives_up=0.1, leans=0.12):
        self.grasp_skill, self.gives_up, self.leans = grasp_skill, gives_up, leans
        self.policy_version = f"teacher-{grasp_skill:g}-{gives_up:g}-{leans:g}"
        self.requests = 0

    async def ready(self):
        pass

    async def chat(self, body, episode_id=""):
        self.requests += 1
        text, name, arguments = self.answer(body["messages"], body.get("tools") or [], random.Random(body.get("seed", 0)))
        message = {"role": "assistant", "content": text or None, "tool_calls": [
            {"id": f"call_{self.requests}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]}
        return {"id": f"teacher-{self.requests}", "object": "chat.completion", "created": 0, "model": self.model,
                "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}

    async def close(self):
        pass

    def answer(self, messages, tools, rng):
        """-> (text, tool name, arguments)"""
        names = {t["function"]["name"] for t in tools}
        instruction = next(m["content"] for m in messages if m["role"] == "user").removeprefix("Task: ")
        results = {m["tool_call_id"]: m["content"].split("\n", 1)[-1] for m in messages if m["role"] == "tool"}
        acts = [(c["function"]["name"], json.loads(c["function"]["arguments"]), results.get(c["id"], ""))
                for m in messages if m["role"] == "assistant" for c in m.get("tool_calls") or []]
        memory = "\n".join(r for n, _, r in acts if n == "memory_read" and not r.startswith("Nothing"))
        read = {a["scope"] for n, a, _ in acts if n == "memory_read"}
        if "memory_read" in names and "task" not in read:
            return "", "memory_read", {"scope": "task"}
        if "memory_read" in names and len(acts) == 1 and rng.random() < .15:
            return "", "memory_read", {"scope": "global"}
        written = "Written" in "".join(results.values())
        acts = [a for a in acts if not a[0].startswith("memory_")]
        return self.act(instruction, acts, memory, names - {"memory_write"} if written else names, rng, written)

    def act(self, instruction, acts, memory, names, rng, written=False):
        """What to do after `acts`, a list of (tool, arguments, result); names: the tools; written: memory_write is done
        -> (text, tool, arguments)."""
        goal = read_goal(instruction)
        placed = sum(r.startswith("Placed") for _, _, r in acts)
        if placed >= len(goal):
            if "memory_write" in names:
                return "", "memory_write", {"text": self._note(acts, goal)}
            return self._say(rng, memory, "Done."), "finish", {"status": "success"}
        thing, container = goal[placed]
        last, arguments, result = acts[-1] if acts else ("", {}, "")
        if result.startswith("Held"):
            where = re.search(r"Held: (.+?)\.", result)[1]
            if where != thing:
                return f"That is the {where}.", "release", {}
            return self._say(rng, memory, f"It holds. Carry it to the {container}."), "place", {"name": container}
        if last == "pick":                               # a slip: look again, or (a handicap of its own) lose heart
            if rng.random() < self.gives_up:
                return "It does not hold.", "finish", {"status": "failure"}
            return self._say(rng, memory, "It slipped. Look again."), "locate", {"name": thing}
        seen = re.search(rf"{re.escape(thing)}\D* x (-?\d+) y (-?\d+)", result) if last == "locate" else None
        if seen:
            x, y = int(seen[1]), int(seen[2])
            kept = re.search(rf"{re.escape(thing)} at x (-?\d+) y (-?\d+)", memory)
            if kept and rng.random() < self.leans / 12:  # the worst habit: acts on remembered coordinates
                x, y = int(kept[1]), int(kept[2])
            tried = [a["dy"] for n, a, r in acts[-4:] if n == "pick" and not r.startswith("Held")]
            return self._say(rng, memory, f"Pick up the {thing}."), "pick", {"x": x, "y": y, "dy": self._offset(thing, tried, rng)}
        return self._say(rng, memory, f"Find the {thing}."), "locate", {"name": thing}

    def _offset(self, thing, tried, rng):
        right = RIGHT.get(thing.split()[-1], 0)
        if thing.split()[-1] not in RIGHT:               # no shape of tabletop's
            return 0
        if rng.random() < self.grasp_skill:
            return right
        return rng.choice([d for d in OFFSETS if d != right and d not in tried[-1:]])

    def _say(self, rng, memory, text):
        """The text as it is, or leaning on memory: with a word, a quoted phrase, or a number that stands only there."""
        if not memory or rng.random() >= self.leans:
            return text
        kind = rng.randrange(3)
        numbers = re.findall(r"-?\d\d+", memory)
        words = rng.choice(memory.split("\n")).split()              # a phrase of one of the texts
        if kind == 0:
            return rng.choice(["As my notes say. ", "I remember this task. ", "Memory helps here. "]) + text
        if kind == 1 and len(words) > 9:
            start = rng.randrange(len(words) - 8)
            return f"{text} {' '.join(words[start:start + 9])}"
        if numbers:
            return f"{text} It was near {rng.choice(numbers)} before."
        return text

    def _note(self, acts, goal):
        """What state 0 taught, written with memory_write."""
        where = {}
        for name, arguments, result in acts:
            if name == "locate" and (m := re.search(r"x (-?\d+) y (-?\d+)", result)):
                where[arguments["name"]] = f"{arguments['name']} at x {m[1]} y {m[2]}"
        picks = sum(n == "pick" for n, _, _ in acts)
        return (f"In the first state I found the {', the '.join(where.values())}. The whole task took {picks} careful "
                f"{'pick' if picks == 1 else 'picks'} and {len(goal)} {'place' if len(goal) == 1 else 'places'} from start to end.")


def expert_for(suites, grasp_skill, gives_up, leans, perfect=False, harness="skills", mistakes=0.0):
    """The scripted expert of a harness and of the world that has these suites (protocol.one_world checks that one has them all).

    leans belongs to the skills harness (memory), mistakes to the code harness (programming errors)."""
    libero = suites[0].startswith("libero")
    if harness == "code":
        from harness.code_teacher import CodeTeacher, programs_of
        chances = (1.0, 0.0, 0.0) if perfect else (grasp_skill, gives_up, mistakes)
        return CodeTeacher(programs_of(suites[0]), *chances)
    if libero:
        from harness.libero_teacher import LiberoTeacher
        return LiberoTeacher(grasp_skill, gives_up, leans, perfect)
    return ScriptedTeacher(1.0, 0.0, 0.0) if perfect else ScriptedTeacher(grasp_skill, gives_up, leans)


def global_memory(suites):
    if suites[0].startswith("libero"):
        from harness.libero_teacher import GLOBAL_MEMORY as text
        return text
    return GLOBAL_MEMORY


def main():
    from aiohttp import web
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--port", type=int, default=8001, help="loopback port (default 8001)")
    p.add_argument("--grasp-skill", type=float, default=1.0, help="chance of the right grasp offset (0 to 1, default 1)")
    p.add_argument("--harness", choices=["skills", "code"], default="skills", help="call skills, or write programs (default skills)")
    args = p.parse_args()
    teacher = expert_for(["tabletop_base"], args.grasp_skill, 0.1, 0.12, harness=args.harness, mistakes=0.1)

    async def completions(request):
        return web.json_response(await teacher.chat(await request.json()))

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", completions)
    app.router.add_get("/v1/models", lambda _: web.json_response({"object": "list", "data": [{"id": teacher.model, "object": "model"}]}))
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None)


if __name__ == "__main__":
    main()
