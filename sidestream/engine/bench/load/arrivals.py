"""When requests are to be sent: all at once, or as a Poisson process of a given rate."""

from __future__ import annotations

import math
import random
from itertools import accumulate

from sidestream.errors import ConfigError


def arrival_times(count: int, rate: float, *, seed: int) -> list[float]:
    """Seconds from the start at which each of ``count`` requests is due; the first at 0.

    Args:
        rate: requests a second; infinity sends all at the start.
    Raises:
        ConfigError: the rate is not positive.
    """
    if math.isnan(rate) or rate <= 0:
        raise ConfigError(f"request_rate is {rate}, more than 0 is needed; inf sends all at once")
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))
