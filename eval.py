"""Measures planners: success with 95 % intervals, paired exact tests, kinds of failure, figures.

    run      episodes of a checkpoint (or of a running server) on given initial states
    compare  two reports, paired by (task, init, attempt): wins, losses, exact sign test
    table    several reports side by side: success, where the gain comes from, learning curve

Reads:  run: a checkpoint folder. compare, table: output folders of `run` (or their report.json).
Writes: run: DIR/{calls,episodes,arrivals}.jsonl, images/, args.json, manifest.json, and last report.json; with
        --shard i/n all of it in DIR/shard-i-of-n: compare and table read such a DIR once every shard is there.
        compare: DIR/compare.json, compare.png. table: DIR/table.md, table.json, success.png, learning.png.

An invalid episode (infrastructure) is run again (--retries); an attempt that stays invalid leaves every rate and stands
beside it as a count. A failed one counts as 0.

Departures from the papers:
  1. Rates carry Wilson intervals and the number of invalid episodes.
  2. The sign test is exact, two-sided and paired by (task, init, attempt); unlike start states are refused.
  3. A report names the predicate that its reward is: success at any step (latched) or in the last state (final).
With several attempts per start, intervals and test take attempts as independent: `starts` says how many there are.

    python eval.py run --model run/rl-3 --suites tabletop_base,tabletop_swap --inits 1-10 --output run/eval/rl
    python eval.py compare run/eval/sft run/eval/rl
    python eval.py table run/eval/{base,sft,rl} --names base SFT RL --rounds run/round-* --output run/table
    in parts: python eval.py run … --shard 0/4, up to 3/4, or torchrun --nproc_per_node 4 eval.py run …
"""

import argparse
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import adapters
import figures
import protocol
import serving
import records
import template_kwargs
from harness import frames, libero_plus
from harness.world import world_of
from records import BadInput
from stats import percent, rate, sign_test

FAILURES = ("grasp", "language", "second_step", "format", "other")     # Episode.extra["failure"], set by the harness
MEASURES = {"reward": lambda e: e.reward, "latched": lambda e: e.success_latched, "final": lambda e: e.success_final}


# ---------------------------------------------------------------------------------------------- reports

def suite_of(episode):
    return episode.task.rsplit("/", 1)[0]


def groups_of(episode):
    """What an episode is counted under: "all", its suite and, if that is of LIBERO-Plus, its category of perturbation."""
    try:
        category = libero_plus.category_of(episode.task)
    except ImportError as e:
        raise BadInput(f"episode {episode.episode_id}: {e}") from None
    return ["all", suite_of(episode), *([category] if category else [])]


def by_suite(episodes):
    """episodes -> {"all": …, suite: …, category: …, …}"""
    groups = {"all": []}
    for e in episodes:
        for name in groups_of(e):
            groups.setdefault(name, []).append(e)
    return dict(sorted(groups.items(), key=lambda item: (item[0] != "all", item[0] in libero_plus.CATEGORIES, item[0])))


def failure_of(episode):
    """None for a success by reward, else the harness's word for what went wrong ("other" if it has none)."""
    if episode.reward:
        return None
    name = episode.extra.get("failure") or "other"
    if name not in FAILURES:
        raise BadInput(f"episode {episode.episode_id}: unknown failure {name!r}; valid: {', '.join(FAILURES)}")
    return name


def reward_name(valid):
    """The predicate that the rewards of these valid episodes are."""
    same = [m for m in ("latched", "final") if all(bool(e.reward) == MEASURES[m](e) for e in valid)]
    return "success_" + "_and_".join(same) if same else "neither success_latched nor success_final"


def one_per_attempt(episodes, where):
    """Episodes -> ({(task, init, attempt): the valid try, else the last}, number of tries that were run again)."""
    kept, replaced = {}, 0
    for e in episodes:
        key = (e.task, e.init, e.attempt)
        if key in kept and e.valid and kept[key].valid:
            raise BadInput(f"{where}: task {e.task} init {e.init} attempt {e.attempt} is there twice, both valid "
                           f"({kept[key].episode_id}, {e.episode_id}); expected one")
        replaced += key in kept
        if key not in kept or not kept[key].valid:
            kept[key] = e
    return kept, replaced


