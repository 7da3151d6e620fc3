"""mcp.json: what is read, what is refused, what is imported, and that secrets stay hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.tools.config import HIDDEN, Secrets, ServerConfig, ToolsError, import_from, load, parse

FILE: dict[str, Any] = {
    "mcpServers": {
        "files": {
            "command": "npx",
            "args": ["-y", "server", "${HOME}/x"],
            "env": {"TOKEN": "${MINE}", "B": "${N:-no}"},
        },
        "wiki": {"type": "http", "url": "https://a.example/mcp", "headers": {"Authorization": "Bearer abcdefgh"}},
        "old": {"command": "x", "disabled": True},
    }
}


def test_servers_are_read_in_the_form_of_other_programs() -> None:
    files, wiki, old = parse(json.dumps(FILE), "f", own={"HOME": "/h", "MINE": "s3cr3t-token"})
    assert (files.command, files.args) == ("npx", ("-y", "server", "/h/x"))
    assert files.env == {"TOKEN": "s3cr3t-token", "B": "no"}
    assert (wiki.url, wiki.shown, old.disabled) == ("https://a.example/mcp", "a.example", True)
    (other,) = parse(json.dumps({"servers": {"one": {"command": "x"}}}), "f")
    assert other.name == "one"


def test_a_program_gets_what_the_file_names_and_little_else() -> None:
    server = ServerConfig(name="a", command="x", env={"KEY": "value"})
    own = {"PATH": "/bin", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "no", "LOWBIT_CHAT_ENDPOINT_TOKEN": "no"}
    assert server.environment(own) == {"PATH": "/bin", "HOME": "/h", "KEY": "value"}


BROKEN: dict[str, tuple[Any, str]] = {
    "no command": ({}, "needs either a command or a url"),
    "both": ({"command": "x", "url": "https://a.example"}, "needs either a command or a url"),
    "a list": ([1], "is not an object"),
    "args": ({"command": "x", "args": "y"}, "args is not a list"),
    "env": ({"command": "x", "env": {"A": 1}}, r"env.A is not text"),
    "variable": ({"command": "x", "env": {"A": "${NOT_SET_ANYWHERE}"}}, "names the variable NOT_SET_ANYWHERE"),
    "sse": ({"type": "sse", "url": "https://a.example"}, "transport sse"),
    "scheme": ({"url": "file:///etc/passwd"}, "must begin with http"),
    "in the clear": ({"url": "http://a.example", "headers": {"A": "b"}}, "unencrypted"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_entry_costs_that_server_only(kind: str) -> None:
    entry, words = BROKEN[kind]
    bad, good = parse(json.dumps({"mcpServers": {"bad": entry, "good": {"command": "x"}}}), "f", own={})
    assert words in bad.problem
    assert good.problem == ""


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mcpServers": []}', "[" * 5000])
def test_a_file_without_servers_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(ToolsError, match=r"mcp\.json"):
        load(file)


def test_a_file_of_another_program_is_imported_as_it_stands(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "claude.json", tmp_path / "own" / "mcp.json"
    theirs.write_text(json.dumps(FILE))
    assert import_from(theirs, file=ours) == ["files", "wiki", "old"]
    theirs.write_text(json.dumps({"servers": {"new": {"command": "y"}}}))
    import_from(theirs, file=ours)
    found = json.loads(ours.read_text())["mcpServers"]
    assert list(found) == ["files", "wiki", "old", "new"]
    assert found["files"]["env"]["TOKEN"] == "${MINE}"  # a variable stays one
    assert ours.stat().st_mode & 0o077 == 0
    before = ours.read_bytes()
    theirs.write_text(json.dumps({"servers": {"bad": {}}}))
    with pytest.raises(ToolsError, match="needs either"):
        import_from(theirs, file=ours)
    assert ours.read_bytes() == before


def test_secrets_are_hidden() -> None:
    server = ServerConfig(
        name="a",
        command="x",
        args=("--api-key", "argument-secret", "--token=other-secret", "/plain/path"),
        env={"K": 'quo"ted-secret', "SHORT": "1"},
    )
    wiki = ServerConfig(name="b", url="https://a.example/mcp?key=query-secret", headers={"A": "Bearer header-secret"})
    hide = Secrets([server, wiki]).hide
    for text in (
        "argument-secret",
        "other-secret",
        'quo"ted-secret',
        'quo\\"ted-secret',
        "header-secret",
        "query-secret",
    ):
        assert hide(f"before {text} after") == f"before {HIDDEN} after"
    assert hide("1 /plain/path") == "1 /plain/path"
