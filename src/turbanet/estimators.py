"""Where scikit-learn users look for the estimators; they live in `ensembles.estimators` and `selection.search_cv`."""

from turbanet.ensembles.estimators import TurbaClassifier, TurbaRegressor
from turbanet.selection.search_cv import TurbaSearchCV

__all__ = ["TurbaClassifier", "TurbaRegressor", "TurbaSearchCV"]
