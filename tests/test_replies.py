"""Replies of a planner: which programs are cut out of them, which decision stands there, and that no text at all breaks the reading."""

import time

import pytest
from hypothesis import example, given, settings, strategies as st

from harness.replies import CUT, CUT_THINKING, fences, NO_PROGRAM, read_reply, Reply, without_thinking

FINISH = Reply(True, None, None)


def code(text):
    return Reply(False, text, None)


def problem(text):
    return Reply(False, None, text)


@pytest.mark.parametrize("text, expected", [
    # fences and languages
    ("```python\nx = 1\n```", code("x = 1")),
    ("Sure:\n```py\nx = 1\n```\nThat is it.", code("x = 1")),
    ("```python3\nx = 1\n```", code("x = 1")),
    ("```Python\nx = 1\n```", code("x = 1")),
    ("``` python\nx = 1\n```", code("x = 1")),
    ("```python title=\"a.py\"\nx = 1\n```", code("x = 1")),
    ("~~~python\nx = 1\n~~~", code("x = 1")),
    ("~~~~ py\nx = 1\n~~~~~", code("x = 1")),                                   # a closing fence may be longer
    ("```python   \nx = 1\n```   ", code("x = 1")),
    ("```\nx = 1\n```", code("x = 1")),                                         # no language, and none is labelled as Python
    ("```json\n{}\n```\n```\nx = 1\n```", code("x = 1")),
    ("```\nthe output will be 1\n```\n```python\nx = 1\n```", code("x = 1")),   # … but one is
    ("```bash\nls\n```\n```python\nx = 1\n```\n```json\n{}\n```", code("x = 1")),
    ("```bash\nls\n```", problem(NO_PROGRAM)),
    ("```pycon\n>>> 1\n```", problem(NO_PROGRAM)),
    ("```python-repl\n>>> 1\n```", problem(NO_PROGRAM)),
    ("```python\n\n  \n```", problem(NO_PROGRAM)),                               # an empty program is none
    # several
    ("First\n```python\nx = 1\n```\nthen\n```python\nprint(x)\n```\ndone", code("x = 1\nprint(x)")),
    ("```py\nx = 1\n```\n~~~python\ny = 2\n~~~", code("x = 1\ny = 2")),
    # fences within fences, and indented ones
    ("````python\ns = '''\n```python\nno\n```\n'''\n````", code("s = '''\n```python\nno\n```\n'''")),
    ("~~~python\ns = '''\n```\n'''\n~~~", code("s = '''\n```\n'''")),
    ("```python\n# ```text\nx = 1\n```", code("# ```text\nx = 1")),
    ("```python\n```text\nx = 1\n```", code("```text\nx = 1")),                  # a fence with a language closes nothing
    ("```markdown\n```python\nx = 1\n```\n", problem(NO_PROGRAM)),
    ("1. Do this:\n   ```python\n   if True:\n       x = 1\n   ```\n2. Look.", code("if True:\n    x = 1")),
    ("```python\n    x = 1\n    y = 2\n```", code("x = 1\ny = 2")),
    ("\t```python\n\tx = 1\n\t```", code("x = 1")),
    # no fence
    ("x = 1", problem(NO_PROGRAM)),
    ("", problem(NO_PROGRAM)),
    ("   \n\n", problem(NO_PROGRAM)),
    ("Call `goto_pose(p, q)` next.", problem(NO_PROGRAM)),
    ("```goto_pose(p, q)```", problem(NO_PROGRAM)),                              # in one line: a code span, no fence
    # unclosed
    ("```python\nx = 1\ny = 2", code("x = 1\ny = 2")),
    ("```python\nx = 1\n~~~\ny = 2", code("x = 1\n~~~\ny = 2")),                 # another kind of fence closes nothing
    ("````python\nx = 1\n```", code("x = 1\n```")),                              # nor does a shorter one
    ("```python\nx = 1\n```\n```python\ny = 2", code("x = 1\ny = 2")),
    # decisions
    ("FINISH", FINISH),
    ("The mug stands on the tray.\n\nFINISH", FINISH),
    ("**FINISH**", FINISH), ("FINISH.", FINISH), ("`FINISH`", FINISH), ("  FINISH  ", FINISH), ("# FINISH", FINISH), ("\"FINISH\"", FINISH),
    ("FINISH\n```python\nx = 1\n```", FINISH),                                   # a program beside it is not run
    ("```python\nx = 1\n```\nFINISH", FINISH),
    ("REGENERATE\n```python\nx = 1\n```", code("x = 1")),
    ("**REGENERATE**\n```python\nx = 1\n```\nREGENERATE", code("x = 1")),
    ("REGENERATE\n```python\nx = 1\n```\nFINISH", code("x = 1")),                # the first decides
    ("FINISH\nREGENERATE\n```python\nx = 1\n```", FINISH),
    ("REGENERATE", problem(NO_PROGRAM)),
    ("I will not REGENERATE.\nFINISH", FINISH),
    ("I will not REGENERATE", problem(NO_PROGRAM)),                              # CaP-X runs what follows the word
    ("I could FINISH, but:\n```python\nx = 1\n```", code("x = 1")),
    ("finish", problem(NO_PROGRAM)),
    ("FINISHED", problem(NO_PROGRAM)),
    ("```python\nFINISH = 1\n```", code("FINISH = 1")),
    ("```python\n# then\nFINISH\n```", code("# then\nFINISH")),                  # within a fence it is no decision
    ("```text\nFINISH\n```\n```python\nx = 1\n```", code("x = 1")),
    # thinking
    ("<think>```python\nold()\n```\nFINISH\n</think>```python\nx = 1\n```", code("x = 1")),
    ("thinking begun in the prompt ```python\nold()\n```\n</think>\n\nFINISH", FINISH),
    ("<think>\nFINISH\n</think>\nREGENERATE\n```python\nx = 1\n```", code("x = 1")),
    ("<think>a</think>\n<think>\n```python\nold()\n```\n</think>\n```python\nx = 1\n```", code("x = 1")),
    ("```python\nx = 1\n```\n<think>\n```python\nold()\n```", code("x = 1")),
    ("<think>\n```python\nx = 1\n```\nFINISH", problem(NO_PROGRAM)),
    # line ends
    ("REGENERATE\r\n```python\r\nif True:\r\n    x = 1\r\n```\r\n", code("if True:\n    x = 1")),
    ("Done.\r\nFINISH\r\n", FINISH),
])
def test_rules(text, expected):
    assert read_reply(text) == expected


