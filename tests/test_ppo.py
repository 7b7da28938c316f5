import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from turbanet import TurbaTrainState
from turbanet.networks.policies import Categorical, Gaussian
from turbanet.ppo import ActorCritic, DualEncoderActorCritic, PPOConfig, RolloutBuffer, Taken, gae, ppo_loss

SETTINGS = {"clip_range": 0.2, "ent_coef": 0.01, "vf_coef": 0.5}


def rollout(steps=20, envs=3, seed=0):
    random = np.random.default_rng(seed)
    floats = {name: random.normal(size=(steps, envs)).astype(np.float32) for name in ("rewards", "values", "final")}
    ends = random.random((steps, envs)) < 0.2
    return floats, ends, ends & (random.random((steps, envs)) < 0.5), random.normal(size=envs).astype(np.float32)


def plain_gae(rewards, values, final, ends, truncated, last, gamma, lam):
    """Environment by environment, from the last step to the first."""
    advantages = np.zeros_like(rewards)
    for env in range(rewards.shape[1]):
        later, following = 0.0, last[env]
        for step in reversed(range(len(rewards))):
            if ends[step, env]:
                later, following = 0.0, final[step, env] if truncated[step, env] else 0.0
            later = rewards[step, env] + gamma * following - values[step, env] + gamma * lam * later
            advantages[step, env], following = later, values[step, env]
    return advantages


@pytest.mark.parametrize("envs", [1, 3, 16])
def test_compute_gae_equals_a_plain_loop(envs):
    seen, ends, truncated, last = rollout(envs=envs)
    buffer = RolloutBuffer(
        observations=None, actions=None, rewards=seen["rewards"], dones=ends, action_lps=None, values=seen["values"],
        last_values=last, next_obs=None, truncated=truncated, final_values=seen["final"],
    )  # fmt: skip
    advantages, returns = buffer.compute_gae(PPOConfig(gamma=0.9, gae_lambda=0.8))
    expected = plain_gae(**seen, ends=ends, truncated=truncated, last=last, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, expected + seen["values"], rtol=1e-5, atol=1e-6)
    assert isinstance(advantages, np.ndarray) and advantages.flags.writeable


def test_compute_gae_of_lists_equals_that_of_arrays():
    seen, ends, truncated, last = rollout()
    arrays = {"rewards": seen["rewards"], "dones": ends, "values": seen["values"], "last_values": last}
    arrays |= {"truncated": truncated, "final_values": seen["final"]}
    nothing = dict.fromkeys(["observations", "actions", "action_lps", "next_obs"])
    of_arrays, of_lists = (
        RolloutBuffer(**nothing, **given).compute_gae(PPOConfig())
        for given in (arrays, {name: array.tolist() for name, array in arrays.items()})
    )
    np.testing.assert_allclose(of_lists, of_arrays, rtol=1e-6)


def test_steps_that_were_truncated_are_ends_of_episodes():
    """As Gymnasium gives both apart."""
    seen, ends, truncated, last = rollout()
    how = {"truncated": truncated, "final_values": seen["final"]}
    apart, together = (
        RolloutBuffer(None, None, seen["rewards"], done, None, seen["values"], last, None, **how).compute_gae(
            PPOConfig()
        )
        for done in (ends & ~truncated, ends)
    )
    assert (ends & truncated).any()
    np.testing.assert_array_equal(apart[0], together[0])


def test_compute_gae_takes_an_end_for_a_termination_unless_it_is_told():
    seen, ends, _, last = rollout()
    buffer = RolloutBuffer(None, None, seen["rewards"], ends.astype(np.float32), None, seen["values"], last, None)
    expected = plain_gae(**seen, ends=ends, truncated=ends & False, last=last, gamma=0.99, lam=0.95)
    np.testing.assert_allclose(buffer.compute_gae(PPOConfig())[0], expected, rtol=1e-5, atol=1e-5)


def test_a_truncated_episode_goes_on_in_value_and_a_terminated_one_does_not():
    ones = np.ones((1, 2), np.float32)
    buffer = RolloutBuffer(
        None, None, ones, ones > 0, None, 0 * ones, np.zeros(2, np.float32), None, np.array([[True, False]]), 10 * ones
    )
    np.testing.assert_allclose(buffer.compute_gae(PPOConfig(gamma=0.5))[0], [[6, 1]])


def test_compute_gae_refuses_what_does_not_fit():
    seen, ends, truncated, last = rollout()
    whole = RolloutBuffer(None, None, seen["rewards"], ends, None, seen["values"], last, None)
    with pytest.raises(ValueError, match=r"\[step, env\], last_values \[env\]; got .* and \(2,\)"):
        whole._replace(last_values=last[:2]).compute_gae(PPOConfig())
    with pytest.raises(ValueError, match="give final_values"):
        whole._replace(truncated=truncated).compute_gae(PPOConfig())


