"""Measures the installed DeepSpeed, for `nox -s bench`: ``python run.py RESULTS.json [--quick]``.

The file has the rows of every release by part, and is written after each measurement; one that it
has is not made again. So hours of measuring may be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.pool import RankPool, configure_environment
from harness.releases import between
from harness.training import REDUCED_AT_STEP, mode_config

from bench import measure

HOUR = 3600.0

Row = dict[str, Any]
Model = tuple[str, int, int]

# Stage, offload.
CELLS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
SMALL = ("layers", 4, 512)
MEDIUM = ("layers", 4, 2048)  # 16.8 million: next to these the buffers of gloo are small
MODELS: dict[str, Model] = {
    "50 M": ("layers", 12, 2048),  # 50.3 million parameters
    "10,000 tiny": ("scalars", 10_000, 8),
}


def stock_modes() -> list[str]:
    return ["managed", "native"] if between("0.19.5") else ["managed", "boundary"]


def config_of(
    mode: str, stage: int, offload: bool, n: int, model: Model, **options: Any
) -> dict[str, Any]:
    """The ds_config of one mode: 16-bit gradients summed as they are, so that all modes do the same
    arithmetic on every release."""
    largest = model[2] ** 2 if model[0] == "layers" else model[1] * model[2]
    return mode_config(
        stage,
        offload,
        gas=n if mode == "managed" else 1,
        unmanaged=mode in ("unmanaged", "native"),
        zero={"reduce_bucket_size": 2 * largest},
        **options,
    )


class Bench:
    def __init__(self, path: Path, quick: bool) -> None:
        self.path = path
        self.results = json.loads(path.read_text()) if path.exists() else {}
        self.rows: dict[str, list[Row]] = self.results.setdefault(version("deepspeed"), {})
        self.counts = [1, 4] if quick else [1, 4, 16]
        self.rounds = 6 if quick else 20
        self.cells = [(1, False), (2, False), (3, False), (2, True)] if quick else CELLS
        self.counted = SMALL if quick else MEDIUM
        self.models = {"quick": SMALL} if quick else MODELS
        self.nums = (100, 1000) if quick else (100, 1000, 10_000)
        self.world_sizes = (2,) if quick else (2, 4)

    @contextmanager
    def pool(self, world_size: int) -> Iterator[None]:
        self.ranks = RankPool(world_size)
        try:
            yield
        finally:
            self.ranks.close()

    def has(self, part: str, **key: Any) -> bool:
        return any(row.items() >= key.items() for row in self.rows.setdefault(part, []))

    def add(self, part: str, row: Row) -> None:
        self.rows[part].append(row)
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        print(part, row, flush=True)

    def costs(self) -> None:
        """Collectives, copies and bytes of a window, by mode. Both ranks together."""
        for stage, offload in self.cells:
            modes: list[tuple[str, str, dict[str, Any]]] = [("unmanaged", "unmanaged", {})]
            modes += [(mode, mode, {}) for mode in stock_modes()]
            if stage > 1:
                modes.append(("unmanaged, at step", "unmanaged", REDUCED_AT_STEP))
            for n in self.counts:
                for name, mode, options in modes:
                    key = {"stage": stage, "offload": offload, "n": n, "mode": name}
                    if self.has("costs", **key):
                        continue
                    config = config_of(mode, stage, offload, n, self.counted, **options)
                    per_rank = self.ranks.run(
                        measure.costs,
                        mode=mode,
                        config=config,
                        model=self.counted,
                        n=n,
                        timeout=HOUR,
                    )
                    self.add("costs", key | measure.over_ranks(per_rank))

    def overhead(self) -> None:
        """Microseconds per call on a managed engine."""
        for stage, offload in self.cells:
            key = {"stage": stage, "offload": offload}
            if not self.has("overhead", **key):
                config = config_of("managed", stage, offload, 1, SMALL)
                own, *_ = self.ranks.run(measure.managed_overhead, config=config, timeout=HOUR)
                self.add("overhead", key | own)

    def growth(self, world_size: int) -> None:
        """The plugin's own time per call, by number of parameters and of backwards."""
        for stage, offload in self.cells:
            for num in self.nums:
                # Whether it grows with N shows with few parameters, and takes hours with many.
                for n in self.counts if num <= 1000 else self.counts[:1]:
                    key = {"ranks": world_size, "stage": stage, "offload": offload}
                    key |= {"num": num, "n": n}
                    if self.has("growth", **key):
                        continue
                    model = ("scalars", num, 8)
                    config = config_of("unmanaged", stage, offload, n, model)
                    own, *_ = self.ranks.run(
                        measure.own_seconds, config=config, model=model, n=n, timeout=HOUR
                    )
                    self.add("growth", key | own)

    def ratios(self, n: int) -> None:
        """Time of an unmanaged window over that of a stock one, in pairs."""
        # At stage 0 stock code takes a norm only to clip by it.
        cells = [(*cell, 0.0) for cell in self.cells] + [(0, False, 1.0)]
        for name, model in self.models.items():
            for stage, offload, clip in cells:
                key = {"model": name, "stage": stage, "offload": offload, "clip": clip, "n": n}
                if self.has("ratios", **key):
                    continue
                configs = {
                    mode: config_of(mode, stage, offload, n, model) | {"gradient_clipping": clip}
                    for mode in ("unmanaged", *stock_modes())
                }
                found, *_ = self.ranks.run(
                    measure.ratios,
                    configs=configs,
                    model=model,
                    n=n,
                    rounds=self.rounds,
                    timeout=HOUR,
                )
                for stock, values in found.items():
                    middle, low, high = measure.median_and_quartiles(values)
                    more = {"median": middle, "low": low, "high": high, "pairs": len(values)}
                    self.add("ratios", key | {"stock": stock} | more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    configure_environment()
    bench = Bench(arguments.path, arguments.quick)
    for world_size in bench.world_sizes:
        with bench.pool(world_size):
            bench.growth(world_size)
    with bench.pool(2):
        bench.costs()
        bench.overhead()
        for n in bench.counts:  # what is quick first
            bench.ratios(n)


if __name__ == "__main__":
    main()
