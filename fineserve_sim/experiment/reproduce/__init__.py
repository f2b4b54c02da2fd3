"""``fineserve-sim reproduce``: the papers' claims against our numbers, with a verdict on each."""

from fineserve_sim.experiment.reproduce.ledger import LedgerError, Target, chosen, read_ledger, targets
from fineserve_sim.experiment.reproduce.session import Experiments, Row, load_all, reproduce

__all__ = ["Experiments", "LedgerError", "Row", "Target", "chosen", "load_all", "read_ledger", "reproduce", "targets"]
