"""Measures the installed DeepSpeed, for `nox -s bench`: ``python run.py OUT.json [--quick]``."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.pool import RankPool, configure_environment
from harness.releases import between
from harness.training import REDUCED_AT_STEP, mode_config

from bench import measure

HOUR = 3600.0

# Stage, offload.
CELLS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
LARGE = ("layers", 12, 2048)  # 50.3 million parameters
TINY = ("scalars", 10_000, 8)
SMALL = ("layers", 4, 512)


def stock_modes() -> list[str]:
    return ["managed", "native"] if between("0.19.5") else ["managed", "boundary"]


def config_of(
    mode: str, stage: int, offload: bool, n: int, model: tuple[str, int, int], **options: Any
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
    def __init__(self, ranks: RankPool, quick: bool) -> None:
        self.ranks = ranks
        self.quick = quick
        self.counts = [1, 4] if quick else [1, 4, 16]
        self.rounds = 6 if quick else 20
        self.cells = [(1, False), (2, False), (3, False), (2, True)] if quick else CELLS

    def costs(self) -> list[dict[str, Any]]:
        """Collectives, copies and bytes of a window, by mode. Both ranks together."""
        rows = []
        for stage, offload in self.cells:
            modes: list[tuple[str, dict[str, Any]]] = [("unmanaged", {})]
            modes += [(mode, {}) for mode in stock_modes()]
            if stage > 1:
                modes.append(("unmanaged", REDUCED_AT_STEP))
            for n in self.counts:
                for mode, options in modes:
                    config = config_of(mode, stage, offload, n, SMALL, **options)
                    per_rank = self.ranks.run(
                        measure.costs, mode=mode, config=config, model=SMALL, n=n, timeout=HOUR
                    )
                    name = f"{mode}, at step" if options else mode
                    rows.append(
                        {
                            "stage": stage,
                            "offload": offload,
                            "n": n,
                            "mode": name,
                            "ranks": per_rank,
                        }
                    )
        return rows

    def ratios(self) -> list[dict[str, Any]]:
        """Time of an unmanaged window over that of a stock one, in pairs."""
        rows = []
        models = {"quick": SMALL} if self.quick else {"50 M": LARGE, "10,000 tiny": TINY}
        for name, model in models.items():
            for stage, offload in self.cells:
                for n in self.counts:
                    configs = {
                        mode: config_of(mode, stage, offload, n, model)
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
                        row = {"model": name, "stage": stage, "offload": offload, "stock": stock}
                        rows.append(row | {"n": n, "median": middle, "low": low, "high": high})
                        print(row, n, f"{middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
        return rows

    def growth(self) -> list[dict[str, Any]]:
        """The plugin's own time per call, by number of parameters and of backwards."""
        rows = []
        for stage, offload in self.cells:
            for num in (100, 1000) if self.quick else (100, 1000, 10_000):
                for n in self.counts:
                    model = ("scalars", num, 8)
                    config = config_of("unmanaged", stage, offload, n, model)
                    own, *_ = self.ranks.run(
                        measure.own_seconds, config=config, model=model, n=n, timeout=HOUR
                    )
                    rows.append({"stage": stage, "offload": offload, "num": num, "n": n} | own)
        return rows

    def overhead(self) -> list[dict[str, Any]]:
        """Microseconds per call on a managed engine."""
        rows = []
        for stage, offload in self.cells:
            config = config_of("managed", stage, offload, 1, SMALL)
            own, *_ = self.ranks.run(measure.managed_overhead, config=config, timeout=HOUR)
            rows.append({"stage": stage, "offload": offload} | own)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    configure_environment()
    result: dict[str, Any] = {"deepspeed": version("deepspeed"), "torch": version("torch")}
    result["quick"] = arguments.quick
    for world_size in (2,) if arguments.quick else (2, 4):
        ranks = RankPool(world_size)
        try:
            bench = Bench(ranks, arguments.quick)
            parts: dict[str, Any] = {"growth": bench.growth()}
            if world_size == 2:
                parts |= {"costs": bench.costs(), "overhead": bench.overhead()}
                parts |= {"ratios": bench.ratios()}
            result[f"{world_size} ranks"] = parts
        finally:
            ranks.close()
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
