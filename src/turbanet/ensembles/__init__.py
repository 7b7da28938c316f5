"""Ensembles: members' predictions combined, scored, calibrated and exported."""

from turbanet.ensembles.calibration import (
    brier_score,
    diversity,
    expected_calibration_error,
    negative_log_likelihood,
    prediction_interval,
    temperature,
)
from turbanet.ensembles.combine import (
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
from turbanet.ensembles.exported import Exported, export, load_exported
from turbanet.ensembles.predictions import without_nan

__all__ = [
    "Exported",
    "accuracy",
    "accuracy_by_size",
    "brier_score",
    "confusion",
    "disagreement",
    "diversity",
    "ensemble_geometric_mean",
    "ensemble_mean",
    "ensemble_vote",
    "expected_calibration_error",
    "export",
    "greedy_weights",
    "load_exported",
    "mean_confusion",
    "member_scores",
    "negative_log_likelihood",
    "out_of_bag",
    "prediction_interval",
    "score_interval",
    "scores",
    "stacking_weights",
    "temperature",
    "without_nan",
]
