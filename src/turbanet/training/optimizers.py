"""What an optimizer is asked for: a step of one member, and the parameters that the member is scored by."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from turbanet.training.arrays import first_line


def check_optimizer(optimizer: optax.GradientTransformation, params: Any) -> None:
    """ValueError for no parameters, for whole numbers, and for an optimizer that asks for more than `fit` has.

    params : one member's, known by shapes and types
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
        optax.with_extra_args_support(optimizer).update(params, state, params, value=jnp.float32(0))
        return evaluation_params(state, params)

    try:
        scored_by = jax.eval_shape(step, params)
    except Exception as error:  # whatever an optimizer does without what it needs
        known = "with gradients, parameters and the loss's value alone, as optax.adam(0.001) does"
        raise ValueError(f"The optimizer must make a step {known}; this one raises: {first_line(error)}") from error
    if jax.tree.map(jnp.shape, scored_by) != jax.tree.map(jnp.shape, params):
        raise ValueError("evaluation_params must return parameters of the model's structure and shapes.")


def evaluation_params(opt_state: Any, params: Any) -> Any:
    """The parameters by which a member is scored and predicts: `params`, or what its optimizer makes of them for that.

    An optimizer does by having a state, at any depth, with a method evaluation_params(params), such as one that keeps
    their average, or by being Optax's schedule_free.
    """
    for state in _averaging(opt_state):
        is_optax = isinstance(state, optax.contrib.ScheduleFreeState)
        of_state = partial(optax.contrib.schedule_free_eval_params, state) if is_optax else state.evaluation_params
        params = of_state(params)
    return params


def has_averages(opt_state: Any) -> bool:
    """Whether a member is scored by other parameters than those it trains."""
    return bool(_averaging(opt_state))


def check_plain(swarm: Any, who: str) -> None:
    """ValueError where `who` computes with the parameters of a swarm that predicts by others."""
    if has_averages(swarm.opt_state):
        came = f"{who} goes by what is trained, and this swarm predicts by what its optimizer keeps beside it"
        raise ValueError(f"{came}: take an optimizer without averages, such as optax.adam(0.001).")


def _averaging(opt_state):
    """The states that make parameters to score by, found where they lie in an optimizer's state."""

    def is_one(node):
        return isinstance(node, optax.contrib.ScheduleFreeState) or hasattr(node, "evaluation_params")

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]
