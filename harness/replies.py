"""What a planner's reply says: the decision and the program in it. Pure functions of text.

Rules (CaP-X cuts from the first "```python" to the last "```", and takes REGENERATE from anywhere in the text; both misread common
replies, so the rules here are ours):
  thinking   everything up to the last </think> is left out; a <think> that is never closed hides what follows it
  fences     lines of ``` or ~~~ open and close them, as in Markdown; ```python, ```py and ```python3 are programs, other languages are
             not; fences without a language count only where none is labelled as Python
  several    programs are joined in their order: they would share one session anyway
  unclosed   the program goes on to the end of the reply, unless the token limit cut the reply: half a program is not run
  no fence   is no program: prose is never run
  decision   FINISH or REGENERATE alone on a line outside all fences (**FINISH** and FINISH. too); the first such line decides.
             A program without a decision is run: the reply says what to do next.
"""

import re
import textwrap
from dataclasses import dataclass

PYTHON = ("python", "py", "python3")
_FENCE = re.compile(r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^`~]*+$")       # possessive: linear in a long line
_DECISION = re.compile(r"^[\s*_#>`\"'-]*(FINISH|REGENERATE)[\s*_`\"'.:!-]*$")

NO_PROGRAM = "the reply holds no ```python block"
CUT = "the reply was cut off by its token limit before the ```python block was closed"
CUT_THINKING = "the reply was cut off by its token limit while it was still thinking"


@dataclass(frozen=True)
class Reply:
    """finish: the planner ends the episode. Else `code` is what to run, or `problem` says why there is nothing to run."""
    finish: bool
    code: str | None
    problem: str | None


def without_thinking(text):
    """A reply's text after its thinking, for servers that leave <think> in the content."""
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]


def fences(text):
    """-> ([(language, text, closed)] of every fenced block in order, the lines outside)."""
    blocks, outside, marker, language, inside = [], [], None, "", []
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if marker is None and match:
            marker, language, inside = match[1], match[2].lower(), []
        elif marker is not None and match and not match[2] and match[1].startswith(marker):
            blocks.append((language, textwrap.dedent("\n".join(inside)), True))
            marker = None
        elif marker is not None:
            inside.append(line)
        else:
            outside.append(line)
    if marker is not None:
        blocks.append((language, textwrap.dedent("\n".join(inside)), False))
    return blocks, outside


def read_reply(text, cut=False):
    """A reply's content -> Reply. cut: the token limit ended it (finish_reason "length")."""
    said = without_thinking(text)
    blocks, outside = fences(said.replace("\r\n", "\n"))
    decision = next((m[1] for line in outside if (m := _DECISION.match(line))), None)
    if decision == "FINISH":
        return Reply(True, None, None)
    programs = [b for b in blocks if b[0] in PYTHON] or [b for b in blocks if not b[0]]
    if cut and programs and not programs[-1][2]:
        return Reply(False, None, CUT)
    code = "\n".join(b[1] for b in programs)
    if code.strip():
        return Reply(False, code, None)
    thinking = "<think>" in text.rpartition("</think>")[2] or not said.strip()       # the latter: the server keeps thinking apart
    return Reply(False, None, CUT_THINKING if cut and thinking else NO_PROGRAM)
