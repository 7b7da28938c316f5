"""Where scikit-learn users look for the estimators; they live in `ensembles.estimators` and `selection.search_cv`."""

from turbanet.core.extras import lacking

try:
    from turbanet.ensembles.estimators import TurbaClassifier, TurbaRegressor
    from turbanet.selection.search_cv import TurbaSearchCV
except ModuleNotFoundError as error:
    raise lacking(error, "sklearn") from None

__all__ = ["TurbaClassifier", "TurbaRegressor", "TurbaSearchCV"]
