"""The commands put together."""

from __future__ import annotations

from fineserve_runtime import __version__
from fineserve_runtime.cli import check, demo, model, replay, serve, steps, top, whatif
from fineserve_sim.cli.program import program

app = program(
    "fineserve-run",
    __version__,
    help="Serve many mixed-precision models on shared devices: FineServe's policies over real vLLM engines.",
    epilog="Start with: fineserve-run check, then fineserve-run demo",
)
app.command()(serve.serve)
app.command()(replay.replay)
app.command()(steps.steps)
app.command()(top.top)
app.command()(model.model)
app.command()(whatif.whatif)
app.command()(whatif.plan)
app.command()(check.check)
app.command()(demo.demo)