@pytest.mark.parametrize("text, expected", [
    ("```python\nx = 1\ngoto_po", problem(CUT)),
    ("```\nx = 1\ngoto_po", problem(CUT)),
    ("```python\nx = 1\n```\nThen:\n```python\ny =", problem(CUT)),              # not the whole of it: nothing is run
    ("```python\nx = 1\n```\nThis program will", code("x = 1")),                 # the cut is in the words behind it
    ("```python\nx = 1\n```\n```text\nthe out", code("x = 1")),                  # … or in a fence that is no program
    ("<think>I wonder ```python\nx = 1\n```", problem(CUT_THINKING)),
    ("<think>a</think>\n<think>b", problem(CUT_THINKING)),
    ("<think>I wonder</think>Well, the mug", problem(NO_PROGRAM)),
    ("I would start by", problem(NO_PROGRAM)),
    ("FINISH\nbecause the mug", FINISH),
    ("", problem(CUT_THINKING)),                                                 # the server keeps thinking apart
])
def test_replies_cut_by_the_token_limit(text, expected):
    assert read_reply(text, cut=True) == expected


def test_cut_changes_nothing_where_the_program_is_whole():
    text = "REGENERATE\n```python\nx = 1\n```\n"
    assert read_reply(text, True) == read_reply(text, False) == code("x = 1")


def test_without_thinking():
    assert without_thinking("<think>a</think>b") == "b"
    assert without_thinking("a</think>b</think>c") == "c"
    assert without_thinking("b<think>a") == "b"
    assert without_thinking("b") == "b"


def test_fences_tells_languages_and_lines_outside():
    blocks, outside = fences("a\n```C++\nx\n```\nb\n~~~\ny")
    assert blocks == [("c++", "x", True), ("", "y", False)] and outside == ["a", "b"]


# ---------------------------------------------------------------------------------------------- any text

PIECES = st.sampled_from(["```", "```python", "~~~", "````", "~~~~py", "x = 1", "    y = 2", "FINISH", "REGENERATE", "**FINISH**", "\n", "\r\n", " ", "\t",
                          "<think>", "</think>", "`", "~", "é", "\ud83d", "\x00", "'''", "text"])
TEXTS = st.one_of(st.text(max_size=200), st.lists(st.one_of(PIECES, PIECES.map("\n{}\n".format)), max_size=30).map("".join))


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.booleans())
@example("\ud800```\n", True)
def test_any_text_gives_one_of_three_answers_and_no_invented_code(text, cut):
    reply = read_reply(text, cut)
    assert [reply.finish, reply.code is not None, reply.problem is not None].count(True) == 1
    assert reply.problem in (None, NO_PROGRAM, CUT, CUT_THINKING) and (cut or reply.problem in (None, NO_PROGRAM))
    if reply.finish:
        assert "FINISH" in text
    if reply.code is not None:
        lines = iter(line.strip() for line in without_thinking(text).replace("\r\n", "\n").split("\n"))
        assert reply.code.strip() and all(line.strip() in lines for line in reply.code.split("\n") if line.strip())     # a subsequence


LINES = st.lists(st.sampled_from(["x = 1", "if x:", "    y = 2", "# FINISH", "FINISH", "REGENERATE", "s = '`'", "```text", "", "print('~~~')"]),
                 min_size=1, max_size=5).filter(lambda lines: lines[0][:1] not in ("", " "))
BLOCKS = st.lists(st.tuples(st.sampled_from(["python", "py", "python3", "json", "text", ""]), LINES), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(BLOCKS, st.sampled_from(["```", "~~~", "````"]), st.sampled_from(["Then:", "", "I will not REGENERATE:", "REGENERATE"]), st.booleans())
def test_programs_come_out_as_they_were_written(blocks, fence, prose, cut):
    text = "\n".join(f"{prose}\n{fence}{language}\n" + "\n".join(lines) + f"\n{fence}" for language, lines in blocks)
    labelled = [lines for language, lines in blocks if language.startswith("py")]
    expected = "\n".join("\n".join(lines) for lines in labelled or [lines for language, lines in blocks if not language])
    assert read_reply(text, cut) == (code(expected) if expected else problem(NO_PROGRAM))


@pytest.mark.parametrize("text", ["```" + "a" * 20_000 + "`", "```" + " " * 20_000 + "`", "`" * 20_000 + "~", " " * 20_000 + "FINISHED",
                                  "```python\n" + " " * 20_000 + "x\n```", "<think>" * 5_000 + "</think>" * 5_000, "```\n~~~\n" * 5_000],
                         ids=["language", "spaces", "backticks", "decision", "indent", "think", "fences"])
def test_a_degenerate_reply_is_read_in_no_time(text):
    began = time.process_time()
    read_reply(text)
    assert time.process_time() - began < 0.3            # linear: a few ms. The worker's other episodes stand still meanwhile
