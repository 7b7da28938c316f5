"""Forecasts of many series beside other packages."""
