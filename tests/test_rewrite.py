"""Detectors, rewriter and judge (evidence.py), and what rewrite.py makes of whole teacher episodes."""

import copy
import itertools
import json
import types

import pytest

import gate
import rewrite
from evidence import Dependence, arguments_survive, judge, numbers_in, rewrite_by_rules, rewrite_text
from records import Call, Episode

NOTE = "Red mug: grasp it at the rim with dy 35. The handle slips, so approach from the left side and close slowly."


def dependence(removed=NOTE, context="Task: Put the red mug on the blue tray. x 412 y -133", own=(), leaked=frozenset()):
    return Dependence([removed], [removed], [context], own, leaked)


def kinds(text, d=None):
    return [(kind, found) for kind, found, _, _ in (d or dependence()).find(text)]


# ---------------------------------------------------------------------------------------------- detectors

@pytest.mark.parametrize("text, found", [
    ("My memory says so.", "memory"), ("I REMEMBER this mug.", "REMEMBER"), ("As I recall, it slips.", "recall"),
    ("The notes are clear.", "notes"), ("It slipped previously.", "previously"), ("Last time it slipped.", "Last time"),
    ("In a past episode it fell.", "past episode"), ("An earlier attempt failed.", "earlier attempt"),
    ("The note says left.", "note says"),
])
def test_word(text, found):
    assert kinds(text) == [("word", found)]


@pytest.mark.parametrize("text", ["I note that the mug is red.", "I see the notebook.", "The member is here.",
                                  "I look at the last mug.", "A total recallibration.", "",
                                  "I pick up the red mug at x 412 y -133."])
def test_no_word(text):
    assert kinds(text) == []


def test_quote_of_eight_words():
    eight = "the handle slips SO approach, from the left"
    assert kinds(eight) == [("quote", eight)]
    assert kinds("the handle slips so approach from the") == []                      # seven
    assert kinds("the handle slips so approach it from the left side and close") == []    # eight, not consecutive
    longer = "slips, so approach from the left side and close slowly"
    assert kinds("I know it " + longer + " today.") == [("quote", longer)]           # overlapping runs are one phrase
    two = Dependence(["one two three four", "five six seven eight"], [], [])
    assert two.find("one two three four five six seven eight") == []                 # not across two removed texts


def test_quote_that_the_student_can_read_is_no_evidence():
    text = "Put the red mug on the blue tray now"
    d = dependence("Task was: put the red mug on the blue tray now.", "Put the red mug on the blue tray now!")
    assert kinds(text, d) == []
    d = dependence(removed="Task was: put the red mug on the blue tray now.", context="Put the red mug on a tray.")
    assert kinds(text, d) == [("quote", text)]


def test_numbers_compare_by_value():
    assert numbers_in("0.020 20.0 -3 +7 (12) x=4, 5mm 1e3 .5 9.") == {0.02, 20, -3, 7, 12, 4, 5, 1000, 0.5, 9}
    assert numbers_in("0.020") == numbers_in(".02") and numbers_in("20") == numbers_in("20.0") == numbers_in("2e1")
    assert numbers_in("20") != numbers_in("-20") and numbers_in("−20") == numbers_in("-20")
    assert numbers_in("10-20") == {10, 20} and numbers_in("mug_1 box2 v1.2") == frozenset()


def test_number_only_in_removed_text():
    assert kinds("I grasp at dy 35.") == [("number", "35")]
    assert [k for k, _ in kinds("dy 35.0")] == ["number"] and kinds("dy -35") == []  # the sign counts
    assert kinds("Go to x 412.") == []                                               # in the context alone
    assert kinds("Wait 99 s.") == []                                                 # nowhere: the teacher's own
    both = dependence(context="dy may be 20 or 35")
    assert kinds("dy 35", both) == []                                                # in both
    own = dependence(own=["I try dy 35"])
    assert kinds("dy 35", own) == []                                                 # the student's own earlier word
    leaked = dependence(own=["dy 35"], leaked={35.0})
    assert [k for k, _ in kinds("dy 35", leaked)] == ["number"]                      # … unless that word came from memory


def test_argument():
    d = dependence()

    def found(arguments):
        return d.evidence({"content": "", "tool_calls": [call("a", "pick", arguments)]})
    assert found('{"x": 412, "dy": 35}') == [{"kind": "argument", "where": "arguments", "found": "35"}]
    assert found({"x": 412, "dy": 35}) == [{"kind": "argument", "where": "arguments", "found": "35"}]
    assert found('{"how": "dy=35.0"}')[0]["found"] == "35.0"
    assert found('{"x": 412, "dy": -35, "z": 7}') == []
    assert found('{"summary": "the handle slips so approach from the left"}')[0]["kind"] == "argument"


