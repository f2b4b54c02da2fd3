"""CPU time of the KV slab manager, in nanoseconds a block, for single and batched alloc and free.

The pool is first aged: two thirds of it is taken, then requests of random length come and go, so that slabs are PARTIAL
with scattered holes. Seven models have six block sizes; QoQ's is a grid key, the others follow the LCM rule.

    python benchmarks/slab.py [--json] [--seed 0] [--blocks 20000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time

from fineserve_sim.policy.memory.geometry import KVGeometry
from fineserve_sim.policy.memory.slab import KVSlabManager

POOL_BYTES = 60 * 2**30
BATCHES = (1, 8, 64, 512)
MODELS = {
    "8B FP16": KVGeometry(32, 8, 128, 2),
    "8B FP8": KVGeometry(32, 8, 128, 1),
    "8B FP8 (second)": KVGeometry(32, 8, 128, 1),
    "70B FP16 tp4": KVGeometry(80, 8, 128, 2, tp=4),
    "Qwen3-32B FP16": KVGeometry(64, 8, 128, 2),
    "Qwen2.5-14B FP16": KVGeometry(48, 8, 128, 2),
    "8B QoQ": KVGeometry(32, 8, 128, 0.5, quant_bytes_per_head=4),
}


def aged_manager(rng: random.Random) -> KVSlabManager:
    """A pool two thirds full in the steady state of random arrivals and departures."""
    manager = KVSlabManager(POOL_BYTES, {owner: model.block_bytes for owner, model in enumerate(MODELS.values())})
    live: list[tuple[int, list[int]]] = []
    for _ in range(4000):
        while manager.ledger().free_bytes < POOL_BYTES // 3:
            owner, ids = live.pop(rng.randrange(len(live)))
            manager.free(owner, ids)
        owner = rng.randrange(len(MODELS))
        if taken := manager.alloc(owner, rng.randint(1, 200)):
            live.append((owner, taken))
    return manager


def measure(manager: KVSlabManager, owner: int, batch: int, blocks: int, rng: random.Random) -> tuple[float, float]:
    """(alloc, free) ns a block: batches are allocated until ``blocks`` are held, then freed in random order."""
    count = min(blocks, manager.free_blocks(owner)) // batch
    start = time.process_time()
    batches = [manager.alloc(owner, batch) for _ in range(count)]
    alloc_s = time.process_time() - start
    rng.shuffle(batches)
    start = time.process_time()
    for ids in batches:
        manager.free(owner, ids or ())
    free_s = time.process_time() - start
    assert None not in batches
    return alloc_s * 1e9 / (count * batch), free_s * 1e9 / (count * batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="CPU nanoseconds a block of the KV slab manager, the best of the repeats."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks held at the peak of a measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    manager = aged_manager(rng)
    rows = []
    for owner, name in ((1, "8B FP8"), (6, "8B QoQ")):
        key = MODELS[name].block_bytes
        for batch in BATCHES:
            runs = [measure(manager, owner, batch, args.blocks, rng) for _ in range(args.repeats)]
            alloc_ns, free_ns = min(run[0] for run in runs), min(run[1] for run in runs)
            kind = "grid" if manager.plan.is_grid(key) else "lcm"
            rows.append({"key": kind, "batch": batch, "alloc_ns": round(alloc_ns, 1), "free_ns": round(free_ns, 1)})
    manager.check()

    if args.json:
        print(
            json.dumps(
                {"python": platform.python_version(), "slab_bytes": manager.plan.slab_bytes, "ns_per_block": rows}
            )
        )
        return
    print(f"Python {platform.python_version()}, slabs of {manager.plan.slab_bytes / 2**20:g} MiB; ns a block")
    print(f"{'key':>6} {'batch':>6} {'alloc':>8} {'free':>8}")
    for row in rows:
        print(f"{row['key']:>6} {row['batch']:>6} {row['alloc_ns']:>8} {row['free_ns']:>8}")


if __name__ == "__main__":
    main()
