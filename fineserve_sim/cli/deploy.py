"""The command that writes what others deploy: deploy."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineserve_sim.cli.console import OutOption, examples, interruptible, path_argument, print_rows

if TYPE_CHECKING:
    from fineserve_sim.deploy.engines import Deployed


class Format(StrEnum):
    """What starts the engines."""

    VLLM = "vllm"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    KAI = "kai"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog=examples("fineserve-sim deploy plan.yaml --as kubernetes --models /models --out deploy"))(deploy)


def deploy(
    file: Annotated[Path, path_argument("FILE", "Experiment in YAML, such as the plan.yaml of plan.")],
    *,
    format: Annotated[
        Format,
        typer.Option(
            "--as",
            help="Scripts of vllm, Docker Compose, manifests for NVIDIA's device plugin, or for KAI's scheduler.",
        ),
    ],
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="This system of the file; else the first.", show_default=False)
    ] = None,
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="DIR", help="The folder with a checkpoint of each model, by its catalog name."
        ),
    ] = "/models",
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", metavar="ID=WHERE", help="The checkpoint of a model, if elsewhere; may be repeated."),
    ] = None,
    out: OutOption = None,
) -> None:
    """Write a placement as files that start stock vLLM engines.

    Each engine gets its GPUs, its share of their memory and, under MPS, of the SMs.
    """
    with interruptible():
        from fineserve_sim.deploy.engines import engines_of, shares_memory
        from fineserve_sim.experiment import load_experiment

        experiment = load_experiment(file)
        given = dict(_pair(text) for text in weights or ())
        engines = engines_of(experiment, system, models=models, weights=given)
        written = _written(format, engines, models)
        folder = out or Path("results") / f"deploy-{file.stem}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (folder / name).write_text(text, encoding="utf-8")
        _print(engines)
        if shares_memory(experiment, system) and any(each.mode not in ("exclusive", "mig") for each in engines):
            typer.echo(
                "Engines of one GPU share KV memory in this system; stock vLLM cannot, and each gets a fixed part. What that "
                "costs: fineserve-sim run FILE --set 'systems.0.memory={policy: private}'"
            )
        if format in (Format.KUBERNETES, Format.KAI):
            typer.echo(
                "Kubernetes chooses the GPU of each engine: those that share one here may share other ones there."
            )
        typer.echo(f"Wrote {', '.join(str(folder / name) for name in written)}")


def _written(format: Format, engines: Sequence[Deployed], models: str) -> dict[str, str]:
    from fineserve_sim.deploy import compose, kubernetes, vllm

    if format is Format.VLLM:
        return vllm.scripts(engines)
    if format is Format.COMPOSE:
        return compose.files(engines, models)
    return (kubernetes.by_plugin if format is Format.KUBERNETES else kubernetes.by_kai)(engines)


def _pair(text: str) -> tuple[str, str]:
    name, sign, where = text.partition("=")
    if not sign or not name or not where:
        raise ValueError(f"--weights {text}: expected ID=WHERE, such as chat=meta-llama/Llama-3.1-8B-Instruct")
    return name, where


def _print(engines: Sequence[Deployed]) -> None:
    rows = [
        [
            each.name,
            f"{each.node}: {','.join(map(str, each.devices))}",
            each.mode + ("" if each.sm_percent is None else f" {each.sm_percent} %"),
            f"{each.memory_share:.3f}",
            f"{each.kv_bytes / 2**30:.1f}",
            f"{each.max_model_len:,}",
            str(each.port),
        ]
        for each in engines
    ]
    headers = ("engine", "node: GPUs", "shared by", "of memory", "KV GiB", "longest", "port")
    print_rows(headers, rows, right=headers[3:])
