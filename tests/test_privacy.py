"""Client-level epsilon: between the exact one of the Gaussian mechanism and a bound by hand, where all take part."""

import numpy as np
import pytest
from scipy import optimize, stats

import turbanet as tn

HOW = {"clients": 1000, "sampled": 10, "rounds": 100, "delta": 1e-4}


def exact(noise, rounds, delta):
    """Epsilon of `rounds` Gaussian mechanisms, one client moving the sum by 2 (Balle and Wang 2018, theorem 8)."""
    far = 2 * np.sqrt(rounds) / noise

    def over(epsilon):
        return stats.norm.cdf(far / 2 - epsilon / far) - np.exp(epsilon) * stats.norm.cdf(-far / 2 - epsilon / far)

    return optimize.brentq(lambda epsilon: over(epsilon) - delta, 0, 200)


@pytest.mark.parametrize(("noise", "rounds"), [(5.0, 1), (20.0, 10), (60.0, 200)])
def test_epsilon_of_all_clients_in_each_round_lies_just_above_the_exact_one(noise, rounds):
    found = tn.federated.client_epsilon(noise=noise, clients=50, sampled=50, rounds=rounds, delta=1e-5)
    by_hand = exact(noise, rounds, 1e-5)
    assert by_hand <= found < 1.15 * by_hand


def test_fewer_sampled_clients_and_rounds_give_away_less():
    most = tn.federated.client_epsilon(noise=4, **HOW)
    assert tn.federated.client_epsilon(noise=4, **HOW | {"rounds": 50}) < most
    assert tn.federated.client_epsilon(noise=4, **HOW | {"sampled": 5}) < most
    assert tn.federated.client_epsilon(noise=0, **HOW) == np.inf


def test_sampling_never_gives_away_more_than_taking_part_in_each_round():
    found = [tn.federated.client_epsilon(noise=4, **HOW | {"clients": 100, "sampled": n}) for n in (10, 60, 99, 100)]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled": 1001}, "at most the 1000 clients"),
        ({"delta": 0}, "delta between 0 and 1"),
        ({"noise": -1.0}, "noise must be a finite number of at least 0"),
        ({"noise": np.inf}, "noise must be a finite number of at least 0"),
        ({"rounds": 0}, "rounds must be a whole number"),
    ],
)
def test_bad_input_stops_with_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        tn.federated.client_epsilon(**{"noise": 1.0, **HOW, **change})
