"""TurbaNet's public names, for type checkers and for `turbanet/__init__.py`, which loads each at its first use."""

from . import cluster, ensembles, evolution, federated, networks, plot, rl
from .checkpoints.checkpoint import Checkpoints
from .core.interrupt import Interrupted
from .core.plan import Plan, use_cores
from .core.schedules import hyperparameters, with_hyperparameters, with_schedule
from .data.augment import Chain, RandomCrop, RandomFlip, augmented
from .data.sampling import all_rows, bootstrap, dirichlet, k_fold, ragged, shards, subset
from .ensembles.combine import accuracy, ensemble_geometric_mean, ensemble_mean, ensemble_vote, score_interval
from .ensembles.exported import Exported, export, load_exported
from .loss import binary_cross_entropy, cross_entropy, l2_loss, mse, quantile_loss, softmax_cross_entropy
from .networks.models import LSTM, MLP
from .plot import LivePlot
from .selection.cross_validation import CrossValidation, cross_validate
from .selection.search import draw, grid, halving
from .training.callbacks import TrainingView
from .training.fit import batch_order, evaluate, fit, predict
from .training.fit_batches import fit_batches
from .training.history import History
from .training.live import ProgressTable
from .training.sample_weight import mean_over_rows, weighted
from .turba_train_state import TurbaTrainState

__version__: str
__all__ = [
    "LSTM",
    "MLP",
    "Chain",
    "Checkpoints",
    "CrossValidation",
    "Exported",
    "History",
    "Interrupted",
    "LivePlot",
    "Plan",
    "ProgressTable",
    "RandomCrop",
    "RandomFlip",
    "TrainingView",
    "TurbaTrainState",
    "accuracy",
    "all_rows",
    "augmented",
    "batch_order",
    "binary_cross_entropy",
    "bootstrap",
    "cluster",
    "cross_entropy",
    "cross_validate",
    "dirichlet",
    "draw",
    "ensemble_geometric_mean",
    "ensemble_mean",
    "ensemble_vote",
    "ensembles",
    "evaluate",
    "evolution",
    "export",
    "federated",
    "fit",
    "fit_batches",
    "grid",
    "halving",
    "hyperparameters",
    "k_fold",
    "l2_loss",
    "load_exported",
    "mean_over_rows",
    "mse",
    "networks",
    "plot",
    "predict",
    "quantile_loss",
    "ragged",
    "rl",
    "score_interval",
    "shards",
    "softmax_cross_entropy",
    "subset",
    "use_cores",
    "weighted",
    "with_hyperparameters",
    "with_schedule",
]