def test_gae_of_whole_returns_is_the_discounted_sum_less_the_value():
    rewards, values = np.ones((4, 1)), np.full((4, 1), 2.0)
    no = np.zeros((4, 1), bool)
    advantages = gae(rewards, values, np.full((4, 1), 2.0), no, no, 0.5, 1.0)
    by_hand = [1 + 0.5 + 0.25 + 0.125 + 0.0625 * 2 - 2, 1 + 0.5 + 0.25 + 0.125 * 2 - 2, 1 + 0.5 + 0.25 * 2 - 2, 0]
    np.testing.assert_allclose(advantages[:, 0], by_hand, rtol=1e-6)


def taken(batch=6, seed=0):
    random = np.random.default_rng(seed)
    logits, values = random.normal(size=(batch, 3)), random.normal(size=batch)
    numbers = [random.normal(size=batch) for _ in range(3)]
    return logits, values, Taken(random.integers(0, 3, batch), numbers[0] - 1, numbers[1], numbers[2], values + 0.5)


def by_hand(logits, values, batch, clip_range, ent_coef, vf_coef):
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ratio = np.exp(logs[np.arange(len(logs)), batch.action] - batch.log_probability)
    advantage = (batch.advantage - batch.advantage.mean()) / batch.advantage.std(ddof=1)
    policy = -np.minimum(advantage * ratio, advantage * ratio.clip(1 - clip_range, 1 + clip_range)).mean()
    value = 0.5 * ((values - batch.returns) ** 2).mean()
    entropy = -(np.exp(logs) * logs).sum(1).mean()
    return policy, value, entropy, policy + vf_coef * value - ent_coef * entropy


def test_ppo_loss_by_hand():
    logits, values, batch = taken()
    policy, value, entropy, loss = by_hand(logits, values, batch, **SETTINGS)
    found, parts = ppo_loss(jnp.asarray(logits), jnp.asarray(values), batch, **SETTINGS)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(
        [parts["policy_loss"], parts["value_loss"], parts["entropy"]], [policy, value, entropy], rtol=1e-5
    )


def test_ppo_loss_clips_values_from_what_they_were():
    values, batch = jnp.zeros(2), Taken(np.array([0, 1]), np.zeros(2), np.zeros(2), np.ones(2), np.full(2, -1.0))
    _, parts = ppo_loss(jnp.zeros((2, 2)), values, batch, **SETTINGS, clip_values=True)
    np.testing.assert_allclose(parts["value_loss"], 0.5 * (1 - (-1 + 0.2)) ** 2, rtol=1e-6)


def test_ppo_loss_of_one_action_does_not_divide_by_no_deviation():
    logits, values, batch = taken(batch=1)
    assert np.isfinite(ppo_loss(jnp.asarray(logits), jnp.asarray(values), batch, **SETTINGS)[0])


def test_the_public_loss_packs_action_probability_advantage_and_return():
    logits, values, batch = taken()
    y = np.stack([batch.action, batch.log_probability, batch.advantage, batch.returns], axis=1)
    loss_fn = PPOConfig(ent_coef=0.01).loss_fn
    loss, parts = loss_fn({}, None, jnp.asarray(y), lambda variables, x: (jnp.asarray(logits), jnp.asarray(values)))
    *expected, whole = by_hand(logits, values, batch, **SETTINGS)
    np.testing.assert_allclose([loss, *parts], [whole, *expected], rtol=1e-5)
    with pytest.raises(ValueError, match=r"y is \[batch, 4\]"):
        loss_fn({}, None, jnp.asarray(y[:, :3]), None)
    with pytest.raises(ValueError, match="clip_values needs the values as they were"):
        PPOConfig(clip_values=True).loss_fn({}, None, jnp.asarray(y), None)


def test_config_wires_the_learning_rate_and_the_clipping_in():
    optimizer = PPOConfig(lr=0.5, max_grad_norm=1e-9).optimizer
    params = {"w": jnp.ones(3)}
    updates, _ = optimizer.update({"w": jnp.full(3, 100.0)}, optimizer.init(params), params)
    # Adam's first step is lr * g / (|g| + eps), of a gradient that clipping has made far smaller than eps
    np.testing.assert_allclose(updates["w"], -0.5 * 1e-9 / np.sqrt(3) / 1e-5, rtol=1e-3)


