"""``fineserve-run whatif`` and ``fineserve-run plan`` ask the twin of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fineserve_runtime.cli.options import KeyOption, UrlOption, operator_asks

JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def whatif(
    *,
    system: Annotated[
        str | None,
        typer.Option("--system", "-s", help="Under another system, the file's or a built-in one.", show_default=False),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Under a plan.yaml of the same models.", show_default=False),
    ] = None,
    ttft_slo: Annotated[
        float | None, typer.Option(min=1e-6, help="Under this TTFT limit in seconds.", show_default=False)
    ] = None,
    one_device_fewer: Annotated[bool, typer.Option("--one-device-fewer", help="On one device fewer.")] = False,
    url: UrlOption = "http://127.0.0.1:8000",
    key_env: KeyOption = "FINESERVE_ADMIN_KEY",
    as_json: JsonOption = False,
) -> None:
    """Simulate a running server's last minutes under other conditions, and compare the simulation with what was measured."""
    asked: dict[str, Any] = {"system": system, "ttft_slo_s": ttft_slo, "one_device_fewer": one_device_fewer}
    if plan is not None:
        from fineserve_sim.experiment.file.document import read_yaml

        asked["plan"] = read_yaml(plan).data
    _show(operator_asks("POST", "/admin/whatif", asked, url, key_env), as_json=as_json)


def plan(
    *,
    seconds: Annotated[float, typer.Option(min=1, max=120, help="How long to search.")] = 10.0,
    carry_out: Annotated[bool, typer.Option("--carry-out", help="Move the models as the plan says.")] = False,
    url: UrlOption = "http://127.0.0.1:8000",
    key_env: KeyOption = "FINESERVE_ADMIN_KEY",
    as_json: JsonOption = False,
) -> None:
    """Find a better placement for a running server's last minutes, and with --carry-out move its models there.

    The requests of a moving model finish first. New requests wait until the model is on its new device.
    """
    found = operator_asks("POST", "/admin/plan", {"seconds": seconds, "carry_out": carry_out}, url, key_env)
    _show(found, as_json=as_json)
    if not as_json:
        for model, groups in found["groups"].items():
            typer.echo(f"{model}: device {', '.join('+'.join(map(str, group)) for group in groups) or 'none'}")
        for move in found["moves"] or ():
            typer.echo(f"moved: {move['model']} from device {move['before']} to {move['after']}")


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"{found['requests']} requests in {found['window_s']:.0f} s, {found['steps']} steps measured")
    typer.echo(f"{'':10} {'requests/s':>10} {'TTFT ms':>9} {'P99 ms':>9} {'in time':>8}")
    for name in ("measured", "simulated", "whatif"):
        if found[name] is not None:
            typer.echo(f"{name:10} {_row(found[name])}")
    off = ", ".join(f"{name} {value:+.1%}" for name, value in found["error"].items() if value is not None)
    typer.echo(f"the simulator is off by: {off or 'nothing that was measured'}")


def _row(values: dict[str, Any]) -> str:
    median, last = (
        "-" if values[key] is None else f"{1e3 * values[key]:.1f}" for key in ("ttft_median_s", "ttft_p99_s")
    )
    return f"{values['throughput_per_s']:10.2f} {median:>9} {last:>9} {values['in_time']:8.1%}"
