"""Rounds of federated learning, a server and its sampled clients, as one program on all devices."""

import dataclasses
import inspect
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from turbanet.core import schedules
from turbanet.core.arrays import floating
from turbanet.core.interrupt import noted
from turbanet.core.progress import progress_bar
from turbanet.core.state import updated
from turbanet.core.sums import added, zero
from turbanet.data.examples import Data
from turbanet.training import compilation, program

CALL_SECONDS = 2  # approximate length of a call of the program, unless one round takes longer
CALL_ROUNDS = 128  # most rounds of a call; its metrics have room for so many


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds of the server and its clients, and the scores between them."""

    loss_fn: Callable
    server: optax.GradientTransformation
    epochs: int
    batch_size: int
    ragged: bool
    masked: bool  # whether some clients have fewer rows than a batch, so that the loss takes a mask
    sampled: int
    proximal: bool  # whether the loss penalises the distance to the server's weights
    clip: bool  # whether changes are clipped and noise is added
    own: tuple[str, ...]
    scores: tuple  # ((name, metric), ...)
    score_every: int

    def on_device(self, carry, inputs, first, many, last, *, plan):
        """Run `many` rounds of one device from the `first` on, of `last` in all: (carry, metrics [round])."""

        @partial(jax.jit, inline=True)  # traced once, for its shapes and for the loop
        def one(carry, number):
            carry, metrics = self.round(carry, inputs, plan)
            due = ((number + 1) % self.score_every == 0) | (number + 1 == last)
            return carry, {**metrics, "scores": self.score(carry[0], inputs[4], due)}

        def body(number, carry):
            carry, recorded = carry
            carry, metrics = one(carry, first + number)
            return carry, jax.tree.map(lambda all, one: all.at[number].set(one), recorded, metrics)

        room = program.room(jax.eval_shape(one, carry, first)[1], CALL_ROUNDS)
        return jax.lax.fori_loop(0, many, body, (carry, room))

    def round(self, carry, inputs, plan):
        """Run one round: (carry, metrics of its clients)."""
        server, moments, own = carry
        rows, counts, x, y, _, key, numbers = inputs
        # The epoch counts on from call to call, so that no noise is ever drawn twice.
        sample_key, drop_key, noise_key = jax.random.split(jax.random.fold_in(key, server.epoch), 3)
        clients = jax.random.permutation(sample_key, len(rows))[: self.sampled]
        returned = jax.random.uniform(drop_key, (self.sampled,)) >= numbers["drop_out"]
        positions = self.positions(plan)
        ids = clients[jnp.minimum(positions, self.sampled - 1)]
        counted = jnp.where(positions < self.sampled, returned[jnp.minimum(positions, self.sampled - 1)], False)
        each = ids, rows[ids], counts[ids], jax.tree.map(lambda leaf: leaf[ids], own)
        after, own_after, loss = plan.in_blocks(self.local, each, (server, x, y, numbers["proximal"]))
        before = split_layers(server.params, self.own)[0], server.collections
        change, collections = self.mean_change(before, after, counted, counts[ids], noise_key, numbers, plan)
        updates, moments = updated(self.server, jax.tree.map(jnp.negative, change), moments, before[0])
        params = optax.apply_updates(before[0], updates)
        server = server.replace(
            params={**server.params, **params} if self.own else params,
            collections=jax.tree.map(jnp.add, server.collections, collections),
            step=server.step + self.epochs * -(-rows.shape[1] // self.batch_size),
            epoch=server.epoch + self.epochs,
        )
        at = jnp.where(counted, ids, len(rows))  # out of bounds, so not written, for clients that do not count
        own = jax.tree.map(partial(_scatter, at=_all_gather(at, plan), plan=plan), own, own_after)
        return (server, moments, own), {"loss": loss, "clients": clients, "returned": returned}

    def positions(self, plan):
        """Positions of this device's clients among the sampled ones; past the last one where the device is not full."""
        devices = len(plan.devices)
        share = -(-self.sampled // devices)
        begin = share * jax.lax.axis_index("member") if devices > 1 else 0
        return begin + jnp.arange(share)

    def local(self, client, shared):
        """Train one client from the server's state: (shared params and collections, own layers, mean loss)."""
        id, rows, count, own = client
        server, x, y, proximal = shared
        state = server.replace(id=id, params={**server.params, **own} if self.own else server.params)
        data = Data(x, y, rows, count, is_own=(), length=len(rows), ragged=self.ragged)
        train = program.Train(self.client_loss(server, proximal), self.batch_size, masked=self.masked)

        def epoch(number, carry):
            state, total = carry
            state, loss = train.epoch(schedules.begin_epoch(state.replace(epoch=server.epoch + number)), data)
            return state, added(total, loss)

        state, (total, _) = jax.lax.fori_loop(0, self.epochs, epoch, (state, zero()))
        shared, own = split_layers(state.params, self.own)
        return (shared, state.collections), own, total / self.epochs

    def client_loss(self, server, proximal):
        """Return a client's loss, with the proximal term of FedProx if there is one."""
        if not self.proximal:
            return self.loss_fn
        server_params = split_layers(server.params, self.own)[0]

        def loss(params, x, y, apply_fn, **keywords):
            value, prediction = self.loss_fn(params, x, y, apply_fn, **keywords)
            change = optax.tree.sub(split_layers(params, self.own)[0], server_params)
            return value + 0.5 * proximal * optax.tree.norm(change, squared=True), prediction

        vars(loss)["__signature__"] = inspect.signature(self.loss_fn, follow_wrapped=False)
        return loss

    def mean_change(self, before, after, counted, counts, key, numbers, plan):
        """Mean change of the clients of all devices: weighted by rows, or clipped, unweighted and with noise.

        Sums are at least of float32. Only weights are clipped, not running statistics.
        """
        floats, put = floating(before)
        changes = [
            (new - old).astype(jnp.promote_types(old.dtype, jnp.float32))
            for new, old in zip(floating(after)[0], floats, strict=True)
        ]
        weights = [counted * counts] * len(changes)
        if self.clip:
            clipped = len(floating(before[0])[0])
            norms = jax.vmap(optax.tree.norm)(changes[:clipped])
            scale = counted * jnp.minimum(1, numbers["clip"] / jnp.maximum(norms, 1e-12))
            weights = [scale] * clipped + [counted] * (len(changes) - clipped)
        sums = [jnp.tensordot(w.astype(change.dtype), change, 1) for w, change in zip(weights, changes, strict=True)]
        flat, split = ravel_pytree((sums, weights[0].sum().astype(changes[0].dtype)))
        flat = jax.lax.psum(flat, "member") if len(plan.devices) > 1 else flat
        sums, total = split(flat)
        if self.clip:
            keys, total = jax.random.split(key, len(sums)), self.sampled
            noise = [jax.random.normal(k, change.shape, change.dtype) for k, change in zip(keys, sums, strict=True)]
            spread = numbers["noise"] * numbers["clip"]
            sums = [change + spread * draw for change, draw in zip(sums, noise, strict=True)]
        mean = [change / jnp.maximum(total, 1) for change in sums]
        return put([one.astype(old.dtype) for one, old in zip(mean, floats, strict=True)], rest=jnp.zeros_like)

    def score(self, server, held_out, due):
        """Return (loss, {metric: score}) of the server's network on held-out rows, zeros if no score is due."""
        if held_out is None:
            return ()

        @partial(jax.jit, inline=True)
        def scored():
            loss, metrics, _ = program.Evaluate(self.loss_fn, self.scores)(server, held_out)
            return loss, metrics

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
        return jax.lax.cond(due, scored, lambda: zeros)

    def compiled(self, plan, carry, inputs):
        """Return the compiled (carry, inputs, first=, many=, last=) -> (carry, metrics); cached."""
        whole, by_client = PartitionSpec(), PartitionSpec(None, "member")
        metrics = {"loss": by_client, "clients": whole, "returned": whole, "scores": whole}
        function, names = partial(self.on_device, plan=plan), ("first", "many", "last")
        return compilation.on_devices(self, function, plan, carry, inputs, names=names, specs=(whole, (whole, metrics)))


def run(ready, carry, inputs, rounds, *, progress):
    """Call the compiled program until all rounds are done, or Ctrl-C has come: (carry, metrics [round, ...])."""
    recorded = []
    done, many = 0, 1
    with noted() as interrupted, progress_bar(progress, total=rounds, unit="round") as bar:
        while done < rounds and not (done and interrupted()):
            many = min(many, CALL_ROUNDS, rounds - done)
            begin = time.perf_counter()
            carry, metrics = jax.block_until_ready(ready(carry, inputs, first=done, many=many, last=rounds))
            pace = (time.perf_counter() - begin) / many
            recorded.append(jax.tree.map(lambda leaf, many=many: np.asarray(leaf)[:many].copy(), metrics))
            _check_finite(recorded[-1], done)
            done += many
            bar.update(many)
            bar.set_postfix(loss=f"{recorded[-1]['loss'][-1].mean():.4g}")
            many = max(1, int(CALL_SECONDS / pace))
    return carry, jax.tree.map(lambda *calls: np.concatenate(calls), *recorded)


def _check_finite(metrics, done):
    bad = np.argwhere(~np.isfinite(metrics["loss"][:, : metrics["clients"].shape[1]]))
    if len(bad):
        round, position = bad[0]
        client, value = metrics["clients"][round, position], metrics["loss"][round, position]
        found = f"The loss of client {client} is {value} in round {done + round}"
        raise FloatingPointError(f"{found}: take a smaller learning rate.")


def split_layers(params, own):
    """Split parameters into (layers that all clients share, layers of each client's own)."""
    if not own:
        return params, {}
    return ({n: layer for n, layer in params.items() if n not in own}, {n: params[n] for n in own})


def _all_gather(leaf, plan):
    """All-gather a leaf [client, ...] from the devices."""
    return jax.lax.all_gather(leaf, "member", tiled=True) if len(plan.devices) > 1 else leaf


def _scatter(all, some, *, at, plan):
    return all.at[at].set(_all_gather(some, plan), mode="drop")
