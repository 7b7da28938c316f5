"""Agents: a swarm of policies that learn by PPO, each in environments of its own, compiled from end to end."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.networks.policies import Agent, Normalised
from turbanet.ppo import PPOConfig
from turbanet.rl import environments, learning
from turbanet.rl.settings import count_updates, into_swarm, of_members
from turbanet.training import member
from turbanet.training.arrays import check_seed, check_whole
from turbanet.training.data import Data
from turbanet.training.interrupt import Interrupted
from turbanet.training.member import Swarm
from turbanet.training.plan import Plan, check_plan, gathered, home, say_once
from turbanet.training.run import Training
from turbanet.training.scores import apply
from turbanet.turba_train_state import TurbaTrainState

SEGMENTS = 10  # of a training without evaluations: from one checkpoint to the next


@dataclasses.dataclass(frozen=True)
class AgentHistory:
    """What `train_agents` saw of each member, and what it cost.

    train_loss, policy_loss, value_loss, entropy, kl : [update, member], means over an update's steps
    train_return : [update, member], the mean return of the episodes that ended in an update; NaN where none did
    episodes : [update, member], how many those were
    steps : transitions of each member in an update
    evaluation : [evaluation, member], the mean return of greedy episodes apart from training; None where none was asked
    updates : int [member], how many each member made; what was seen of it is NaN after that
    seed, member : int [member], the members' names
    compile_seconds, steady_seconds : of waiting for what compiles, and of training without it
    plan : under which the training ended; None in what was unpickled
    """

    train_loss: np.ndarray
    policy_loss: np.ndarray
    value_loss: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    train_return: np.ndarray
    episodes: np.ndarray
    steps: int
    evaluation: np.ndarray | None
    updates: np.ndarray
    seed: np.ndarray
    member: np.ndarray
    compile_seconds: float
    steady_seconds: float
    plan: Plan | None

    def frame(self) -> Any:
        """A tidy pandas table: update, steps (transitions so far), seed, member and what was seen of it."""
        import pandas as pd

        updates, members = self.train_loss.shape
        update = np.repeat(np.arange(updates), members)
        names = {"seed": np.tile(self.seed, updates), "member": np.tile(self.member, updates)}
        seen = "train_return", "episodes", "train_loss", "policy_loss", "value_loss", "entropy", "kl"
        columns = {name: getattr(self, name).ravel() for name in seen}
        return pd.DataFrame({"update": update, "steps": (update + 1) * self.steps, **names, **columns})


def train_agents(
    env: Any,
    config: PPOConfig | None = None,
    members: int | Swarm = 1,
    *,
    seed: int = 0,
    model: Any = None,
    params: Any = None,
    evaluations: int = 0,
    episodes: int = 10,
    solved: float | None = None,
    checkpoints: Any = None,
    plan: Plan | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
) -> tuple[Swarm, AgentHistory]:
    """Train a swarm of agents by PPO, each in environments of its own.

    An agent depends on its seed and its id alone: it learns what it would have learned by itself.

    Parameters
    ----------
    env : one of gymnax's, or an object with reset(key, params) -> (observation, state), step_env(key, state, action,
        params) -> (observation, state, reward, terminated, info), is_truncated(state, params), action_space(params)
    config : None for the defaults of `PPOConfig`; of what it marks [member] an array has one number for each member
    members : how many agents, or a swarm that `train_agents` returned, which learns on
    seed : an int, from which each agent draws by its id
    model : a Flax network, x [..., feature] -> (policy, values [...]), the policy logits or a distribution (see
        `networks.policies`); None: `Agent`, for the actions that the environment takes
    params : of the environment; None: its own. A number in them that has become an array [member], where
        `env.default_params` has one number, is each member's own
    evaluations : how often in the training, evenly and the last time at its end, each agent plays `episodes` greedy
        episodes; where they do not divide the updates, the first ones have an update fewer before them
    episodes : of an evaluation
    solved : the mean return of an evaluation from which on an agent stops, and costs nothing
    checkpoints : a folder or `Checkpoints` that keeps the training after each evaluation, or each tenth of it: killed
        and called again as before, it ends bit for bit where it would have ended
    plan : where members run: a `Plan`, or None for one by rule
    progress : whether a bar shows the updates done and the mean return
    on_interrupt : what Ctrl-C does between two calls of the program: "raise" an `Interrupted`, whose `swarm` and
        `history` are what was trained so far, or "return" these

    Returns
    -------
    (swarm, AgentHistory) : `swarm.predict` and `predict` give policies and values of observations

    Raises
    ------
    ValueError : for an environment without that interface, actions that are neither numbered nor a box of one axis,
        and settings that do not fit one another
    MemoryError : where not even one member at a time fits in memory
    Interrupted : a KeyboardInterrupt, for Ctrl-C

    Examples
    --------
    >>> import gymnax
    >>> from turbanet.rl import PPOConfig, train_agents
    >>> env, _ = gymnax.make("CartPole-v1")
    >>> config = PPOConfig(n_steps=32, n_envs=4, batch_size=32, n_epochs=2, total_timesteps=1024)
    >>> swarm, history = train_agents(env, config, members=3, progress=False)
    >>> history.train_loss.shape  # [update, member]
    (8, 3)
    """
    environments.check(env)
    config = config or PPOConfig()
    updates = count_updates(config)
    check_plan(plan)
    if on_interrupt not in ("raise", "return"):
        raise ValueError(f'on_interrupt must be "raise" or "return", got {on_interrupt!r}.')
    if solved is not None and not evaluations:
        raise ValueError("An agent is solved by an evaluation: give evaluations=, how many there are in the training.")
    check_whole(episodes=episodes)
    if evaluations:
        check_whole(evaluations=evaluations)
    if evaluations > updates:
        raise ValueError(f"There are {updates} updates in {config.total_timesteps} timesteps; got {evaluations=}.")
    count = int(members) if isinstance(members, int | np.integer) else len(members)
    epochs = evaluations or updates
    every = -(-updates // epochs)
    data, one = _data(env, config, params, count, updates=updates, epochs=epochs)
    if isinstance(members, int | np.integer):
        actions, continuous = environments.actions(env, one)
        observed = jax.eval_shape(env.reset, jax.random.key(0), one)[0]
        members = new_swarm(model or Agent(actions, continuous=continuous), config, count, observed.shape, seed)
    elif model is not None:
        raise ValueError("A model came with a swarm, which has its own: leave model out, or give a number of members.")
    swarm = into_swarm(members, data.x["settings"])
    how: dict[str, Any] = {"every": every, "episodes": episodes if evaluations else 0, "uneven": updates % epochs > 0}
    program = learning.learner(config, env, **how)
    life = jax.tree.map(lambda leaf: np.repeat(leaf[None], len(swarm), 0), program.begun(swarm.get_state(0), one))
    active = learning.Solved(np.ones(len(swarm), bool), float("inf") if solved is None else float(solved))
    start = swarm.replace(underway=life, stopping=active)
    segment = 1 if evaluations else max(1, epochs // SEGMENTS)
    how = {"epochs": epochs, "segment": segment, "plan": plan, "checkpoints": checkpoints}
    run = Training(program, start, (data, None), metrics={}, between=None, **how)
    interrupted = run.finish(
        lambda: {"return": _last(run.losses[-1][2])}, progress=progress, unit="update", units=updates / epochs
    )
    state = run.end()
    history = _history(run, program, swarm, updates_of_epochs(updates, epochs))
    name_the_lost(history, "it stopped with the weights it had before")
    state = gathered(state.replace(stopping=None))
    state = jax.device_put(state, jax.tree.map(home, swarm))
    if interrupted and on_interrupt == "raise":
        raise Interrupted(state, history)
    return state, history


@dataclasses.dataclass(frozen=True)
class Play:
    """The returns [episode] of one member, by program.compiled."""

    env: Any
    episodes: int
    greedy: bool

    def __call__(self, state, data):
        key = jax.random.fold_in(member.member_key(data.x["seed"], state.id, member.PLAY), state.seed)
        return environments.play(self.env, state, data.x["params"], key, episodes=self.episodes, greedy=self.greedy)


def evaluate_agents(
    env: Any,
    swarm: Swarm,
    *,
    episodes: int = 100,
    params: Any = None,
    greedy: bool = True,
    seed: int = 0,
    plan: Plan | None = None,
) -> np.ndarray:
    """The returns [member, episode] of every agent's own episodes, each played to its end.

    Parameters
    ----------
    env, params, plan : as `train_agents` takes them
    swarm : of networks x -> policy or (policy, values); an array is the logits of numbered actions
    episodes : of each agent
    greedy : whether the likeliest action is taken in each step, or one is drawn
    seed : of the episodes
    """
    environments.check(env)
    check_whole(episodes=episodes)
    params, is_own = environments.parameters(env, params, len(swarm))
    x = {"params": params, "seed": check_seed(seed)}
    own = {"params": is_own, "seed": False}
    return np.asarray(apply(Play(env, episodes, greedy), swarm, _as_data(x, own, 1), plan))


def new_swarm(model: Any, config: PPOConfig, members: int, observed: tuple[int, ...], seed: int) -> Swarm:
    """A swarm that has not learned, of networks for observations of this shape."""
    if config.normalize_observations:
        model = Normalised(model)
    return TurbaTrainState.swarm(
        model, PPOConfig().optimizer, members, sample_input=jnp.zeros((1, *observed), float), seed=seed
    )


def _data(env, config, params, members, *, updates, epochs):
    """The members' settings and environment parameters as `Data`, and one member's parameters."""
    params, is_own = environments.parameters(env, params, members)
    settings = of_members(config, members, updates=updates)
    each = updates_of_epochs(updates, epochs)
    settings["shorter"] = each[each < each.max()].sum(dtype=np.int32)
    own = {"settings": {name: value.ndim > 0 for name, value in settings.items()}, "params": is_own}
    one = jax.tree.map(lambda leaf, is_it: leaf[0] if is_it else leaf, params, is_own)
    return _as_data({"settings": settings, "params": params}, own, config.batch_size), one


def _as_data(x, own, length):
    return Data(x, None, None, None, is_own=tuple(jax.tree.leaves(own)), length=length, ragged=False)


def updates_of_epochs(updates: int, epochs: int) -> np.ndarray:
    """int [epoch], how many updates each has of all: those that have one more than others come last."""
    few, more = divmod(updates, epochs)
    return few + (np.arange(epochs) >= epochs - more)


def _last(seen):
    """The mean return over the members that ended an episode in the last update."""
    last = seen["train_return"][-1]  # [member, update]
    made = ~np.isnan(seen["episodes"][-1]).all(0)
    last = last[:, made.nonzero()[0].max(initial=0)]
    return np.nan if np.isnan(last).all() else np.nanmean(last)


def _history(run, program, swarm, made):
    """What a run saw; made: int [epoch], how many updates each has, of the room for `program.every` of them."""
    losses, _, found = run.seen()
    nothing = np.zeros((0, len(swarm), program.every), np.float32)  # interrupted before anything was seen

    def by_update(leaf):  # [epoch, member, update of it]
        return np.moveaxis(leaf, 2, 1)[np.arange(program.every) < made[: len(leaf), None]]

    seen = {name: by_update(found.get(name, nothing)) for name in program.seen if name != "evaluation"}
    losses = by_update(losses if found else nothing)
    return AgentHistory(
        train_loss=losses,
        **seen,
        steps=program.config.n_steps * program.config.n_envs,
        evaluation=found.get("evaluation", nothing[..., 0]) if program.episodes else None,
        updates=(~np.isnan(seen["episodes"])).sum(0),
        seed=np.asarray(swarm.seed),
        member=np.asarray(swarm.id),
        compile_seconds=run.compile_seconds,
        steady_seconds=run.steady_seconds,
        plan=run.plan,
    )


def name_the_lost(history: AgentHistory, outcome: str) -> None:
    """Say whose losses are no numbers, from when on, and what became of the member."""
    lost = ~np.isfinite(history.train_loss) & ~np.isnan(history.episodes)
    for position in np.flatnonzero(lost.any(0)):
        since = f"from update {lost[:, position].argmax()} on"
        say_once(
            f"The losses of member {history.member[position]} are no numbers {since}, as where rewards are NaN: "
            f"{outcome}, the others went on."
        )
