"""Lines that grew past the page, broken as the formatter of the house breaks them."""

import re
from itertools import chain

WIDTH = 120
_OPEN, _CLOSE = "([{", ")]}"


def wrapped(text: str) -> str:
    """The text with every line of code that is longer than `WIDTH` broken at its brackets; docstrings stay."""
    lines: list[str] = []
    quoted = False
    for line in text.split("\n"):
        marks = line.count('"""')
        if quoted or marks or len(line) <= WIDTH or line.lstrip().startswith("#"):
            lines.append(line)
        else:
            lines += _broken(line)
        quoted ^= marks % 2 == 1
    return "\n".join(lines)


def tidied(text: str) -> str:
    """The text without a name for what is returned on the next line, and without a constructor that does nothing."""
    text = _RETURNED.sub(r"\1return \3", text)
    return _IDLE.sub("    def ", _CAST.sub(r"\1return \3\4", text))


_RETURNED = re.compile(r"^( +)(\w+) = (.+)\n\1return \2$", re.M)
# A call alone: of a sum or a product the method would bind to the last part.
_CALLED = r"torch\.\w+\((?:[^()]|\([^()]*\))*\)"
_CAST = re.compile(rf"^( +)(\w+) = ({_CALLED})\n\1return \2(\.to\(x\.dtype\))$", re.M)
_IDLE = re.compile(r"^    def __init__\(self\) -> None:\n        super\(\)\.__init__\(\)\n\n    def ", re.M)


def _broken(line: str) -> list[str]:
    """A long line over several: what is within its last brackets on a line of its own, or an element on each."""
    found = re.match(r"^( *)(.*?)(  # .*)?$", line)
    assert found is not None
    indent, code, comment = found[1], found[2], found[3] or ""
    if len(indent) + len(code) <= WIDTH and not comment:
        return [line]
    assigned = re.match(r"^([\w, ]+ = )(.+)$", code)
    if assigned is not None:
        right = assigned[2]
        elements = _divided(right, ",")
        if len(elements) > 1:
            inside = [f"{each}," for each in elements]
        elif right[-1] not in _CLOSE and len(indent) + 4 + len(right) <= WIDTH:
            inside = [right]
        elif right[-1] not in _CLOSE:
            numerator, *others = _divided(right, " / ")
            inside = [numerator, *(f"/ {each}" for each in others)] if others else []
        else:
            inside = []
        if inside:
            parts = [f"{indent}    {each}" for each in inside]
            return [f"{indent}{assigned[1]}(", *chain.from_iterable(map(_fitted, parts)), f"{indent}){comment}"]
    pair = _last_pair(code)
    if pair is None:
        return [line]
    first, last = pair
    inner, deeper = code[first + 1 : last], indent + "    "
    head, tail = indent + code[: first + 1], f"{indent}{code[last:]}{comment}"
    if len(deeper) + len(inner) <= WIDTH and not inner.endswith(","):
        return [head, deeper + inner, tail]
    found_lines = [head]
    clauses = _divided(inner, " for ")
    parts = [f"{each}," for each in _divided(inner.rstrip(","), ",")]
    if len(clauses) > 1:
        parts = [clauses[0], *(f"for {each}" for each in clauses[1:])]
    return [*found_lines, *chain.from_iterable(_fitted(f"{deeper}{part}") for part in parts), tail]


def _fitted(line: str) -> list[str]:
    return _broken(line) if len(line) > WIDTH else [line]


def _last_pair(code: str) -> tuple[int, int] | None:
    """The outermost brackets that close last, and hold something."""
    stack: list[int] = []
    pairs: list[tuple[int, int]] = []
    for i, char in enumerate(code):
        if char in _OPEN:
            stack.append(i)
        elif char in _CLOSE:
            start = stack.pop()
            if not stack and i > start + 1:
                pairs.append((start, i))
    return pairs[-1] if pairs else None


def _divided(inner: str, mark: str) -> list[str]:
    """What a mark divides outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(inner):
        depth += (char in _OPEN) - (char in _CLOSE)
        if not depth and inner.startswith(mark, i):
            parts.append(inner[start:i].strip())
            start = i + len(mark)
    return [*parts, inner[start:].strip()]
