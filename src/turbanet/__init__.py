"""TurbaNet: train hundreds of small neural networks at once."""

from turbanet.augment import Chain, RandomCrop, RandomFlip, augmented
from turbanet.calibration import (
    brier_score,
    diversity,
    expected_calibration_error,
    negative_log_likelihood,
    prediction_interval,
    temperature,
)
from turbanet.checkpoint import Checkpoints
from turbanet.conv import matmul_conv
from turbanet.convnets import VGG, AlexNet, LeNet, LeNet5, MobileNet, ResNet
from turbanet.cross_validation import CrossValidation, cross_validate
from turbanet.ensemble import (
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
from turbanet.fit import History, batch_order, evaluate, fit, measured_plan, predict
from turbanet.loss import binary_cross_entropy, cross_entropy, l2_loss, mse, softmax_cross_entropy, weighted
from turbanet.models import LSTM, MLP
from turbanet.plan import Plan, use_cores
from turbanet.sampling import all_rows, bootstrap, k_fold, ragged, subset
from turbanet.schedules import hyperparameters, with_hyperparameters, with_schedule
from turbanet.search import draw, grid, halving
from turbanet.turba_train_state import TurbaTrainState

__all__ = [
    "LSTM",
    "MLP",
    "VGG",
    "AlexNet",
    "Chain",
    "Checkpoints",
    "CrossValidation",
    "History",
    "LeNet",
    "LeNet5",
    "MobileNet",
    "Plan",
    "RandomCrop",
    "RandomFlip",
    "ResNet",
    "TurbaTrainState",
    "accuracy",
    "accuracy_by_size",
    "all_rows",
    "augmented",
    "batch_order",
    "binary_cross_entropy",
    "bootstrap",
    "brier_score",
    "confusion",
    "cross_entropy",
    "cross_validate",
    "disagreement",
    "diversity",
    "draw",
    "ensemble_geometric_mean",
    "ensemble_mean",
    "ensemble_vote",
    "evaluate",
    "expected_calibration_error",
    "fit",
    "greedy_weights",
    "grid",
    "halving",
    "hyperparameters",
    "k_fold",
    "l2_loss",
    "matmul_conv",
    "mean_confusion",
    "measured_plan",
    "member_scores",
    "mse",
    "negative_log_likelihood",
    "out_of_bag",
    "predict",
    "prediction_interval",
    "ragged",
    "score_interval",
    "scores",
    "softmax_cross_entropy",
    "stacking_weights",
    "subset",
    "temperature",
    "use_cores",
    "weighted",
    "with_hyperparameters",
    "with_schedule",
]
