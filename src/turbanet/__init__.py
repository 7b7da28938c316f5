"""TurbaNet: train hundreds of small neural networks at once."""

from turbanet.conv import matmul_conv
from turbanet.ensemble import (
    accuracy,
    accuracy_by_size,
    confusion,
    disagreement,
    ensemble_mean,
    ensemble_vote,
    mean_confusion,
    member_scores,
    score_interval,
    scores,
)
from turbanet.fit import History, batch_order, evaluate, fit, measured_plan, predict
from turbanet.loss import binary_cross_entropy, cross_entropy, l2_loss, mse, softmax_cross_entropy
from turbanet.models import LSTM, MLP, LeNet
from turbanet.plan import Plan, use_cores
from turbanet.sampling import all_rows, bootstrap, k_fold, ragged, subset
from turbanet.turba_train_state import TurbaTrainState

__all__ = [
    "LSTM",
    "MLP",
    "History",
    "LeNet",
    "Plan",
    "TurbaTrainState",
    "accuracy",
    "accuracy_by_size",
    "all_rows",
    "batch_order",
    "binary_cross_entropy",
    "bootstrap",
    "confusion",
    "cross_entropy",
    "disagreement",
    "ensemble_mean",
    "ensemble_vote",
    "evaluate",
    "fit",
    "k_fold",
    "l2_loss",
    "matmul_conv",
    "mean_confusion",
    "measured_plan",
    "member_scores",
    "mse",
    "predict",
    "ragged",
    "score_interval",
    "scores",
    "softmax_cross_entropy",
    "subset",
    "use_cores",
]
