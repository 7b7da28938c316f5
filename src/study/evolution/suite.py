"""Evolution and its peers for the study: NumPy's cart poles, three searches of one budget, rewards."""

import numpy as np

from study.agents.suite import CLEANRL

GENERATION_STEPS = 500  # steps of every agent in a timed generation
SEARCHES = "population-based", "random", "random, cosine"
# Long enough to show a reward's value, short enough for thousands of agents.
BRIEF = CLEANRL._replace(lr=1e-3, anneal=(), clip_values=False, normalize_observations=True, normalize_rewards=True)


def agents(members, hidden, *, seed=0):
    """Make a swarm of perceptrons that choose between cart pole's two actions; they have no optimizer."""
    import optax

    import turbanet as tn

    return tn.TurbaTrainState.swarm(tn.MLP((*hidden, 2)), optax.identity(), members, input_size=4, seed=seed)


def endless(params):
    """Change cart pole's parameters so that no episode ends early and every agent acts in all steps."""
    return params.replace(theta_threshold_radians=1e9, x_threshold=1e9)


def layers(swarm):
    """Return the layers of a swarm of perceptrons: [(kernel [member, input, output], bias [member, output]), ...]."""
    params = swarm.params
    names = sorted(params, key=lambda name: int(name.rpartition("_")[2]))
    return [tuple(np.asarray(params[name][kind]) for kind in ("kernel", "bias")) for name in names]


def actions(weights, observations):
    """Compute greedy actions [member] on observations [member, feature], one batched product a layer."""
    x = observations[:, None]
    for number, (kernel, bias) in enumerate(weights):
        x = np.maximum(x, 0) if number else x
        x = x @ kernel + bias[:, None]
    return x[:, 0].argmax(-1)


def in_gymnasium(weights, *, steps=GENERATION_STEPS, seed=0):
    """Play every network's first episode in Gymnasium's vectorised cart poles by NumPy: returns [member].

    Every member acts `steps` times; episodes after its first do not count.
    """
    import gymnasium

    members = len(weights[0][0])
    worlds = gymnasium.make_vec("CartPole-v1", members, vectorization_mode="vector_entry_point")
    observations, _ = worlds.reset(seed=seed)
    total, goes_on = np.zeros(members), np.ones(members, bool)
    for _ in range(steps):
        observations, rewards, terminated, truncated, _ = worlds.step(actions(weights, observations))
        total += np.where(goes_on, rewards, 0)
        goes_on &= ~(terminated | truncated)
    worlds.close()
    return total


def searches(data, *, members, rounds, share, widths, batch_size, distributions, seed):
    """Run three searches of equal networks and epochs over the same draws of hyperparameters: (table, history).

    The searches are population-based training and random search, with constant rates and with cosine schedules. They
    start from equal weights. The table has a line a search: test accuracy and validation loss of its network with the
    least validation loss.

    data : ((x, y), (x_val, y_val), (x_test, y_test)); distributions : {hyperparameter of AdamW: SciPy distribution}
    """
    from functools import partial

    import optax
    import pandas as pd

    import turbanet as tn
    from turbanet.core.schedules import cosine

    (x, y), validation, test = data
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("b1", "b2", "eps"))
    optimizer = adamw(learning_rate=0.001, weight_decay=0.0)
    swarm = tn.TurbaTrainState.swarm(tn.MLP(widths), optimizer, members, sample_input=x[:1], seed=seed)
    values, _ = tn.draw(members, seed=seed, **distributions)
    kwargs = {"batch_size": batch_size, "validation": validation, "progress": False}

    def train(swarm, round, values):
        swarm = tn.with_hyperparameters(swarm, **values)
        swarm, metrics = tn.fit(swarm, x, y, tn.softmax_cross_entropy, epochs=1, **kwargs)
        return swarm, -metrics.validation_loss[-1]

    found = {}
    tuned, history = tn.evolution.population_based(
        swarm, train, values, rounds=rounds, share=share, seed=seed, limits={"learning_rate": (0, 1)}, progress=False
    )
    found[SEARCHES[0]] = tuned, -history.fitness[-1]
    drawn = tn.with_hyperparameters(swarm, **values)
    falling = tn.with_schedule(drawn, partial(cosine, period=rounds))
    for name, start in zip(SEARCHES[1:], (drawn, falling), strict=True):
        trained, metrics = tn.fit(start, x, y, tn.softmax_cross_entropy, epochs=rounds, **kwargs)
        found[name] = trained, metrics.validation_loss[-1]
    lines = []
    for name, (trained, loss) in found.items():
        best = trained[[int(trained.id[np.nanargmin(loss)])]]
        right = float(tn.accuracy(tn.predict(best, test[0]), test[1])[0])
        lines.append((name, seed, right, float(np.nanmin(loss))))
    return pd.DataFrame(lines, columns=["search", "seed", "test accuracy", "validation loss"]), history


class RewardSearch:
    """Agents by PPO, each rewarded by its own reward network, whose fitness is the agent's true return.

    env : the true environment
    rewards : a swarm of reward networks; every call trains as many agents, so that one program is compiled
    timesteps : of an agent's training
    episodes : greedy episodes that score an agent
    """

    def __init__(self, env, rewards, *, timesteps, hidden, episodes, plan=None):
        import turbanet as tn
        from turbanet.networks.policies import Agent

        self.env, self.episodes, self.plan, self.members = env, episodes, plan, len(rewards)
        self.rewarded = tn.rl.Rewarded.by(env, rewards)
        self.config = BRIEF._replace(total_timesteps=timesteps)
        self.model = Agent(env.action_space(env.default_params).n, hidden=tuple(hidden))

    def returns(self, params, *, seed):
        """Train new agents, each rewarded by the network of its `params` [member, ...]: true mean returns [member]."""
        import turbanet as tn

        kwargs = {"plan": self.plan, "seed": seed}
        paid = self.rewarded.default_params.replace(reward=params)
        agents, _ = tn.rl.train_agents(
            self.rewarded, self.config, self.members, model=self.model, params=paid, progress=False, **kwargs
        )
        return np.asarray(tn.rl.evaluate_agents(self.env, agents, episodes=self.episodes, **kwargs)).mean(axis=1)

    def __call__(self, rewards, generation):
        """Evaluate a generation of `evolve`: a reward network's fitness is the true return of its new agent."""
        return rewards, self.returns(rewards.params, seed=generation)

    def all_paid_by(self, weights):
        """Repeat one network's weights [...] for all agents, [member, ...]."""
        import jax

        return jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], self.members, axis=0), weights)

    def chosen(self, rewards, fitness, *, finalists, seed):
        """Choose the best of the fittest reward networks by equal shares of new agents: its weights [...]."""
        import jax

        judged = np.argsort(-fitness)[np.arange(self.members) * finalists // self.members]
        params = jax.tree.map(lambda leaf: np.asarray(leaf)[judged], rewards.params)
        returns = self.returns(params, seed=seed)
        best = max(dict.fromkeys(judged), key=lambda index: returns[judged == index].mean())
        return jax.tree.map(lambda leaf: np.asarray(leaf)[best], rewards.params)


def always_one(weights):
    """Return a reward network's weights [...] that always give 1, as the true cart pole does in each step."""
    import jax

    last = max(weights, key=lambda name: int(name.rpartition("_")[2]))
    zeros = jax.tree.map(np.zeros_like, weights)
    return {**zeros, last: {**zeros[last], "bias": np.ones_like(zeros[last]["bias"])}}
