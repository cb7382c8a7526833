"""The protocol's tasks and initial states: which a command may use, and the refusals.

Initial states of every task: 0 builds task memory, 1-10 evaluate, 11-44 (on tabletop and robosuite also 100 and up) train, 45-49
validate and choose.
"""

import re

from harness import libero_plus, world
from records import BadInput

EVALUATION_STATES = range(1, 11)        # of every task: never collected from, never trained on
MEMORY_STATES = range(0, 1)
VALIDATION_STATES = range(45, 50)


def parse_suites(text, training=None):
    """'a,b' -> {suite: [Task]}; BadInput for an unknown one, and for one that the command `training` must not use."""
    from harness.world import task_list
    suites = {}
    for suite in text.split(","):
        if training and suite in libero_plus.SUITES:
            raise BadInput(f"--suites: {training} must not use {suite}: LIBERO-Plus is for evaluation alone (eval.py run … --inits 0)")
        try:
            suites[suite] = task_list(suite)
        except (ValueError, ImportError) as e:
            raise BadInput(f"--suites: {e}") from None
    return suites


def one_world(suites):
    """BadInput if the suites are of several worlds: each has a scripted expert and a global memory of its own."""
    worlds = sorted({world.world_of(s) for s in suites})
    if len(worlds) > 1:
        raise BadInput(f"--suites {','.join(suites)}: {' and '.join(worlds)} have a scripted expert and a global memory each; "
                       "run each in a command of its own")


def parse_inits(text, option="--inits"):
    """'1-10,45,100-199' -> [1, …]; duplicates and backward ranges refused."""
    inits = []
    for part in text.split(","):
        m = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not m:
            raise BadInput(f"{option} {text!r}: expected numbers and ranges such as 1-10,45, found {part!r}")
        if int(m[2] or m[1]) < int(m[1]):
            raise BadInput(f"{option} {text!r}: {part.strip()!r} runs backwards")
        inits += range(int(m[1]), int(m[2] or m[1]) + 1)
    if len(set(inits)) != len(inits):
        raise BadInput(f"{option} {text!r}: a number stands twice")
    return inits


def parse_tasks(text, suites):
    """--tasks (None: all) of {suite: [Task]} -> [(suite, index)]; BadInput for an index that a suite lacks."""
    chosen = None if text is None else parse_inits(text, "--tasks")
    for suite, tasks in suites.items():
        known = [t.index for t in tasks]
        if unknown := sorted(set(chosen or ()) - set(known)):
            raise BadInput(f"--tasks {text}: {suite} has no task {unknown[0]}; valid: {min(known)}-{max(known)}")
    return [(s, t.index) for s, tasks in suites.items() for t in tasks if chosen is None or t.index in chosen]


def check_states(specs, option="--inits"):
    """BadInput if a spec names an initial state that its world does not have."""
    from harness.world import task_list, world_class
    for suite, index, init in {(s["suite"], s["index"], s["init"]) for s in specs}:
        try:
            world_class(suite).check_init(task_list(suite)[index], init)
        except ValueError as e:
            raise BadInput(f"{option}: {e}") from None


def settle_noise(args, suites):
    """--noise not given is LIBERO's default where LIBERO runs, so that args.json says it; refused where no world has any."""
    if any(s.startswith("libero") for s in suites):
        args.noise = world.LIBERO_NOISE if args.noise is None else args.noise
    elif args.noise is not None:
        raise BadInput(f"--noise {args.noise:g}: {', '.join(sorted(suites))} have no noise; leave the option out (LIBERO suites have)")


def check_pictures(args, suites):
    """BadInput if --pictures are asked for of a world that cannot be rendered here: every episode would crash."""
    from harness.frames import check
    for name in sorted({world.world_of(s) for s in suites}) if args.pictures else ():
        try:
            print(f"--pictures: {name} is rendered by {check(name)}")
        except RuntimeError as e:
            raise BadInput(f"--pictures: {e}; no episode was run") from None


def refuse_held_out(episode, path):
    """BadInput if an episode that is to be trained on starts from a state that is for memory, evaluation or validation."""
    if episode.init in (*EVALUATION_STATES, *VALIDATION_STATES, *MEMORY_STATES):
        raise BadInput(f"{path}: episode {episode.episode_id} starts from state {episode.init} of {episode.task}; 0 is for memory, 1-10 "
                       "for evaluation, 45-49 for validation, and none of them is trained on; give a folder of collect.py or rollout.py")


def refuse_evaluation_states(inits, stage, option="--inits"):
    bad = [i for i in inits if i in EVALUATION_STATES or i in VALIDATION_STATES or i in MEMORY_STATES]
    if bad:
        raise BadInput(f"{option}: {stage} must not use states {bad[:12]}: 0 is for memory, 1-10 for evaluation, 45-49 for validation; "
                       "training states are 11-44, and on tabletop and robosuite also 100 upwards")
