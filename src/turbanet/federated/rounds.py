"""Rounds of federated learning: a server and its sampled clients, one program for many rounds on all devices."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from tqdm.auto import tqdm

from turbanet.training import member, program, schedules
from turbanet.training.arrays import floating
from turbanet.training.sampling import epoch_order, own_order, own_steps
from turbanet.training.sums import added, zero

CALL_SECONDS = 2  # of one call of the program, about, where a round takes less
CALL_ROUNDS = 128  # of one call at the most, for which there is room in what was seen


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Some rounds of the server and its clients, and the scores between them."""

    loss_fn: Callable
    server: optax.GradientTransformation
    epochs: int
    batch_size: int
    ragged: bool
    masked: bool  # whether some clients have fewer rows than a batch, of which a mask tells the loss
    sampled: int
    proximal: bool  # whether clients are held near the server's weights
    clip: bool  # whether changes are shortened, and noise is added
    own: tuple[str, ...]
    scores: tuple  # ((name, metric), ...)
    score_every: int

    def of_device(self, carry, given, first, many, last, *, plan):
        """`many` rounds from the `first` on, of which there are `last`, on one device: (carry, what was seen)."""

        @partial(jax.jit, inline=True)  # is traced once, for its shapes and for the loop
        def one(carry, number):
            carry, found = self.round(carry, given, plan)
            due = ((number + 1) % self.score_every == 0) | (number + 1 == last)
            return carry, {**found, "scores": self.score(carry[0], given[4], due)}

        def another(number, carry):
            carry, seen = carry
            carry, found = one(carry, first + number)
            return carry, jax.tree.map(lambda all, one: all.at[number].set(one), seen, found)

        room = program.room(jax.eval_shape(one, carry, first)[1], CALL_ROUNDS)
        return jax.lax.fori_loop(0, many, another, (carry, room))

    def round(self, carry, given, plan):
        """One round: (carry, what was seen of its clients)."""
        server, moments, own = carry
        rows, counts, x, y, _, key, numbers = given
        pick, drop, noise = jax.random.split(jax.random.fold_in(key, server.epoch), 3)  # never twice the same noise
        clients = jax.random.permutation(pick, len(rows))[: self.sampled]
        returned = jax.random.uniform(drop, (self.sampled,)) >= numbers["drop_out"]
        here = self.places(plan)
        mine = clients[jnp.minimum(here, self.sampled - 1)]
        back = jnp.where(here < self.sampled, returned[jnp.minimum(here, self.sampled - 1)], False)
        each = mine, rows[mine], counts[mine], jax.tree.map(lambda leaf: leaf[mine], own)
        after, own_after, loss = plan.in_blocks(self.local, each, (server, x, y, numbers["proximal"]))
        before = apart(server.params, self.own)[0], server.collections
        change, collections = self.mean_change(before, after, back, counts[mine], noise, numbers, plan)
        updates, moments = self.server.update(jax.tree.map(jnp.negative, change), moments, before[0])
        params = optax.apply_updates(before[0], updates)
        server = server.replace(
            params={**server.params, **params} if self.own else params,
            collections=jax.tree.map(jnp.add, server.collections, collections),
            step=server.step + self.epochs * -(-rows.shape[1] // self.batch_size),
            epoch=server.epoch + self.epochs,
        )
        kept = jnp.where(back, mine, len(rows))  # where nothing is written
        own = jax.tree.map(partial(_written, at=_everywhere(kept, plan), plan=plan), own, own_after)
        return (server, moments, own), {"loss": loss, "clients": clients, "returned": returned}

    def places(self, plan):
        """Which of the sampled clients train on this device, by position; some are past the last if it is not full."""
        devices = len(plan.devices)
        share = -(-self.sampled // devices)
        begin = share * jax.lax.axis_index("member") if devices > 1 else 0
        return begin + jnp.arange(share)

    def local(self, client, shared):
        """One client's round, from the server's state on: (what it shares, what is its own, its mean loss)."""
        id, rows, count, own = client
        server, x, y, proximal = shared
        state = server.replace(id=id, params={**server.params, **own} if self.own else server.params)
        length = rows.shape[0]
        steps = own_steps(count if self.ragged else length, self.batch_size)
        mask = jnp.arange(self.batch_size) < count if self.masked else None

        def epoch(number, carry):
            state, total = carry
            state = schedules.begin_epoch(state.replace(epoch=server.epoch + number))
            key = jax.random.fold_in(member.member_key(state.seed, id, member.SHUFFLE), state.epoch)
            all_rows = self.batch_size == length and not self.ragged  # nothing to shuffle
            how = {"length": length, "batch_size": self.batch_size}
            order = (own_order if self.ragged else epoch_order)(None if all_rows else key, count, **how)

            def step(place, carry):
                state, total = carry
                its_x, its_y = jax.tree.map(lambda leaf: leaf[rows[order[place]]], (x, y))
                state, loss, _ = member.train_step(self.of_client(server, proximal), state, its_x, its_y, mask)
                return state, added(total, loss)

            return jax.lax.fori_loop(0, steps, step, (state, total))

        state, (total, _) = jax.lax.fori_loop(0, self.epochs, epoch, (state, zero()))
        shared, own = apart(state.params, self.own)
        return (shared, state.collections), own, total / (steps * self.epochs)

    def of_client(self, server, proximal):
        """The loss of a client that is held near the server."""
        if not self.proximal:
            return self.loss_fn
        there = apart(server.params, self.own)[0]

        def loss(params, x, y, apply_fn, **counted):
            value, prediction = self.loss_fn(params, x, y, apply_fn, **counted)
            away = optax.tree.norm(optax.tree.sub(apart(params, self.own)[0], there), squared=True)
            return value + 0.5 * proximal * away, prediction

        return loss

    def mean_change(self, before, after, back, counts, key, numbers, plan):
        """What the clients of all devices have changed in the mean: by rows, or clipped, all alike and with noise."""
        floats, put = floating(before)
        changes = [new - old for new, old in zip(floating(after)[0], floats, strict=True)]
        weights = back * counts
        if self.clip:
            norms = jax.vmap(optax.tree.norm)(changes)
            weights = back * jnp.minimum(1, numbers["clip"] / jnp.maximum(norms, 1e-12))
        sums = [jnp.tensordot(weights.astype(change.dtype), change, 1) for change in changes]
        flat, split = ravel_pytree((sums, weights.sum().astype(floats[0].dtype)))
        flat = jax.lax.psum(flat, "member") if len(plan.devices) > 1 else flat
        sums, total = split(flat)
        if not self.clip:
            return put([change / jnp.maximum(total, 1) for change in sums], rest=jnp.zeros_like)
        keys = jax.random.split(key, len(sums))
        noise = [jax.random.normal(k, change.shape, change.dtype) for k, change in zip(keys, sums, strict=True)]
        noisy = [change + numbers["noise"] * numbers["clip"] * each for change, each in zip(sums, noise, strict=True)]
        return put([change / self.sampled for change in noisy], rest=jnp.zeros_like)

    def score(self, server, held_out, due):
        """(loss, {metric}) of the server's network on held-out rows, zeros where none is due."""
        if held_out is None:
            return ()

        @partial(jax.jit, inline=True)
        def scored():
            loss, found, _ = program.Evaluate(self.loss_fn, self.scores)(server, held_out)
            return loss, found

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
        return jax.lax.cond(due, scored, lambda: zeros)

    def compiled(self, plan, carry, given):
        """(carry, given, first, many, last) -> leaves of carry, what was seen; from memory if an equal one is there."""
        key = program.identity(self, plan, carry[0], (carry[1:], given))
        return program.remembered(key, partial(self._compile, plan, carry, given))

    def _compile(self, plan, carry, given):
        trees = jax.tree.structure(carry), jax.tree.structure(given)
        run: Any = partial(self.of_device, plan=plan)
        if len(plan.devices) > 1:
            everywhere, by_client = PartitionSpec(), PartitionSpec(None, "member")
            seen = {"loss": by_client, "clients": everywhere, "returned": everywhere, "scores": everywhere}
            mesh = plan.share(0).sharding.mesh
            run = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=(everywhere, seen), check_vma=False)

        def of_leaves(carry, given, *numbers):
            carry, seen = run(*map(jax.tree.unflatten, trees, (carry, given)), *numbers)
            return jax.tree.leaves(carry), seen

        numbers = [jax.ShapeDtypeStruct((), np.int32)] * 3
        leaves = jax.tree.leaves(carry), jax.tree.leaves(given)
        return plan.lower(of_leaves, *leaves, *numbers, donate_argnums=0).compile()


def run(ready, carry, given, rounds, *, progress):
    """Call after call of what is `compiled`: (carry, what was seen [round, ...])."""
    tree = jax.tree.structure(carry)
    leaves, read = jax.tree.leaves(carry), jax.tree.leaves(given)
    parts = []
    done, many = 0, 1
    with tqdm(total=rounds, unit="round", disable=not progress) as bar:
        while done < rounds:
            many = min(many, CALL_ROUNDS, rounds - done)
            begin = time.perf_counter()
            leaves, seen = jax.block_until_ready(ready(leaves, read, *map(np.int32, (done, many, rounds))))
            pace = (time.perf_counter() - begin) / many
            parts.append(jax.tree.map(lambda leaf, many=many: np.asarray(leaf)[:many], seen))
            _check_numbers(parts[-1], done)
            done += many
            bar.update(many)
            bar.set_postfix(loss=f"{parts[-1]['loss'][-1].mean():.4g}")
            many = max(1, int(CALL_SECONDS / pace))
    return jax.tree.unflatten(tree, leaves), jax.tree.map(lambda *each: np.concatenate(each), *parts)


def _check_numbers(seen, done):
    bad = np.argwhere(~np.isfinite(seen["loss"][:, : seen["clients"].shape[1]]))
    if len(bad):
        round, place = bad[0]
        client, value = seen["clients"][round, place], seen["loss"][round, place]
        came = f"The loss of client {client} is {value} in round {done + round}"
        raise FloatingPointError(f"{came}: take a smaller learning rate.")


def apart(params, own):
    """The parameters in two: the layers that all share, and those that are each client's own."""
    if not own:
        return params, {}
    return ({n: layer for n, layer in params.items() if n not in own}, {n: params[n] for n in own})


def _everywhere(leaf, plan):
    """What each device has of a leaf [client, ...], one after the other, on every device."""
    return jax.lax.all_gather(leaf, "member", tiled=True) if len(plan.devices) > 1 else leaf


def _written(all, some, *, at, plan):
    return all.at[at].set(_everywhere(some, plan), mode="drop")
