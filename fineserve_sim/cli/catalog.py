"""Commands that say what there is: list and describe."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fineserve_sim.cli.console import JsonOption, console, examples, print_json, print_rows


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("list", epilog=examples("fineserve-sim list systems", "fineserve-sim list models --json"))(list_)
    app.command(epilog=examples("fineserve-sim describe fineserve", "fineserve-sim describe static* --json"))(describe)


def complete_system(incomplete: str) -> list[str]:
    """Names of systems for shell completion."""
    from fineserve_sim.systems import load_systems

    return [name for name in load_systems() if name.startswith(incomplete)]


def complete_gpu(incomplete: str) -> list[str]:
    """Names of GPUs for shell completion."""
    from fineserve_sim import catalog

    return [name for name in catalog.gpus() if name.startswith(incomplete)]


def complete_kind(incomplete: str) -> list[str]:
    """What can be listed, for shell completion."""
    return [kind for kind in _LISTS if kind.startswith(incomplete)]


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="systems|models|gpus|precisions|policies",
            help="What to list.",
            show_default=False,
            autocompletion=complete_kind,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """List the built-in systems, models, GPUs, precisions or policies, one line each."""
    from fineserve_sim.experiment.file.errors import nearest

    if kind not in _LISTS:
        raise ValueError(f'cannot list "{kind}"; {nearest(kind, _LISTS)}')
    entries, shown, right = _LISTS[kind]()
    if as_json:
        print_json(entries)
    else:
        print_rows(list(shown[0]), [list(row.values()) for row in shown], right=right)


_Listing = tuple[list[dict[str, Any]], list[dict[str, str]], tuple[str, ...]]
"""Plain entries for JSON; the same as rows of text by column; the columns that hold numbers."""


def _systems() -> _Listing:
    from fineserve_sim.systems import load_systems

    systems = list(load_systems().values())
    shown = [{"System": system.name, "Title": system.title, "What it is": system.summary} for system in systems]
    return [system.model_dump(mode="json") for system in systems], shown, ()


def _models() -> _Listing:
    from fineserve_sim import catalog

    half = catalog.precision("W16A16")
    entries, shown = [], []
    for model in catalog.models().values():
        parameters, kv_bytes = catalog.parameters(model), catalog.kv_token_bytes(model, half, 1)
        entries.append(model.model_dump(mode="json") | {"parameters": parameters, "kv_token_bytes_16bit": kv_bytes})
        row = {"Model": model.name, "Parameters": f"{parameters / 1e9:.2f} B", "Layers": str(model.layers)}
        shown.append(row | {"KV per token, 16 bit": f"{kv_bytes / 1024:g} KiB"})
    return entries, shown, ("Parameters", "Layers", "KV per token, 16 bit")


def _gpus() -> _Listing:
    from fineserve_sim import catalog
    from fineserve_sim.latency.tables import DEVICES

    gpus = list(catalog.gpus().values())
    shown = [
        {
            "GPU": gpu.name,
            "Memory": f"{gpu.memory_gib:g} GiB",
            "BF16": f"{gpu.bf16_flops_per_s / 1e12:.0f} TFLOP/s",
            "FP8": f"{gpu.fp8_flops_per_s / 1e12:.0f} TFLOP/s" if gpu.fp8_flops_per_s else "none",
            "Bandwidth": f"{gpu.memory_bytes_per_s / 1e12:.2f} TB/s",
            "Kernel rates": "measured" if gpu.efficiency == "measured" else "scaled by its peaks",
            "Latency tables": "its own"
            if gpu.name in DEVICES
            else f"{gpu.tables_from}, scaled"
            if gpu.tables_from
            else "none",
        }
        for gpu in gpus
    ]
    return [gpu.model_dump(mode="json") for gpu in gpus], shown, ("Memory", "BF16", "FP8", "Bandwidth")


def _precisions() -> _Listing:
    from fineserve_sim import catalog

    precisions = list(catalog.precisions().values())
    shown = [
        {
            "Precision": precision.name,
            "Also called": ", ".join(precision.aliases),
            "Bits a weight": f"{precision.effective_weight_bits:g}",
            "Activation": str(precision.activation_bits),
            "KV": str(precision.kv_bits),
            "Computes in": precision.tensor_core,
        }
        for precision in precisions
    ]
    return [precision.model_dump(mode="json") for precision in precisions], shown, ("Bits a weight", "Activation", "KV")


def _policies() -> _Listing:
    from fineserve_sim.cli.policies import policies

    found = policies()
    shown = [{"Axis": p.axis, "Policy": p.name, "What it is": p.doc.split("\n", maxsplit=1)[0]} for p in found]
    return [policy.as_dict() for policy in found], shown, ()


_LISTS = {
    "systems": _systems,
    "models": _models,
    "gpus": _gpus,
    "precisions": _precisions,
    "policies": _policies,
}


def describe(
    system: Annotated[
        str, typer.Argument(metavar="SYSTEM", show_default=False, autocompletion=complete_system, help="Its name.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show a system: its policy on each axis, their options with defaults, and its YAML."""
    from fineserve_sim.cli.policies import chosen
    from fineserve_sim.experiment.file.errors import nearest
    from fineserve_sim.systems import load_systems

    systems = load_systems()
    if system not in systems:
        raise ValueError(f'unknown system "{system}"; {nearest(system, systems)}')
    spec = systems[system]
    choices = chosen(spec)
    if as_json:
        names = {"name": spec.name, "title": spec.title, "summary": spec.summary}
        print_json(names | {"axes": [policy.as_dict() | {"values": values} for policy, values in choices]})
        return
    out = console()
    out.print(f"{spec.title} ({spec.name}): {spec.summary}", markup=False)
    for policy, values in choices:
        out.print(f"\n[bold]{policy.axis}: {policy.name}[/bold]")
        out.print(policy.doc, markup=False)
        for option in policy.options:
            value = values[option.name]
            changed = "" if value == option.default else f"; default {option.default}"
            out.print(f"  {option.name} = {value}  ({option.choices}{changed})", markup=False)
    out.print("\n[bold]YAML[/bold]")
    out.print(_yaml(spec.model_dump(mode="json")), markup=False, soft_wrap=True)


def _yaml(system: dict[str, Any]) -> str:
    """The system file with every option written out, one line an axis."""
    import yaml

    return yaml.safe_dump(system, sort_keys=False, default_flow_style=None, width=1000, allow_unicode=True).rstrip()
