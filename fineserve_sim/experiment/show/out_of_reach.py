"""What no number of GPUs can do, in sentences: which model, which limit, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.show.labels import number

_GIB = 2**30


def out_of_reach_lines(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a model that cannot keep the targets even alone on idle GPUs, the one with the most such requests first."""
    return [f"{model['model']} (TP {model['tp']}): {_causes(model)}{_would(model)}." for model in models]


def changes_text(changes: Sequence[Mapping[str, Any]]) -> str:
    """``q72 at TP 4 and yi in fp8``."""
    return " and ".join(
        f"{change['model']} {'at' if change['key'] == 'tp' else 'in'} {_way(change)}" for change in changes
    )


def _way(change: Mapping[str, Any]) -> str:
    return f"TP {change['value']}" if change["key"] == "tp" else str(change["value"])


def _would(model: Mapping[str, Any]) -> str:
    if model["would"] is None:
        return ""
    ways = " or ".join(map(_way, model["would"]))
    return f"; {ways} would do" if ways else "; no other precision or degree would do"


def _causes(model: Mapping[str, Any]) -> str:
    if not model["kv_tokens"]:
        needs, has = (f"{model[name] / _GIB:.1f} GiB" for name in ("fixed_bytes", "usable_bytes"))
        return f"it needs {needs} on each GPU before any KV, of which {has} are usable"
    reach = f"prompts above {model['reach_tokens']:,} tokens" if model["reach_tokens"] else "no prompt can"
    told = {
        "memory": f"need more KV memory than the {model['kv_tokens']:,} tokens beside its weights",
        "context": f"do not fit into its context of {model['context_tokens']:,} tokens",
        "ttft": f"cannot have a first token within {_s(model, 'ttft')} ({reach})",
        "tpot": f"cannot have a token each {_s(model, 'tpot')}",
        "e2e": f"cannot end within {_s(model, 'e2e')}",
    }
    parts = [
        f"{_share(count / model['requests'])} {told[cause]}"
        for cause, count in sorted(model["causes"].items(), key=lambda item: -item[1])
        if count
    ]
    return f"{parts[0].replace(' % ', ' % of its requests ', 1)}{''.join(f', {part}' for part in parts[1:])}"


def _share(share: float) -> str:
    """Never none of what is some."""
    return f"{100 * share:.1f} %" if share >= 0.0005 else "under 0.1 %"


def _s(model: Mapping[str, Any], moment: str) -> str:
    return f"{number(float(model[f'{moment}_slo_s'] or 0.0))} s"
