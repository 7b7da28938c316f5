import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first

from study.agents import stable_baselines
from study.baselines.trainers import torch_threads
from turbanet.ppo import Categorical, RolloutBuffer, Taken, ppo_loss
from turbanet.rl import PPOConfig

CONFIG = PPOConfig(lr=0.0, n_steps=32, n_envs=2, batch_size=64, n_epochs=1, gamma=0.97, gae_lambda=0.9, ent_coef=0.02)


@pytest.fixture(scope="module")
def learned():
    """Stable-Baselines3's agent after one update, which does not move it, with what it saw and the losses it found."""
    agent = stable_baselines.agent(CONFIG, "CartPole-v1", seed=3)
    agent.learn(CONFIG.n_steps * CONFIG.n_envs)
    return agent


def test_advantages_equal_stable_baselines(learned):
    seen = learned.rollout_buffer
    steps, envs = seen.rewards.shape
    begins = np.concatenate([seen.episode_starts, np.zeros((1, envs))])  # an episode, in the step after an end
    tensors = learned.policy.obs_to_tensor(learned._last_obs)[0]
    last = learned.policy.predict_values(tensors).detach().numpy()[:, 0]
    dones = begins[1:].copy()
    dones[-1] = learned._last_episode_starts
    buffer = RolloutBuffer(None, None, seen.rewards, dones, None, seen.values.reshape(envs, steps).T, last, None)
    advantages, returns = buffer.compute_gae(CONFIG)
    np.testing.assert_allclose(advantages, seen.advantages.reshape(envs, steps).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, seen.returns.reshape(envs, steps).T, rtol=1e-4, atol=1e-5)


def test_loss_of_one_batch_equals_stable_baselines(learned):
    import torch

    seen, policy = learned.rollout_buffer, learned.policy
    observations, actions = torch.as_tensor(seen.observations), torch.as_tensor(seen.actions[:, 0])
    old = seen.log_probs.ravel() - 0.3 * np.sin(np.arange(64))  # as if the policy had moved since
    values, logs, entropy = policy.evaluate_actions(observations, actions)
    ratio = torch.exp(logs - torch.as_tensor(old, dtype=torch.float32))
    advantage = torch.as_tensor(seen.advantages.ravel())
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = torch.clamp(ratio, 1 - CONFIG.clip_range, 1 + CONFIG.clip_range)
    policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
    value_loss = torch.nn.functional.mse_loss(torch.as_tensor(seen.returns.ravel()), values.ravel())
    expected = policy_loss - CONFIG.ent_coef * entropy.mean() + learned.vf_coef * value_loss

    logits = policy.get_distribution(observations).distribution.logits.detach().numpy()
    of_agent = Taken(
        seen.actions[:, 0].astype(int), old, seen.advantages.ravel(), seen.returns.ravel(), seen.values.ravel()
    )
    weights = {name: getattr(CONFIG, name) for name in ("clip_range", "ent_coef", "vf_coef")}
    of_policy = Categorical(jnp.asarray(logits)), jnp.asarray(values.detach().numpy()[:, 0])
    loss, parts = ppo_loss(*of_policy, of_agent, **weights)
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(parts["policy_loss"], policy_loss.item(), rtol=1e-4, atol=1e-6)


def test_losses_equal_what_stable_baselines_logs(learned):
    seen, logged = learned.rollout_buffer, learned.logger.name_to_value
    logits = learned.policy.get_distribution(learned.policy.obs_to_tensor(seen.observations)[0]).distribution.logits
    of_agent = Taken(
        seen.actions[:, 0].astype(int),
        seen.log_probs.ravel(),
        seen.advantages.ravel(),
        seen.returns.ravel(),
        seen.values.ravel(),
    )
    values = jnp.asarray(seen.values.ravel())
    weights = {name: getattr(CONFIG, name) for name in ("clip_range", "ent_coef", "vf_coef")}
    loss, parts = ppo_loss(Categorical(jnp.asarray(logits.detach().numpy())), values, of_agent, **weights)
    np.testing.assert_allclose(loss, logged["train/loss"], rtol=1e-4)
    np.testing.assert_allclose(2 * parts["value_loss"], logged["train/value_loss"], rtol=1e-4)
    np.testing.assert_allclose(-parts["entropy"], logged["train/entropy_loss"], rtol=1e-4)


def test_settings_are_annealed_as_ours_are():
    config = PPOConfig(n_steps=8, n_envs=2, batch_size=16, anneal=("lr", "clip_range"), clip_values=True)
    agent = stable_baselines.agent(config, "CartPole-v1")
    assert agent.lr_schedule(0.5) == pytest.approx(0.5 * config.lr)
    assert agent.clip_range(0.25) == pytest.approx(0.25 * config.clip_range) and agent.vf_coef == config.vf_coef / 2


@pytest.mark.parametrize("apart", first(1, [False, True]), ids=["here", "in processes"])
def test_seconds_are_of_processes_that_may_fail_in_one_sentence(apart, monkeypatch, capsys):
    """Here, as a process that imports Stable-Baselines3 takes long to start; `test_cluster_costs` has the error."""

    def here(command, name):
        assert command[:3] == [sys.executable, "-m", "study.agents.stable_baselines"]
        capsys.readouterr()
        with torch_threads(None):
            stable_baselines._main(command[3])
        return capsys.readouterr().out

    if not apart:
        monkeypatch.setattr(stable_baselines.programs, "output", here)
    config = PPOConfig(n_steps=8, n_envs=1, batch_size=8, n_epochs=1)
    kind = stable_baselines.VECTORISED[0]
    seconds = partial(stable_baselines.seconds, config, vectorised=kind, threads=1, updates=1)
    assert seconds("CartPole-v1") > 0
    if apart:
        with pytest.raises(RuntimeError, match="Stable-Baselines3 ended with 1: .*NoSuch"):
            seconds("NoSuch-v1")
    said = iter([3.0, 4.0])
    monkeypatch.setattr(stable_baselines.programs, "output", lambda *_: f"a warning\n{next(said)}")
    assert seconds("CartPole-v1", agents=2) == 2
