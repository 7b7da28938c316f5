"""Requirements on optimizers: that they can make a step, and the parameters that they evaluate a member by."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from turbanet.core.arrays import first_line
from turbanet.core.plan import say_once
from turbanet.core.state import State, updated


def check_optimizer(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Raise ValueError for no parameters, for integer ones, and for an optimizer that needs more than `fit` has.

    params : one member's, or their shapes and types
    """
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("The model has no parameters: there is nothing to train.")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"The parameter {name} is {leaf.dtype}, and only floats have gradients: cast it.")

    def step(params):
        state = optimizer.init(params)
        updated(optimizer, params, state, params, jnp.float32(0))
        held = [values for _, values in optax.tree.get_all_with_path(state, "hyperparams")]
        return evaluation_params(state, params), held

    try:
        scored_by, held = jax.eval_shape(step, params)
    except Exception as error:  # an optimizer may raise anything
        needs = "with gradients, parameters and the loss's value alone, as optax.adam(0.001) does"
        raise ValueError(f"The optimizer must make a step {needs}; this one raises: {first_line(error)}") from error
    if jax.tree.map(jnp.shape, scored_by) != jax.tree.map(jnp.shape, params):
        raise ValueError("evaluation_params must return parameters of the model's structure and shapes.")
    values = {name: leaf for each in held if isinstance(each, dict) for name, leaf in each.items()}
    short = [name for name, leaf in values.items() if jnp.issubdtype(leaf, jnp.floating) and leaf.dtype.itemsize < 4]
    if short:
        advice = "give optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)"
        say_once(f"The optimizer holds {', '.join(short)} in 16 bits, in which 0.999 is 1 or near it: {advice}.")


def check_outer(optimizer: optax.GradientTransformation, params: Any, name: str) -> None:
    """Raise ValueError for an optimizer, the argument `name`, of networks' mean change, which needs more than that.

    params : those of the network
    """
    try:
        state = jax.eval_shape(optimizer.init, params)
        jax.eval_shape(partial(updated, optimizer), params, state, params)
    except Exception as error:  # an optimizer may raise anything
        needs = "with a mean change and parameters alone, as optax.sgd(1.0) does"
        raise ValueError(f"{name} must make a step {needs}; this one raises: {first_line(error)}") from error
    if has_averages(state):
        problem = f"{name} must leave the network the parameters that it trains, and this one predicts by others"
        raise ValueError(f"{problem}: take an optimizer without averages, such as optax.sgd(1.0).")


def evaluation_params(opt_state: Any, params: Any) -> Any:
    """Return the parameters that a member predicts and is scored by: `params`, or its optimizer's in their place.

    An optimizer has its own, such as an average, if its state holds, at any depth, an object with a method
    evaluation_params(params), or if it is Optax's schedule_free.
    """
    for state in _averaging(opt_state):
        is_optax = isinstance(state, optax.contrib.ScheduleFreeState)
        of_state = partial(_schedule_free, state) if is_optax else state.evaluation_params
        params = of_state(params)
    return params


def _schedule_free(state, params):
    """Return the parameters of Optax's schedule_free, which may be the optimizer of a part of them."""

    def is_other(node):
        return isinstance(node, optax.MaskedNode)

    def of_own(choose):
        return jax.tree.map(lambda z, *leaves: choose(is_other(z), z, *leaves), state.z, params, is_leaf=is_other)

    filled = of_own(lambda other, z, before: before if other else z)
    averaged = optax.contrib.schedule_free_eval_params(state._replace(z=filled), params)
    return jax.tree.map(
        lambda z, before, after: before if is_other(z) else after, state.z, params, averaged, is_leaf=is_other
    )


def has_averages(opt_state: Any) -> bool:
    """Whether a member is scored by other parameters than those that it trains."""
    return bool(_averaging(opt_state))


def check_plain(swarm: State, caller: str) -> None:
    """Raise ValueError, in the name of `caller`, if a swarm predicts by other parameters than those that it trains."""
    if has_averages(swarm.opt_state):
        problem = f"{caller} uses the trained parameters, but this swarm predicts with parameters of its optimizer"
        raise ValueError(f"{problem}: take an optimizer without averages, such as optax.adam(0.001).")


def _averaging(opt_state):
    """Return the parts of an optimizer's state, at any depth, that have parameters to evaluate by."""

    def is_one(node):
        return isinstance(node, optax.contrib.ScheduleFreeState) or hasattr(node, "evaluation_params")

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]
