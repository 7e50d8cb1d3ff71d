"""The `laminar` command: parses, calls, prints. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from laminar import __version__
from laminar.buffer.etcd_access import PASSWORD_VARIABLE, VARIABLES, EtcdAccess
from laminar.errors import LaminarError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Asynchronous RL post-training of language models, with its state in a store.\n\n"
        "```\n"
        "laminar run examples/quickstart.toml           start a run, or resume it\n"
        "laminar run config.toml --dry-run              check a config, start nothing\n"
        "laminar status                                 the newest run here, live or ended\n"
        "laminar experience ls my-run --where 'reward > 0.9'\n"
        "laminar plot my-run                            curves as a PNG\n"
        "laminar audit my-run                           is everything there exactly once?\n"
        "laminar replay my-run --steps 5                train recorded steps again, and compare\n"
        "laminar recover my-run                         rebuild a lost etcd from the store\n"
        "laminar simulate examples/cluster.toml         a job on a cluster that you do not have yet\n"
        "```\n"
    ),
)
experience = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help=(
        "Look at what was generated and what it was trained on.\n\n"
        "```\n"
        "laminar experience ls my-run --limit 50 --where \"status <> 'ok'\"\n"
        "laminar experience show my-run 12 3\n"
        "laminar experience sql my-run 'select version, avg(reward) from experience group by version'\n"
        "laminar experience export my-run rewards.parquet\n"
        "```\n"
    ),
)
app.add_typer(experience, name="experience")
relay = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at the relays, which carry weights from the trainer to the rollouts' hosts.",
)
app.add_typer(relay, name="relay")

PEM = "PEM file"
RUN_HELP = "A run's name, a store folder or its URL."
Target = Annotated[str | None, typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Default: the newest run here.")]
Named = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Etcd = Annotated[str, typer.Option("--etcd", metavar="HOST:PORT,…", help="etcd's addresses, if not in the config.")]
Where = Annotated[str, typer.Option("--where", metavar="SQL", help='A condition over the columns; quote "group".')]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Rows at most.")]


class Kind(StrEnum):
    rollout = "rollout"
    trainer = "trainer"
    relay = "relay"
    committer = "committer"


class Table(StrEnum):
    experience = "experience"
    steps = "steps"
    step_metrics = "step_metrics"
    evaluation = "evaluation"
    prompts = "prompts"


class Format(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    csv = "csv"


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    # The environment reaches `main` even when parsing ends in an error, and the workers of a local run too.
    if debug:
        os.environ["LAMINAR_DEBUG"] = "1"


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="The run's config, a TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value of the config. May be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start and write nothing.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live display.")] = False,
) -> None:
    """Start a run on this machine, or resume it where it stopped.

    Ctrl-C stops it within seconds and loses nothing; the same command goes on.

    `laminar run config.toml --set trainer.learning_rate=2e-5 --set run.name=warm`
    """
    from laminar.config import load_config_with

    # Before the import of what runs it: a mistake in the config is told in a fraction of a second.
    parsed, text = load_config_with(config, set_ or [])
    from laminar.workers.local import run as run_local

    raise typer.Exit(run_local(parsed, text=text, dry_run=dry_run, plain=plain))


@app.command()
def worker(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="rollout: generates; trainer: learns, or stands by; relay: serves weights on its host, reassigns and "
            "commits; committer: started by each relay, by hand for debugging only.",
        ),
    ],
    name: Annotated[str, typer.Option("--run", metavar="NAME", help="The run to join.")],
    etcd: Annotated[
        str, typer.Option("--etcd", metavar="HOST:PORT,…", envvar="LAMINAR_ETCD", help="etcd's addresses.")
    ],
    ca: Annotated[str, typer.Option("--etcd-ca", envvar=VARIABLES["ca"], help=f"TLS: {PEM} of etcd's authority.")] = "",
    certificate: Annotated[
        str, typer.Option("--etcd-cert", envvar=VARIABLES["certificate"], help=f"TLS: {PEM} of this client.")
    ] = "",
    key: Annotated[str, typer.Option("--etcd-key", envvar=VARIABLES["key"], help=f"TLS: {PEM} of its key.")] = "",
    user: Annotated[str, typer.Option("--etcd-user", envvar=VARIABLES["user"], help="etcd's user, if it asks.")] = "",
    password_env: Annotated[
        str, typer.Option("--etcd-password-env", help="The environment variable that holds the password.")
    ] = PASSWORD_VARIABLE,
    password_file: Annotated[
        str, typer.Option("--etcd-password-file", envvar=VARIABLES["password_file"], help="Or the file that does.")
    ] = "",
    index: Annotated[int, typer.Option("--index", min=0, help="Which of the workers of its kind on this host.")] = 0,
) -> None:
    """Start one worker by hand, on any machine that reaches etcd and the store.

    Everything else it reads from the run's manifest. Keys of an object store come from the environment.

    `laminar worker rollout --etcd node1:2379,node2:2379 --run my-run`
    """
    from laminar.workers.main import run_worker

    access = EtcdAccess(tuple(_endpoints(etcd)), ca, certificate, key, user, password_env, password_file)
    raise typer.Exit(run_worker(kind.value, access=access, run=name, index=index))


@app.command()
def status(target: Target = None, etcd: Etcd = "") -> None:
    """How a run stands: live from etcd while it works, from the store afterwards."""
    from laminar.workers.viewing import render
    from laminar.workers.viewing.inspect import open_store
    from laminar.workers.viewing.status import run_status

    _print(render.status(run_status(open_store(target), _endpoints(etcd))))


@relay.command("status")
def relay_status(target: Target = None, etcd: Etcd = "") -> None:
    """The chain of a running run: versions held, bytes a second of each hop, repairs, last errors.

    `lag` is the time from a relay's hearing of the version to its having all of it.
    """
    from laminar.workers.viewing.inspect import open_store
    from laminar.workers.viewing.relay_status import chain_status, render_chain

    _print(render_chain(chain_status(open_store(target), _endpoints(etcd))))


@experience.command("ls")
def experience_ls(target: Target = None, limit: Limit = 20, where: Where = "") -> None:
    """List committed trajectories, the newest first.

    `laminar experience ls my-run --where "finish_reason = 'length' and reward < 0.1"`
    """
    from laminar.workers.viewing import render
    from laminar.workers.viewing.inspect import list_experience, open_store

    _print(render.table(list_experience(open_store(target), limit=limit, where=where), limit=limit))


@experience.command("show")
def experience_show(
    target: Named,
    group: Annotated[int, typer.Argument(min=0, help="The group: one drawing of a prompt.")],
    sample: Annotated[int, typer.Argument(min=0, help="The sample within the group.")],
) -> None:
    """Show one trajectory: who wrote what under which version, its reward, how it was trained on."""
    from laminar.workers.viewing import render
    from laminar.workers.viewing.inspect import open_store, show_trajectory

    _print(render.trajectory(show_trajectory(open_store(target), group, sample)))


@experience.command("sql")
def experience_sql(
    target: Named,
    query: Annotated[str, typer.Argument(help='DuckDB\'s SQL. `group` is a word of SQL: write the column as "group".')],
    limit: Limit = 100,
) -> None:
    """Query the tables experience, steps, step_metrics, evaluation and prompts together.

    `laminar experience sql my-run 'select e.version, avg(s.staleness) from experience e
    join steps s using ("group", sample) group by e.version order by 1'`
    """
    from laminar.workers.viewing import render
    from laminar.workers.viewing.inspect import open_store

    _print(render.table(open_store(target).query(query), limit=limit))


@experience.command("export")
def experience_export(
    target: Named,
    path: Annotated[Path, typer.Argument(help="The file to write: .parquet, .jsonl or .csv.")],
    file_format: Annotated[Format | None, typer.Option("--format", help="Default: by the ending of PATH.")] = None,
    table: Annotated[Table, typer.Option("--table", help="Which table.")] = Table.experience,
    where: Where = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a table to one file, whole or not at all."""
    from laminar.workers.viewing.export import export_table
    from laminar.workers.viewing.inspect import open_store

    rows = export_table(
        open_store(target),
        path,
        table=table.value,
        file_format=file_format.value if file_format else "",
        where=where,
        force=force,
    )
    _print(Text(f"{rows} rows of {table.value} written to {path}"))


