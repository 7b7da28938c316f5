"""Reinforcement learning: a swarm of agents, each with its own network, in separate environments or in one world."""

from turbanet.networks.policies import Agent, Normalised
from turbanet.ppo import PPOConfig
from turbanet.rl.agents import AgentHistory, evaluate_agents, train_agents
from turbanet.rl.foraging import Foraging
from turbanet.rl.multi_agent import evaluate_together, train_together
from turbanet.rl.rewards import Rewarded

__all__ = [
    "Agent",
    "AgentHistory",
    "Foraging",
    "Normalised",
    "PPOConfig",
    "Rewarded",
    "evaluate_agents",
    "evaluate_together",
    "train_agents",
    "train_together",
]
