"""The `laminar` command as a user meets it: help, errors, exit codes, and every documented line."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar import __version__
from laminar.cli import app, main
from laminar.config import config_from
from laminar.errors import ConfigError

MakeStore = Callable[..., Path]
DOCUMENT = Path(__file__).parent.parent / "docs" / "inspecting.md"
HEAVY = ("torch", "vllm", "lance", "transformers", "duckdb", "pyarrow", "matplotlib", "tensorboard", "grpc", "etcd3")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), flags=re.S)


@pytest.fixture
def here(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store("my-run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMINAR_DEBUG", raising=False)
    return tmp_path


def fails(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["laminar", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


class TestHelp:
    def test_help_imports_nothing_heavy(self) -> None:
        script = (
            "import sys\nfrom laminar.cli import app\n"
            "try: app(['--help'])\nexcept SystemExit: pass\n"
            "print('MODULES', *sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        modules = set(done.stdout.rpartition("MODULES")[2].split())
        assert modules.isdisjoint(HEAVY), sorted(modules & set(HEAVY))

    @pytest.mark.parametrize(
        "command",
        [[], ["run"], ["worker"], ["status"], ["audit"], ["recover"], ["replay"], ["plot"], ["version"], ["experience"]]
        + [["experience", name] for name in ("ls", "show", "sql", "export")],
    )
    def test_every_command_has_help(self, command: list[str]) -> None:
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output

    def test_help_teaches_with_examples(self) -> None:
        assert "laminar run examples/quickstart.toml" in CliRunner().invoke(app, ["--help"]).output
        assert "--set trainer.learning_rate=2e-5" in CliRunner().invoke(app, ["run", "--help"]).output

    def test_version(self) -> None:
        assert CliRunner().invoke(app, ["version"]).output.strip() == __version__


class TestErrors:
    def test_one_clear_line_on_stderr_and_the_errors_exit_code(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert fails(monkeypatch, "status", "my-rum") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: no store at 'my-rum'") and "did you mean 'my-run'" in captured.err
        assert "Traceback" not in captured.err

    def test_debug_shows_the_traceback(self, here: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(
            [sys.executable, "-m", "laminar.cli", "--debug", "status", "my-rum"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert done.returncode == 1 and "Traceback" in done.stderr and "ConfigError" in done.stderr

    def test_a_misspelt_key_starts_nothing(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (here / "c.toml").write_text('[model]\npath = "tiny-reverse"\n[trainer]\nlerning_rate = 1e-5\n')
        assert fails(monkeypatch, "run", "c.toml") == 2
        assert "did you mean 'learning_rate'" in capsys.readouterr().err

    def test_set_overrides_a_value_and_is_checked_like_the_file(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Case 44: group size 1 with a group baseline; refused at config time."""
        (here / "c.toml").write_text('[model]\npath = "tiny-reverse"\n')
        assert fails(monkeypatch, "run", "c.toml", "--set", "sampling.samples_per_prompt=1") == 2
        assert "needs at least 2 samples" in capsys.readouterr().err
        assert fails(monkeypatch, "run", "c.toml", "--set", "nonsense") == 2
        assert "section.key=value" in capsys.readouterr().err
        assert fails(monkeypatch, "run", "absent.toml") == 2
        assert "cannot read the config absent.toml" in capsys.readouterr().err


class TestLooking:
    def test_ls_in_a_pipe_cuts_no_line(self, here: Path) -> None:
        result = CliRunner().invoke(app, ["experience", "ls", "my-run", "--limit", "2"])
        assert result.exit_code == 0
        heading, first = result.output.splitlines()[:2]
        assert heading.split()[:4] == ["group", "sample", "version", "reward"]
        assert first.split()[:5] == ["12", "3", "11", "–", "reward_timeout"]

    def test_rows_too_wide_for_a_terminal_are_shown_a_column_a_line(self, here: Path) -> None:
        from rich.console import Console

        from laminar.workers.viewing.inspect import open_store
        from laminar.workers.viewing.render import table

        console = Console(width=80, record=True, file=io.StringIO())
        console.print(table(open_store("my-run").query("select * from experience"), limit=1))
        text = console.export_text()
        assert text.startswith("row 0") and "span_digest" in text and "51 more rows" in text

    def test_show_labels_who_wrote_what(self, here: Path) -> None:
        output = CliRunner().invoke(app, ["experience", "show", "my-run", "3", "3"]).output
        assert "rollout-b-2-bb" in output and "d00d" in output
        assert "[policy, version 2] answer four" in output
        assert "[environment] tool says" in output
        assert "exact 0.75" in output

    def test_sql_says_how_many_rows_are_not_shown(self, here: Path) -> None:
        output = (
            CliRunner()
            .invoke(app, ["experience", "sql", "my-run", "select sample from experience", "--limit", "5"])
            .output
        )
        assert "47 more rows" in output


class TestDocumentation:
    """docs/inspecting.md is run, not believed."""

    @pytest.mark.parametrize("line", [line for block in blocks("console") for line in block.splitlines()])
    def test_command(self, here: Path, line: str) -> None:
        import shlex

        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert result.output.strip()

    @pytest.mark.parametrize("source", blocks("python"))
    def test_python(self, here: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
        exec(compile(source, str(DOCUMENT), "exec"), {})

    def test_there_is_something_to_run(self) -> None:
        assert len(blocks("python")) >= 4 and len(blocks("console")) == 1


@pytest.mark.parametrize("name", ["../x", "a b", "", "A", "a/b"])
def test_a_run_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not usable: 1 to 63"):
        config_from({"run": {"name": name}, "model": {"path": "x"}})