@app.command()
def audit(target: Target = None, etcd: Etcd = "") -> None:
    """Check that every drawn trajectory is there exactly once, and all else that must hold. Exits with 1 if not."""
    from laminar.workers.viewing.inspect import audit_run, open_store

    report = audit_run(open_store(target), _endpoints(etcd))
    for problem in report.problems:
        _print(Text(problem, style="red"))
    _print(Text(report.summary))
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def recover(
    target: Named,
    etcd: Etcd = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also where the run is at work (workers are fenced out), or etcd is sound.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, write nothing.")] = False,
) -> None:
    """Rebuild a lost etcd, or one that was restored from an old copy, from the run's store.

    Everything that was committed or flushed goes on; what is lost is said. Then `laminar run` resumes the run.

    `laminar recover my-run --dry-run`
    """
    from laminar.workers.supervisor.recovering import run_recover
    from laminar.workers.viewing.inspect import open_store

    store = open_store(target)
    _print(Text(run_recover(store.root, store.options, _endpoints(etcd), force=force, dry_run=dry_run)))


@app.command()
def replay(
    target: Target = None,
    first: Annotated[
        int | None, typer.Option("--from-step", min=0, help="The first step. Default: that after the checkpoint.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            "--checkpoint", min=0, help="The version to begin with; 0: the initial model. Default: the nearest before."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="How many steps. Default: all.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Another value than the recorded. May be repeated."),
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The run's initial model, if it has moved.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write all metrics too: .parquet, .jsonl or .csv.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Train recorded steps again, with the same or other settings, and compare; the run need not be there.

    Each line has what came out and, in brackets, what was recorded. With the same settings the same bits should come
    out: exits with 1 if they do not. Nothing is written into the store.

    `laminar replay my-run --from-step 20 --steps 10 --set trainer.learning_rate=1e-5 --set trainer.clip_high=0.2`
    """
    from laminar.workers.viewing import render
    from laminar.workers.viewing.export import checked_writer, write_table
    from laminar.workers.viewing.inspect import open_store
    from laminar.workers.viewing.replay import Question, as_table, changes_of, devices_of, verdict
    from laminar.workers.viewing.replay import replay as run_replay

    store = open_store(target)
    changes = changes_of(store.run, set_ or [])
    if out is not None:
        checked_writer(out, force=force)
    question = Question(first, checkpoint, steps, changes, devices_of(store.run, set_ or []), model)
    replayed = run_replay(store, question, lambda step: _print(render.replayed(step)))
    if out is not None:
        write_table(as_table(replayed), out, force=force)
    fine, text = verdict(replayed, changes)
    _print(Text(text, style="" if fine else "red"))
    raise typer.Exit(0 if fine else 1)


MODES = {
    "a cluster's file": ("set_", "real", "output", "json_"),
    "--fit": ("output", "json_", "force"),
    "--faults": ("seeds", "jobs"),
}
"""What `laminar simulate` does, and the options that say something to it."""


def _refuse_idle_options(context: typer.Context, mode: str) -> None:
    """Raises BadParameter for an option that does nothing in this mode: who gives it expects that it does."""
    for option in context.command.params:
        name = str(option.name)
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        belongs = [other for other, names in MODES.items() if name in names]
        if given and belongs and mode not in belongs:
            raise typer.BadParameter(
                f"{option.opts[0]} does nothing with {mode}; it belongs to {' and '.join(belongs)}: leave it out"
            )


@app.command()
def simulate(
    context: typer.Context,
    cluster: Annotated[
        Path | None, typer.Argument(metavar="[CLUSTER.toml]", help="A job on a cluster, such as examples/cluster.toml.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value of the file. May be repeated."),
    ] = None,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="The last policy with the workers themselves: slower. Engine, training and time stay modelled, and "
            "one token stands for many.",
        ),
    ] = False,
    fit: Annotated[
        str, typer.Option("--fit", metavar="RUN", help="How many rollouts balance a recorded run's trainer.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The PNG (default `<cluster>.png`), or the TOML that --fit writes."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON in place of the table.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --fit: replace existing files.")] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Run the real workers under seeded faults.")] = False,
    seeds: Annotated[str, typer.Option("--seeds", metavar="A..B", help="A seed, or a range with both ends.")] = "0..99",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes; default: one a core.")] = os.cpu_count() or 1,
) -> None:
    """Try a job on a cluster before you rent it; fit one to a recorded run; or prove the protocol under faults.

    `laminar simulate examples/cluster.toml --set cluster.gpus=256` compares Laminar with synchronous, one-step stale,
    streaming and partial-rollout training: throughput, idle GPUs, staleness, KV use; a table, JSON, a PNG.

    `laminar simulate --fit my-run` says how many rollouts balance the trainer, and writes such a file.

    `laminar simulate --faults` runs the real rollout, trainer, relay and manager code in virtual time, with crashes at
    any call, pauses, partitions, full disks, power cuts. Exits with 1 if any seed breaks an invariant; a seed replays
    exactly.
    """
    if (cluster is not None) + bool(fit) + faults != 1:
        raise typer.BadParameter("name a cluster's TOML file, or say --fit RUN, or --faults")
    _refuse_idle_options(context, "--faults" if faults else "--fit" if fit else "a cluster's file")
    if faults:
        from laminar.simulator.seeds import run_faults

        raise typer.Exit(0 if run_faults(seeds, jobs, lambda text: _print(Text(text))) else 1)
    from laminar.simulator.scale.command import run_cluster, run_fit

    if cluster is None:
        run_fit(fit, output, as_json=json_, force=force, say=_print)
    else:
        run_cluster(cluster, set_ or [], output, as_json=json_, real=real, say=_print)


@app.command()
def plot(
    target: Target = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: `<run>.png` in this folder.")] = None,
) -> None:
    """Draw reward, response length and staleness over steps and over time."""
    from laminar.workers.viewing.inspect import open_store
    from laminar.workers.viewing.plot import plot as draw

    store = open_store(target)
    _print(Text(str(draw(store, output or Path(f"{store.run.run}.png")))))


@app.command()
def version() -> None:
    """Print the version of Laminar."""
    _print(Text(__version__))


def _endpoints(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _print(what: object) -> None:
    console = Console()
    if not console.is_terminal:
        # Nobody scrolls sideways in a pipe: do not cut lines at a guessed width.
        console = Console(width=10_000)
    console.print(what, highlight=False, soft_wrap=not console.is_terminal and isinstance(what, Text))


def main() -> None:
    """Run the command; a LaminarError becomes one message and its exit code."""
    try:
        app()
    except LaminarError as error:
        if os.environ.get("LAMINAR_DEBUG"):
            raise
        message = Text.assemble(("error: ", "bold red"), (str(error), "red"))
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