def part_rate(part):
    return {**rate(e.reward for e in part if e.valid), "invalid": sum(not e.valid for e in part)}


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


def summarize(episodes):
    """Episodes, one per attempt -> the counted part of a report. Rates are over valid episodes alone."""
    valid = [e for e in episodes if e.valid]
    picks = sum(e.extra.get("picks", 0) for e in valid)
    steps = {e.task: e.extra["steps"] for e in valid if "steps" in e.extra}    # a task's goals; a crash tells none
    return {
        "reward_is": reward_name(valid), **part_rate(episodes),
        "success_latched": rate(e.success_latched for e in valid),
        "success_final": rate(e.success_final for e in valid),
        "invalid_reasons": dict(Counter(e.reason for e in episodes if not e.valid)),
        "starts": len({(e.task, e.init) for e in valid}),
        "failures": {f: sum(failure_of(e) == f for e in valid) for f in FAILURES},
        "ends": {end: sum(e.end == end for e in valid) for end in records.ENDS},
        "mean_calls": mean(len(e.calls) for e in valid), "mean_seconds": mean(e.seconds for e in valid),
        "picks_right": sum(e.extra.get("picks_right", 0) for e in valid) / picks if picks else None,
        "steps": {str(n): part_rate([e for e in episodes if steps.get(e.task) == n])
                  for n in sorted(set(steps.values()))},
        "suites": {s: part_rate(part) for s, part in by_suite(episodes).items() if s != "all"},
        "tasks": {t: part_rate([e for e in episodes if e.task == t]) for t in sorted({e.task for e in episodes})}}


class Report(NamedTuple):
    name: str
    folder: Path
    episodes: list                      # Episodes
    header: dict                        # report.json: sampling, policy_version, …


def parts_of(path, last, command):
    """An output folder -> [itself], or its shards if all are there. `last`: the file that makes a folder whole."""
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{path}: no such folder; give the --output of {command}")
    parts = sorted(folder.glob("shard-*-of-*")) or [folder]
    if parts != [folder]:
        wanted = int(parts[0].name.split("-")[-1])
        missing = sorted({f"{i}/{wanted}" for i in range(wanted)} - {"{1}/{3}".format(*p.name.split("-")) for p in parts})
        if missing or len(parts) != wanted:
            what = f"run the missing {command} --shard {', '.join(missing)}" if missing else "two splits are mixed; run into another folder"
            raise BadInput(f"{folder}: {len(parts)} of {wanted} shards are there; {what}")
    for part in parts:
        if not (part / last).exists():
            raise BadInput(f"{part}: no {last}, so this run is not finished; repeat its {command} command")
    return parts


def load(path, name=None):
    """An output folder of `run` (or its report.json) -> Report; shards count as one report."""
    path = Path(path)
    path = path.parent if path.name == "report.json" else path
    parts = parts_of(path, "report.json", "`eval.py run`")
    headers = [records.read_json(p / "report.json") for p in parts]
    for part, header in zip(parts, headers, strict=True):
        for field in ("harness", "sampling", "policy_version", "noise", "seed"):
            if header.get(field) != headers[0].get(field):
                raise BadInput(f"{part}/report.json: {field} {header.get(field)!r} is not that of the other shards, "
                               f"{headers[0].get(field)!r}; evaluate again into another folder")
    kept, _ = one_per_attempt((e for p in parts for e in records.read_episodes(p / "episodes.jsonl")), path)
    if not kept:
        raise BadInput(f"{path}/episodes.jsonl: no episodes")
    return Report(name or path.name, path, list(kept.values()), headers[0])


# ---------------------------------------------------------------------------------------------- paired comparison

