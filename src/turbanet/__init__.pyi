"""TurbaNet's public names, for type checkers and for `turbanet/__init__.py`, which loads each at its first use.

`name as name` is how a stub says that a name is public; editors complete no other.
"""

from . import (
    cluster as cluster,
    ensembles as ensembles,
    evolution as evolution,
    federated as federated,
    networks as networks,
    plot as plot,
    rl as rl,
)
from .checkpoints.checkpoint import Checkpoints as Checkpoints
from .core.interrupt import Interrupted as Interrupted
from .core.plan import Plan as Plan, use_cores as use_cores
from .core.schedules import (
    hyperparameters as hyperparameters,
    with_hyperparameters as with_hyperparameters,
    with_schedule as with_schedule,
)
from .data.augment import Chain as Chain, RandomCrop as RandomCrop, RandomFlip as RandomFlip, augmented as augmented
from .data.sample_weight import mean_over_rows as mean_over_rows, weighted as weighted
from .data.sampling import (
    all_rows as all_rows,
    bootstrap as bootstrap,
    dirichlet as dirichlet,
    k_fold as k_fold,
    ragged as ragged,
    shards as shards,
    subset as subset,
)
from .ensembles.combine import (
    accuracy as accuracy,
    ensemble_geometric_mean as ensemble_geometric_mean,
    ensemble_mean as ensemble_mean,
    ensemble_vote as ensemble_vote,
    score_interval as score_interval,
)
from .ensembles.exported import Exported as Exported, export as export, load_exported as load_exported
from .live import ProgressTable as ProgressTable
from .loss import (
    binary_cross_entropy as binary_cross_entropy,
    cross_entropy as cross_entropy,
    l2_loss as l2_loss,
    mse as mse,
    quantile_loss as quantile_loss,
    softmax_cross_entropy as softmax_cross_entropy,
)
from .networks.models import LSTM as LSTM, MLP as MLP
from .plot import LivePlot as LivePlot
from .selection.cross_validation import CrossValidation as CrossValidation, cross_validate as cross_validate
from .selection.search import draw as draw, grid as grid, halving as halving
from .training.callbacks import TrainingView as TrainingView
from .training.fit import batch_order as batch_order, evaluate as evaluate, fit as fit, predict as predict
from .training.fit_batches import fit_batches as fit_batches
from .training.history import History as History
from .turba_train_state import TurbaTrainState as TurbaTrainState

__version__: str
