"""docs/command_line.md has every command, every option and every exit code of the command line."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from torchdali.tools.cli import commands

COMMAND_FILES = (Path(__file__).parents[2] / "torchdali" / "tools" / "commands").glob("*.py")
PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
COMMANDS = commands().commands


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the name in their first column."""
    lines = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return {re.findall(r"`(\w+)`", row[0])[0]: row[1:] for row in rows}


def test_every_command_has_a_section_and_its_rows() -> None:
    sections = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    assert sections == set(COMMANDS) == set(table("Command | What it does")) == set(table("Command | 0 | 1 | 2"))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_named(name: str) -> None:
    options = [option for one in COMMANDS[name].params if isinstance(one, click.Option) for option in one.opts]
    missing = [option for option in options if option not in section(name)]
    assert not missing


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_says_the_exit_codes(name: str) -> None:
    said = " ".join((COMMANDS[name].help or "").split())
    assert re.search(r"Exits with [01]", said)
    assert all(len(cells) == 3 and all(cells) for cells in table("Command | 0 | 1 | 2").values())


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_the_help_is_whole_in_80_columns(name: str) -> None:
    result = CliRunner().invoke(commands(), [*([name] if name else []), "--help"], terminal_width=80)
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")] == []
    shown = " ".join(result.output.split())
    for command in [COMMANDS[name]] if name else COMMANDS.values():
        first, _, rest = (command.help or "").partition("\n\n")
        for text in [first, *(re.split(r"\n\n", rest) if name else [])]:
            assert " ".join(text.split()) in shown


def test_every_problem_is_explained() -> None:
    source = "".join(path.read_text() for path in COMMAND_FILES)
    raised = set(re.findall(r'Problem\([^"]*?"([a-z ]+)"', source))
    listed = set(re.findall(r"^\| `([a-z ]+)` \|", section("check"), re.MULTILINE))
    assert raised == listed
    assert len(raised) == 10
