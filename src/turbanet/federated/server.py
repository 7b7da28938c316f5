"""Federated learning: clients train one network on their own rows, and a server averages their changes."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from turbanet.core import metrics, schedules
from turbanet.core.arrays import check_seed, check_whole, floating
from turbanet.core.gather import home
from turbanet.core.interrupt import Interrupted
from turbanet.core.memory import fitting
from turbanet.core.optimizers import check_outer, check_plain
from turbanet.core.plan import Plan, check_plan, say_once
from turbanet.core.state import Swarm
from turbanet.core.tables import Shown, count, spread
from turbanet.data.checks import batch_statistics, check_data, check_masks
from turbanet.data.examples import pair, prepare
from turbanet.data.sampling import check_rows
from turbanet.federated.rounds import Rounds, run, split_layers


@dataclasses.dataclass(frozen=True, repr=False)
class FederatedHistory(Shown):
    """Metrics of each round of `train`.

    train_loss : float32 [round, sampled], each sampled client's mean loss over its steps
    clients : int [round, sampled], the sampled clients
    returned : bool [round, sampled], whether the client's change reached the server
    scored : int [score], number of rounds before each score of the server's network
    validation_loss : float32 [score], None without validation
    validation_metric : [score], or {name: [score]} for several metrics; None without a metric
    bytes_down, bytes_up : int [round], size in memory of the weights sent by the server and of those returned
    startup_seconds, steady_seconds : from the call to the first round, mostly compilation; of the rounds
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

    def _shown(self):
        rounds, sampled = self.train_loss.shape
        clients = spread(self.train_loss[0]), spread(self.train_loss[-1])
        rows = [["", "first", "last"], ["train_loss, median (range) of the clients", *clients]]
        scores: Any = self.validation_metric
        scores = scores if isinstance(scores, dict) else {"validation_metric": scores}
        for name, values in {"validation_loss": self.validation_loss, **scores}.items():
            if values is not None and len(values):
                rows.append([name, f"{values[0]:.3g}", f"{values[-1]:.3g}"])
        cost = f"{self.startup_seconds:.3g} s to begin, {self.steady_seconds:.3g} s of rounds"
        return f"FederatedHistory: {count(rounds, 'round')} of {count(sampled, 'client')}, {cost}", rows

    def rounds_to(self, score: float, metric: str | None = None) -> float:
        """Return the rounds until the best score so far first reaches `score`; infinite if it never does.

        Interpolated linearly between two scores, as by McMahan et al. (2017); higher scores are better. metric: the
        name of one of several metrics. Raises ValueError for a metric that was not computed.
        """
        scores: Any = self.validation_metric
        scores = scores if isinstance(scores, dict) else {None: scores}
        if scores.get(metric) is None:
            names = [name for name, values in scores.items() if name and values is not None]
            if scores.get(None) is not None:
                raise ValueError("The one metric has no name: leave metric= out.")
            if not names:
                raise ValueError("There are no scores: train with validation= and metric=.")
            raise ValueError(f"There are no scores of metric={metric!r}, but of {names}: name one of them.")
        known = ~np.isnan(scores[metric])
        best, scored = np.maximum.accumulate(np.asarray(scores[metric], float)[known]), self.scored[known]
        above = np.flatnonzero(best >= score)
        if not len(above):
            return float("inf")
        around = slice(max(above[0] - 1, 0), above[0] + 1)
        return float(np.interp(score, best[around], scored[around]))


