"""Two results of one kind of benchmark, figure by figure, with their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sidestream.errors import ConfigError

Report = Mapping[str, Any]
POINTS = ("mean", "p50", "p90", "p99")
SETTINGS = ("model", "device", "mode", "dtype", "kv_cache_dtype", "endpoint")
PREFIX_POINTS = {
    "mean": "first_token_mean_ms",
    "p50": "first_token_ms",
    "p90": "first_token_p90_ms",
    "p99": "first_token_p99_ms",
}
RATES = {"requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s", "total_tokens_per_s": "tokens/s"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report.

    Attributes:
        rate: whether more is faster; otherwise it is a time.
    """

    name: str
    value: float
    unit: str
    rate: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure in two reports.

    Attributes:
        slower: how many times as slow the second is; None where one of the two is 0.
    """

    name: str
    first: float
    second: float
    unit: str
    slower: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two reports have in common.

    Attributes:
        differences: settings that make them runs of different things, as lines for people.
        only_first, only_second: names of the figures that only one of them has.
    """

    kind: str
    ratios: tuple[Ratio, ...]
    differences: tuple[str, ...]
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data; ``slower`` is above 1 where the second is slower, be the figure a time or a rate."""
        found = asdict(self)
        return {"kind": "compare", "of": found.pop("kind"), "figures": found.pop("ratios"), **found}


def compare(first: Report, second: Report) -> Comparison:
    """Ratios of every figure that both reports have.

    Raises:
        ConfigError: they are of different kinds, have nothing in common, or are no reports.
    """
    kinds = [kind_of(report) for report in (first, second)]
    if kinds[0] != kinds[1]:
        raise ConfigError(f"the first is a report of `bench {kinds[0]}`, the second of `bench {kinds[1]}`")
    (kind, _) = kinds
    try:
        a, b = ({figure.name: figure for figure in FIGURES[kind](report)} for report in (first, second))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a report of `sidestream bench {kind} --json`: {error!r}") from None
    ratios = tuple(_ratio(a[name], b[name]) for name in a if name in b)
    only_a, only_b = (tuple(name for name in one if name not in other) for one, other in ((a, b), (b, a)))
    if not ratios:
        raise ConfigError(
            f"the two reports of `bench {kind}` have no figure in common; "
            f"the first has {', '.join(only_a) or 'none'}; the second has {', '.join(only_b) or 'none'}"
        )
    return Comparison(kind, ratios, tuple(_differences(first, second)), only_a, only_b)


def kind_of(report: Report) -> str:
    """Which benchmark a report is of; those of latency once did not say.

    Raises:
        ConfigError: it is of none.
    """
    kind = report.get("kind", "latency" if "decode" in report else None)
    if not isinstance(kind, str) or kind not in FIGURES:
        known = ", ".join(FIGURES)
        raise ConfigError(f"not a report of `sidestream bench`: its kind is {kind!r}, known are {known}")
    return kind


def _latency(report: Report) -> Iterator[Figure]:
    for row in report["decode"]:
        case = f"batch {row['batch']}, context {row['context']}"
        yield Figure(case, float(row["median"]), "ms")
        if "mean" in row:
            yield Figure(f"{case}, mean", float(row["mean"]), "ms")
    for row in report["prefill"]:
        yield Figure(f"prefill of {row['tokens']}", float(row["tokens_per_s"]), "tokens/s", rate=True)


def _throughput(report: Report) -> Iterator[Figure]:
    repeats = report["repeats"]
    for name, unit in RATES.items():
        yield Figure(unit, float(repeats[name]["median"]), unit, rate=True)
    for name, spread in repeats.items():
        if name.endswith("_ms"):
            latency, point, _ = name.split("_")
            yield Figure(f"{latency} {point}", float(spread["median"]), "ms")


def _serve(report: Report) -> Iterator[Figure]:
    for name, unit in RATES.items():
        if report[name] is not None:
            yield Figure(unit, float(report[name]), unit, rate=True)
    if report["goodput"] is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in sorted(report["goodput"]["objectives_ms"].items()))
        yield Figure(f"goodput at {limits}", float(report["goodput"]["requests_per_s"]), "requests/s", rate=True)
    for name in ("ttft", "tpot", "itl", "e2e"):
        summary = report[f"{name}_ms"]
        for point in POINTS if summary is not None else ():
            yield Figure(f"{name} {point}", float(summary[point]), "ms")


def _prefix(report: Report) -> Iterator[Figure]:
    for row in report["rows"]:
        cache = "cache on" if row["cache"] else "cache off"
        for point, key in PREFIX_POINTS.items():
            if row.get(key) is not None:
                yield Figure(f"{cache}, ttft {point}", float(row[key]), "ms")
        yield Figure(f"{cache}, tokens", float(row["tokens_a_second"]), "tokens/s", rate=True)


FIGURES: dict[str, Callable[[Report], Iterator[Figure]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "serve": _serve,
    "shared-prefix": _prefix,
    "multi-turn": _prefix,
}
"""Kind of a report to how its figures are found."""


def _ratio(first: Figure, second: Figure) -> Ratio:
    slow, fast = (first.value, second.value) if first.rate else (second.value, first.value)
    slower = slow / fast if slow and fast else None
    return Ratio(first.name, first.value, second.value, first.unit, slower)


def _differences(first: Report, second: Report) -> Iterator[str]:
    a, b = ({name: report.get(name) for name in SETTINGS} | _workload(report) for report in (first, second))
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            yield f"{name}: {a.get(name)} and {b.get(name)}"
    for side, report in (("first", first), ("second", second)):
        if report.get("failed"):
            yield f"{report['failed']} requests of the {side} failed, and are in no figure"


def _workload(report: Report) -> dict[str, Any]:
    workload = report.get("workload")
    return dict(workload) if isinstance(workload, Mapping) else {}
