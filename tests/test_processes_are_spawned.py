"""No process of a run is forked: threads, gRPC and weights in memory do not survive it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import laminar

SOURCES = sorted(Path(laminar.__file__).parent.rglob("*.py"))
FORKS = {"fork", "forkpty", "preexec_fn", "ProcessPoolExecutor", "Pool", "set_start_method", "get_context"}


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name for alias in node.names)
            yield getattr(node, "module", None) or ""


def test_nothing_forks() -> None:
    """Case 59: worker processes that are forked under threads hang: all of them are spawned."""
    found = {(p.name, n) for p in SOURCES for n in names(ast.parse(p.read_text())) if n in FORKS}
    found |= {(p.name, n) for p in SOURCES for n in names(ast.parse(p.read_text())) if n.startswith("multiprocessing")}
    assert found == set() and len(SOURCES) > 50


def test_vllm_is_told_to_spawn_too() -> None:
    [engine] = [p for p in SOURCES if p.parts[-2:] == ("engines", "vllm.py")]
    assert 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in engine.read_text()
