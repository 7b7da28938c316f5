"""Where forecasters look; they live in `series.forecaster`."""

from turbanet.core.extras import lacking

try:
    from turbanet.series.forecaster import Forecaster
except ModuleNotFoundError as error:
    raise lacking(error, "forecast") from None

__all__ = ["Forecaster"]
