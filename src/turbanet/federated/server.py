"""Federated learning: clients train one network on rows of their own, and a server averages what they changed."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.federated.rounds import Rounds, apart, run
from turbanet.training import metrics, schedules
from turbanet.training.arrays import check_seed, check_whole, floating
from turbanet.training.checks import check_data, check_masks
from turbanet.training.data import pair, prepare
from turbanet.training.member import Swarm
from turbanet.training.memory import fitting
from turbanet.training.optimizers import check_plain
from turbanet.training.plan import Plan, check_plan, home, say_once
from turbanet.training.sampling import check_rows


@dataclasses.dataclass(frozen=True)
class FederatedHistory:
    """What the server saw.

    train_loss : float32 [round, sampled], each sampled client's mean loss over its steps
    clients : int [round, sampled], who was sampled
    returned : bool [round, sampled], whose change came back
    scored : int [score], after how many rounds the server's network was scored
    validation_loss : float32 [score], None without validation
    validation_metric : [score], of several metrics {name: [score]}, None where none was asked for
    bytes_down, bytes_up : int [round], the weights that the server sent and those that came back, as they lie in memory
    startup_seconds, steady_seconds : from the call to the first round, compilation above all, and of the rounds
    """

    train_loss: np.ndarray
    clients: np.ndarray
    returned: np.ndarray
    scored: np.ndarray
    validation_loss: np.ndarray | None
    validation_metric: np.ndarray | dict[str, np.ndarray] | None
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    startup_seconds: float
    steady_seconds: float

    def rounds_to(self, score: float, metric: str | None = None) -> float:
        """Rounds until the best score so far first reaches `score`, read off a line between the two around it.

        As McMahan et al. (2017) count them, from scores of which more is better; infinite if it never does. metric: the
        name of one of several. Raises ValueError where no such metric was asked for.
        """
        known: Any = (
            self.validation_metric if isinstance(self.validation_metric, dict) else {None: self.validation_metric}
        )
        if known.get(metric) is None:
            names = [name for name, scores in known.items() if name and scores is not None]
            raise ValueError(f"There are no scores of metric={metric!r}; there are {names or 'none'}: see metric.")
        best = np.maximum.accumulate(np.asarray(known[metric], float))
        above = np.flatnonzero(best >= score)
        if not len(above):
            return float("inf")
        around = slice(max(above[0] - 1, 0), above[0] + 1)
        return float(np.interp(score, best[around], self.scored[around]))


def train(
    swarm: Swarm,
    x: Any,
    y: Any,
    loss_fn: Callable | None = None,
    *,
    clients: Any,
    rounds: int,
    sampled: int,
    local_epochs: int = 1,
    batch_size: int | None = None,
    server: optax.GradientTransformation | None = None,
    proximal: float = 0.0,
    own: Sequence[str] = (),
    drop_out: float = 0.0,
    clip: float | None = None,
    noise: float = 0.0,
    validation: tuple[Any, Any] | None = None,
    metric: Callable | Mapping[str, Callable] | None = None,
    score_every: int | None = None,
    seed: int = 0,
    plan: Plan | None = None,
    allow_nan: bool = False,
    progress: bool = True,
) -> tuple[Swarm, FederatedHistory]:
    """Train ONE network by clients that keep their rows (FedAvg: McMahan et al. 2017).

    In each round some clients start from the server's weights and train on their own rows, all at once; the mean of
    their changes, weighted by how many rows they have, is the server's step. Each of them begins with the optimizer
    state that the swarm came with. A second call goes on with the rounds of the first, but for the server's moments.

    Parameters
    ----------
    swarm : TurbaTrainState of one member: the server's network, and the clients' optimizer
    x, y : arrays or pytrees of arrays, [row, ...]
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction); None: the swarm's own
    clients : int [client, row], each one's rows, padded at the end with -1: see `shards`, `dirichlet`, `ragged`
    rounds : how many
    sampled : clients of a round, drawn anew without repetition
    local_epochs : a client's passes over its rows in a round
    batch_size : rows of a client's step, of a client with fewer all of its own; None: all of them. A last, partial
        batch goes on with the client's first rows of that epoch
    server : an Optax optimizer that takes the clients' mean change as its downhill direction: optax.sgd(1.0, 0.9) is
        FedAvgM, optax.adam(0.01) FedAdam (Reddi et al. 2021); None: the change itself
    proximal : weight of half the squared distance to the server's weights in a client's loss (FedProx: Li et al. 2020)
    own : layers, by their names in `params`, that stay with each client and go on from round to round (FedPer:
        Arivazhagan et al. 2019)
    drop_out : the probability that what a client learned in a round is lost
    clip : the longest that a client's change may be, all its weights as one vector; longer ones are shortened, and all
        count alike, as privacy wants it (McMahan et al. 2018)
    noise : standard deviation of the noise on the sum of the changes, in units of `clip`: see `client_epsilon`. What it
        covers is the network; the losses of the history are not private
    validation : (x, y) that the server's network is scored on
    metric : metric(prediction, y, mask=mask) -> a number, such as `accuracy`, or {name: metric}
    score_every : rounds between two scores; the last one is scored too. None: about a twentieth of them
    seed : of who is sampled, who drops out, and of the noise
    plan : the devices, and how many clients train together on each; None: by rule
    allow_nan : whether x and y may hold NaN and infinite numbers
    progress : whether a bar shows the rounds done

    Returns
    -------
    (swarm, FederatedHistory) : the server's network; with `own` layers a swarm of all clients, their ids their places
        in `clients`

    Raises
    ------
    ValueError : for more than one member, clients without rows, more sampled clients than clients, layers that the
        network has not, and what `fit` refuses, clients with fewer rows than a batch among it
    FloatingPointError : for a client whose loss becomes NaN or infinite

    Examples
    --------
    >>> import jax, numpy as np, optax, turbanet as tn
    >>> x, y = np.tile(np.eye(4, dtype=np.float32), (10, 1)), np.tile(np.arange(4), 10)
    >>> net = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), optax.sgd(0.1), 1, sample_input=x[:1])
    >>> rows = tn.shards(jax.random.key(0), labels=y, clients=10, per_client=2)
    >>> how = {"rounds": 5, "sampled": 4, "batch_size": 2, "progress": False}
    >>> net, seen = tn.federated.train(net, x, y, tn.softmax_cross_entropy, clients=rows, **how)
    >>> len(net), seen.train_loss.shape
    (1, (5, 4))
    """
    called = time.perf_counter()
    optional = {"batch_size": batch_size, "score_every": score_every}
    optional = {name: number for name, number in optional.items() if number is not None}
    check_whole(rounds=rounds, sampled=sampled, local_epochs=local_epochs, **optional)
    score_every = score_every or max(1, rounds // 20)
    data = prepare(swarm, x, y)
    if len(swarm) != 1:
        raise ValueError(f"federated.train trains one network, the server's, got a swarm of {len(swarm)}: swarm[[id]].")
    check_plain(swarm, "federated")
    if schedules.needs_validation(swarm):
        raise ValueError('The schedule "reduce" follows a validation loss after each epoch, which clients have not.')
    loss_fn = swarm.loss(loss_fn)
    check_data(swarm, data, loss_fn, allow_nan=allow_nan)
    rows, counts = _rows(clients, data.length)
    batch_size = min(batch_size or rows.shape[1], rows.shape[1])
    masked = bool((counts < batch_size).any())
    if masked:
        one = int(counts.argmin())
        which = f"Batches of {batch_size} rows for client {one}, which has {counts[one]},"
        check_masks(swarm, loss_fn, which, f"batch_size={counts[one]} at the most")
    own_names = _layers(swarm, own)
    _check(len(rows), sampled, proximal=proximal, drop_out=drop_out, clip=clip, noise=noise)
    if noise and swarm.collections:
        kept = sorted(swarm.collections)
        raise ValueError(f"The model's {kept} would leave the clients without noise: take one without, as GroupNorm.")
    held_out, scores = _validation(swarm, loss_fn, validation, metric, own_names, allow_nan)
    rule = Rounds(
        loss_fn=loss_fn,
        server=server or optax.sgd(1.0),
        epochs=local_epochs,
        batch_size=batch_size,
        ragged=bool((counts < rows.shape[1]).any()),
        masked=masked,
        sampled=sampled,
        proximal=proximal > 0,
        clip=clip is not None,
        own=own_names,
        scores=scores,
        score_every=score_every,
    )
    plan = _plan(plan, swarm, sampled)
    state = jax.tree.map(lambda leaf: leaf[0], swarm.replace(loss_fn=None, sample=None))
    shared_layers, own_layers = apart(state.params, own_names)
    own_layers = jax.tree.map(lambda leaf: jnp.tile(leaf, (len(rows), *(1,) * leaf.ndim)), own_layers)
    carry = plan.share((state, rule.server.init(shared_layers), own_layers))
    numbers = {"proximal": proximal, "drop_out": drop_out, "clip": clip or 0.0, "noise": noise}
    numbers = {name: jnp.float32(number) for name, number in numbers.items()}  # another one compiles nothing anew
    given = plan.share((rows, counts, data.x, data.y, held_out, jax.random.key(check_seed(seed)), numbers))
    ready, block = fitting(partial(rule.compiled, plan, carry, given), plan)
    while block != plan.block:
        say_once(f"Out of memory with blocks of {plan.block} clients; going on with {block}.")
        plan = dataclasses.replace(plan, block=block)
        ready, block = fitting(partial(rule.compiled, plan, carry, given), plan)
    jax.block_until_ready(given)
    begun = time.perf_counter()
    (state, _, own_layers), seen = run(ready, carry, given, rounds, progress=progress)
    steady = time.perf_counter() - begun
    sent = sum(leaf.nbytes for leaf in floating((shared_layers, state.collections))[0])
    history = _history(seen, rounds, score_every, held_out, metric, sent, (begun - called, steady))
    return _swarm(swarm, state, own_layers, len(rows)), history


def _history(seen, rounds, every, held_out, metric, sent, seconds):
    """What was seen as the server tells it; `sent`: the bytes of one network."""
    numbers = np.arange(1, rounds + 1)
    due = (numbers % every == 0) | (numbers == rounds)
    loss, found = seen["scores"] or (None, {})
    loss, found = jax.tree.map(lambda leaf: leaf[due], (loss, found))
    asked = found if isinstance(metric, Mapping) else found.get(metrics.ONE)
    sampled = seen["clients"].shape[1]
    return FederatedHistory(
        train_loss=seen["loss"][:, :sampled],
        clients=seen["clients"],
        returned=seen["returned"],
        scored=numbers[due if held_out is not None else slice(0)],
        validation_loss=loss,
        validation_metric=asked if metric is not None else None,
        bytes_down=np.full(rounds, sampled * sent),
        bytes_up=seen["returned"].sum(1) * sent,
        startup_seconds=seconds[0],
        steady_seconds=seconds[1],
    )


def _swarm(swarm, state, own, clients):
    """The server's network as the swarm that came in, or all clients' with their own layers."""
    trained = jax.tree.map(lambda leaf: leaf[None], state.replace(apply_fn=None, tx=None))
    same = {name: getattr(swarm, name) for name in ("apply_fn", "tx", "loss_fn", "sample")}
    net = jax.device_put(trained, home(swarm.step)).replace(**same)
    if not own:
        return net
    everyone = net.copies(clients)
    return everyone.replace(params={**everyone.params, **jax.device_put(own, home(swarm.step))})


def _plan(plan, swarm, sampled):
    """The devices, no more than there are clients in a round, and the block of so many of them."""
    check_plan(plan)
    plan = plan or Plan()
    plan = dataclasses.replace(plan, devices=plan.devices[:sampled])
    each = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((sampled, *leaf.shape[1:]), leaf.dtype), swarm)
    return plan.resolve(each)


def _rows(clients, length):
    """(rows, counts) of the clients."""
    try:
        rows, counts = check_rows(clients, members=len(clients), length=length)
    except (TypeError, ValueError) as error:
        wanted = "clients must be int [client, row], at least one row each, padded at the end with -1 (see ragged)"
        raise ValueError(f"{wanted}: {error}") from None
    return rows[:, : counts.max()], counts


def _layers(swarm, own):
    """The names of the layers that stay with the clients, checked."""
    names = (own,) if isinstance(own, str) else tuple(own)
    known = list(swarm.params) if isinstance(swarm.params, Mapping) else []
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"own names layers of the network, got {unknown[0]!r}; it has {known}.")
    if names and len(names) == len(known):
        raise ValueError(f"own names all layers, {known}: nothing is left that the clients learn together.")
    return names


def _check(clients, sampled, *, proximal, drop_out, clip, noise):
    if sampled > clients:
        raise ValueError(f"sampled must be at most the {clients} clients that there are, got {sampled}.")
    if not 0 <= drop_out < 1:
        raise ValueError(f"drop_out is a probability, at least 0 and below 1, got {drop_out!r}.")
    if not 0 <= proximal < np.inf or not 0 <= noise < np.inf:
        raise ValueError(f"proximal and noise must be at least 0, got {proximal!r} and {noise!r}.")
    if clip is not None and not 0 < clip < np.inf:
        raise ValueError(f"clip must be a number above 0, or None, got {clip!r}.")
    if noise and clip is None:
        raise ValueError("noise is in units of clip: say how long a client's change may be, clip=1.0 for example.")


def _validation(swarm, loss_fn, validation, metric, own, allow_nan):
    """(held-out data, ((name, metric), ...)), checked."""
    in_program, on_host = metrics.split(metric)
    if on_host:
        name = next(iter(on_host))
        raise ValueError(f"{name} must take mask=, bool [row], as accuracy does: it is compiled with the rounds.")
    if validation is None:
        if metric is not None:
            raise ValueError("metric came without validation=(x, y): give the data that it is for.")
        return None, ()
    if own:
        raise ValueError("With own layers the server has no whole network to score: evaluate the clients' afterwards.")
    held_out = prepare(swarm, *pair(validation))
    check_data(swarm, held_out, loss_fn, allow_nan=allow_nan, part="validation ")
    return held_out, in_program
