"""study/pipeline/canonical.py: what stays of code, under every Python; run by its path, as dvc.yaml does."""

import ast
import hashlib
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import first

SOURCE = Path(__file__).parents[1] / "src"
SCRIPT = SOURCE / "study/pipeline/canonical.py"
MODULE = runpy.run_path(str(SCRIPT))
canonical = MODULE["canonical"]
TRICKY = '''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""The module's docstring

# with what looks like a comment.
"""

from math import (  # why

    pi,

)
import os; x = 1  # type: int

text = """kept

# kept
"""  # gone
word = f"""{x:#x}  # kept

{pi!r}

"""; other = "é" + f'{"é"}'  # ö, and another # here


@property  # of nothing
def decorated(self, é="é"): "é is a docstring"; return é  # é


class Empty:
    """All there is."""


class Nothing: "Only this"


def nested(
    x,  # one

    y,
):
    # before it

    """A docstring after a comment."""  # and before one

    async def inner():
        ("a docstring "
         "in two")

        f"""no docstring"""
        """nor this"""
        return x + \\
            y

    def bare():
        "one"; "not this one"
    def ended():
        """with a semicolon""";  # and a comment
        return {"#": '#'}
    def joined():
        "a docstring" \\
        " that goes on"
        y = 1 \\
        # ends here

        return y
    class Inner:
        r"""Raw\\."""

        x: int = 0

        """not the class's"""
'''
KEPT = '''from math import (
    pi,
)
import os; x = 1
text = """kept

# kept
"""
word = f"""{x:#x}  # kept

{pi!r}

"""; other = "é" + f'{"é"}'
@property
def decorated(self, é="é"): return é
class Empty:
    pass
class Nothing: pass
def nested(
    x,
    y,
):
    async def inner():
        f"""no docstring"""
        """nor this"""
        return x + \\
            y
    def bare():
        "not this one"
    def ended():
        return {"#": '#'}
    def joined():
        y = 1 \\

        return y
    class Inner:
        x: int = 0
        """not the class's"""
'''


def without_docstrings(source):
    """The syntax tree in words, docstrings left out by hand."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bare = ast.get_docstring(node) is None
            node.body = node.body if bare else node.body[1:] or ([] if node is tree else [ast.Pass()])
    return ast.dump(tree)


def digest(folder):
    """One number for the names and bytes of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    told = [f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def python(version):
    """An interpreter of another version, or None: on the PATH, or one that pyenv installed."""
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for name in (f"python{version}", *map(str, installed)):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:  # no shim that fails
            return found
    return None


def test_canonical_of_a_tricky_source_by_hand():
    assert canonical(TRICKY) == KEPT


@pytest.mark.parametrize("begin", first(1, range(4)))
def test_canonical_copy_means_what_its_source_means(begin):
    for file in sorted(SOURCE.rglob("*.py*"))[begin::4]:
        if file.suffix in (".py", ".pyi"):
            source = file.read_text()
            assert ast.dump(ast.parse(canonical(source))) == without_docstrings(source), file


def test_canonical_is_blind_to_words_and_sees_a_changed_number():
    source = 'def f():\n    """One."""\n    return 1  # one\n'
    assert canonical(source.replace("One", "Two\n\n").replace("  # one", "")) == canonical(source)
    assert canonical(source.replace("return 1", "return 2")) != canonical(source)


@pytest.mark.parametrize("source", ["", "\n\n", "# a comment\n", '"""A docstring."""\n', '"""A docstring."""'])
def test_canonical_of_words_alone_is_empty(source):
    assert canonical(source) == ""


@pytest.mark.parametrize("version", first(1, ["3.11", "3.12", "3.13"]))
def test_copies_have_the_same_bytes_under_every_python(tmp_path, version):
    other = python(version)
    if other is None:
        pytest.skip(f"there is no Python {version} here")
    folder = SOURCE / "study"
    MODULE["copy"](folder, tmp_path / "here")
    subprocess.run([other, "-I", SCRIPT, folder, tmp_path / "there"], check=True)
    assert digest(tmp_path / "here") == digest(tmp_path / "there")


def test_copy_keeps_other_files_and_leaves_rubbish(tmp_path):
    source = tmp_path / "build/__pycache__/source"  # what lies above the tree does not matter
    for name, text in {
        "a.py": "x = 1  # one",
        "b/c.pyi": "# c\ny: int",
        "b/n.csv": "# n\n",
        "__pycache__/a": "",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/old.py").touch()
    MODULE["copy"](source, tmp_path / "copy")
    copies = {str(p.relative_to(tmp_path / "copy")): p.read_text() for p in tmp_path.glob("copy/**/*") if p.is_file()}
    assert copies == {"a.py": "x = 1\n", "b/c.pyi": "y: int\n", "b/n.csv": "# n\n"}


def test_main_names_the_file_that_is_not_python(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ny = (\n")
    ran = subprocess.run([sys.executable, SCRIPT, tmp_path, tmp_path / "copy"], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.startswith(f"canonical: {tmp_path / 'bad.py'}, line 2, is not Python:")
