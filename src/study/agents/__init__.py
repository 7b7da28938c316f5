"""Agents: PPO by settings that others have published scores for, Stable-Baselines3 beside it, scores and figures."""
