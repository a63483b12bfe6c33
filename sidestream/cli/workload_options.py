"""Options of a workload, as the commands that make up prompts have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from sidestream.cli.option_group import Command, option_group
from sidestream.engine.bench.workload import Workload

WORKLOAD = "Workload"

NumPrompts = Annotated[int, typer.Option(help="Requests that are measured.", rich_help_panel=WORKLOAD)]
InputLen = Annotated[int, typer.Option(help="Tokens of a prompt.", rich_help_panel=WORKLOAD)]
OutputLen = Annotated[int, typer.Option(help="Tokens of an answer.", rich_help_panel=WORKLOAD)]
RangeRatio = Annotated[
    float,
    typer.Option(
        help="Lengths are drawn between (1 - this) and (1 + this) times those given; below 1.", rich_help_panel=WORKLOAD
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        help="prose (text that ships with Sidestream), synthetic (made-up words), random-ids, or a text file's path. "
        "Prompts begin at words of the text and go on at its start where it ends.",
        rich_help_panel=WORKLOAD,
    ),
]
WorkloadSeed = Annotated[int, typer.Option("--seed", help="Of prompts and lengths.", rich_help_panel=WORKLOAD)]
NumWarmups = Annotated[
    int,
    typer.Option(help="Requests before the measurement, with prompts of their own.", rich_help_panel=WORKLOAD),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=WORKLOAD)]

OPTIONS = {
    "num_prompts": NumPrompts,
    "input_len": InputLen,
    "output_len": OutputLen,
    "range_ratio": RangeRatio,
    "dataset": Dataset,
    "seed": WorkloadSeed,
}
"""In the order of ``--help``."""


def workload_options() -> Callable[[Command], Command]:
    """A command's keyword ``workload`` is a ``Workload`` of these options."""
    return option_group("workload", Workload, OPTIONS, {})