def pairs(a, b):
    """Two Reports -> ([(episode of a, episode of b)] valid on both sides, counts of what could not be paired)."""
    left, right = ({(e.task, e.init, e.attempt): e for e in r.episodes} for r in (a, b))
    both = [(left[k], right[k]) for k in sorted(left.keys() & right.keys())]
    for x, y in both:
        if x.start_state and y.start_state and x.start_state != y.start_state:
            raise BadInput(f"{b.folder}: task {y.task} init {y.init} has start state {y.start_state[:12]}, but "
                           f"{x.start_state[:12]} in {a.folder}; evaluate both again with one version of the world")
    paired = [(x, y) for x, y in both if x.valid and y.valid]
    return paired, {"only_in_a": len(left) - len(both), "only_in_b": len(right) - len(both),
                    "invalid_on_a_side": len(both) - len(paired)}


def compare(a, b, measure="reward"):
    """Report b against Report a -> dict: per suite (and "all") both rates, wins, losses and ties of b, p."""
    paired, unpaired = pairs(a, b)
    get, rows = MEASURES[measure], {}
    in_a, in_b = by_suite(a.episodes), by_suite(b.episodes)
    for name in sorted(in_a.keys() | in_b.keys(), key=lambda s: (s != "all", s)):
        ea, eb = in_a.get(name, []), in_b.get(name, [])
        mine = [(bool(get(x)), bool(get(y))) for x, y in paired if name in groups_of(x)]
        wins, losses = sum(y and not x for x, y in mine), sum(x and not y for x, y in mine)
        rows[name] = {
            "a": rate(get(e) for e in ea if e.valid), "invalid_a": sum(not e.valid for e in ea),
            "b": rate(get(e) for e in eb if e.valid), "invalid_b": sum(not e.valid for e in eb),
            "pairs": len(mine), "wins": wins, "losses": losses, "ties": len(mine) - wins - losses,
            "p": sign_test(wins, losses)}
    starts = len({(x.task, x.init) for x, _ in paired})
    return {"a": str(a.folder), "b": str(b.folder), "names": [a.name, b.name], "measure": measure,
            "reward_is": [reward_name([e for e in r.episodes if e.valid]) for r in (a, b)],
            "starts": starts, "unpaired": unpaired, "suites": rows}


def verdict(row, names):
    """'RL against SFT: 121 won, 74 lost, 605 tied of 800 pairs, exact two-sided sign test p = 0.00094'"""
    return (f"{names[1]} against {names[0]}: {row['wins']} won, {row['losses']} lost, {row['ties']} tied of "
            f"{row['pairs']} pairs, exact two-sided sign test p = {row['p']:.2g}")


def show_comparison(result, reports):
    """Prints what `compare` found: whatever makes the two reports unlike, then a block for each suite."""
    names = result["names"]
    for r, is_a in zip(reports, result["reward_is"], strict=True):
        print(f"{r.name}: {r.folder}, policy {r.header.get('policy_version') or 'unnamed'}, sampling "
              f"{(r.header.get('sampling') or {}).get('profile', 'unnamed')}, reward is {is_a}")
    if reports[0].header.get("sampling") != reports[1].header.get("sampling"):
        print("note: the two were sampled differently")
    if reports[0].header.get("harness") != reports[1].header.get("harness"):
        print("note: the two were played in different harnesses")
    noise = [(r.header.get("noise"), r.header.get("seed", 0)) for r in reports]           # its draws are seeded by both
    if noise[0] != noise[1] and any(level for level, _ in noise):
        print("note: the executor's noise was another: " + ", ".join(
            f"{name} {level} mm, seed {seed}" for name, (level, seed) in zip(names, noise, strict=True)))
    shown = [s for s in result["suites"] if s != "all" or len(result["suites"]) != 2]      # one suite: not shown twice
    for suite in shown:
        row = result["suites"][suite]
        print(f"\n{suite} ({result['measure']})")
        for name, side in zip(names, "ab", strict=True):
            print(f"  {name:<12} {percent(row[side], row['invalid_' + side])}")
        print(f"  {verdict(row, names)}")
    u = result["unpaired"]
    print(f"\n{result['starts']} starts (task, init) paired; not paired: {u['only_in_a']} only in {names[0]}, "
          f"{u['only_in_b']} only in {names[1]}, {u['invalid_on_a_side']} invalid on a side")


