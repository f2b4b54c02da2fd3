"""What a client may send: every body, prompt, count, list, header and connection has a limit."""

from __future__ import annotations

from fineserve_sim.experiment.file.schema import Strict
from fineserve_sim.experiment.file.values import Count, Positive


class HttpLimits(Strict):
    """``body_bytes`` of a request, ``head_bytes`` of its headers; ``connections`` at a time; ``choices`` of a request (prompts
    times ``n``). A list of stop strings, token ids or words has at most ``entries``, of ``entry_chars`` characters each. A
    client has ``head_s`` to send its headers once it has begun, and ``body_s`` for the body. It may be silent for ``silent_s``
    after it connected, and may leave what it is sent unread for ``unread_s``."""

    body_bytes: Count = 4 * 2**20
    head_bytes: Count = 32 * 2**10
    connections: Count = 4096
    choices: Count = 64
    entries: Count = 256
    entry_chars: Count = 1024
    head_s: Positive = 10.0
    body_s: Positive = 30.0
    silent_s: Positive = 60.0
    unread_s: Positive = 60.0
