"""Members' predictions put together, scored and calibrated; no training but through `fit`."""