def test_evidence_says_where():
    message = {"content": "dy 35", "reasoning": "my memory", "tool_calls": []}
    assert [(e["kind"], e["where"]) for e in dependence().evidence(message)] == [("number", "text"), ("word", "reasoning")]


# ---------------------------------------------------------------------------------------------- rewriter and judge

@pytest.mark.parametrize("before, after", [
    ("From memory, the rim holds.", ""),                                             # what memory said goes with it
    ("From memory, the rim holds, so I pick up the red mug.", "I pick up the red mug."),
    ("I pick up the red mug, as my notes say.", "I pick up the red mug."),
    ("I pick up the red mug because last time it slipped. Then I place it.", "I pick up the red mug. Then I place it."),
    ("I remember this. I pick up the red mug!", "I pick up the red mug!"),
    ("I pick up the red mug at dy 35, so the mug holds.", "The mug holds."),
    ("I look first.\nMemory says dy 35.\nI pick up the red mug.", "I look first.\nI pick up the red mug."),
    ("The mug, as I recall, is red; then I go to x 412, y -133.", "The mug, then I go to x 412, y -133."),
    ("The mug, as I recall, is red.", ""),
    ("My memory helps.", ""), ("", ""), ("I pick up the red mug.", "I pick up the red mug."),
])
def test_rules(before, after):
    assert rewrite_text(before, dependence()) == after
    assert dependence().find(after) == []


def test_rules_drop_a_quote_across_sentences():
    text = "I go. Grasp it at the rim with dy. The handle is wet. I pick up."
    removed = "grasp it at the rim with dy the handle is dry"
    assert rewrite_text(text, Dependence([removed], [removed], [])) == "I go. I pick up."


def test_judge():
    d = dependence()
    message = {"role": "assistant", "content": "Memory says dy 35. I pick.",
               "tool_calls": [call("a", "pick", '{"x":  412}')]}
    good = rewrite_by_rules(message, d)
    assert good["content"] == "I pick." and good["tool_calls"] == message["tool_calls"] and judge(message, good, d) is None
    spaced = copy.deepcopy(good)
    spaced["tool_calls"][0]["function"]["arguments"] = '{"x": 412}'                  # equal as JSON, not byte for byte
    assert judge(message, spaced, d) == "tool_calls_changed"
    assert judge(message, {**good, "tool_calls": []}, d) == "tool_calls_changed"
    renamed = copy.deepcopy(good)
    renamed["tool_calls"][0]["function"]["name"] = "place"
    assert judge(message, renamed, d) == "tool_calls_changed"
    assert judge(message, {**good, "content": "As I recall, I pick."}, d) == "still_dependent"
    assert judge(message, {**good, "reasoning": "dy is 35"}, d) == "still_dependent"
    assert judge(message, {**good, "content": ""}, d) is None                        # the tool call is left
    text = {"role": "assistant", "content": "My memory helps."}
    assert judge(text, rewrite_by_rules(text, d), d) == "emptied"


@pytest.mark.parametrize("arguments, ok", [
    ('{"b": 1,   "a":2}', True), ('{"name": "é"}', True), ('{"name": "\\u00e9"}', True), ("{}", True), ("", True),
    ({"x": 1}, True), ('{"x": [1, 2.5, {"y": null}]}', True), ('{"x": 0.020}', False), ('{"x": 1e3}', False),
    ('{"x": 1, "x": 2}', False), ("[1]", False), ("not json", False), ('{"x": 1', False),
    ('{"x": "\\ud800"}', False), ('{"x": ' + "[" * 2000 + "]" * 2000 + "}", False)])
def test_arguments_survive(arguments, ok):
    assert arguments_survive(arguments) is ok


# ---------------------------------------------------------------------------------------------- whole episodes

def tool(name, *parameters):
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": {
        "type": "object", "properties": {p: {"type": "integer"} for p in parameters}}}}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [tool("locate", "name"), tool("memory_read", "key"), tool("pick", "x", "y", "dy"), tool("place", "name"),
         tool("memory_write", "text"), tool("finish", "status")]