def train(
    swarm: Swarm,
    x: Any,
    y: Any,
    loss_fn: Callable | None = None,
    *,
    clients: Any,
    rounds: int,
    sampled: int | None = None,
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

    In each round some clients start from the server's weights and train on their own rows in parallel. The mean of
    their changes, weighted by their numbers of rows, is the server's step. Each client starts every round with the
    swarm's optimizer state. A second call continues the rounds of the first, except for the server's optimizer state;
    with `own` layers, which are then a swarm's, there is none.

    Parameters
    ----------
    swarm : TurbaTrainState of one member: the server's network, and the clients' optimizer
    x, y : arrays or pytrees of arrays, [row, ...]
    loss_fn : loss(params, x, y, apply_fn) -> (scalar, prediction); None: the swarm's own
    clients : int [client, row], rows of each client, padded at the end with -1: see `shards`, `dirichlet`, `ragged`
    rounds : number of rounds
    sampled : clients of a round, drawn in each round without replacement; None: all
    local_epochs : a client's passes over its rows in a round
    batch_size : rows of a client's step, or all rows of a client with fewer; None: all rows. A last, partial batch is
        filled up with the client's first rows of that epoch
    server : an Optax optimizer of the server, whose gradient is the negative mean change: optax.sgd(1.0, 0.9) is
        FedAvgM, optax.adam(0.01) FedAdam (Reddi et al. 2021); None: the server adds the mean change
    proximal : weight of half the squared distance to the server's weights in a client's loss (FedProx: Li et al. 2020)
    own : names in `params` of layers that each client keeps for itself from round to round (FedPer: Arivazhagan et
        al. 2019); running statistics are averaged all the same
    drop_out : probability that a client's change of a round is lost
    clip : norm to which each client's change is clipped, all its weights as one vector; clients then count equally, and
        their sum is divided by `sampled` also where changes are lost, as differential privacy requires (McMahan et al.
        2018). None: no clipping
    noise : standard deviation of the noise on the sum of the changes, in units of `clip`: see `client_epsilon`. It
        protects the network; the losses of the history are not private
    validation : (x, y) that the server's network is scored on
    metric : metric(prediction, y, mask=mask) -> a number, such as `accuracy`, or {name: metric}
    score_every : rounds between two scores; the last round is scored too. None: about a twentieth of the rounds
    seed : seed of the sampling, of the dropouts and of the noise
    plan : the devices, and the block of clients that train together on each; None to choose one
    allow_nan : whether x and y may hold NaN and infinite numbers
    progress : whether to show a bar with the rounds done

    Returns
    -------
    (swarm, FederatedHistory) : the server's network; with `own` layers a swarm of all clients, whose ids are their
        positions in `clients`

    Raises
    ------
    ValueError : for more than one member, clients without rows, more sampled clients than clients, unknown layers, and
        what `fit` refuses, such as clients with fewer rows than a batch if the loss takes no mask
    FloatingPointError : for a client whose loss becomes NaN or infinite
    Interrupted : a KeyboardInterrupt, for Ctrl-C; it has the network and the history so far

    Examples
    --------
    >>> import jax, numpy as np, optax, turbanet as tn
    >>> x, y = np.tile(np.eye(4, dtype=np.float32), (10, 1)), np.tile(np.arange(4), 10)
    >>> net = tn.TurbaTrainState.swarm(tn.MLP((8, 4)), optax.sgd(0.1), 1, sample_input=x[:1])
    >>> rows = tn.shards(jax.random.key(0), labels=y, clients=10, per_client=2)
    >>> settings = {"rounds": 5, "sampled": 4, "batch_size": 2, "progress": False}
    >>> net, history = tn.federated.train(net, x, y, tn.softmax_cross_entropy, clients=rows, **settings)
    >>> len(net), history.train_loss.shape
    (1, (5, 4))
    """
    called = time.perf_counter()
    optional = {"sampled": sampled, "batch_size": batch_size, "score_every": score_every}
    optional = {name: value for name, value in optional.items() if value is not None}
    check_whole(rounds=rounds, local_epochs=local_epochs, **optional)
    score_every = score_every or max(1, rounds // 20)
    data = prepare(swarm, x, y)
    if len(swarm) != 1:
        raise ValueError(f"federated.train trains one network, got a swarm of {len(swarm)}: pass one, swarm[[id]].")
    check_plain(swarm, "federated.train")
    if schedules.needs_validation(swarm):
        raise ValueError('The schedule "reduce" needs a validation loss, which clients do not have: use another one.')
    loss_fn = swarm.loss(loss_fn)
    rows, counts = _rows(clients, data.length)
    sampled = sampled or len(rows)
    used = np.unique(rows[rows >= 0])  # others may hold anything
    checked = data if len(used) == data.length else prepare(swarm, x, y, rows=used[None])
    check_data(swarm, checked, loss_fn, allow_nan=allow_nan, trains=True)
    batch_size = min(batch_size or rows.shape[1], rows.shape[1])
    masked = bool((counts < batch_size).any())
    if masked:
        client = int(counts.argmin())
        which = f"Batches of {batch_size} rows for client {client}, which has {counts[client]},"
        check_masks(swarm, loss_fn, which, f"batch_size={counts[client]} at the most")
    own_names = _layers(swarm, own or ())
    _check(len(rows), sampled, proximal=proximal, drop_out=drop_out, clip=clip, noise=noise)
    if noise and (names := batch_statistics(swarm)):
        raise ValueError(f"The model's {names} would leave the clients without noise: use GroupNorm, for example.")
    server = server or optax.sgd(1.0)
    check_outer(server, split_layers(swarm.get_state(0).params, own_names)[0], "server")
    held_out, scores = _validation(swarm, loss_fn, validation, metric, own_names, allow_nan)
    program = Rounds(
        loss_fn=loss_fn,
        server=server,
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
    shared_layers, own_layers = split_layers(state.params, own_names)
    own_layers = jax.tree.map(lambda leaf: jnp.tile(leaf, (len(rows), *(1,) * leaf.ndim)), own_layers)
    carry = plan.share((state, program.server.init(shared_layers), own_layers))
    numbers = {"proximal": proximal, "drop_out": drop_out, "clip": clip or 0.0, "noise": noise}
    numbers = {name: jnp.float32(number) for name, number in numbers.items()}  # as data: other values compile nothing
    inputs = plan.share((rows, counts, data.x, data.y, held_out, jax.random.key(check_seed(seed)), numbers))
    ready, block = fitting(partial(program.compiled, plan, carry, inputs), plan)
    while block != plan.block:
        say_once(f"Out of memory with blocks of {plan.block} clients; going on with {block}.")
        plan = dataclasses.replace(plan, block=block)
        ready, block = fitting(partial(program.compiled, plan, carry, inputs), plan)
    jax.block_until_ready(inputs)
    began = time.perf_counter()
    (state, _, own_layers), recorded = run(ready, carry, inputs, rounds, progress=progress)
    steady = time.perf_counter() - began
    size = sum(leaf.nbytes for leaf in floating((shared_layers, state.collections))[0])
    history = _history(recorded, rounds, score_every, held_out, metric, size, (began - called, steady))
    trained = _swarm(swarm, state, own_layers, len(rows))
    if (done := len(history.clients)) < rounds:
        raise Interrupted(trained, history, f"{done} round(s)")
    return trained, history


def _history(recorded, rounds, every, held_out, metric, size, seconds):
    """Return the history of the recorded metrics; size: bytes of one network; seconds: (startup, steady)."""
    numbers = np.arange(1, len(recorded["clients"]) + 1)
    due = (numbers % every == 0) | (numbers == rounds)
    loss, scores = recorded["scores"] or (None, {})
    loss, scores = jax.tree.map(lambda leaf: leaf[due], (loss, scores))
    requested = scores if isinstance(metric, Mapping) else scores.get(metrics.ONE)
    sampled = recorded["clients"].shape[1]
    return FederatedHistory(
        train_loss=recorded["loss"][:, :sampled],
        clients=recorded["clients"],
        returned=recorded["returned"],
        scored=numbers[due if held_out is not None else slice(0)],
        validation_loss=loss,
        validation_metric=requested if metric is not None else None,
        bytes_down=np.full(len(numbers), sampled * size),
        bytes_up=recorded["returned"].sum(1) * size,
        startup_seconds=seconds[0],
        steady_seconds=seconds[1],
    )


def _swarm(swarm, state, own, clients):
    """Return the server's network as a swarm of one, or a swarm of all clients with their own layers."""
    trained = jax.tree.map(lambda leaf: leaf[None], state.replace(apply_fn=None, tx=None))
    unchanged = {name: getattr(swarm, name) for name in ("apply_fn", "tx", "loss_fn", "sample")}
    net = jax.device_put(trained, home(swarm.step)).replace(**unchanged)
    if not own:
        return net
    copies = net.copies(clients)
    return copies.replace(params={**copies.params, **jax.device_put(own, home(swarm.step))})


def _plan(plan, swarm, sampled):
    """Return the plan with at most one device a sampled client, and a block for the clients of a round."""
    check_plan(plan)
    plan = plan or Plan()
    plan = dataclasses.replace(plan, devices=plan.devices[:sampled])
    each = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((sampled, *leaf.shape[1:]), leaf.dtype), swarm)
    return plan.resolve(each)


