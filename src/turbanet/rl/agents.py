"""Train and evaluate a swarm of PPO agents, each in environments of its own, as one compiled program."""

import dataclasses
import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbanet.core import extras, member
from turbanet.core.arrays import check_seed, check_whole
from turbanet.core.gather import gathered, home
from turbanet.core.interrupt import Interrupted
from turbanet.core.plan import Plan, check_plan, say_once
from turbanet.core.state import check_swarm
from turbanet.core.stopping import Stopping
from turbanet.core.tables import Shown, count, spread
from turbanet.data.examples import Data
from turbanet.networks.policies import Agent, Normalised
from turbanet.ppo import PPOConfig
from turbanet.rl import environments, learning
from turbanet.rl.settings import as_config, count_updates, into_swarm, of_members
from turbanet.training.callbacks import check_callbacks
from turbanet.training.run import Training
from turbanet.training.scores import apply
from turbanet.turba_train_state import TurbaTrainState

SEGMENTS = 10  # of a training without evaluations; a checkpoint follows each


@dataclasses.dataclass(frozen=True, repr=False)
class AgentHistory(Shown):
    """Metrics of each member in a training by `train_agents`, and the seconds it took.

    train_loss, policy_loss, value_loss, entropy, kl : [update, member], means over an update's steps
    train_return : [update, member], mean return of the episodes that ended in an update; NaN where none did
    episodes : [update, member], number of those episodes
    steps : transitions of each member in an update; of each agent where they share one network
    evaluation : [evaluation, member], mean return of greedy episodes apart from training; None without evaluations
    updates : int [member], updates that each member made; its metrics are NaN after the last one
    seed, member : int [member], the members' seeds and ids
    compile_seconds, steady_seconds : seconds spent waiting for compilation, and training
    plan : the plan in use when the training ended; None after unpickling
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

    def _shown(self):
        updates, members = self.train_loss.shape
        rows = [["median (range) of the members", "first update", "last update"]]
        for name in ("train_return", "train_loss", "entropy"):
            values = getattr(self, name)
            rows.append([name, spread(values[0]), spread(values[-1])])
        cost = f"{self.compile_seconds:.3g} s of compilation, {self.steady_seconds:.3g} s of training"
        return f"AgentHistory: {count(members, 'member')}, {count(updates, 'update')}, {cost}", rows

    def frame(self) -> Any:
        """Return a tidy pandas table: update, steps (transitions so far), seed, member and its metrics."""
        pd = extras.pandas()

        updates, members = self.train_loss.shape
        update = np.repeat(np.arange(updates), members)
        identity = {"seed": np.tile(self.seed, updates), "member": np.tile(self.member, updates)}
        names = "train_return", "episodes", "train_loss", "policy_loss", "value_loss", "entropy", "kl"
        metrics = {name: getattr(self, name).ravel() for name in names}
        return pd.DataFrame({"update": update, "steps": (update + 1) * self.steps, **identity, **metrics})


def train_agents(
    env: Any,
    config: PPOConfig | None = None,
    members: int | TurbaTrainState = 1,
    *,
    seed: int | None = None,
    model: Any = None,
    params: Any = None,
    evaluations: int = 0,
    episodes: int = 10,
    solved: float | None = None,
    checkpoints: Any = None,
    plan: Plan | None = None,
    progress: bool = True,
    on_interrupt: str = "raise",
) -> tuple[TurbaTrainState, AgentHistory]:
    """Train a swarm of agents by PPO, each in environments of its own.

    An agent depends only on its seed and its id: it learns what it would learn if trained alone.

    Parameters
    ----------
    env : a gymnax environment, or an object with reset(key, params) -> (observation, state), step_env(key, state,
        action, params) -> (observation, state, reward, terminated, info), is_truncated(state, params) and
        action_space(params)
    config : None for the defaults of `PPOConfig`; a setting that it marks [member] may be an array, one number a member
    members : the number of agents, or a swarm that `train_agents` returned, whose training continues; environments,
        the statistics of `normalize_rewards` and `anneal` begin anew
    seed : an int, 0 by default; each agent draws from it and from its id. A swarm has its own
    model : a Flax network, x [..., feature] -> (policy, values [...]), where the policy is logits or a distribution
        (see `networks.policies`); None: `Agent`, for the actions that the environment takes
    params : the environment's parameters; None: its `default_params`. An array [member] in place of a number of
        `env.default_params` gives each member its own; an environment without these has one value for all
    evaluations : evaluations of each agent during training, evenly spaced, the last one at the end; if they do not
        divide the updates, the first intervals are one update shorter
    episodes : greedy episodes of an evaluation
    solved : mean return of an evaluation at which an agent stops; a stopped agent costs nothing
    checkpoints : a folder or `Checkpoints`, written after each evaluation, or after each tenth of the training without
        evaluations; a killed training that is called again with the same arguments ends with the same bits
    plan : where members run: a `Plan`, or None to choose one
    progress : whether to show a bar with the updates done and the mean return
    on_interrupt : what Ctrl-C does between two calls of the program: "raise" an `Interrupted` whose `swarm` and
        `history` hold the training so far, or "return" them

    Returns
    -------
    (swarm, AgentHistory) : `swarm.predict` and `predict` give policies and values of observations

    Raises
    ------
    ValueError : for an environment without that interface, actions that are neither discrete nor a box of one axis,
        and settings that contradict one another
    MemoryError : if not even one member at a time fits in memory
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
    config = as_config(config)
    updates = count_updates(config)
    check_plan(plan)
    check_callbacks((), on_interrupt)
    if solved is not None and not evaluations:
        raise ValueError(f"solved={solved} needs evaluations, got {evaluations=}: give evaluations= of at least 1.")
    if not (solved is None or (isinstance(solved, Real) and not math.isnan(solved))):
        raise ValueError(f"solved is one mean return, for all members, or None; got {solved!r}.")
    check_whole(episodes=episodes)
    if evaluations:
        check_whole(evaluations=evaluations)
    if evaluations > updates:
        raise ValueError(f"There are {updates} updates in {config.total_timesteps} timesteps; got {evaluations=}.")
    count = int(members) if isinstance(members, int | np.integer) else len(check_swarm(members))
    epochs = evaluations or updates
    data, env_params = _data(env, config, params, count, updates=updates, epochs=epochs)
    actions, continuous = environments.actions(env, env_params)
    shape = environments.observation_shape(env, env_params)
    environments.check_types(env, env_params)
    if isinstance(members, int | np.integer):
        members = new_swarm(
            model or Agent(actions, continuous=continuous), config, count, shape, 0 if seed is None else seed
        )
    elif model is not None:
        raise ValueError("A model came with a swarm, which has its own: leave model out, or give a number of members.")
    elif seed is not None:
        raise ValueError("A seed came with a swarm, which has its own: leave seed out, or give a number of members.")
    environments.check_sample(env, environments.observation_shape(env, env_params), members)
    swarm = into_swarm(members, data.x["settings"], config)
    program = learning.learner(
        config,
        env,
        every=-(-updates // epochs),
        episodes=episodes if evaluations else 0,
        uneven=updates % epochs > 0,
        solved=float("inf") if solved is None else float(solved),
    )
    life = program.initial_life(env_params)
    life = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(swarm), *leaf.shape)), life)
    start = swarm.replace(_underway=life, _stopping=Stopping(np.ones(len(swarm), bool)))
    segment = 1 if evaluations else max(1, epochs // SEGMENTS)
    options = {"epochs": epochs, "segment": segment, "plan": plan, "checkpoints": checkpoints}
    run = Training(program, start, (data, None), metrics={}, between=None, **options)
    try:
        interrupted = run.finish(
            lambda: {"return": _last_return(run.losses[-1][2])},
            progress=progress,
            unit="update",
            units=updates / epochs,
        )
    except BaseException:
        run.release()
        raise
    state = run.end()
    history = _history(run, program, swarm, updates_of_epochs(updates, epochs))
    warn_of_diverged(history, "it stopped with the weights it had before")
    state = gathered(state.replace(_stopping=None))
    state = jax.device_put(state, jax.tree.map(home, swarm))
    if interrupted and on_interrupt == "raise":
        raise Interrupted(state, history)
    return state, history


@dataclasses.dataclass(frozen=True)
class Play:
    """Program for `scores.apply`: (state, data) of one member -> its returns [episode]."""

    env: Any
    episodes: int
    greedy: bool

    def __call__(self, state, data):
        key = jax.random.fold_in(member.member_key(data.x["seed"], state.id, member.PLAY), state.seed)
        return environments.play(self.env, state, data.x["params"], key, episodes=self.episodes, greedy=self.greedy)


def evaluate_agents(
    env: Any,
    swarm: TurbaTrainState,
    *,
    episodes: int = 100,
    params: Any = None,
    greedy: bool = True,
    seed: int = 0,
    plan: Plan | None = None,
) -> np.ndarray:
    """Return the returns [member, episode] of each agent in episodes of its own, each to its end or 10 000 steps.

    Parameters
    ----------
    env, params, plan : as in `train_agents`
    swarm : networks x -> policy or (policy, values); an array is the logits of discrete actions
    episodes : episodes of each agent
    greedy : whether to take the likeliest action in each step instead of sampling one
    seed : seed of the episodes
    """
    environments.check(env)
    check_whole(episodes=episodes)
    params, is_own = environments.parameters(env, params, len(check_swarm(swarm)))
    environments.check_sample(env, environments.observation_shape(env, _first(params, is_own)), swarm)
    x = {"params": params, "seed": check_seed(seed)}
    own = {"params": is_own, "seed": False}
    return np.asarray(apply(Play(env, episodes, greedy), swarm, _as_data(x, own, 1), plan))


def new_swarm(model: Any, config: PPOConfig, members: int, shape: tuple[int, ...], seed: int) -> TurbaTrainState:
    """Return an untrained swarm for observations of this shape."""
    if config.normalize_observations:
        if isinstance(model, tuple):
            raise ValueError("normalize_observations takes a Flax module as model=, got a pair of functions: wrap it.")
        model = Normalised(model)
    return TurbaTrainState.swarm(
        model, PPOConfig().optimizer, members, sample_input=jnp.zeros((1, *shape), float), seed=seed
    )


def _data(env, config, params, members, *, updates, epochs):
    """Return the members' settings and environment parameters as `Data`, and one member's environment parameters."""
    params, is_own = environments.parameters(env, params, members)
    settings = of_members(config, members, updates=updates)
    counts = updates_of_epochs(updates, epochs)
    settings["shorter"] = counts[counts < counts.max()].sum(dtype=np.int32)  # updates in the epochs with one fewer
    own = {"settings": {name: value.ndim > 0 for name, value in settings.items()}, "params": is_own}
    data = _as_data({"settings": settings, "params": params}, own, config.batch_size)
    return data, _first(params, is_own)


def _first(params, is_own):
    return jax.tree.map(lambda leaf, own: leaf[0] if own else leaf, params, is_own)


def _as_data(x, own, length):
    return Data(x, None, None, None, is_own=tuple(jax.tree.leaves(own)), length=length, ragged=False)


def updates_of_epochs(updates: int, epochs: int) -> np.ndarray:
    """Return the number of updates of each epoch, int [epoch]; epochs with one more come last."""
    least, remainder = divmod(updates, epochs)
    return least + (np.arange(epochs) >= epochs - remainder)


def _last_return(metrics):
    """Mean return over the members that ended an episode in the last update."""
    returns = metrics["train_return"][-1]  # [member, update]
    made = ~np.isnan(metrics["episodes"][-1]).all(0)
    returns = returns[:, made.nonzero()[0].max(initial=0)]
    return np.nan if np.isnan(returns).all() else np.nanmean(returns)


def _history(run, program, swarm, counts):
    """Return the history of a run; counts: int [epoch], updates of each epoch, at most `program.every`."""
    losses, _, recorded = run.losses_so_far()
    empty = np.zeros((0, len(swarm), program.every), np.float32)  # for a run interrupted before its first epoch ended

    def by_update(leaf):  # [epoch, member, update] -> [update, member]
        return np.moveaxis(leaf, 2, 1)[np.arange(program.every) < counts[: len(leaf), None]]

    metrics = {name: by_update(recorded.get(name, empty)) for name in program.metric_names if name != "evaluation"}
    metrics["loss"] = by_update(losses if recorded else empty)
    evaluation = recorded.get("evaluation", empty[..., 0]) if program.episodes else None
    return history_of(metrics, evaluation, swarm, program.config, (run.compile_seconds, run.steady_seconds), run.plan)


def history_of(
    metrics: dict[str, np.ndarray], evaluation: Any, swarm: Any, config: PPOConfig, seconds: tuple, plan: Any
) -> AgentHistory:
    """Return the history of a training, of {name: [update, member]}, NaN after a member's last update.

    seconds : (of compilation, of training)
    """
    return AgentHistory(
        train_loss=metrics.pop("loss"),
        **metrics,
        steps=config.n_steps * config.n_envs,
        evaluation=evaluation,
        updates=(~np.isnan(metrics["episodes"])).sum(0),
        seed=np.asarray(swarm.seed),
        member=np.asarray(swarm.id),
        compile_seconds=seconds[0],
        steady_seconds=seconds[1],
        plan=plan,
    )


def warn_of_diverged(history: AgentHistory, outcome: str) -> None:
    """Log which members' losses became NaN or infinite, at which update, and the `outcome` for the member."""
    diverged = ~np.isfinite(history.train_loss) & ~np.isnan(history.episodes)
    for position in np.flatnonzero(diverged.any(0)):
        since = f"from update {diverged[:, position].argmax()} on"
        say_once(
            f"The losses of member {history.member[position]} are NaN or infinite {since}, as when rewards are NaN: "
            f"{outcome}; the other members continued."
        )