SYSTEM = "You move objects.\n[memory]\nTrays are wide: 260 mm.\n[/memory]\nAnswer with one tool call."
USER = "Task: Put the red mug on the blue tray."
# (text, reasoning, [(tool, arguments, result)])
STEPS = [
    ("Let me read my notes.", None, [("memory_read", '{"key": "red mug"}', NOTE)]),   # memory only
    ("I look for the red mug.", None, [("locate", '{"name":   "red mug"}', "red mug at x 412 y -133")]),   # kept
    ("From memory, the rim holds. I pick up the red mug.", "Memory says dy 35. The mug is red.",
     [("pick", '{"x": 412, "y": -133}', "Slipped.")]),   # rewritten
    ("I pick up the red mug.", None, [("pick", '{"x": 412, "y": -133, "dy": 35}', "Held: red mug.")]),   # argument
    ("I save this and place it.", None, [("memory_write", '{"text": "dy 35 works"}', "saved"),
                                         ("place", '{"name": "blue tray"}', "Placed the red mug.")]),   # mixed, kept; success
    ("I look again.", None, [("locate", '{"name": "red mug"}', "red mug at x 600 y 50")]),   # after success
    ("The tray was 260 mm wide. Done.", None, [("finish", '{"status": "success"}', "Finished.")]),   # rewritten, the end
]
SUCCESS_TURN = 4
OUTCOMES = {"dropped: memory_only": 1, "dropped: after_success": 1, "history_only: argument": 1, "kept": 2,
            "rewritten": 2}