def points(k, n):
    """k of n in %, 0 if n is 0."""
    return 100 * k / n if n else 0.0


def gains(summaries):
    """Points of success that each report gained over the one before it, by the kind of failure that became rarer
    (negative: more frequent). Every failed episode has one kind, so the kinds add to the whole gain."""
    return [{f: points(x["failures"][f], x["n"]) - points(y["failures"][f], y["n"]) for f in FAILURES}
            for x, y in itertools.pairwise(summaries)]


# ---------------------------------------------------------------------------------------------- subcommands

def make_expert(args, suites):
    """--expert -> (scripted upstream, the memory folder that it may read or None)."""
    from harness.teacher import expert_for
    protocol.one_world(suites)
    if args.expert == "perfect":
        return expert_for(list(suites), 1.0, 0.0, 0.0, perfect=True, harness=args.harness), None
    saved, memory = records.read_json(records.folders(args.teacher_run)[0] / "args.json"), Path(args.teacher_run).resolve() / "memory"
    if saved.get("stage") != "collect" or saved.get("teacher") != "scripted":
        raise BadInput(f"--teacher-run {args.teacher_run}: its args.json is of no collect.py run with --teacher scripted")
    if saved["harness"] != args.harness:
        raise BadInput(f"--teacher-run {args.teacher_run}: is of --harness {saved['harness']}, this command of {args.harness}")
    handicap = {k: saved[k] for k in ("grasp_skill", "gives_up", "leans", "mistakes") if k in saved}
    print(f"expert: {' '.join(f'{k}={v}' for k, v in handicap.items())}, inherited from {args.teacher_run}")
    if args.expert == "memory" and not memory.is_dir():
        raise BadInput(f"--teacher-run {args.teacher_run}: has no memory/; it was collected with --no-memory or --harness code")
    if args.expert == "memory" and (unknown := suites.keys() - saved["suites"].split(",")):
        raise BadInput(f"--teacher-run {args.teacher_run}: explored {saved['suites']}, so it has no memory of {', '.join(sorted(unknown))}")
    return expert_for(list(suites), **handicap, harness=args.harness), str(memory) if args.expert == "memory" else None


def choose_film(args, specs):
    """--video -> the spec of the episode to film, with "video": the file to write; or None. BadInput if that cannot be done here."""
    if not args.video:
        if args.video_format:
            raise BadInput(f"--video-format {args.video_format}: there is no --video to write in it")
        return None
    names = {"{suite}/{index}:{init}:{attempt}".format(**s): s for s in specs}
    film = names.get(args.video) or names.get(f"{args.video}:0")
    if not film:
        raise BadInput(f"--video {args.video}: not among this run's episodes; expected SUITE/INDEX:INIT or "
                       f"SUITE/INDEX:INIT:ATTEMPT, e.g. {next(iter(names))}")
    form = args.video_format or "gif"
    path, saved = (Path(args.output) / f"episode.{form}").resolve(), Path(args.output) / "args.json"
    if path.exists() and saved.exists() and (other := records.read_json(saved).get("video")) not in (None, args.video):
        raise BadInput(f"--video {args.video}: {path} is the film of {other}; give another --output")
    plus = libero_plus.of_task(f"{film['suite']}/{film['index']}")
    if plus and (why := libero_plus.reason(plus, pictures=True)):
        raise BadInput(f"--video {args.video}: {why}; no episode was run")
    try:
        print(f"--video: rendered by {frames.check(world_of(film['suite']), form)}")
    except RuntimeError as e:
        raise BadInput(f"--video {args.video}: {e}; no episode was run") from None
    film["video"] = str(path)
    return film


