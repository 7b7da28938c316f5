"""Where scikit-learn users look for the estimators; they live in `ensembles.estimators`."""

from turbanet.ensembles.estimators import TurbaClassifier, TurbaRegressor

__all__ = ["TurbaClassifier", "TurbaRegressor"]
