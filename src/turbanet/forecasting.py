"""Where forecasters look; they live in `series`."""

from turbanet.core.extras import lacking

try:
    from turbanet.series.baselines import scores
    from turbanet.series.forecaster import Forecaster
except ModuleNotFoundError as error:
    raise lacking(error, "forecast") from None

__all__ = ["Forecaster", "scores"]
