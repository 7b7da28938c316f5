"""Differential privacy of federated learning: the epsilon of one client."""

from turbanet.core.arrays import check_whole
from turbanet.core.extras import needed


def client_epsilon(*, noise: float, clients: int, sampled: int, rounds: int, delta: float) -> float:
    """Return the epsilon, at this `delta`, that `train` with `clip` and `noise` guarantees for a whole client.

    Two sets of clients are neighbours if one client's rows are replaced: a round always has `sampled` clients, drawn
    without replacement. One client changes the sum by up to twice `clip`. The accountant is dp-accounting's for Rényi
    differential privacy (Wang et al. 2019). Its bound for samples is loose where many are drawn: returned is the less
    of it and of the bound without sampling, which holds as well.

    Parameters
    ----------
    noise : standard deviation of the noise on the sum of the clients' changes, in units of `clip`
    clients : number of clients
    sampled : clients of a round
    rounds : number of rounds
    delta : above 0 and below 1; only meaningful below 1 / clients

    Returns
    -------
    Epsilon; infinite without noise.

    Raises
    ------
    ValueError : for more sampled clients than clients, and numbers out of range
    ImportError : without the package dp-accounting

    Examples
    --------
    >>> from turbanet.federated import client_epsilon
    >>> settings = {"clients": 100_000, "sampled": 100, "rounds": 1000, "delta": 1e-6}
    >>> client_epsilon(noise=4, **settings) < client_epsilon(noise=2, **settings)
    True
    """
    check_whole(clients=clients, sampled=sampled, rounds=rounds)
    if sampled > clients:
        raise ValueError(f"sampled must be at most the {clients} clients that there are, got {sampled}.")
    if not 0 <= noise < float("inf") or not 0 < delta < 1:
        required = "noise must be a finite number of at least 0 and delta between 0 and 1"
        raise ValueError(f"{required}, got {noise!r} and {delta!r}.")
    if not noise:
        return float("inf")
    dp_accounting = needed("dp_accounting", "privacy")
    rdp = needed("dp_accounting.rdp", "privacy")
    gaussian = dp_accounting.GaussianDpEvent(noise / 2)  # in units of the sensitivity, which is twice `clip`
    of_round = dp_accounting.SampledWithoutReplacementDpEvent(clients, sampled, gaussian)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE

    def bound(event):
        return float(rdp.RdpAccountant(neighboring_relation=relation).compose(event, rounds).get_epsilon(delta))

    return min(bound(of_round), bound(gaussian))
