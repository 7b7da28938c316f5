"""TurbaNet's public names, for type checkers and for `turbanet/__init__.py`, which loads each at its first use."""

from .cluster.fit import fit_on_cluster
from .cluster.results import ClusterHistory, ClusterResults, ShardsFailed
from .cluster.settings import Cluster
from .ensembles.calibration import (
    brier_score,
    diversity,
    expected_calibration_error,
    negative_log_likelihood,
    prediction_interval,
    temperature,
)
from .ensembles.combine import (
    accuracy,
    accuracy_by_size,
    confusion,
    disagreement,
    ensemble_geometric_mean,
    ensemble_mean,
    ensemble_vote,
    greedy_weights,
    mean_confusion,
    member_scores,
    out_of_bag,
    score_interval,
    scores,
    stacking_weights,
)
from .ensembles.exported import Exported, export, load_exported
from .ensembles.predictions import without_nan
from .loss import binary_cross_entropy, cross_entropy, l2_loss, mse, softmax_cross_entropy
from .networks.conv import matmul_conv
from .networks.convnets import VGG, AlexNet, LeNet, LeNet5, MobileNet, ResNet
from .networks.models import LSTM, MLP
from .networks.products import dot_general
from .networks.recurrent import lstm
from .populations.agents import AgentHistory, evaluate_agents, train_agents
from .populations.evolve import evolve
from .populations.federated import FederatedHistory, federated
from .populations.foraging import Foraging
from .populations.genealogy import EvolutionHistory
from .populations.genetics import Genetic, Tournament, Truncation
from .populations.local_sgd import local_sgd
from .populations.population_based import population_based
from .populations.privacy import client_epsilon
from .populations.rewards import Rewarded
from .populations.together import evaluate_together, train_together
from .ppo import PPOConfig
from .selection.cross_validation import CrossValidation, cross_validate
from .selection.search import draw, grid, halving
from .training.augment import Chain, RandomCrop, RandomFlip, augmented
from .training.callbacks import TrainingView
from .training.checkpoint import Checkpoints
from .training.fit import batch_order, evaluate, fit, predict
from .training.fit_batches import fit_batches
from .training.history import History
from .training.interrupt import Interrupted
from .training.live import LivePlot, ProgressTable
from .training.plan import Plan, use_cores
from .training.sampling import all_rows, bootstrap, dirichlet, k_fold, ragged, shards, subset
from .training.schedules import hyperparameters, with_hyperparameters, with_schedule
from .training.weights import mean_over_rows, weighted
from .turba_train_state import TurbaTrainState

__all__ = [
    "LSTM",
    "MLP",
    "VGG",
    "AgentHistory",
    "AlexNet",
    "Chain",
    "Checkpoints",
    "Cluster",
    "ClusterHistory",
    "ClusterResults",
    "CrossValidation",
    "EvolutionHistory",
    "Exported",
    "FederatedHistory",
    "Foraging",
    "Genetic",
    "History",
    "Interrupted",
    "LeNet",
    "LeNet5",
    "LivePlot",
    "MobileNet",
    "PPOConfig",
    "Plan",
    "ProgressTable",
    "RandomCrop",
    "RandomFlip",
    "ResNet",
    "Rewarded",
    "ShardsFailed",
    "Tournament",
    "TrainingView",
    "Truncation",
    "TurbaTrainState",
    "accuracy",
    "accuracy_by_size",
    "all_rows",
    "augmented",
    "batch_order",
    "binary_cross_entropy",
    "bootstrap",
    "brier_score",
    "client_epsilon",
    "confusion",
    "cross_entropy",
    "cross_validate",
    "dirichlet",
    "disagreement",
    "diversity",
    "dot_general",
    "draw",
    "ensemble_geometric_mean",
    "ensemble_mean",
    "ensemble_vote",
    "evaluate",
    "evaluate_agents",
    "evaluate_together",
    "evolve",
    "expected_calibration_error",
    "export",
    "federated",
    "fit",
    "fit_batches",
    "fit_on_cluster",
    "greedy_weights",
    "grid",
    "halving",
    "hyperparameters",
    "k_fold",
    "l2_loss",
    "load_exported",
    "local_sgd",
    "lstm",
    "matmul_conv",
    "mean_confusion",
    "mean_over_rows",
    "member_scores",
    "mse",
    "negative_log_likelihood",
    "out_of_bag",
    "population_based",
    "predict",
    "prediction_interval",
    "ragged",
    "score_interval",
    "scores",
    "shards",
    "softmax_cross_entropy",
    "stacking_weights",
    "subset",
    "temperature",
    "train_agents",
    "train_together",
    "use_cores",
    "weighted",
    "with_hyperparameters",
    "with_schedule",
    "without_nan",
]
