"""The built-in systems, and the policies with their options.

What an option settles is in ``options.yaml``, or in the list of open readings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from docs.generate.markdown import number, table, words
from fineserve_sim.cli.policies import Policy, chosen
from fineserve_sim.cli.policies import policies as all_policies
from fineserve_sim.systems import load_systems, open_readings

OPTIONS = Path(__file__).with_name("options.yaml")


def systems() -> str:
    """A row a system: its name, what it is, its policies."""
    rows = []
    for system in load_systems().values():
        axes = ", ".join(f"{policy.axis} `{policy.name}`" for policy, _ in chosen(system))
        rows.append((f"`{system.name}`", system.summary, axes))
    return table(("system", "what it is", "its policies"), rows)


def policies() -> str:
    """A part for each axis, in it each policy with its options."""
    said = meanings()
    axes = dict.fromkeys(policy.axis for policy in all_policies())
    parts = []
    for axis in axes:
        mine = [_policy(policy, said) for policy in all_policies() if policy.axis == axis]
        parts.append("\n\n".join([f"### Axis {axis}", *mine]))
    return "\n\n".join(parts)


def meanings() -> dict[str, str]:
    """What each option settles, by ``axis.policy.option``; where the policy itself is open, by ``axis.policy.policy``."""
    found: dict[str, str] = yaml.safe_load(OPTIONS.read_text(encoding="utf-8"))
    return found | {
        reading.option: f"*Open* ({reading.paper}, {reading.where}): {reading.says}" for reading in open_readings()
    }


def undescribed() -> set[str]:
    """Options without a meaning, and meanings without an option."""
    options = {key(policy, option.name) for policy in all_policies() for option in policy.options}
    policies_themselves = {key(policy, "policy") for policy in all_policies()}
    return options ^ (set(meanings()) - policies_themselves)


def key(policy: Policy, option: str) -> str:
    return f"{policy.axis}.{policy.name}.{option}"


def _policy(policy: Policy, said: dict[str, str]) -> str:
    head = f"**{policy.name}.** {words(policy.doc)}"
    if (itself := key(policy, "policy")) in said:
        head += f" {said[itself]}."
    if not policy.options:
        return head
    rows = [
        (f"`{key(policy, option.name)}`", option.choices, _default(option.default), said[key(policy, option.name)])
        for option in policy.options
    ]
    return f"{head}\n\n" + table(("option", "takes", "default", "what it settles"), rows)


def _default(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else number(value)