def _rows(clients, length):
    """Return (rows, counts) of the clients, checked."""
    try:
        if not len(clients):
            raise ValueError("there are no clients")
        rows, counts = check_rows(clients, members=len(clients), length=length)
    except (TypeError, ValueError) as error:
        required = "clients must be int [client, row], at least one row each, padded at the end with -1 (see ragged)"
        raise ValueError(f"{required}: {error}") from None
    return rows[:, : counts.max()], counts


def _layers(swarm, own):
    """Return the names of the clients' own layers, checked."""
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
    given = {"proximal": proximal, "drop_out": drop_out, "noise": noise} | ({} if clip is None else {"clip": clip})
    for name, value in given.items():
        if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            none = "None" if name == "clip" else "0"
            raise ValueError(f"{name} must be a number, {none} for none; got {value!r}.")
    if not 0 <= drop_out < 1:
        raise ValueError(f"drop_out is a probability, at least 0 and below 1, got {drop_out!r}.")
    if not 0 <= proximal < np.inf or not 0 <= noise < np.inf:
        raise ValueError(f"proximal and noise must be at least 0, got {proximal!r} and {noise!r}.")
    if clip is not None and not 0 < clip < np.inf:
        raise ValueError(f"clip must be a number above 0, or None, got {clip!r}.")
    if noise and clip is None:
        raise ValueError("noise is in units of clip: say how long a client's change may be, clip=1.0 for example.")


def _validation(swarm, loss_fn, validation, metric, own, allow_nan):
    """Return (held-out data, ((name, metric), ...)), checked."""
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
