import itertools
import math

from sidestream.engine.random_stream import uniform


def test_known_values_do_not_change() -> None:
    """A seeded request must give the same tokens in every version."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 5)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.15403342580516755,
    ]


def test_numbers_are_uniform_over_places_and_over_seeds() -> None:
    for numbers in ([uniform(7, i) for i in range(20_000)], [uniform(seed, 3) for seed in range(20_000)]):
        assert all(0.0 <= u < 1.0 for u in numbers)
        counts = [0] * 20
        for u in numbers:
            counts[int(u * 20)] += 1
        chi_square = sum((count - 1_000) ** 2 / 1_000 for count in counts)
        assert chi_square < 43.8  # 0.1 % of uniform samples pass it, at 19 degrees of freedom


def test_neighbouring_seeds_and_places_are_not_correlated() -> None:
    for step in ((1, 0), (0, 1), (1, -1)):
        pairs = [
            (uniform(s, i), uniform(s + step[0], i + 1 + step[1])) for s, i in itertools.product(range(100), repeat=2)
        ]
        covariance = math.fsum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
        assert abs(covariance * 12) < 4 / math.sqrt(len(pairs))


def test_any_integer_is_a_seed() -> None:
    seeds = [-(2**63), 2**63 - 1, 0, -1]
    assert len({uniform(seed, 0) for seed in seeds}) == 4
