"""The one interface in which a world and a harness meet, so that each harness runs on each world.

Units: planners see millimetres (integers) and degrees; worlds work in metres and radians inside.
A world is used by one thread at a time. `threads_ok` says whether several may live in one process.
"""

from dataclasses import dataclass, field


LIBERO_NOISE = 4.0      # mm; default imperfection of the LIBERO executor: a perfect plan needs recovery now and then, as a VLA does


@dataclass(frozen=True)
class Task:
    """One task of a suite. `goal`: list of (predicate, object, target or None), all of which must hold."""
    suite: str
    index: int
    instruction: str
    goal: tuple

    @property
    def id(self):
        return f"{self.suite}/{self.index}"


@dataclass(frozen=True)
class Skill:
    """One skill that a planner may call: what its tool specification says, and the method of the world that runs it."""
    name: str
    description: str
    parameters: dict                    # JSON schema of the arguments
    method: str                         # world.<method>(**arguments) -> Receipt
    moves: bool = True                  # False: perception, changes nothing


@dataclass
class Receipt:
    """What a skill reports. `text` is what the planner reads; `facts` what tests and adapters read (never the planner)."""
    ok: bool
    text: str
    facts: dict = field(default_factory=dict)   # {"event": "held" | "empty" | "slip" | "placed" | "dropped" | …, "object": …, …}


class World:
    """Reset to (task, init), act, observe, success, privileged state."""
    name = ""
    threads_ok = True                   # several worlds may run in threads of one process
    skills: tuple = ()                  # the Skills this world offers

    @classmethod
    def tasks(cls, suite):
        """suite name -> list[Task]; KeyError-like ValueError listing the valid names for an unknown one."""
        raise NotImplementedError

    def reset(self, task, init):
        """Puts the complete start state of (task, init) in place; the same state in any process after any history."""
        raise NotImplementedError

    @classmethod
    def check_init(cls, task, init):
        """ValueError, naming the valid range, if `init` is no initial state of the task. Builds nothing."""
        raise NotImplementedError

    def disturb(self, noise, seed):
        """Level (mm; None or 0: none) and seed of the executor's physical imperfection, from the next reset on."""
        if noise:
            raise ValueError(f"the {self.name} world has no noise, found {noise} mm")

    def state_hash(self):
        """Hex digest of the complete simulator state; after reset it identifies the start state."""
        raise NotImplementedError

    def success(self):
        """The task's predicate, now. Sets `latched`, which stays true until reset; each world says how often it looks while skills run."""
        raise NotImplementedError

    latched = False
    held = None                         # name of the object in the hand

    def unrecoverable(self):
        """None, or a phrase: what happened that no skill can undo (e.g. an object fell off the table)."""
        return None

    def objects(self):
        """Perception with privileged poses: list of {"name", "x", "y", "z"} in integer millimetres, containers included."""
        raise NotImplementedError

    def privileged(self):
        """dict of named privileged quantities (floats, metres), for critics and reports; never shown to a planner."""
        raise NotImplementedError

    def render(self, width=256, height=256):
        """PNG bytes of the present scene. Nothing is rendered unless this is called."""
        raise NotImplementedError

    def close(self):
        pass


def make_world(name):
    """'tabletop' | 'libero' | 'robosuite' -> World. Imports only what that world needs."""
    if name == "tabletop":
        from harness.tabletop import Tabletop
        return Tabletop()
    if name == "libero":
        from harness.libero import Libero
        return Libero()
    if name == "robosuite":
        from harness.robosuite_world import Robosuite
        return Robosuite()
    raise ValueError(f"unknown world {name!r}; valid: tabletop, libero, robosuite")


def world_class(suite):
    name = world_of(suite)
    if name == "tabletop":
        from harness.tabletop import Tabletop
        return Tabletop
    if name == "robosuite":
        from harness.robosuite_world import Robosuite
        return Robosuite
    from harness.libero import Libero
    return Libero


def task_list(suite):
    """Suite name -> list[Task] of the world that has it."""
    if world_of(suite) != "libero":
        return world_class(suite).tasks(suite)
    try:
        return world_class(suite).tasks(suite)
    except ValueError as e:
        raise ValueError(f"{e}; on tabletop: tabletop_base, tabletop_swap, tabletop_task; and robosuite") from None


def world_of(suite):
    """Suite name -> world name."""
    return next((name for name in ("tabletop", "robosuite") if suite.startswith(name)), "libero")
