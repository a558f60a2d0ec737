"""README.md and docs/ run as written: sessions, python blocks, commands, names, links."""

import re
from pathlib import Path

import pytest
from support.commands import check, commands, fences, paths, spans
from support.readme import (
    DOCUMENTS,
    README,
    Command,
    clean_folder,
    python_blocks,
    replay,
    sessions,
    trimmed,
    with_tables,
)
from support.tables import ROOT

import meshfold
from meshfold.cli.main import cli
from meshfold.ir.options import PINS
from meshfold.passes.one_pass.tree import PRUNING_RULES

TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
MOST_LINES_OF_README = 150


def with_sessions(*, slow: bool) -> list[str]:
    return [n for n, text in TEXTS.items() if any(s.is_slow is slow for s in sessions(text))]


def stable(command: Command) -> list[str]:
    """Lines that do not depend on the machine: of what processes compute, rounding noise and
    seconds do."""
    lines = command.output.splitlines()
    if command.line.startswith("meshfold verify"):
        return [lines[0], lines[-1]]
    if "--measured" in command.line:
        return []
    if command.line.startswith("meshfold profile"):
        return lines[:2]
    is_script = command.line.startswith(("python", "OMP_NUM_THREADS=1 torchrun"))
    return [re.sub(r"[\d.]+", "0", line) for line in lines] if is_script else lines


def assert_replayed(text: str, *, with_slow: bool) -> None:
    for written, now in zip(sessions(text), replay(text, with_slow=with_slow), strict=True):
        for a, b in zip(written.commands, now.commands, strict=True):
            assert [a.line, *stable(b)] == [a.line, *stable(a)], "run 'make readme'"


@pytest.mark.parametrize("name", with_sessions(slow=False))
def test_documents_show_what_their_commands_print(name: str) -> None:
    assert_replayed(TEXTS[name], with_slow=False)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", with_sessions(slow=True))
def test_slow_sessions_print_what_documents_show(name: str) -> None:
    assert_replayed(TEXTS[name], with_slow=True)


@pytest.mark.parametrize("name", [n for n, text in TEXTS.items() if python_blocks(text)])
def test_python_blocks_run(name: str) -> None:
    names: dict[str, object] = {}
    with clean_folder(TEXTS[name]):
        for block in python_blocks(TEXTS[name]):
            exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize("name", TEXTS)
def test_commands_in_the_text_are_understood(name: str) -> None:
    for command in commands(TEXTS[name]):
        check(command)


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_of_code_is_tested(name: str) -> None:
    """A console, python or json block carries a mark; sh blocks are checked line by line."""
    plain = re.sub(
        r"<!-- (session|session slow|python|file \S+) -->\n```\w+\n.*?```\n",
        "",
        TEXTS[name],
        flags=re.DOTALL,
    )
    assert {language for language, _ in fences(plain)} <= {"", "sh"}


@pytest.mark.parametrize("name", TEXTS)
def test_names_in_the_text_exist(name: str) -> None:
    """Links, files, and what meshfold exports."""
    text, folder = TEXTS[name], (ROOT / name).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [t for t in links if not (folder / t).exists()] == []
    assert [p for p in paths(text) if not (ROOT / p).exists()] == []
    public = {"meshfold", *meshfold.__all__}
    used = {m[1] for span in spans(text) for m in re.finditer(r"\bmeshfold\.([a-zA-Z]\w*)\(", span)}
    assert used <= public
    methods = {m[1] for span in spans(text) for m in re.finditer(r"^model\.(\w+)\(", span)}
    assert [m for m in methods if not hasattr(meshfold.CompiledModel, m)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_tables_say_what_the_code_says(name: str) -> None:
    assert with_tables(TEXTS[name]) == TEXTS[name], "run 'make readme'"


def test_readme_is_short_and_leads_to_every_document() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_OF_README
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in text] == []
    folders = {p.parent for p in ROOT.glob("*/*") if p.suffix in (".py", ".md")}
    tracked = {p.name for p in folders if not p.name.startswith((".", "build", "dist"))}
    assert [name for name in tracked if f"| `{name}/` |" not in text] == []


def document(name: str) -> str:
    return TEXTS[f"docs/{name}.md"]


def test_every_command_has_a_section_with_a_session_and_all_its_options() -> None:
    sections = re.split(r"^## ", document("command_line"), flags=re.MULTILINE)
    by_name = {section.split("\n")[0]: section for section in sections}
    for name, command in cli.commands.items():
        lines = [c.line for session in sessions(by_name[name]) for c in session.commands]
        assert any(line.startswith(f"meshfold {name} ") for line in lines), name
        options = {o for p in command.params for o in p.opts if o.startswith("--")}
        text = by_name[name] + sections[0]
        assert {o for o in options if o not in text and o != "--output"} == set(), name


def test_every_pin_is_explained() -> None:
    names = {name for span in spans(document("plans")) for name in span.split(", ")}
    assert set(PINS) <= names


def test_every_pruning_rule_is_explained() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", document("search"), re.MULTILINE)
    assert set(PRUNING_RULES) <= set(rows)


def test_words_are_in_alphabetical_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", document("concepts").split("## Words")[1], re.MULTILINE)
    words = [row.strip("`").lower() for row in rows[1:] if not row.startswith("---")]
    assert words == sorted(words, key=lambda w: w.replace("-", ""))


OUTPUT = "a 1\nb 2\nc 3\nb 4\nd 5\n"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("", OUTPUT),
        ("[...]\n", "[...]\n"),
        ("a 9\n[...]\n", "a 1\n[...]\n"),
        ("[...]\nc 9\n[...]\nd 7\n", "[...]\nc 3\n[...]\nd 5\n"),
        ("a 1\n[...]\nb 0\nc 0\n[...]\n", "a 1\n[...]\nb 2\nc 3\n[...]\n"),
    ],
)
def test_lines_that_a_document_leaves_out_stay_left_out(shown: str, expected: str) -> None:
    assert trimmed(OUTPUT, shown) == expected


def test_a_line_that_is_gone_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no line like 'x 1'"):
        trimmed(OUTPUT, "[...]\nx 1\n[...]\n")


@pytest.mark.parametrize(
    "command",
    [
        "meshfold plan MODEL --cluster dgx-h1000",
        "meshfold plan examples/configs/none.json --cluster C",
        "meshfold plan MODEL --cluster C --pin tpp=2",
        "meshfold shows plan.json",
        "--no-such-option",
        "python benchmarks/plan.py --no-such-option",
        "python benchmarks/no_such_file.py",
        "make nothing",
        "pip install '.[nothing]'",
    ],
)
def test_a_command_that_would_fail_is_noticed(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(command)


def test_paths_in_the_text_are_found() -> None:
    assert list(paths("`compiler/api.py`, `docs/`, `a/b`, `x.py`")) == ["compiler/api.py", "docs/"]
    assert Path(ROOT / "compiler" / "api.py").exists()
