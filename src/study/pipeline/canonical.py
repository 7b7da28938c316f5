"""Copies of code without comments, docstrings and blank lines, so that a reworded comment makes no stage stale.

Uses only Python's standard library and gives the same bytes under each version: removed text is cut out by position,
the rest is not touched. The copies are compared, not run.
"""

import argparse
import ast
import io
import shutil
import sys
import tokenize
from pathlib import Path

CODE = (".py", ".pyi")  # other files are copied unchanged
RUBBISH = {"__pycache__", ".ipynb_checkpoints"}


def canonical(source: str) -> str:
    """Return a module's text without comments, docstrings and blank lines; other strings stay unchanged.

    A body of only a docstring becomes `pass`. Raises SyntaxError where the text is not Python.
    """
    lines = source.split("\n")
    tree = ast.parse(source)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments, in_strings = _comments_and_strings(tokens)
    cuts = comments + _docstrings(tree, tokens, lines)
    for start, end, replacement in sorted(cuts, reverse=True):
        _cut(lines, start, end, replacement)
    kept = []
    for number, line in enumerate(lines, 1):
        continued = bool(kept) and kept[-1].endswith("\\")  # here a blank line ends a statement
        if line is not None and (line.strip() or number in in_strings or continued):
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def copy(source: Path, target: Path) -> None:
    """Make `target` afresh: a copy of the tree `source` with canonical code."""
    if target.exists():
        shutil.rmtree(target)
    for file in sorted(source.rglob("*")):
        inner = file.relative_to(source)
        if file.is_dir() or set(inner.parts) & RUBBISH:
            continue
        new = target / inner
        new.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix not in CODE:
            new.write_bytes(file.read_bytes())
            continue
        try:
            with tokenize.open(file) as code:
                new.write_bytes(canonical(code.read()).encode())
        except SyntaxError as error:
            raise ValueError(f"{file}, line {error.lineno}, is not Python: {error.msg}.") from None


def _comments_and_strings(tokens):
    """Find the cuts (start, end, "") of comments, and the numbers of lines that begin within a string."""
    cuts, in_strings, formatted = [], set(), []
    for kind, _, start, end, _ in tokens:
        name = tokenize.tok_name[kind]
        if name.endswith("STRING_START"):  # an f-string is one token before Python 3.12, many since
            formatted.append(start)
        elif name.endswith("STRING_END"):
            in_strings.update(range(formatted.pop()[0] + 1, end[0] + 1))
        elif name == "STRING":
            in_strings.update(range(start[0] + 1, end[0] + 1))
        elif name == "COMMENT" and not formatted:
            cuts.append((start, end, ""))
    return cuts, in_strings


def _docstrings(tree, tokens, lines):
    """Find the cuts (start, end, replacement) of docstrings; the replacement is `pass` for an otherwise empty body."""
    cuts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        docstring, *rest = node.body
        start = _position(lines, docstring.lineno, docstring.col_offset)
        end = _position(lines, docstring.end_lineno, docstring.end_col_offset)
        if not rest:
            cuts.append((start, end, "" if isinstance(node, ast.Module) else "pass"))
            continue
        following = _position(lines, rest[0].lineno, rest[0].col_offset)
        between = [token for token in tokens if end <= token.start < following]
        if any(token.type == tokenize.NEWLINE for token in between):
            end = max([end, *(token.end for token in between if token.string == ";")])
        else:
            end = following
        cuts.append((start, end, ""))
    return cuts


def _position(lines, number, offset):
    """Convert ast's offset in bytes to tokenize's (line, column) in characters."""
    return number, len(lines[number - 1].encode()[:offset].decode())


def _cut(lines, start, end, replacement):
    """Replace the text between two positions; removed lines become None."""
    (first, left), (last, right) = start, end
    before = lines[first - 1][:left]
    after = lines[last - 1][right:]
    lines[first - 1 : last] = [before + replacement + after] + [None] * (last - first)
    if not (replacement or after.strip()):
        lines[first - 1] = before.rstrip()


def main(arguments=None):
    """Copy a tree of Python code without comments, docstrings and blank lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("source", type=Path, help="a folder")
    parser.add_argument("target", type=Path, help="the copy's folder; an existing one is replaced")
    options = parser.parse_args(arguments)
    try:
        copy(options.source, options.target)
    except (ValueError, OSError) as error:
        print(f"canonical: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
