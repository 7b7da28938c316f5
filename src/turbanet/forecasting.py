"""Where forecasters look; they live in `series.forecaster`."""

from turbanet.series.forecaster import Forecaster

__all__ = ["Forecaster"]