@pytest.mark.parametrize("network", [ActorCritic(3), DualEncoderActorCritic(3)])
def test_public_networks_return_logits_and_a_value(network):
    x = jnp.ones((5, 4))
    logits, values = network.apply(network.init(jax.random.key(0), x), x)
    assert logits.shape == (5, 3) and values.shape == (5,)


def test_categorical_equals_scipy():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    policy, p = Categorical(logits), np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    action = jnp.array([0, 2, 1, 1])
    np.testing.assert_allclose(policy.log_probability(action), np.log(p[np.arange(4), action]), rtol=1e-5)
    np.testing.assert_allclose(policy.entropy(), stats.entropy(p, axis=1), rtol=1e-5)
    assert policy.mode().tolist() == p.argmax(1).tolist()
    drawn = policy.sample(policy.noise(jax.random.key(0), 20_000))
    assert (
        stats.chisquare(
            [(drawn[:, 0] == k).sum() for k in range(3)], 20_000 * p[0].astype(float) / p[0].astype(float).sum()
        ).pvalue
        > 1e-3
    )


def test_gaussian_equals_scipy():
    random = np.random.default_rng(0)
    mean, deviation = random.normal(size=(4, 2)), random.uniform(0.5, 2, size=(4, 2))
    policy, action = Gaussian(jnp.asarray(mean), jnp.log(deviation)), random.normal(size=(4, 2))
    expected = stats.norm(mean, deviation)
    np.testing.assert_allclose(policy.log_probability(action), expected.logpdf(action).sum(1), rtol=1e-4)
    np.testing.assert_allclose(policy.entropy(), expected.entropy().sum(1), rtol=1e-5)
    drawn = policy.sample(policy.noise(jax.random.key(0), 5000))
    assert stats.kstest(drawn[:, 0, 1], stats.norm(mean[0, 1], deviation[0, 1]).cdf).pvalue > 1e-3


def test_a_script_for_the_public_package_runs_and_learns():
    """Each member an agent in an environment of its own, stepped by NumPy: action 1 pays."""
    cfg = PPOConfig(lr=0.01, n_steps=16, n_envs=4, batch_size=8, n_epochs=2, total_timesteps=16 * 4 * 12)
    optimizer = optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), optax.adam(cfg.lr, eps=1e-5))
    swarm = TurbaTrainState.swarm(ActorCritic(2), optimizer, swarm_size=cfg.n_envs, input_size=3, seed=42)
    swarm = swarm.set_loss_fn(cfg.loss_fn)
    random, obs, paid = np.random.default_rng(0), np.ones((cfg.n_envs, 3), np.float32), []
    for _ in range(cfg.total_timesteps // (cfg.n_steps * cfg.n_envs)):
        seen = []
        for _ in range(cfg.n_steps):
            logits, values = map(np.asarray, swarm.predict(obs))  # [member, feature], without a batch axis
            logs = np.asarray(jax.nn.log_softmax(logits))
            actions = (random.random(cfg.n_envs) < np.exp(logs[:, 1])).astype(int)
            reward = actions.astype(np.float32)
            seen.append((obs, actions, reward, reward * 0, logs[np.arange(cfg.n_envs), actions], values))
        observations, actions, rewards, dones, action_lps, values = map(np.stack, zip(*seen, strict=True))
        buffer = RolloutBuffer(
            observations=observations,
            actions=actions,
            rewards=rewards,
            dones=dones,
            action_lps=action_lps,
            values=values,
            last_values=np.asarray(swarm.predict(obs)[1]),
            next_obs=obs,
        )
        advantages, returns = buffer.compute_gae(cfg)
        y = np.stack([actions, action_lps, advantages, returns], axis=-1).swapaxes(0, 1)  # [member, step, 4]
        x = observations.swapaxes(0, 1)
        for _ in range(cfg.n_epochs):
            order = random.permutation(cfg.n_steps).reshape(-1, cfg.batch_size)
            for rows in order:
                swarm, loss, (policy, value, entropy) = swarm.train(x[:, rows], y[:, rows].astype(np.float32))
                assert loss.shape == policy.shape == value.shape == entropy.shape == (cfg.n_envs,)
        paid.append(rewards.mean())
    assert paid[0] < 0.7 and paid[-1] > 0.9


def test_an_action_that_is_ruled_out_adds_no_entropy():
    logits = jnp.array([0.0, 0.0, -jnp.inf])
    entropy, slope = jax.value_and_grad(lambda two: Categorical(logits.at[:2].set(two)).entropy())(logits[:2])
    np.testing.assert_allclose([entropy, *slope], [np.log(2), 0, 0], atol=1e-6)