def play(episode_id="e0", steps=STEPS, edit=None, system=SYSTEM, tools=TOOLS, ids=None):
    """Plays scripted answers through an append-only chat loop. edit(turn, messages) changes the history before a call."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": USER}]
    calls = []
    for turn, (text, reasoning, uses) in enumerate(steps):
        if edit:
            messages = edit(turn, copy.deepcopy(messages))
        answer = {"role": "assistant", "content": text}
        if reasoning:
            answer["reasoning"] = reasoning
        if uses:
            answer["tool_calls"] = [call(ids or f"{turn}.{i}", name, arguments)
                                    for i, (name, arguments, _) in enumerate(uses)]
        calls.append(Call(f"{episode_id}/{turn}", episode_id, turn, messages=copy.deepcopy(messages), tools=tools,
                          message=answer, delivered=True, finish_reason="stop"))
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": ids or f"{turn}.{i}", "content": result}
                     for i, (_, _, result) in enumerate(uses)]
    return calls


def episode(episode_id="e0", calls=(), **kw):
    defaults = dict(episode_id=episode_id, harness="skills", task="tabletop/0", init=11, attempt=0, reward=1, valid=True,
                    success_turn=SUCCESS_TURN, finished=True, end="finish", calls=[c.call_id for c in calls])
    return Episode(**{**defaults, **kw})


def options(**kw):
    return types.SimpleNamespace(**{**dict(mode="rewrite", after_success="finish", max_tokens=4096, chat_template_kwargs=None,
                                           limit_episodes=0), **kw})


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return gate.load_tokenizer(tiny_dir)


def rows_of(tokenizer, calls, report=None, ep=None, rewriter=rewrite.rewrite_alone, **kw):
    report = report or rewrite.Report()
    ep, args = ep or episode(calls=calls), options(**kw)
    return rewrite.episode_rows(ep, rewrite.replay(ep, calls, rewriter, args), tokenizer, args, report), report


def test_outcomes_and_rows(tokenizer):
    rows, report = rows_of(tokenizer, play())
    assert report.outcomes == OUTCOMES
    assert [(r["turn"], r["source"]) for r in rows] == [(1, "kept"), (2, "rewritten"), (4, "kept"), (6, "rewritten")]
    assert report.evidence == {"word": 1, "number": 2, "argument": 1} and report.numbers["flagged"] == 3
    assert [report.numbers[k] for k in ("mixed", "history_unmatched", "retokenised")] == [1, 0, 0]
    assert rows[1]["message"]["content"] == "I pick up the red mug."
    assert rows[1]["message"]["reasoning"] == "The mug is red."
    assert [(e["kind"], e["found"]) for e in rows[3]["evidence"]] == [("number", "260")]
    assert rows[3]["message"]["content"] == "Done."


def test_student_context(tokenizer):
    rows, _ = rows_of(tokenizer, play())
    last = rows[-1]
    assert last["messages"][0]["content"] == "You move objects.\nAnswer with one tool call."
    assert [t["function"]["name"] for t in last["tools"]] == ["locate", "pick", "place", "finish"]
    assert [m["role"] for m in last["messages"]] == ["system", "user"] + ["assistant", "tool"] * 5
    text = json.dumps(last["messages"]) + tokenizer.decode(last["prompt_token_ids"] + last["token_ids"])
    for gone in ("memory", "rim", "260", "saved", "notes"):
        assert gone not in text.lower(), gone
    assert rows[0]["messages"] == last["messages"][:2]     # the memory-only answer never happened
    assert last["messages"][2]["content"] == "I look for the red mug."
    assert last["messages"][4]["content"] == "I pick up the red mug."
    assert last["messages"][4]["reasoning"] == "The mug is red."
    history_only = last["messages"][6]["tool_calls"][0]["function"]
    assert history_only["arguments"] == '{"x": 412, "y": -133, "dy": 35}'


def test_targets_are_the_students_own_tokens(tokenizer):
    for row in rows_of(tokenizer, play())[0]:
        assert row["prompt_token_ids"] == gate.render_prompt(tokenizer, row["messages"], row["tools"], {})
        assert row["token_ids"][-1] == tokenizer.eos_token_id
        whole = gate.render_prompt(tokenizer, [*row["messages"], row["message"]], row["tools"], {})
        assert whole[:len(row["prompt_token_ids"]) + len(row["token_ids"])] == row["prompt_token_ids"] + row["token_ids"]


@pytest.mark.parametrize("mode", ["rewrite", "mask"])
def test_rows_of_an_append_only_episode_are_a_prefix_chain(tokenizer, mode):
    rows, report = rows_of(tokenizer, play(), mode=mode)
    assert len(rows) == (4 if mode == "rewrite" else 2)
    for a, b in itertools.pairwise(rows):
        done = a["prompt_token_ids"] + a["token_ids"]
        assert b["prompt_token_ids"][:len(done)] == done
    assert report.numbers["extends_previous"] == len(rows) - 1 and report.numbers["new_prefix"] == 0


def test_mask_is_a_subset_of_rewrite(tokenizer):
    rewritten, _ = rows_of(tokenizer, play())
    masked, report = rows_of(tokenizer, play(), mode="mask")
    assert report.outcomes == {"dropped: memory_only": 1, "dropped: after_success": 1, "history_only: argument": 1,
                               "history_only: masked": 2, "kept": 2}
    assert masked == [r for r in rewritten if r["source"] == "kept"]


def test_arguments_are_byte_identical(tokenizer):
    calls = play()
    rows, _ = rows_of(tokenizer, calls)
    by_turn = {c.turn: c.message for c in calls}
    for r in rows:
        mine = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in r["message"]["tool_calls"]]
        theirs = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in by_turn[r["turn"]]["tool_calls"]
                  if not c["function"]["name"].startswith("memory_")]
        assert mine == theirs
    assert rows[0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"name":   "red mug"}'
    bad = [*STEPS[:1], ("I pick.", None, [("pick", '{"x": 0.50}', "Held.")]), STEPS[-1]]
    rows, report = rows_of(tokenizer, play(steps=bad), ep=episode(calls=play(steps=bad), success_turn=None))
    assert report.outcomes["history_only: arguments_not_preserved"] == 1 and [r["turn"] for r in rows] == [2]


def test_argument_escape_through_the_students_context(tokenizer):
    tools = copy.deepcopy(TOOLS)
    tools[2]["function"]["description"] = "pick up; dy is one of 15, 25, 35.0"
    rows, report = rows_of(tokenizer, play(tools=tools))
    assert report.outcomes["history_only: argument"] == 0 and [r["turn"] for r in rows] == [1, 2, 3, 4, 6]
    assert rows[1]["message"]["reasoning"] == "The mug is red."      # "Memory says" is still a word


def test_leaked_number_does_not_excuse_the_next_call(tokenizer):
    again = [*STEPS[:4], STEPS[3], STEPS[4], STEPS[6]]
    _, report = rows_of(tokenizer, play(steps=again), ep=episode(calls=play(steps=again), success_turn=5))
    assert report.outcomes["history_only: argument"] == 2
    echo = ("I pick up the red mug.", None, [("pick", '{"x": 412, "dy": 35}', "Slipped at dy 35.")])
    echoed = [*STEPS[:3], echo, *again[4:]]
    _, report = rows_of(tokenizer, play(steps=echoed), ep=episode(calls=play(steps=echoed), success_turn=5))
    assert report.outcomes["history_only: argument"] == 1             # a receipt says it: now the student reads it too


def test_after_success(tokenizer):
    rows, report = rows_of(tokenizer, play(), after_success="none")
    assert [r["turn"] for r in rows] == [1, 2, 4] and report.outcomes["dropped: after_success"] == 2
    steps = [*STEPS[:5], ("The mug is on the tray.", None, [])]       # an episode that ends by text
    rows, _ = rows_of(tokenizer, play(steps=steps), ep=episode(calls=play(steps=steps), end="text"))
    assert [r["turn"] for r in rows] == [1, 2, 4, 5]


def test_harness_edits_of_history_stay(tokenizer):
    def edit(turn, messages):
        if turn >= 4:                                      # shortened result, dropped reasoning, shortened answer
            messages[5]["content"] = "red mug at x 412 […]"
            messages[6].pop("reasoning", None)
            messages[6]["content"] = "From memory, the rim holds. […]"
        return messages
    rows, report = rows_of(tokenizer, play(edit=edit))
    history = next(r for r in rows if r["turn"] == 4)["messages"]
    assert history[3]["content"] == "red mug at x 412 […]"
    assert "reasoning" not in history[4] and history[4]["content"] == "[…]"
    assert report.numbers["history_unmatched"] == 0 and report.numbers["new_prefix"] == 1


def test_repeated_tool_call_ids(tokenizer):
    rows, report = rows_of(tokenizer, play(steps=[s for s in STEPS if len(s[2]) == 1], ids="call_0"),
                           ep=episode(calls=play(steps=[s for s in STEPS if len(s[2]) == 1]), success_turn=None))
    assert [r["turn"] for r in rows] == [1, 2, 4, 5]
    assert [m["content"] for m in rows[-1]["messages"] if m["role"] == "tool"] == [
        "red mug at x 412 y -133", "Slipped.", "Held: red mug.", "red mug at x 600 y 50"]


def test_emptied_and_refused_answers_in_history(tokenizer):
    steps = [STEPS[0], ("My memory helps.", None, []), *STEPS[1:3], STEPS[6]]
    rows, report = rows_of(tokenizer, play(steps=steps), ep=episode(calls=play(steps=steps), success_turn=None))
    assert report.outcomes["history_only: emptied"] == 1
    assert [m["role"] for m in rows[0]["messages"]] == ["system", "user"]    # nothing is left of it


def test_a_rewriter_that_touches_arguments_is_refused(tokenizer):
    def meddler(message, d, context, tools):
        new = copy.deepcopy(rewrite_by_rules(message, d))
        for c in new.get("tool_calls", []):
            c["function"]["arguments"] = c["function"]["arguments"].replace("412", "413")
        return new, [judge(message, new, d)]
    rows, report = rows_of(tokenizer, play(), rewriter=meddler)
    assert report.outcomes["history_only: tool_calls_changed"] == 1 and [r["turn"] for r in rows] == [1, 4, 6]
    assert "413" not in json.dumps(rows)                   # nor does it reach the history


@pytest.mark.parametrize("text, rest, removed", [
    ("A\n[memory]\nx 1\n[/memory]\nB", "A\nB", ["x 1"]), ("[memory]\nx\n[/memory]\nB", "B", ["x"]),
    ("A\n[memory]\nx\n[/memory]", "A", ["x"]), ("A [memory] B", "A [memory] B", []),
    ("A\n[memory]\nx\ny\n[/memory]\nB\n[memory]\n[/memory]\nC", "A\nB\nC", ["x\ny", ""]),
    ("[memory]\nx\n[/memory]", "", ["x"]), ("A\n\n  [memory]  \nx\n[/memory]\n\nB", "A\n\n\nB", ["x"])])
def test_memory_sections(text, rest, removed):
    assert rewrite.strip_sections(text, "c") == (rest, removed)


def test_memory_sections_in_messages(tokenizer):
    with pytest.raises(rewrite.BadInput, match="e0/0.*without its end"):
        rows_of(tokenizer, play(system="A\n[memory]\nsecret"))
    calls = play()
    for c in calls:                                        # a message that is nothing but memory, and a section in parts
        c.messages.insert(1, {"role": "user", "content": "[memory]\nsecret\n[/memory]"})
        section = {"type": "text", "text": "[memory]\nx\n[/memory]"}
        c.messages[2] = {"role": "user", "content": [{"type": "text", "text": USER}, section]}
    rows, _ = rows_of(tokenizer, calls)
    assert rows[0]["messages"][1] == {"role": "user", "content": [{"type": "text", "text": USER}]}
    assert "secret" not in json.dumps(rows)


def test_long_rows_are_dropped_and_counted(tokenizer):
    rows, report = rows_of(tokenizer, play(), max_tokens=200)
    assert report.outcomes["dropped: too_long"] > 0 and sum(report.outcomes.values()) == 7
    assert all(len(r["prompt_token_ids"]) + len(r["token_ids"]) <= 200 for r in rows)