def run_episodes(args):
    inits, suites = protocol.parse_inits(args.inits), protocol.parse_suites(args.suites)
    named = protocol.parse_tasks(args.tasks, suites)
    tasks = libero_plus.runnable(named, args.pictures)
    # Attempts and states outermost: a run that is cut by --limit (on tabletop also by STOP) has still seen every task.
    specs = [{"suite": s, "index": i, "init": init, "attempt": a}
             for a in range(args.attempts) for init in inits for s, i in tasks][:args.limit]
    if not specs or (args.limit is not None and args.limit < 1):
        raise BadInput(f"--suites {args.suites} --tasks {args.tasks} --inits {args.inits} --attempts "
                       f"{args.attempts} --limit {args.limit}: no episode is left to run")
    film = choose_film(args, specs)
    plus = suites.keys() <= libero_plus.SUITES.keys()           # its one state, 0, is held out: no stage trains on these suites
    trained = [i for i in inits if not plus and i not in (*protocol.EVALUATION_STATES, *protocol.VALIDATION_STATES)]
    if trained:
        print(f"note: states {args.inits} are not all held out ({len(trained)} are memory or training states)")
    if args.expert:
        upstream, memory = make_expert(args, suites)
        if memory and (lost := [f"{s}/{i}" for s, i in tasks if not (Path(memory) / f"{s}-{i}.md").exists()]):
            print(f"note: {memory} has no task memory of {len(lost)} of {len(tasks)} tasks, e.g. {lost[0]}")
        specs = [{**s, "memory": memory} for s in specs]
    else:
        template_kwargs.check(args.chat_template_kwargs, args.model)
        template_kwargs.note_training(args.chat_template_kwargs, args.model)
        upstream = serving.make_upstream(args)
    policy_version, began = upstream.policy_version, time.monotonic()
    episodes, folder = adapters.run(args, specs, "eval", upstream)
    if not (folder / "manifest.json").exists():      # a STOP file or a signal ended the run; adapters.run has said so
        return records.STOPPED
    if film and any((e.task, e.init, e.attempt) == adapters.Run.key(film) for e in episodes):     # one part of several films
        done = Path(film["video"]).exists()
        print(f"filmed: {film['video']}, and its contact sheet beside it" if done else
              f"note: {args.video} had been run before, or crashed: nothing was filmed; give another --output")
    kept, replaced = one_per_attempt(episodes, folder)
    path, seconds = folder / "report.json", round(time.monotonic() - began, 1)
    if path.exists():                                # a finished command was repeated: it ran nothing
        seconds = records.read_json(path)["wall_seconds"]
    sent = {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    report = {"harness": args.harness, "policy_version": policy_version, "model": str(args.expert or args.model),
              "noise": args.noise, "seed": args.seed,
              "sampling": {"profile": args.sampling, **records.PROFILES[args.sampling], **sent}, "inits": args.inits,
              "attempts": args.attempts, "held_out": not trained, "left_out": len(named) - len(tasks), **summarize(kept.values()),
              "run_again": replaced, "wall_seconds": seconds}               # of the command that finished it
    with records.writing(path):
        records.write_json(path, report)
    print(f"reward is {report['reward_is']}; sampling {args.sampling}; {report['starts']} starts (task, init)")
    for name, part in {"all": report, **report["suites"]}.items():
        print(f"  {name:<20} {percent(part, part['invalid'])}")
    print(f"failures {report['failures']}\nwritten: {path}")


def run_compare(args):
    a, b = load(args.a), load(args.b)
    if a.name == b.name:                            # run-1/eval and run-2/eval
        a, b = (r._replace(name=f"{r.folder.parent.name}/{r.name}") for r in (a, b))
    output = Path(args.output or b.folder / f"against-{a.folder.name}")
    result = compare(a, b, args.measure)
    records.save_args(output, "eval compare", args)
    show_comparison(result, (a, b))
    shown = {s: [row["a"], row["b"]] for s, row in result["suites"].items() if s != "all" or len(result["suites"]) != 2}
    figures.bar_figure(output / "compare.png", result["names"], shown)
    records.write_json(output / "compare.json", result)
    print(f"written: {output}/compare.json, compare.png")


def md_table(head, rows):
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def markdown(names, summaries, comparisons):
    """Tables in Markdown: success with intervals and invalid counts, kinds of failure, gains by kind, paired tests."""
    kinds = [f.replace("_", " ") for f in FAILURES]
    number = lambda v, scale=1: "–" if v is None else f"{scale * v:.1f}"
    lines = md_table(
        ["", "success [95 % interval]", "in the final state, %", "calls", "right grasps, %",
         *(f"failed: {k}, %" for k in kinds)],
        [[name, percent(s, s["invalid"]), number(s["success_final"]["success"], 100), number(s["mean_calls"]),
          number(s["picks_right"], 100), *(number(points(s["failures"][f], s["n"])) for f in FAILURES)]
         for name, s in zip(names, summaries, strict=True)])
    cell = lambda part: percent(part, part["invalid"]) if part else "–"
    for group, title in (("suites", "suite"), ("steps", "goals of the task")):
        keys = sorted({key for s in summaries for key in s[group]})
        rows = [[key, *(cell(s[group].get(key)) for s in summaries)] for key in keys]
        lines += md_table([title, *names], rows) if len(keys) > 1 else []
    lines += md_table(["points gained, by kind of decision", *kinds, "all"],
                      [[f"{x} → {y}", *(f"{v:+.1f}" for v in (*gain.values(), sum(gain.values())))]
                       for (x, y), gain in zip(itertools.pairwise(names), gains(summaries), strict=True)])
    suites = sorted({suite for c in comparisons for suite in c["suites"]} - {"all"})
    if len(suites) > 1:
        paired = lambda row: f"{row['wins']} / {row['losses']}, p = {row['p']:.2g}" if row else "–"
        lines += md_table(["paired: won / lost", *(f"{c['names'][0]} → {c['names'][1]}" for c in comparisons)],
                          [[suite, *(paired(c["suites"].get(suite)) for c in comparisons)] for suite in suites])
    return "\n".join(lines + [f"- {verdict(c['suites']['all'], c['names'])}" for c in comparisons]) + "\n"


def run_table(args):
    names = args.names or [None] * len(args.reports)
    if len(names) != len(args.reports):
        raise BadInput(f"--names gives {len(names)} names for {len(args.reports)} reports; give one for each, in order")
    reports = [load(path, name) for path, name in zip(args.reports, names, strict=True)]
    names = [r.name for r in reports]
    if len(set(names)) != len(names):
        raise BadInput(f"two reports have one name: {', '.join(names)}; tell them apart with --names")
    by_number = lambda p: (int("".join(filter(str.isdigit, p.name)) or 0), p.name)      # round-10 comes after round-9
    rounds = {}
    for folder in sorted(map(Path, args.rounds), key=by_number):
        parts = parts_of(folder, "manifest.json", "rollout.py")
        kept, _ = one_per_attempt((e for p in parts for e in records.read_episodes(p / "episodes.jsonl")), folder)
        rounds[folder.name] = summarize(list(kept.values()))
    output = Path(args.output)
    records.save_args(output, "eval table", args)
    summaries = [summarize(r.episodes) for r in reports]
    tested = [*itertools.pairwise(reports), *([(reports[0], reports[-1])] if len(reports) > 2 else [])]
    comparisons = [compare(a, b) for a, b in tested]
    text = markdown(names, summaries, comparisons)
    print(text)
    (output / "table.md").write_text(text)
    suites = sorted({suite for s in summaries for suite in s["suites"]})
    bars = {"all": summaries} if len(suites) > 1 else {}
    figures.bar_figure(output / "success.png", names, bars | {
        suite: [s["suites"].get(suite) or rate([]) for s in summaries] for suite in suites})
    if rounds:
        figures.learning_figure(output / "learning.png", rounds, dict(zip(names, summaries, strict=True)))
    whole = {r.name: {**r.header, **s, "folder": str(r.folder)} for r, s in zip(reports, summaries, strict=True)}
    records.write_json(output / "table.json", {
        "reports": whole, "gains": gains(summaries), "comparisons": comparisons, "rounds": rounds})
    print(f"written: {output}/table.md, table.json, success.png" + (", learning.png" if rounds else ""))


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    commands = p.add_subparsers(dest="command", required=True, metavar="run|compare|table")

    def add(name, help, description=None):
        return commands.add_parser(name, help=help, description=description or help, formatter_class=records.Formatter)

    r = add("run", "episodes of a checkpoint -> report.json")
    r.add_argument("--output", required=True, help="folder to write")
    serving.add_engine_arguments(r, required=False)
    g = r.add_argument_group("the scripted expert, in place of --model")
    g.add_argument("--expert", choices=("memory", "alone", "perfect"),
                   help="the teacher with task memory, without it, or with nothing to learn: the executor's ceiling (with --noise 0)")
    g.add_argument("--teacher-run", help="memory, alone: output folder of collect.py, whose memory and handicap are taken")
    g = r.add_argument_group("tasks")
    g.add_argument("--suites", required=True, help="suites, comma-separated")
    g.add_argument("--tasks", help="task indices, e.g. 0-4; not given: all of each suite")
    g.add_argument("--inits", default="1-10", help="initial states; 1-10 are for evaluation, 45-49 for validation")
    g.add_argument("--attempts", type=int, default=1, help="attempts per (task, initial state)")
    g.add_argument("--limit", type=int, help="run only the first N episodes (count); not given: all")
    g.add_argument("--video", metavar="SUITE/INDEX:INIT[:ATTEMPT]",
                   help="film one episode -> OUTPUT/episode.gif and its contact sheet OUTPUT/episode.png (no ATTEMPT: 0)")
    g.add_argument("--video-format", choices=frames.FORMATS,
                   help="of --video; mp4 (VP9) needs OpenCV, which requirements-libero.txt brings; default: gif")
    adapters.add_rollout_arguments(r, sampling="eval")

    c = add("compare", "two reports, paired",
            "Two reports paired by (task, init, attempt): both rates, wins, losses, ties and exact sign test of B, per suite.")
    c.add_argument("a", help="output folder of `eval.py run` (or its report.json): the baseline")
    c.add_argument("b", help="… and the one that wins or loses against it")
    c.add_argument("--output", help="folder for compare.json and compare.png; not given: B/against-A")
    c.add_argument("--measure", choices=list(MEASURES), default="reward", help="what counts as success")

    t = add("table", "several reports side by side",
            "Success with intervals and invalid counts, kinds of failure, points gained by kind, paired tests, figures.")
    t.add_argument("reports", nargs="+", help="output folders of `eval.py run`, in the order of training")
    t.add_argument("--names", nargs="+", help="a name for each report; not given: folder names")
    t.add_argument("--rounds", nargs="*", default=[], help="output folders of rollout.py, for the learning curve")
    t.add_argument("--output", required=True, help="folder for table.md, table.json and the figures")
    return p, r


def check_run(p, args):
    """Exactly one planner: a checkpoint, or the scripted expert and what belongs to it."""
    if bool(args.expert) == bool(args.model):
        p.error("give --model CHECKPOINT or --expert {memory,alone,perfect}, one of them")
    if bool(args.teacher_run) != (args.expert in ("memory", "alone")):
        p.error("--teacher-run DIR (an output folder of collect.py) belongs to --expert memory and --expert alone, and to no other")
    if args.expert:
        serving.without_engine(p, args, f"--expert {args.expert}")
        for name in ("sampling", "max_tokens"):
            if getattr(args, name) != p.get_default(name):
                p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: --expert {args.expert} does not honour it; nothing is sampled")
        if args.chat_template_kwargs:
            p.error(f"{template_kwargs.OPTION}: the scripted expert has no chat template")


def main():
    p, run = parser()
    args = p.parse_args()
    if args.command == "run":
        check_run(run, args)
    return {"run": run_episodes, "compare": run_compare, "table": run_table}[args.command](args)


if __name__ == "__main__":
    records.run_main(main)
